"""FedDrift, by hand, by its identities, by its options, and through drifts whose ground truth is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from archipelago.strategies.base import UNASSIGNED
from archipelago.strategies.feddrift import NEVER, FedDriftOptions
from archipelago.strategies.references import Models
from tests.support.experiments import checkpoint_of, outcome, run, session_of
from tests.support.scalar import method_of, scalar_fleet

# y = w x with x = 1 and lr 0.1: a client's loss is (w - y)^2, its step w - 0.2 (w - y) = 0.8 w + 0.2 y.
NOW = {"time_step": 1, "isolation": 1, "delta": 1.0, "merge": 1.0}


def feddrift_of(targets: list[float], clusters: int = 4, **options: Any) -> tuple[Any, Any]:
    fleet = scalar_fleet([[(1.0, y)] for y in targets], lr=0.1)
    made = method_of(
        "feddrift", fleet, clusters=clusters, options={"feddrift": FedDriftOptions(**{**NOW, **options})}
    )
    made.base.clusters = Models(np.zeros((1, 1), np.float32))
    made.base.before = np.zeros(len(targets))  # everybody's loss was 0 at the time step before
    return made, fleet


def models_of(feddrift: Any) -> list[float]:
    return [float(value) for value in feddrift.base.clusters.values[:, 0]]


def again(feddrift: Any, fleet: Any, number: int) -> None:
    fleet.commit()
    fleet.begin(number)
    feddrift.round(fleet, number)


def test_feddrift_round_by_hand() -> None:
    feddrift, fleet = feddrift_of([0.0, 4.0])
    new = float(fleet.initial(1, "new cluster, round 1")[0][0])
    feddrift.round(fleet, 1)
    # Losses under h_0 = 0: 0 and 16. Client 1's concept has drifted: a cluster of its own, alone until round 2.
    base = feddrift.base
    assert base.K == 2 and base.assignment.tolist() == [0, 1] and base.until.tolist() == [NEVER, 2]
    first = 0.8 * new + 0.8
    assert models_of(feddrift) == pytest.approx([0.0, first], abs=1e-6)
    assert base.before.tolist() == [0.0, 16.0]  # not renewed while a client is alone
    assert "client 1 has drifted; 2 clusters" in feddrift.events[0]
    # Round 2: D(0, 1) = max(16 - (first - 4)^2, first^2 - 0) is more than 1: the clusters stay two.
    again(feddrift, fleet, 2)
    assert base.K == 2 and base.until.tolist() == [NEVER, NEVER]
    assert models_of(feddrift) == pytest.approx([0.0, 0.8 * first + 0.8], abs=1e-6)


def test_feddrift_merges_clusters_of_one_concept_by_their_samples() -> None:
    feddrift, fleet = feddrift_of([0.0, 0.5], merge=1.0)
    base = feddrift.base
    base.clusters = Models(np.float32([[0.0], [0.5]]))
    base.K, base.until, base.assignment = 2, np.zeros(2, np.int64), np.array([0, 1])
    # L_01 = L_10 = 0.25, L_00 = L_11 = 0: D = 0.25. Merged, the model is 0.25 before it is trained to 0.2 and 0.3.
    feddrift.round(fleet, 1)
    assert base.K == 1 and base.assignment.tolist() == [0, 0]
    assert models_of(feddrift) == pytest.approx([0.25])
    apart, fleet = feddrift_of([0.0, 0.5], merge=0.2)
    apart.base.clusters = Models(np.float32([[0.0], [0.5]]))
    apart.base.K, apart.base.until, apart.base.assignment = 2, np.zeros(2, np.int64), np.array([0, 1])
    apart.round(fleet, 1)
    assert apart.base.K == 2
    # clusters=1: merging goes on past `merge`.
    fewer, fleet = feddrift_of([0.0, 0.5], clusters=1, merge=0.2)
    fewer.base.clusters = Models(np.float32([[0.0], [0.5]]))
    fewer.base.K, fewer.base.until, fewer.base.assignment = 2, np.zeros(2, np.int64), np.array([0, 1])
    fewer.round(fleet, 1)
    assert fewer.base.K == 1


def test_feddrift_distances_by_hand() -> None:
    losses = np.array([[1.0, 3.0], [4.0, 2.0]])  # of client 0 and client 1 under the two models
    c, n, fed = np.array([0, 1]), np.ones(2), np.arange(2)
    same, own = (feddrift_of([0.0, 0.0], distance=how)[0].base for how in ("same", "own"))
    # L_00 = 1, L_10 = 3 (model 1 on the data of cluster 0), L_01 = 4, L_11 = 2.
    assert same.distances(losses, c, n, fed)[0, 1] == max(4 - 2, 3 - 1)
    assert own.distances(losses, c, n, fed)[0, 1] == max(4 - 1, 3 - 2)


def test_feddrift_compares_clusters_without_the_clients_that_have_just_drifted() -> None:
    """Clients 0 and 1 are at 0 and 1; client 2, whose loss was 0, has gone to 5."""
    for start in ("nearest", "initial"):
        feddrift, fleet = feddrift_of([0.0, 1.0, 5.0], merge=2.0, start=start)
        base = feddrift.base
        base.clusters = Models(np.float32([[0.0], [1.0]]))
        base.K, base.until, base.assignment = 2, np.zeros(2, np.int64), np.array([0, 1, 0])
        new = float(fleet.initial(1, "new cluster, round 1")[0][0])
        feddrift.round(fleet, 1)
        # Losses 0, 1 | 1, 0 | 25, 16: D = 1. With client 2 in cluster 1, L_01 - L_11 would be 13 - 8.
        assert base.K == 2 and base.assignment.tolist() == [0, 0, 1]
        first = 1.0 if start == "nearest" else new  # the model that did best on client 2, as it was
        assert models_of(feddrift) == pytest.approx([0.5, 0.8 * first + 1.0])


def test_feddrift_eager_makes_one_cluster_for_all() -> None:
    each, fleet = feddrift_of([0.0, 4.0, 4.0])
    each.round(fleet, 1)
    assert each.base.assignment.tolist() == [0, 1, 2]
    eager, fleet = feddrift_of([0.0, 4.0, 4.0], eager=True)
    eager.round(fleet, 1)
    assert eager.base.assignment.tolist() == [0, 1, 1]


def test_feddrift_keeps_the_model_of_an_empty_cluster_as_long_as_there_is_capacity() -> None:
    for clusters, left in ((3, 2), (1, 1)):
        feddrift, fleet = feddrift_of([0.0, 0.0], clusters=clusters)
        base = feddrift.base
        base.clusters = Models(np.float32([[0.0], [9.0]]))
        base.K, base.until, base.assignment = 2, np.zeros(2, np.int64), np.array([0, 0])
        feddrift.round(fleet, 1)
        assert left == base.K and models_of(feddrift) == pytest.approx([0.0, 9.0][:left])


def test_feddrift_new_clients_join_the_best_cluster_that_is_not_alone() -> None:
    feddrift, fleet = feddrift_of([4.0, 0.0])
    base = feddrift.base
    base.clusters = Models(np.float32([[0.0], [4.0]]))
    base.K, base.until = 2, np.array([NEVER, 9])
    base.assignment = np.array([UNASSIGNED, 0])
    assert base.labels(fleet).tolist() == [0, 0]
    base.until = np.zeros(2, np.int64)
    assert base.labels(fleet).tolist() == [1, 0]


# On data

SMALL = ("clients=6", "rounds=13", "data.rotations=1", "model.hidden=[16]", "local.steps=6", "clusters=4")
DRIFT = (*SMALL, "drift=[label_swap@7:0.5]", "feddrift.time_step=3")


def test_feddrift_without_a_drift_is_fedavg() -> None:
    drift, plain = (
        session_of("method=" + name, *SMALL[:1], "rounds=3", *SMALL[2:5], *more)
        for name, more in (("feddrift", ("feddrift.delta=100", "feddrift.time_step=1")), ("fedavg", ()))
    )
    run(drift, 3)
    run(plain, 3)
    assert np.array_equal(drift.models()["models"]["clusters"][0], plain.models()["models"]["global"])


def test_feddrift_finds_the_concepts_and_recovers() -> None:
    reports = run(session_of("method=feddrift", *DRIFT), 13)
    assert reports[6].metrics["micro_accuracy"] < reports[5].metrics["micro_accuracy"]
    assert reports[-1].metrics["ari"] == 1.0
    plain = run(session_of("method=fedavg", *SMALL[:-1], DRIFT[-2]), 13)
    assert reports[-1].metrics["micro_accuracy"] > plain[-1].metrics["micro_accuracy"] + 0.1


OPTIONS = ("delta=100", "merge=100", "eager=true", "time_step=2", "isolation=2", "start=nearest")


def digest(option: str = "") -> str:
    base = [
        each for each in DRIFT if not (option and each.startswith(f"feddrift.{option.partition('=')[0]}"))
    ]
    session = session_of("method=feddrift", *base, *([f"feddrift.{option}"] if option else []))
    return outcome(session, run(session, 10))


@pytest.mark.parametrize("some", [OPTIONS[:2], pytest.param(OPTIONS, marks=pytest.mark.full)])
def test_options_of_feddrift_change_the_numbers(some: tuple[str, ...]) -> None:
    """Every option is among these, or has its own test by hand."""
    named = {option.partition("=")[0] for option in OPTIONS} | {"distance"}  # of distances by hand
    assert named == {each.name for each in dataclasses.fields(FedDriftOptions)}
    assert len({digest(), *map(digest, some)}) == 1 + len(some)


def test_feddrift_gives_equal_bits_on_every_layout_and_after_resume() -> None:
    whole = session_of("method=feddrift", *DRIFT)
    reports = run(whole, 13)
    packed = session_of("method=feddrift", *DRIFT, blocks=[[0, 4], [1], [2, 3, 5]])
    earlier = run(packed, 8)
    resumed = session_of("method=feddrift", *DRIFT, checkpoint=checkpoint_of(packed))
    assert outcome(resumed, [*earlier, *run(resumed, 5, first=9)]) == outcome(whole, reports)


def test_feddrift_costs_all_models_at_the_start_of_a_time_step_and_one_between() -> None:
    reports = run(session_of("method=feddrift", *DRIFT), 6)
    down = [report.metrics["cost_models_down"] for report in reports]
    assert down[:3] == [1.0, 1.0, 1.0]  # there is one model
    assert down[4] == 1.0 and all(report.metrics["cost_computation"] < 2.0 for report in reports)
