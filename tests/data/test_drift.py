"""Drift: what happens to whom, the ground truth of every round, and runs through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.drift_recovery import Recovery
from archipelago.core.metrics import was as metric_of_classes
from archipelago.data import Federation, build_federation, load_dataset
from archipelago.data.drift import DriftKind, World, events_of
from archipelago.experiments.config import load_config
from tests.support.errors import Mistake, mistake, refused
from tests.support.experiments import checkpoint_of, config_of, outcome, run, session_of


def federation_of(*overrides: str) -> Federation:
    config = config_of("rounds=20", *overrides)
    return build_federation(config.data, config.partition, config.clients, config.seed)


def stages(*overrides: str) -> Any:
    found = federation_of(*overrides).drift
    assert found is not None
    return found.stages


# What happens


def test_label_swap_permutes_the_labels_of_a_share_of_the_clients() -> None:
    plain = federation_of("data.rotations=1")
    made = federation_of("data.rotations=1", "drift=[label_swap@5:0.25]")
    assert made.drift is not None
    before, after = made.drift.stages
    assert (before.round, after.round) == (1, 5)
    changed = np.flatnonzero(after.groups != before.groups)
    assert len(changed) == 2 and before.groups.tolist() == [0] * 8  # 0.25 of 8 clients
    assert made.groups is not None and len(made.x) == len(plain.x) + sum(
        len(np.concatenate([plain.clients[i].train, plain.clients[i].validation, plain.clients[i].test]))
        for i in changed
    )
    for i in range(8):
        old, new = before.clients[i], after.clients[i]
        for part in ("train", "validation", "test"):
            was, now = getattr(old, part), getattr(new, part)
            assert np.array_equal(made.x[was], made.x[now])  # the same pictures in the same order
            same = made.y[was] == made.y[now]
            assert same.all() if i not in changed else not same.any()


def test_rotation_turns_images_and_two_events_of_one_kind_reach_the_same_group() -> None:
    made = federation_of("data.rotations=1", "drift=[rotation@3:0.25,rotation@6:0.25]", "clients=8", "seed=1")
    assert made.drift is not None
    first, second, third = made.drift.stages
    i = int(np.flatnonzero(second.groups != first.groups)[0])
    was, now = first.clients[i].train, second.clients[i].train
    assert np.array_equal(made.x[now], np.rot90(made.x[was], 1, axes=(2, 3)))
    once = [j for j in range(8) if third.groups[j] == second.groups[i]]
    assert len(once) >= 1 and set(third.groups.tolist()) <= {0, 1, 2}


def test_move_exchanges_what_clients_of_two_groups_hold() -> None:
    before, after = stages("data.rotations=2", "drift=[move@4:0.5]")
    moved = np.flatnonzero(before.groups != after.groups)
    assert len(moved) >= 2 and np.array_equal(np.bincount(before.groups), np.bincount(after.groups))
    for i in moved:
        assert any(after.clients[i].train is before.clients[j].train for j in moved if j != i) or any(
            np.array_equal(after.clients[i].train, before.clients[j].train) for j in moved if j != i
        )


def test_new_classes_appear_at_their_round() -> None:
    made = federation_of("data.rotations=1", "drift=[new_classes@4:0.5]", "data.drift_classes=0.3")
    assert made.drift is not None
    before, after = made.drift.stages
    for i in range(8):
        seen, now = (np.unique(made.y[stage.clients[i].train]) for stage in (before, after))
        if before.groups[i] == after.groups[i]:
            assert np.array_equal(seen, now)
        else:
            assert len(seen) == 7 and len(now) == 10 and np.isin(seen, now).all()
    assert np.array_equal(made.sizes, before.sizes) and (after.sizes >= before.sizes).all()
    assert (after.sizes > before.sizes).sum() == 4


def test_clients_arrive_and_leave() -> None:
    first, second, third = stages("drift=[arrive@3:0.25,leave@5:0.25]")
    assert [int(each.present.sum()) for each in (first, second)] == [6, 8]
    assert 6 <= third.present.sum() < 8
    assert (first.groups[~first.present] == -1).all() and (second.groups >= 0).all()


def test_drift_survives_its_file_and_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    config = config_of("rounds=9", "drift=[label_swap@5:0.5,rotation@5:0.25,new_classes@7,arrive@3:0.2]")
    made = build_federation(config.data, config.partition, config.clients, config.seed)
    again = Federation.from_indices(load_dataset(config.data, config.seed), made.indices())
    assert again.fingerprint == made.fingerprint
    assert made.drift is not None and again.drift is not None
    assert [stage.round for stage in again.drift.stages] == [1, 3, 5, 7]  # two events at once: one stage
    for one, other in zip(made.drift.stages, again.drift.stages, strict=True):
        assert np.array_equal(one.groups, other.groups) and np.array_equal(one.present, other.present)
        assert all(np.array_equal(a.train, b.train) for a, b in zip(one.clients, other.clients, strict=True))
    plain = config_of("rounds=9")
    assert (
        made.fingerprint
        != build_federation(plain.data, plain.partition, plain.clients, plain.seed).fingerprint
    )


class Blank(DriftKind):
    """Of a user's own: data sets of the first clients change hands."""

    def happens(self, world: World, clients: np.ndarray, rng: np.random.Generator) -> None:
        world.holder[:2] = world.holder[[1, 0]]


def test_drift_of_ones_own_by_import_path() -> None:
    before, after = stages(f"drift=[{__name__}.Blank@2]")
    assert np.array_equal(after.clients[0].train, before.clients[1].train)


# Runs through it

DRIFT = (
    "rounds=5",
    "clusters=4",
    "data.rotations=2",
    "drift=[label_swap@3:0.5,arrive@4:0.2,new_classes@5:0.3]",
)


def test_rounds_train_on_the_samples_of_their_stage() -> None:
    session = session_of("method=fedavg", "rounds=4", "drift=[new_classes@3:1]")
    server, seen = session.server, []
    for number in range(1, 5):
        session.run_round(number)
        block = session.fleet.blocks[0]
        seen.append(sum(len(samples.train) for samples in block.clients.values()))
        assert seen[-1] == server.sizes.sum() == session.fleet.all_sizes.sum()
    assert seen[0] == seen[1] < seen[2] == seen[3]


def test_absent_clients_neither_train_nor_are_evaluated() -> None:
    session = session_of("rounds=3", "drift=[arrive@2:0.25,leave@3:0.25]")
    reports = run(session, 3)
    there = [len(report.clients["client"]) for report in reports if report.clients is not None]
    assert there[:2] == [6, 8] and there[2] < 8
    assert [report.metrics["participants"] for report in reports] == there
    assert any("Drift before round 2" in event for event in reports[1].events)


@pytest.mark.parametrize(
    "method", ["ifca+cam", *(pytest.param(name, marks=pytest.mark.full) for name in ("oracle", "fedem"))]
)
def test_drift_gives_equal_bits_on_every_layout_and_after_resume(method: str) -> None:
    more = (*(each for each in DRIFT if "clusters" not in each), f"method={method}", "clusters=12")
    whole = session_of(*more, "clients=12")
    reports = run(whole, 5)
    expected = outcome(whole, reports)
    packed = session_of(*more, "clients=12", blocks=[[0, 9, 10], [1, 2, 3, 11], [4, 5, 6, 7, 8]])
    earlier = run(packed, 3)
    resumed = session_of(*more, "clients=12", checkpoint=checkpoint_of(packed))
    assert outcome(resumed, [*earlier, *run(resumed, 2, first=4)]) == expected


def test_drift_on_the_stacked_engine_is_the_loops_to_rounding() -> None:
    more = ("method=fedavg", "rounds=3", "drift=[rotation@2:0.5,new_classes@3:0.5]", "local.steps=2")
    found = []
    for engine in ("loop", "stacked"):
        session = session_of(*more, f"local.engine={engine}")
        run(session, 3)
        found.append(session.models()["models"]["global"])
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * np.abs(found[0]).max()


def test_oracle_follows_the_ground_truth_of_every_round() -> None:
    session = session_of("method=oracle", "rounds=4", "drift=[label_swap@2:0.5,move@4:0.5]", "clusters=6")
    reports = run(session, 4)
    assert [report.metrics["ari"] for report in reports] == [1.0] * 4
    assignments = [report.assignment for report in reports]
    assert not np.array_equal(assignments[0], assignments[1])
    assert not np.array_equal(assignments[2], assignments[3])
    with refused("too-few-clusters", groups=4, says="clusters=4"):
        session_of("method=oracle", "rounds=4", "drift=[label_swap@2:0.5]", "clusters=2")


def test_drift_descriptors_and_the_clients_classes_are_those_of_the_stage() -> None:
    """FeSEM asks each client anew once its data has changed, and WAS compares what clients hold now."""
    more = ("method=fesem", "fesem.features=label_shares", "rounds=4", "drift=[new_classes@3:0.5]")
    session = session_of(*more, "evaluation.every=1")
    method, up, was = session.server.method.base, [], []
    for report in run(session, 4):
        up.append(report.metrics["cost_models_up"])
        was.append(report.metrics["was"])
    part = 10 / session.server.fleet.spec.size
    assert up == pytest.approx([1 + part, 1.0, 1 + part, 1.0])
    stages = session.server.setup.stages
    assert stages[0].label_counts is not None and stages[1].label_counts is not None
    ids, counts = stages[1].label_counts
    assert not np.array_equal(counts, stages[0].label_counts[1])
    assert method.points == pytest.approx(counts / counts.sum(axis=1, keepdims=True))
    judged = metric_of_classes(counts, method.assignment[ids])
    assert was[3] == pytest.approx(judged)
    assert was[3] != pytest.approx(metric_of_classes(stages[0].label_counts[1], method.assignment[ids]))


def test_drift_descriptors_of_absent_clients_are_asked_for_when_they_take_part() -> None:
    more = ("method=fesem", "fesem.features=label_shares", "rounds=4", "drift=[new_classes@3:1.0]")
    session = session_of(*more, "participation.fraction=0.25")
    run(session, 4)
    method, stages = session.server.method.base, session.server.setup.stages
    before, after = (
        stage.label_counts[1] / stage.label_counts[1].sum(axis=1, keepdims=True) for stage in stages
    )
    assert (method.asked >= 3).any()
    for client, asked in enumerate(method.asked):
        expected = np.nan if asked == 0 else before[client] if asked < 3 else after[client]
        assert method.points[client] == pytest.approx(expected, nan_ok=True)


# Recovery


COLUMNS = {"recovery_time": "micro_accuracy"}


def test_recovery_time_by_hand() -> None:
    recovery = Recovery(0.9, COLUMNS)
    accuracies = [0.5, 1.0, 0.3, None, 0.85, 0.95, 0.2]
    found = []
    for round, accuracy in enumerate(accuracies, start=1):
        if round == 3:
            recovery.starts(3)
        metrics = {} if accuracy is None else {"micro_accuracy": accuracy}
        found.append(recovery.sees(round, metrics).get("recovery_time"))
        again = Recovery(0.9, COLUMNS)
        again.load_state(recovery.save_state())
        recovery = again
    assert found == [None, None, None, None, None, 3, 3]  # 0.95 >= 0.9 in round 6, three after the drift


def test_recovery_from_a_second_drift_is_measured_by_the_level_before_the_first() -> None:
    recovery = Recovery(1.0, COLUMNS)
    recovery.sees(1, {"micro_accuracy": 0.9})
    recovery.starts(2)
    recovery.sees(2, {"micro_accuracy": 0.4})
    recovery.starts(3)  # 0.4 is no level to recover to
    assert recovery.sees(3, {"micro_accuracy": 0.5})["recovery_time"] is None
    assert recovery.sees(5, {"micro_accuracy": 0.9})["recovery_time"] == 2
    recovery.starts(6)
    assert recovery.sees(6, {"micro_accuracy": 0.9})["recovery_time"] == 0


def test_recovery_columns_and_their_level() -> None:
    more = ("method=oracle", "rounds=4", "drift=[label_swap@2:1]", "clusters=4", "local.steps=6")
    low = [report.metrics for report in run(session_of(*more, "evaluation.recovery=0.01"), 4)]
    assert "recovery_time" not in low[0]
    assert low[1]["recovery_time"] == 0 and low[1]["rounds_since_drift"] == 0
    high = [report.metrics for report in run(session_of(*more, "evaluation.recovery=9"), 4)]
    assert high[-1]["recovery_time"] is None and high[-1]["rounds_since_drift"] == 2
    assert low[1]["recovery_time_ari"] == 0


# Mistakes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["drift=[label_swap]"], mistake("wrong-form", given="label_swap", says="label_swap@10:0.5")),
        (["drift=[label_swap@1]"], mistake("wrong-form", given="label_swap@1")),
        (["drift=[label_swap@5:1.5]"], mistake("wrong-form", given="label_swap@5:1.5")),
        (["drift=[label_swop@5]"], mistake("unknown-name", kind="drift", nearest="label_swap")),
        (["drift=[label_swap@50]"], mistake("never-happens", kind="label_swap", round=50)),
        (["data.drift_share=0.2"], mistake("unread", setting="data.drift_share", says="data.drift=")),
        (
            ["data.drift_classes=0.2", "drift=[move@3]"],
            mistake("unread", setting="data.drift_classes", says="new_classes"),
        ),
        (["evaluation.recovery=0.5"], mistake("unread", setting="evaluation.recovery", says="data.drift")),
    ],
)
def test_drift_mistakes_are_one_sentence(given: list[str], expected: Mistake) -> None:
    with expected():
        load_config(overrides=given, env={})


def test_drift_that_cannot_happen_to_the_data_is_refused() -> None:
    with refused("unfit-data", setting="data.drift", kind="move"):
        federation_of("drift=[move@3]", "data.rotations=1")
    assert [event.round for event in events_of(config_of("rounds=9", "drift=[move@5,leave@3]").data)] == [
        3,
        5,
    ]
