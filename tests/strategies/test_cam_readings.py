"""CAM's readings and the released code's ways (compat), by hand."""

import numpy as np
import pytest

from archipelago.strategies.cam import CAM, CAMOptions
from archipelago.strategies.finetune import FinetuneOptions
from archipelago.strategies.references import Models
from tests.support.experiments import checkpoint_of, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

TWO = [[(1.0, 2.0)], [(1.0, -2.0)]]


def cam_on(method, samples, clusters, shared, *, lr=0.1, momentum=0.0, rounds=10, more=None, **options):
    """A method with CAM whose models are given."""
    fleet = scalar_fleet(samples, lr=lr, momentum=momentum)
    given = {
        "cam": CAMOptions(**{"warmup": 0.0, "warm": "base", "schedule": "simultaneous", **options}),
        **(more or {}),
    }
    made = method_of(method, fleet, clusters=len(clusters), rounds=rounds, options=given)
    made.base.clusters = Models(np.float32(clusters)[:, None])
    made.addons[0].shared = made.base.underlay = np.float32([shared])
    return fleet, made


def test_own_start_draws_the_part_that_was_not_warmed_up_for_every_client():
    fleet, strategy = cam_on("fesem+cam", TWO, [-1.0, 1.0], 0.5, start="own", lam=0.0)
    strategy.base.assignment = np.array([1, 0])
    own = fleet.initial(2, "own shared model").values.ravel().astype(float)
    strategy.round(fleet, 1)
    # Each client's theta_i on top of its own draw, and the draw itself beside the cluster model.
    theta = [1.0 - 0.2 * (1.0 + own[0] - 2.0), -1.0 - 0.2 * (-1.0 + own[1] + 2.0)]
    theta_0 = [own[0] - 0.2 * (1.0 + own[0] - 2.0), own[1] - 0.2 * (-1.0 + own[1] + 2.0)]
    assert np.sort(strategy.base.clusters.values.ravel()).tolist() == pytest.approx(sorted(theta), rel=1e-5)
    assert strategy.addons[0].shared.tolist() == pytest.approx([np.mean(theta_0)], rel=1e-5)
    shared = strategy.addons[0].shared.copy()
    strategy.round(fleet, 2)  # from the average now, whoever a client is
    moved = np.mean([shared[0] - 0.2 * (shared[0] + t - y) for t, y in zip(theta, (2.0, -2.0), strict=True)])
    assert strategy.addons[0].shared.tolist() == pytest.approx([moved], rel=1e-5)


def test_own_start_under_a_loss_based_base_is_that_of_the_cluster_part():
    fleet, strategy = cam_on("ifca+cam", TWO, [-1.0, 1.0], 0.5, start="own")
    own = fleet.initial(2, "own cluster model").values.ravel().astype(float)
    strategy.round(fleet, 1)
    theta = [own[0] - 0.2 * (0.5 + own[0] - 2.0), own[1] - 0.2 * (0.5 + own[1] + 2.0)]
    # Assigned by the server's models: client 0 to cluster 1, client 1 to cluster 0.
    assert strategy.base.clusters.values.ravel().tolist() == pytest.approx(theta[::-1], rel=1e-5)
    theta_0 = [0.5 - 0.2 * (0.5 + own[0] - 2.0), 0.5 - 0.2 * (0.5 + own[1] + 2.0)]
    assert strategy.addons[0].shared.tolist() == pytest.approx([np.mean(theta_0)], rel=1e-5)


@pytest.mark.parametrize(("predict", "expected"), [("server", [0.0, 0.0]), ("local", [0.15**2, 0.3**2])])
def test_clients_predict_with_the_servers_cluster_part_or_their_own(predict, expected):
    # theta: 1 - 0.2 (1.5 - 2) = 1.1 and 1 - 0.4 (2 * 1.5 - 4) = 1.4, mean 1.25; shared: 0.6 and 0.9, mean 0.75.
    # Their own: 1.1 + 0.75 - 2 = -0.15 and 2 (1.4 + 0.75) - 4 = 0.3.
    samples = [[(1.0, 2.0)], [(2.0, 4.0)]]
    fleet, strategy = cam_on("ifca+cam", samples, [1.0, -5.0], 0.5, predict=predict)
    strategy.round(fleet, 1)
    mse = fleet.evaluate(strategy.prediction(fleet))["mse"]
    assert mse.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(("kmeans", "clusters"), [("size", [30 / 11, 5.0]), ("base", [0.0, 4.0])])
def test_kmeans_of_fesem_cam_counts_samples_or_clients(kmeans, clusters):
    # One step of lr 0.5 goes to y: points 0, 3 and 5 of 1, 10 and 10 samples. By clients {0} {3, 5}; by samples 0 is
    # cheaper to move to 3 (9 * 10 / 11 = 8.2) than 3 to 5 (4 * 100 / 20 = 20).
    samples = [[(1.0, 0.0)], [(1.0, 3.0)] * 10, [(1.0, 5.0)] * 10]
    fleet, strategy = cam_on("fesem+cam", samples, [1.0, 1.0], 0.0, lr=0.5, lam=0.0, kmeans=kmeans)
    strategy.round(fleet, 1)
    assert np.sort(strategy.base.clusters.values.ravel()).tolist() == pytest.approx(clusters, rel=1e-5)


def test_by_samples_fesem_cam_is_wecfl_cam():
    first, second = (session_of(f"method={base}+cam", "cam.warmup=0.25") for base in ("fesem", "wecfl"))
    assert outcome(first, run(first, 3)) == outcome(second, run(second, 3))


def test_warm_up_of_clusters_is_the_base_and_then_the_shared_part_joins_in():
    for base in ("ifca", "fesem"):
        plain = session_of(f"method={base}", "rounds=4")
        cam = session_of(
            f"method={base}+cam", "cam.warm=clusters", "cam.warmup=0.5", "rounds=4", "cam.kmeans=base"
        )
        start = cam.server.method.addons[0].shared.copy()
        run(plain, 2)
        run(cam, 2)
        assert np.array_equal(
            plain.server.method.base.clusters.values, cam.server.method.base.clusters.values
        )
        assert np.array_equal(cam.server.method.addons[0].shared, start)
        cam.run_round(3)
        assert not np.array_equal(cam.server.method.addons[0].shared, start)


def test_first_clusters_by_kmeans_where_one_random_model_wins_everywhere():
    # Theta_g = 0.5. By loss both are nearest to 0 (cluster 0); one step of lr 0.5 from it goes to 1.5 and -2.5.
    for first, together in (("loss", True), ("kmeans", False)):
        fleet, strategy = cam_on("ifca+cam", TWO, [0.0, 50.0], 0.5, lr=0.5, first=first)
        strategy.round(fleet, 1)
        assert (strategy.base.assignment[0] == strategy.base.assignment[1]) == together
    clusters = strategy.base.clusters.values.ravel()[strategy.base.assignment]
    assert clusters.tolist() == pytest.approx([1.5, -2.5], rel=1e-6)  # already there: its gradient is zero


def test_local_warm_up_gives_ifca_its_first_clusters():
    session = session_of("method=ifca+cam", "cam.warm=local", "cam.warmup=0.5", "rounds=4", "data.rotations=4",
                         "clusters=4", "local.steps=10")  # fmt: skip
    assert (run(session, 1)[0].assignment == -1).all()
    assert run(session, 1, first=2)[0].metrics["ari"] == 1.0


def test_warm_up_by_the_data_ends_when_the_same_groups_are_found_twice():
    # Theta_g = 0.5, lr 0.1: y = 2 draws its clients to 0.8, y = -2 to 0; the next round from the mean, 0.4. The groups
    # are the same: rounds 1 and 2 are the warm-up, and round 3 has both parts.
    fleet, strategy = cam_on("ifca+cam", TWO * 2, [-1.0, 1.0], 0.5, rounds=10, warmup=None, warm="shared")
    for number in (1, 2):
        strategy.round(fleet, number)
        assert (strategy.base.assignment == -1).all()
    assert strategy.addons[0].beta == 2 and "ends" in strategy.base.events[-1]
    strategy.round(fleet, 3)
    assert strategy.base.assignment[0] == strategy.base.assignment[2] != strategy.base.assignment[1]


def test_warm_up_by_the_data_lasts_its_longest_where_groups_change_or_there_are_none():
    cam = CAMOptions(warmup=None, warm="shared")
    fleet = scalar_fleet([[(1.0, y)] for y in (-3.0, -1.0, 1.0, 3.0)], lr=0.1)
    strategy = method_of("ifca+cam", fleet, clusters=2, rounds=20, options={"cam": cam})
    found = [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1]]
    given = iter(np.array(found))
    strategy.addons[0].groups = lambda *_: next(given)  # what K-means says, round by round
    for number in range(1, 7):
        strategy.round(fleet, number)
        assert strategy.addons[0].ended is None and strategy.addons[0].beta == 6
        assert (strategy.base.assignment == -1).all()


def test_warm_up_by_the_data_is_of_the_shared_part_alone():
    for warm, base, beta in (("local", "ifca", 3), ("base", "fesem", 3), ("clusters", "ifca", 3)):
        fleet, strategy = cam_on(f"{base}+cam", TWO * 2, [-1.0, 1.0], 0.5, rounds=10, warmup=None, warm=warm)
        for number in range(1, 4):
            strategy.round(fleet, number)
        assert strategy.addons[0].beta == beta and strategy.addons[0].ended is None
    assert CAM.for_few_rounds(CAMOptions(warmup=None), 2).warmup == 0.5
    assert CAM.for_few_rounds(CAMOptions(warmup=None), 10).warmup is None


@pytest.mark.parametrize(
    "options",
    [
        ("method=fesem+cam", "cam.start=own", "cam.schedule=global_first_aggregated"),
        ("method=ifca+cam+finetune", "cam.start=own", "cam.predict=local"),
        ("method=ifca+cam", "cam.warm=local", "cam.first=kmeans"),
        ("method=ifca+cam", "cam.warmup=0", "cam.first=kmeans"),
        (
            "method=ifca+cam",
            "cam.warmup=auto",
            "cam.warm=shared",
            "rounds=10",
            "data.rotations=2",
            "clusters=2",
        ),
    ],
)
def test_readings_survive_layouts_and_restores(options):
    setting = (*(() if any("warmup" in each for each in options) else ("cam.warmup=0.25",)), *options)
    whole = session_of(*setting)
    first = run(whole, 3)
    half = session_of(*setting, blocks=[[7, 0, 3], [1, 2], [4, 5, 6]])
    reports = run(half, 1)
    again = session_of(*setting, blocks=[[0, 1, 2, 3], [4, 5, 6, 7]], checkpoint=checkpoint_of(half))
    assert outcome(again, reports + run(again, 2, first=2)) == outcome(whole, first)


@pytest.mark.parametrize(("fresh", "tuned"), [(False, 1.46), (True, 1.36)])
def test_fine_tuning_goes_on_with_the_momentum_that_clients_have_and_leaves_it(fresh, tuned):
    fleet = scalar_fleet([[(1.0, 2.0)]], lr=0.1, momentum=0.5)
    options = {"finetune": FinetuneOptions(fresh=fresh)}
    strategy = method_of("fedavg+finetune", fleet, rounds=2, options=options)
    strategy.base.model = np.float32([1.0])
    strategy.round(fleet, 1)  # gradient -2: 1.2. Then -1.6, with half of the momentum -2.6: 1.46
    mse = fleet.evaluate(strategy.prediction(fleet))["mse"]
    assert mse.tolist() == pytest.approx([(tuned - 2.0) ** 2], rel=1e-5)
    fleet.commit()
    fleet.begin(2)
    strategy.round(fleet, 2)  # as if nobody had fine-tuned: 1.2 + 0.26
    assert strategy.base.model.tolist() == pytest.approx([1.46], rel=1e-6)


@pytest.mark.parametrize(
    ("predict", "expected"), [("sum", [0.23**2, 0.434**2]), ("cluster", [0.75**2, 0.33**2])]
)
def test_both_parts_of_cam_are_tuned_in_their_own_slots_and_the_released_code_tests_one(predict, expected):
    more = {"finetune": FinetuneOptions(predict=predict)}
    fleet, strategy = cam_on("ifca+cam+finetune", TWO, [-1.0, 1.0], 0.5, momentum=0.5, rounds=1, more=more)
    strategy.round(fleet, 1)  # clusters -1.3 and 1.1, shared 0.4; gradients 3 and -1 of either part
    # Client 0: 1.1 + 0.1 (0.5 + 1) = 1.25, then 0.4 + 0.1 (0.5 + 0.7) = 0.52. Client 1: -1.3 - 0.1 (1.5 + 2.2) =
    # -1.67, then 0.4 - 0.1 (1.5 + 1.46) = 0.104.
    mse = fleet.evaluate(strategy.prediction(fleet))["mse"]
    assert mse.tolist() == pytest.approx(expected, rel=1e-4)


def test_stacked_clients_are_tuned_as_the_others():
    """The other engine reads the same slot: equal to rounding."""
    setting = ("method=ifca+cam+finetune", "cam.warmup=0", "rounds=2")
    loop, stacked = session_of(*setting), session_of(*setting, "local.engine=stacked")
    ends = [run(session, 2)[-1].clients["loss"] for session in (loop, stacked)]
    assert np.allclose(*ends, rtol=1e-3)
