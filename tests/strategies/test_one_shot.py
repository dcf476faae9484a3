"""FL+HC, FedClust and PACFL: by hand, by their identities, on ground-truth groups, and for new clients."""

from dataclasses import fields
from functools import cache

import numpy as np
import pytest

from archipelago.strategies.base import UNASSIGNED
from archipelago.strategies.fedclust import FedClustOptions
from archipelago.strategies.flhc import FLHCOptions
from archipelago.strategies.pacfl import PACFLOptions, angle, leading
from archipelago.strategies.references import Models
from tests.support.experiments import digest, run, session_of
from tests.support.scalar import method_of, scalar_fleet

METHODS = ("flhc", "fedclust", "pacfl")
# Clients pull w by 0.2 (y - w) in a step of lr 0.1.
FOUR = [[(1.0, 2.0)], [(1.0, 4.0)], [(1.0, -2.0)], [(1.0, -6.0)]]
GOOD = ("clients=12", "clusters=4", "local.steps=10", "local.lr=0.1", "model.hidden=[32]", "data.rotations=4",
        "evaluation.every=4")  # fmt: skip


def test_flhc_two_rounds_by_hand():
    fleet = scalar_fleet(FOUR, lr=0.1)
    flhc = method_of("flhc", fleet, clusters=2, rounds=9, options={"flhc": FLHCOptions(before=1)})
    flhc.base.clusters = Models(np.float32([[0.0]]))
    flhc.round(fleet, 1)
    # FedAvg: the mean of 0.4, 0.8, -0.4, -1.2.
    assert flhc.base.K == 1 and flhc.base.clusters.values.tolist() == [pytest.approx([-0.1])]
    fleet.begin(2)
    flhc.round(fleet, 2)
    # Updates from -0.1: 0.42, 0.82, -0.38, -1.18. Ward merges 0.42 with 0.82, -0.38 with -1.18 (0.8) before both (1.6).
    assert flhc.base.assignment.tolist() == [0, 0, 1, 1] and flhc.base.K == 2
    assert flhc.base.clusters.values.ravel().tolist() == pytest.approx([0.52, -0.88], rel=1e-5)
    fleet.begin(3)
    flhc.round(fleet, 3)  # 0.8 * 0.52 + 0.2 * 3 and 0.8 * -0.88 - 0.2 * 4
    assert flhc.base.clusters.values.ravel().tolist() == pytest.approx([1.016, -1.504], rel=1e-5)
    assert "2, 2 clients" in flhc.base.events[0] if flhc.base.number == 2 else not flhc.base.events


def test_fedclust_first_round_by_hand_and_a_new_client():
    fleet = scalar_fleet(FOUR, lr=0.1)
    fedclust = method_of("fedclust", fleet, clusters=3, options={"fedclust": FedClustOptions(cut=0.5)})
    fedclust.base.clusters = start = Models(fleet.initial(1).values)
    w = float(start.values[0, 0])
    fedclust.round(fleet, 1)
    # Trained weights are 0.8 w + 0.4, 0.8, -0.4, -1.2: only the first two are within lambda = 0.5 of each other.
    assert fedclust.base.assignment.tolist() == [0, 0, 1, 2]
    expected = [0.8 * w + move for move in (0.6, -0.4, -1.2)]
    assert fedclust.base.clusters.values.ravel().tolist() == pytest.approx(expected, rel=1e-5)
    fedclust.base.assignment = np.array([UNASSIGNED, 0, 1, 2])
    fedclust.base.points = np.where(np.arange(4)[:, None] == 0, np.nan, fedclust.base.points)
    assert fedclust.labels(fleet).tolist() == [
        0,
        0,
        1,
        2,
    ]  # client 0 trains from the first model, and is nearest to 1


def test_pacfl_signatures_and_angles_by_hand():
    # Two samples along (3, 4) span one direction; a third along (-4, 3) adds the other.
    one, two = np.float32([[3, 4], [6, 8]]), np.float32([[3, 4], [6, 8], [-0.4, 0.3]])
    assert leading(one, 2) == pytest.approx(np.array([[0.6, 0.0], [0.8, 0.0]]))
    assert np.abs(leading(two, 2)) == pytest.approx(np.array([[0.6, 0.8], [0.8, 0.6]]))
    x, y = np.array([[1.0], [0.0]]), np.array([[0.6], [0.8]])
    for measure in ("smallest", "sum"):
        assert angle(x, y, measure) == pytest.approx(53.1301, rel=1e-5)
        assert angle(x, -y, measure) == pytest.approx(53.1301, rel=1e-5)
    plane, other = np.eye(3)[:, :2], np.eye(3)[:, 1:]
    assert angle(plane, other, "smallest") == pytest.approx(0)  # they share the second axis
    assert angle(plane, other, "sum") == pytest.approx(
        180
    )  # (3) pairs the first with the second, the second with the third


def test_pacfl_two_rounds_by_hand():
    """y = w . x: samples along (1, 0), (3, 0.1), (0, 2) and (0.1, -4) are two directions, each FedAvg on its own."""
    x = np.array([[1.0, 0.0], [3.0, 0.1], [0.0, 2.0], [0.1, -4.0]])
    y, w = np.array([2.0, 4.0, 2.0, 6.0]), np.array([[0.5, -0.5], [0.5, -0.5]])
    fleet = scalar_fleet([[(tuple(x[i]), y[i])] for i in range(4)], lr=0.01)
    pacfl = method_of("pacfl", fleet, clusters=4, options={"pacfl": PACFLOptions(vectors=1, cut=5.0)})
    pacfl.base.clusters = Models(np.float32(w[:1]))
    for number in (1, 2):
        fleet.begin(number)
        pacfl.round(fleet, number)
        own = np.repeat(w, 2, axis=0)  # the model of each client's cluster
        steps = own - 0.01 * 2 * x * (np.sum(own * x, axis=1) - y)[:, None]
        w = steps.reshape(2, 2, 2).mean(axis=1)
        # 1.9 degrees between the first two, 1.4 between the others, about 90 across: cut at 5.
        assert pacfl.base.assignment.tolist() == [0, 0, 1, 1]
        assert pacfl.base.clusters.values == pytest.approx(w, rel=1e-5)
    assert pacfl.base.apart(pacfl.base.points)[0, 1] == pytest.approx(
        np.degrees(np.arctan(0.1 / 3)), rel=1e-4
    )


@pytest.mark.parametrize("method", METHODS)
def test_one_cluster_is_fedavg(method):
    one, fedavg = session_of(f"method={method}", "clusters=1"), session_of("method=fedavg", "clusters=1")
    reports, plain = run(one, 3), run(fedavg, 3)
    assert np.array_equal(one.server.method.base.clusters.values[0], fedavg.server.method.base.model)
    assert digest(reports[-1].clients["accuracy"]) == digest(plain[-1].clients["accuracy"])


@pytest.mark.parametrize(
    ("method", "more"), [("flhc", ()), ("fedclust", ()), ("pacfl", ()), ("pacfl", ("pacfl.measure=sum",))]
)
def test_ground_truth_rotations_are_found_at_once(method, more):
    report = run(session_of(f"method={method}", "seed=1", "rounds=4", *GOOD, *more), 4)[-1]
    assert report.metrics["ari"] == 1.0 and report.metrics["silhouette"] > 0.2


def test_number_of_clusters_is_found_where_a_distance_is_given():
    # Angles inside a group are 3 to 6.3 degrees (seeds 0 to 2), across groups 9.2 to 66.
    report = run(
        session_of("method=pacfl", "pacfl.cut=8", *GOOD[:1], *GOOD[2:], "clusters=10", "rounds=1"), 1
    )[-1]
    assert report.metrics["cluster_sizes"] == [3, 3, 3, 3] and report.metrics["ari"] == 1.0


def test_pacfl_needs_labels_to_tell_swapped_ones():
    """Where groups differ by their labels alone, samples say nothing, and those of each class do."""
    swapped = ("method=pacfl", "data.rotations=1", "data.label_swaps=2", "clusters=2", "rounds=1")
    plain, by_class = (run(session_of(*swapped, *more), 1)[-1].metrics["ari"]
                       for more in ((), ("pacfl.by_class=true", "pacfl.measure=sum")))  # fmt: skip
    assert plain < 0.5 and by_class == 1.0


CHANGES = (
    "pacfl.vectors=1", "pacfl.measure=sum", "pacfl.cut=40", "pacfl.linkage=complete", "pacfl.clustering=affinity",
    "flhc.before=0", "flhc.distance=cosine", "flhc.linkage=single", "flhc.cut=0.8", "flhc.clustering=kmeans",
    "fedclust.features=parameters", "fedclust.distance=cosine", "fedclust.cut=0.1",
    "fedclust.clustering=affinity",
)  # fmt: skip
DIVIDED = (
    "partition=dirichlet",
    "partition.alpha=0.5",
    "clusters=3",
    "rounds=4",
    "clients=10",
    "local.steps=2",
)


@cache
def undisturbed(method):
    return digest(run(session_of(f"method={method}", *DIVIDED), 4))


@pytest.mark.parametrize("change", CHANGES)
def test_options_reach_the_numbers(change):
    method = change.partition(".")[0]
    assert digest(run(session_of(f"method={method}", *DIVIDED, change), 4)) != undisturbed(method)


def test_linkage_of_fedclust_reaches_the_numbers():
    found = [run(session_of("method=fedclust", *DIVIDED, "seed=1", f"fedclust.linkage={linkage}"), 1)
             for linkage in ("average", "complete")]  # fmt: skip
    assert digest(found[0]) != digest(found[1])


@pytest.mark.parametrize("options", [FLHCOptions, FedClustOptions, PACFLOptions])
def test_every_option_is_among_the_changes(options):
    named = {change.partition("=")[0].partition(".")[2] for change in CHANGES
             if change.startswith(options.__name__.removesuffix("Options").lower())}  # fmt: skip
    apart = {"linkage"} if options is FedClustOptions else {"by_class"}  # have tests of their own
    apart &= {each.name for each in fields(options)}
    assert named | apart == {each.name for each in fields(options)}


@pytest.mark.parametrize("method", METHODS)
def test_everyone_is_clustered_and_held_out_clients_are_placed(method):
    setting = (f"method={method}", "participation.fraction=0.4", "rounds=4", *GOOD, "holdout_clients=0.25")
    session = session_of(*setting)
    report = run(session, 4)[-1]
    groups, base = session.server.setup.groups, session.server.method.base
    assert (base.assignment[session.server.population] != UNASSIGNED).all()
    where = session.server.method.labels(session.fleet.measuring().select(session.server.held_out))
    known = {groups[i]: base.assignment[i] for i in session.server.population}
    assert [known[groups[i]] for i in session.server.held_out] == where.tolist()
    assert np.isfinite(report.metrics["holdout_micro_accuracy"])


def test_pacfl_places_clients_without_labels():
    from actors.client_views import LocalView

    session = session_of("method=pacfl", "holdout_clients=0.25")
    run(session, 1)
    asked = []
    LocalView._refuse_labels, kept = (lambda view: asked.append(view)), LocalView._refuse_labels
    try:
        session.server.method.base.adopt_unlabelled(session.fleet.measuring().select(session.server.held_out))
    finally:
        LocalView._refuse_labels = kept
    assert not asked


@pytest.mark.parametrize(("method", "up"), [("flhc", 1.0), ("fedclust", 1.0), ("pacfl", None)])
def test_cost_is_fedavgs(method, up):
    session = session_of(f"method={method}", "rounds=4")
    reports = run(session, 4)
    signature = 3 * 64 / session.fleet.spec.size
    for report in reports:
        extra = signature if up is None and report.round == 1 else 0.0
        assert report.metrics["cost_models_up"] == pytest.approx(1 + extra)
        assert report.metrics["cost_models_down"] == pytest.approx(1)
        assert report.metrics["cost_computation"] == pytest.approx(1)
