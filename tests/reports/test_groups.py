"""Which runs become one row: those that differ in their seed alone, wherever they were started."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import archipelago.experiments.choose_clusters
from archipelago.core.registry import REGISTRIES, Registry
from archipelago.core.vocabulary import describe
from archipelago.experiments.choose_clusters import Choice
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import run_experiment
from archipelago.reports.build import ReportRequest, build_report
from archipelago.reports.groups import Group, make_groups
from archipelago.reports.repeats import Repeat
from archipelago.runs.lock import FolderLock
from archipelago.runs.sweeps import find_trials
from tests.support.written_runs import write_run, write_sweep


def sweep_of(folder: Path, group: str, seeds: tuple[int, ...], lr: float = 0.1, **lost: str) -> Path:
    """A sweep of one group, with a trial more that left nothing behind if `lost` says what became of it."""
    trials: list[dict[str, object]] = []
    for seed in seeds:
        write_run(folder / f"runs/{seed}", seed=seed, config={"local": {"lr": lr}})
        trials.append({"group": group, "seed": seed, "run": f"runs/{seed}"})
    if lost:
        trials.append({"group": group, "seed": 9, **lost})
    return write_sweep(folder, trials)


def groups_of(*paths: Path) -> list[Group]:
    return make_groups(find_trials(paths))


def test_further_seed_joins_the_row_of_a_sweep(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "sweep", "ifca", (0, 1))
    alone = write_run(tmp_path / "alone", seed=2, config={"local": {"lr": 0.1}})
    other = sweep_of(tmp_path / "other", "ifca | lr=0.1", (3, 4))
    for paths in ([sweep, alone, other], [alone, other, sweep]):
        (group,) = groups_of(*paths)
        assert [each.start for each in sorted(group.finished)] == [0, 1, 2, 3, 4]


def test_what_a_sweep_compares_stays_apart_even_if_no_result_depends_on_it(tmp_path: Path) -> None:
    trials = []
    for executor in ("loop", "stacked"):
        for seed in (0, 1):
            run = f"runs/{executor}-{seed}"
            write_run(tmp_path / run, seed=seed, config={"local": {"executor": executor}})
            trials.append({"group": f"ifca, executor={executor}", "seed": seed, "run": run})
    first, second = groups_of(write_sweep(tmp_path, trials))
    assert [first.label, second.label] == [
        "IFCA (group=ifca, executor=loop)",
        "IFCA (group=ifca, executor=stacked)",
    ]
    assert sorted(first.finished) == sorted(second.finished) == [Repeat(0, 0), Repeat(1, 1)]


def test_seeds_that_chose_their_own_number_of_clusters_are_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {0: 2, 1: 2, 2: 3}
    monkeypatch.setattr(
        archipelago.experiments.choose_clusters,
        "choose_clusters",
        lambda config: Choice(chosen[config.seed], ()),
    )
    small = ["clients=4", "rounds=1", "local.steps=1", "fleet.backend=in_process", "model=mlp", "method=ifca"]
    config = load_config(overrides=[*small, "clusters=auto"], env={})
    runs = [
        run_experiment(dataclasses.replace(config, seed=seed), tmp_path / f"{seed}", quiet=True)
        for seed in chosen
    ]
    (same,) = groups_of(*runs[:2])
    assert (same.label, same.clusters, same.note) == ("IFCA", 2, "")
    (group,) = groups_of(*runs)
    assert (group.label, group.clusters, len(group.finished)) == ("IFCA", None, 3)
    assert group.note == "K was chosen on validation data: 2 (seed 0, 1), 3 (seed 2)"
    given = run_experiment(
        load_config(overrides=[*small, "clusters=2"], env={}), tmp_path / "given", quiet=True
    )
    by_label = {each.label: each.clusters for each in groups_of(*runs[:2], given)}
    assert by_label == {"IFCA (clusters=auto)": 2, "IFCA": 2}


def test_trial_that_left_nothing_is_noted_on_the_row_of_its_own_sweep(tmp_path: Path) -> None:
    one = sweep_of(tmp_path / "one", "ifca", (0,), status="failed", reason="out of memory")
    other = sweep_of(tmp_path / "other", "ifca", (0,), lr=0.9)
    assert {group.label: group.note for group in groups_of(one, other)} == {
        "IFCA (lr=0.1)": "seed 9: failed (out of memory)",
        "IFCA (lr=0.9)": "",
    }


def test_groups_without_a_run_of_two_sweeps_are_distinguished(tmp_path: Path) -> None:
    one = sweep_of(tmp_path / "one", "cfl", (), status="failed", reason="it broke")
    other = sweep_of(tmp_path / "other", "cfl", (), status="waiting")
    assert {group.label: group.note for group in groups_of(one, other)} == {
        f"cfl ({one})": "seed 9: failed (it broke)",
        f"cfl ({other})": "seed 9: waiting",
    }
    assert [group.label for group in groups_of(one)] == ["cfl"]


def test_of_two_runs_of_one_seed_the_first_finished_one_counts(tmp_path: Path) -> None:
    broken = write_run(tmp_path / "a", accuracy=[0.1] * 4, state="failed")
    first = write_run(tmp_path / "b", accuracy=[0.5] * 4)
    second = write_run(tmp_path / "c", accuracy=[0.9] * 4)
    (group,) = groups_of(broken, first, second)
    assert [run.path for run in group.counted] == [run.path for run in group.shown] == [first]
    assert group.by_repeat("micro_accuracy") == {Repeat(0, 0): 0.5}
    (group,) = groups_of(broken)
    assert group.counted == [] and [run.path for run in group.shown] == [broken]


def test_run_whose_process_is_gone_was_interrupted(tmp_path: Path) -> None:
    def note() -> str:
        (group,) = groups_of(run)
        return group.note

    run = write_run(tmp_path / "run", state="running")
    assert note() == "seed 0: running after 4 rounds"  # a copy without its lock: nothing is known
    lock = FolderLock(run, run)
    named = (run / ".lock").read_text()
    assert note() == "seed 0: running after 4 rounds"
    lock.release()
    (run / ".lock").write_text(named)  # as a kill leaves it
    assert note() == "seed 0: interrupted after 4 rounds"
    (run / ".lock").write_text("process 1 on another-machine\n")
    assert note() == "seed 0: running after 4 rounds"


def test_runs_from_before_there_was_a_precision_are_of_the_group_of_32_bits(tmp_path: Path) -> None:
    write_run(tmp_path / "old", seed=0)
    write_run(tmp_path / "new", seed=1, config={"precision": "32", "determinism": "exact"})
    write_run(tmp_path / "rounded", seed=0, config={"precision": "bf16", "determinism": "auto"})
    groups = groups_of(*(tmp_path / name for name in ("old", "new", "rounded")))
    assert sorted(len(group.runs) for group in groups) == [1, 2]
    assert any("bf16" in group.label for group in groups)


def test_parts_of_somebody_else_are_reported_by_their_own_labels(tmp_path: Path) -> None:
    """A rule, a network, an engine, by import path or by a plug-in's name; the platform's keep their names."""
    named = {
        "model": {"name": "own.nets.tanh"},
        "aggregation": {"name": "third"},
        "local": {"engine": "clipped"},
    }
    known = {"own.nets.tanh": "Tanh network", "third": "Third quartile", "clipped": "Clipped loop"}
    plain = {"model": {"name": "mlp"}, "aggregation": {"name": "median"}, "local": {"engine": "loop"}}
    for name, config in (("theirs", named), ("ours", plain)):
        write_run(tmp_path / name, config=config)
        words = {**describe({"method": "ifca", **config}), **({"others": known} if name == "theirs" else {})}
        assert words.get("others", {}) == (known if name == "theirs" else {})
        (tmp_path / name / "vocabulary.json").write_text(json.dumps(words))
    report = build_report(
        ReportRequest([str(tmp_path / "theirs"), str(tmp_path / "ours")], str(tmp_path / "report"))
    )
    rows = {(table.title, row.label) for table in report.tables for row in table.rows}
    # Networks are problems of their own; engines never tell two rows apart.
    assert rows == {
        ("digits, iid, model=Tanh network", "IFCA (aggregation=Third quartile)"),
        ("digits, iid, model=mlp", "IFCA (aggregation=median)"),
    }
    page = (report.folder / "report.html").read_text(encoding="utf-8")
    assert "<dt>own.nets.tanh</dt><dd>Tanh network</dd>" in page
    assert "<td>Third quartile</td>" in page


def test_labels_of_chosen_parts_are_those_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    def tanh(input_shape: object, outputs: int) -> None:
        """A network of somebody's own."""

    tanh.__module__ = "own.nets"
    table: Registry[object] = Registry("other model")
    monkeypatch.setitem(REGISTRIES, "other model", table)
    table.register("tanh_layers", "a hyperbolic tangent", label="Tanh network")(tanh)
    assert describe({"method": "ifca", "model": {"name": "tanh_layers"}})["others"] == {
        "tanh_layers": "Tanh network"
    }
    assert "others" not in describe({"method": "ifca", "model": {"name": "mlp"}, "local": {"engine": "loop"}})
