"""Sweeps without Ray: trials one after the other in this process, as the same code runs them on Ray Tune."""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from pyarrow.fs import FileSystem
from ray.tune.experiment import Trial as TunesTrial
from ray.tune.schedulers import PopulationBasedTraining

from actors.placement import Node
from actors.reports import RoundReport
from actors.session import ActorsLost, InProcessSession
from archipelago import open_run
from archipelago.experiments.runner import run_experiment
from archipelago.runs.checkpoints import checkpoints
from archipelago.runs.status import read_status
from archipelago.runs.storage import Mirror, join, local_copy, read_text, reading, remove_file, write_text
from archipelago.runs.sweeps import is_sweep, read_rows
from archipelago.sweeps.directory import SweepDirectory
from archipelago.sweeps.dry_run import describe, seconds_per_round
from archipelago.sweeps.resources import _PROBE, Reservation, at_a_time, reservation_for, sees
from archipelago.sweeps.runner import resume_sweep, run_sweep
from archipelago.sweeps.search import Queue, Study
from archipelago.sweeps.shared_prefix import in_order, shared_prefixes
from archipelago.sweeps.trial import TrialRun, payload, values_now
from archipelago.sweeps.tune import TuneSweep
from archipelago.sweeps.view import SweepView
from tests.support import killers
from tests.support.errors import refused
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs, events
from tests.support.sweeps import assert_equal_sweeps, rows_of, sweep_of

HERE = "fleet.backend=in_process"


def test_trial_is_the_run_that_it_would_be_alone(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, "sweep.methods=[fedavg,ifca]", "sweep.seeds=[0,3]")
    address = run_sweep(sweep, str(tmp_path / "sweep"), quiet=True)
    assert [(row.trial, row.status, row.run) for row in read_rows(address)] == [
        (f"{method}-seed{seed}", "finished", f"runs/{method}-seed{seed}")
        for method in ("fedavg", "ifca")
        for seed in (0, 3)
    ]
    alone = run_experiment(config_of("method=ifca", "seed=3"), tmp_path / "alone", quiet=True)
    assert_equal_runs(tmp_path / "sweep/runs/ifca-seed3", alone)
    with refused("finished", says="4 trials"):
        resume_sweep(address, quiet=True)
    with refused("exists"):
        run_sweep(sweep, address, quiet=True)


TABLES = ("metrics.csv", "timings.csv", "events.jsonl", "clients.parquet", "assignments.parquet")
TUNED = ("sweep.methods=[ifca+cam+finetune,ifca+cam]", "rounds=9", "evaluation.every=2", "evaluation.last=2")


def test_fine_tuned_trial_takes_over_the_rounds_of_the_one_that_trains_the_same(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, *TUNED, "checkpoint.every=4", "checkpoint.keep=1")
    address = Path(run_sweep(sweep, str(tmp_path / "sweep"), quiet=True))
    assert {row.status for row in read_rows(str(address))} == {"finished"}
    tuned, plain = (address / "runs" / name for name in ("ifca+cam+finetune-seed0", "ifca+cam-seed0"))
    # Evaluations after rounds 2, 4, 6, 8 and 9: the last two fine-tune, so both train the same until round 7.
    seconds = [(run / "timings.csv").read_text().splitlines() for run in (tuned, plain)]
    assert seconds[0][:8] == seconds[1][:8] and seconds[0][8] != seconds[1][8]
    assert [round for round, _ in checkpoints(plain)] == [7, 9]
    assert any(text.startswith("Rounds 1 to 7 are those of ifca+cam-seed0") for text in events(tuned))
    changed = ("method=ifca+cam+finetune", *TUNED[1:])
    alone = run_experiment(config_of(*changed, "seed=0"), tmp_path / "alone", quiet=True)
    assert_equal_runs(tuned, alone)
    records = [
        {path.name: path.read_bytes() for path in (run / "records").iterdir()} for run in (tuned, alone)
    ]
    assert records[0] == records[1] and len(records[0]) > 4
    before, after = (open_run(run).metrics["micro_accuracy"].to_numpy() for run in (plain, tuned))
    assert np.array_equal(before[:7], after[:7], equal_nan=True) and before[-1] != after[-1]


def test_fine_tuned_trial_without_a_finished_prefix_trains_by_itself(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, *TUNED, "checkpoint.every=4")
    tuned, plain = sweep.trials()
    alone = run_experiment(
        config_of("method=ifca+cam+finetune", *TUNED[1:], "seed=0"), tmp_path / "alone", quiet=True
    )

    def finished(name: str) -> Path:
        given = payload(tuned, str(tmp_path / name), prefix=str(tmp_path / "plain"))
        del given["trial"]
        run = TrialRun(**given)
        while not run.step()["done"]:
            pass
        assert_equal_runs(tmp_path / name, alone)
        return tmp_path / name

    given = payload(plain, str(tmp_path / "plain"), watched=True, branches=True)
    del given["trial"]
    earlier = TrialRun(**given)
    finished("no prefix")
    for _ in range(8):
        earlier.step()
    assert not any("Rounds 1 to" in text for text in events(finished("prefix under way")))
    while not earlier.step()["done"]:
        pass
    assert any("Rounds 1 to 7" in text for text in events(finished("prefix finished")))
    (checkpoint,) = (tmp_path / "plain/checkpoints/round-000007").glob("clients-*")
    for damaged in (checkpoint, *(tmp_path / "plain" / name for name in TABLES)):
        whole = damaged.read_bytes() if damaged.exists() else b""
        damaged.write_bytes(whole[: len(whole) // 2] + b"\n,\n")
        assert not any("Rounds 1 to" in text for text in events(finished(f"damaged {damaged.name}")))
        damaged.write_bytes(whole)


def test_kill_while_rounds_are_taken_over_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = sweep_of(tmp_path, HERE, *TUNED)
    tuned, plain = (payload(trial, str(tmp_path / trial.name)) for trial in sweep.trials())
    del tuned["trial"], plain["trial"]
    ends = TrialRun(**plain, branches=True)
    while not ends.step()["done"]:
        pass

    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Killed

    for place in (
        "archipelago.sweeps.shared_prefix.CheckpointWriter.submit",
        "archipelago.runs.directory.RunDirectory.truncate",
    ):
        first = TrialRun(**tuned, prefix=plain["address"])
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(place, die)
            first.step()
        first.close()  # the lock would die with its process
    again = TrialRun(**tuned, prefix=plain["address"])
    while not again.step()["done"]:
        pass
    assert sum("Rounds 1 to 7 " in text for text in events(Path(tuned["address"]))) == 1
    alone = config_of("method=ifca+cam+finetune", *TUNED[1:], "seed=0")
    assert_equal_runs(Path(tuned["address"]), run_experiment(alone, tmp_path / "alone", quiet=True))


def test_shared_prefixes_are_of_trials_that_differ_in_nothing_else(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path,
        HERE,
        "sweep.methods=[fedavg,ifca+finetune,ifca]",
        "sweep.grid={local.lr: [0.1, 0.2]}",
        "sweep.seeds=[0,1]",
    )
    trials = {trial.name: trial for trial in sweep.trials()}
    found = shared_prefixes(trials.values())
    assert len(found) == 4
    for one, other in found.items():
        assert (trials[one].config.method, trials[other].config.method) == ("ifca+finetune", "ifca")
        assert trials[one].seed == trials[other].seed
        assert trials[one].config.local.lr == trials[other].config.local.lr


def test_queue_hands_out_a_trial_when_the_one_whose_rounds_it_shares_is_over(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, "sweep.methods=[ifca+finetune,fedavg,ifca]")
    prefixes = shared_prefixes(sweep.trials())
    ordered = in_order(sweep.trials(), prefixes)
    assert [trial.config.method for trial in ordered] == ["fedavg", "ifca", "ifca+finetune"]
    over: set[str] = set()
    queue = Queue(
        ordered,
        lambda trial: {"name": trial.name},
        may_begin=lambda trial: prefixes.get(trial.name, "") in {*over, ""},
    )
    assert [queue.suggest(f"{n}") for n in range(3)] == [
        {"name": "fedavg-seed0"},
        {"name": "ifca-seed0"},
        None,
    ]
    over.add("ifca-seed0")
    assert queue.suggest("3") == {"name": "ifca+finetune-seed0"} and queue.suggest("4") == Queue.FINISHED


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "armed"
    folder.mkdir()
    monkeypatch.setenv(killers.FOLDER, str(folder))
    yield folder


def test_trial_that_fails_says_why_and_does_not_stop_the_others(armed: Path, tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path,
        HERE,
        "sweep.methods=[fedavg,ifca]",
        "rounds=3",
        *(m for m in killers.MODULE[1:]),
        "checkpoint.every=1",
    )
    killers.arm("training", after=30, action="raise")  # in the second round of the first trial
    address = run_sweep(sweep, str(tmp_path / "sweep"), quiet=True)
    rows = rows_of(address)
    assert (rows["fedavg-seed0"].status, rows["ifca-seed0"].status) == ("failed", "finished")
    assert "told to fail by a test" in rows["fedavg-seed0"].reason
    resume_sweep(address, quiet=True)  # a failed trial is given another chance, from its last checkpoint
    assert {row.status for row in read_rows(address)} == {"finished"}
    undisturbed = run_sweep(sweep, str(tmp_path / "undisturbed"), quiet=True)
    assert_equal_sweeps(address, undisturbed)


def test_sweep_that_was_edited_is_refused_by_the_key(armed: Path, tmp_path: Path) -> None:
    axes = "sweep.methods=[fedavg,local]"
    sweep = sweep_of(tmp_path, HERE, axes, "rounds=2", *killers.MODULE[1:], "checkpoint.every=1")
    killers.arm("training", after=30, action="raise")  # in the second round of the first trial
    address = run_sweep(sweep, str(tmp_path / "sweep"), quiet=True)
    assert [row.status for row in rows_of(address).values()] == ["failed", "finished"]
    before = {path: path.read_bytes() for path in Path(address).rglob("metrics.csv")}
    document = Path(address, "sweep.yaml")
    written = document.read_text()
    for edited, key in (
        (written.replace("settings:\n", "settings:\n  local.lr: 0.5\n"), "local.lr was not there and is 0.5"),
        (
            written.replace("- local\n", "- ifca\n"),
            'sweep.methods was ["fedavg", "local"] and is ["fedavg", "ifca"]',
        ),
    ):
        assert edited != written
        document.write_text(edited)
        with refused("other-config") as caught:
            resume_sweep(address, quiet=True)
        assert key in str(caught.value)
    # A sweep from before knows nothing of itself: the trial that had begun refuses other settings than its own.
    document.write_text(written.replace("settings:\n", "settings:\n  local.lr: 0.5\n"))
    Path(address, "identity.json").unlink()
    resume_sweep(address, quiet=True)
    row = rows_of(address)["fedavg-seed0"]
    assert row.status == "failed" and "local.lr was 0.05 and is 0.5" in row.reason
    assert {path: path.read_bytes() for path in before} == before
    document.write_text(written)  # set back: it continues
    resume_sweep(address, quiet=True)
    assert {row.status for row in read_rows(address)} == {"finished"}


def test_trial_that_is_closed_resumes_where_it_was(tmp_path: Path) -> None:
    (trial,) = sweep_of(tmp_path, "method=ifca", "sweep.seeds=[1]", "rounds=6", "checkpoint.every=2").trials()
    given = {key: value for key, value in payload(trial, str(tmp_path / "run")).items() if key != "trial"}
    metric = "micro_accuracy"
    first = TrialRun(**given, metric=metric, watched=True)
    reported = [first.step() for _ in range(3)]
    assert [result["round"] for result in reported] == [1, 2, 3] and not reported[-1]["done"]
    first.close()
    again = TrialRun(**given, metric=metric, watched=True, replay=True)
    replayed = [again.step() for _ in range(6)]
    assert [result["round"] for result in replayed] == [1, 2, 3, 4, 5, 6]
    assert {result["taken"] for result in reported} == {0} and {result["taken"] for result in replayed} == {2}
    assert [result[metric] for result in replayed[:3]] == [result[metric] for result in reported]
    assert replayed[-1]["done"] and replayed[-1]["state"] == "finished"
    over = TrialRun(**given, metric=metric, watched=True, replay=True)
    assert [over.step()["done"] for _ in range(6)] == [False] * 5 + [True]  # reported again, not run again
    alone = run_experiment(config_of("method=ifca", "seed=1", "rounds=6"), tmp_path / "alone", quiet=True)
    assert_equal_runs(tmp_path / "run", alone)
    part = TrialRun(**{**given, "address": str(tmp_path / "part")}, metric=metric, watched=True)
    part.step(), part.step(), part.close()
    stopped = TrialRun(
        **{**given, "address": str(tmp_path / "part")}, metric=metric, watched=True, replay=True, ended=True
    )
    assert [(result["round"], result["done"]) for result in (stopped.step(), stopped.step())] == [
        (1, False),
        (2, True),
    ]


def test_state_is_taken_over_with_other_values(tmp_path: Path) -> None:
    settings = ("method=fedavg", "sweep.seeds=[0]", "rounds=4", "checkpoint.every=1")
    (trial,) = sweep_of(tmp_path, *settings).trials()
    runs = []
    for name, lr in (("good", 0.1), ("bad", 0.001)):
        given = {key: value for key, value in payload(trial, str(tmp_path / name)).items() if key != "trial"}
        runs.append(TrialRun(**{**given, "values": {"local.lr": lr}}, metric="micro_loss", watched=True))
    good, bad = runs
    for run in runs:
        run.step(), run.step()
    (tmp_path / "saved").mkdir()
    good.save(tmp_path / "saved")
    bad.take_over(tmp_path / "saved", {"local.lr": 0.1})
    results = [run.step() for run in (good, bad)]
    assert (
        results[0]["micro_loss"] == results[1]["micro_loss"]
    )  # the same state, the same values: the same round
    bad.close()
    # Killed now, it continues with the values that it was given last.
    resumed = TrialRun(
        str(tmp_path / "bad"), given["settings"], {"local.lr": 0.001}, metric="micro_loss", watched=True
    )
    # Tune has these values too, or it would hand back the first ones after the next pause.
    assert values_now(str(tmp_path / "bad"), {"local.lr": 0.001}) == {"local.lr": 0.1}
    assert values_now(str(tmp_path / "good"), {"local.lr": 0.2}) == {"local.lr": 0.2}
    assert resumed.step()["round"] == 3  # reported again
    assert resumed.step()["micro_loss"] == good.step()["micro_loss"]
    for run in (good, resumed):
        run.close()
    assert (
        "Took over the state of good; continues with local.lr=0.1."
        in (tmp_path / "bad/events.jsonl").read_text()
    )


def test_payload_of_a_resumed_population_has_the_values_it_had_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archipelago.sweeps.tune.live_nodes", lambda: [NODE])
    drawn = ("sweep.sample.local.lr=uniform(0.01,0.1)", "sweep.sampler=random", "sweep.samples=2")
    population = ("method=fedavg", "sweep.scheduler=pbt", "partition.validation=0.2")
    directory = SweepDirectory.create(str(tmp_path / "sweep"), sweep_of(tmp_path, *population, *drawn))
    tuned = TuneSweep(directory, SweepView(directory, quiet=True), None)
    moved, still = directory.sweep.trials()
    write_text(
        join(directory.run_address(moved.name), "schedule.json"),
        '[{"round": 2, "values": {"local.lr": 0.5}}, {"round": 4, "values": {"local.lr": 0.7}}]',
    )
    reserved = {moved.combination: Reservation([{"CPU": 1.0}], 0)}
    assert tuned._payload(moved, reserved)["values"] == {"local.lr": 0.7}
    assert tuned._payload(still, reserved)["values"] == still.values
    directory.close()


def test_study_learns_of_a_trial_once_though_it_is_reported_again_to_a_scheduler(tmp_path: Path) -> None:
    """A resumed sweep under ASHA hands out finished trials, too: their curves are what the others are judged by."""
    drawn = ("sweep.sample.local.lr=uniform(0.01,0.1)", "sweep.sampler=optuna", "sweep.samples=4")
    sweep = sweep_of(
        tmp_path,
        "method=fedavg",
        "partition.validation=0.2",
        "sweep.scheduler=asha",
        "sweep.seeds=[0,1]",
        *drawn,
    )
    metric = sweep.settings.metric
    (label,) = sweep.combinations
    done, half = ([sweep.trial(label, {"local.lr": lr}, seed) for seed in (0, 1)] for lr in (0.02, 0.03))
    past = {done[0].group: (done[0].values, [0.5, 0.7]), half[0].group: (half[0].values, [0.4])}
    study = Study(sweep, label, past, lambda trials: None)
    study._searcher = learnt = Mock()  # what Optuna learns
    study.resume(half[1:], past)
    queue = Queue([*done, *half], lambda trial: {"name": trial.name}, study)
    for trial, value in zip([*done, *half], (0.5, 0.7, 0.4, 0.8), strict=True):
        assert queue.suggest(trial.name) == {"name": trial.name}
        queue.on_trial_complete(trial.name, {metric: value, "state": "finished"})
    points = [call.args for call in learnt.add_evaluated_point.call_args_list]
    assert points == [({"local.lr": 0.02}, pytest.approx(0.6)), ({"local.lr": 0.03}, pytest.approx(0.6))]
    assert learnt.on_trial_complete.call_count == 0


def test_population_does_not_wait_for_a_member_that_is_over(tmp_path: Path) -> None:
    """Resumed at round 10 they are ahead of the first exchange, where Tune's own rule waits for a member to follow."""
    drawn = ("sweep.sample.local.lr=uniform(0.01,0.1)", "sweep.sampler=random", "sweep.samples=2")
    population = ("method=fedavg", "sweep.scheduler=pbt", "partition.validation=0.2", "sweep.interval=2")
    ahead, behind, _ = members = [Mock(status=status) for status in ("PAUSED", "PAUSED", "TERMINATED")]
    controller = Mock(
        get_trials=lambda: members,
        get_live_trials=lambda: [each for each in members if each.status != "TERMINATED"],
    )
    ours: Any = sweep_of(tmp_path, *population, *drawn).scheduler.make(12)
    for rule, chosen in ((ours, behind), (copy.copy(ours), None)):
        rule._trial_state = {
            member: Mock(last_train_time=time) for member, time in zip(members, (11, 10, 12), strict=True)
        }
        rule._next_perturbation_sync = 10
        if chosen is None:
            rule.__class__ = PopulationBasedTraining
        assert rule.choose_trial_to_run(controller) is chosen
    ahead.status = "RUNNING"  # somebody to wait for
    ours._next_perturbation_sync = 10
    assert ours.choose_trial_to_run(controller) is None


def test_population_explores_what_it_was_given_and_nothing_else(tmp_path: Path) -> None:
    """Tune's own rule multiplies whatever it has, without end, and fails at what cannot be multiplied."""
    space = {
        "local.momentum": "uniform(0,0.95)", "local.lr": "loguniform(0.001,1)", "local.steps": "randint(1,12)",
        "local.weight_decay": "quniform(0,0.5,0.1)", "local.batch": "choice([16,32,64])",
        "local.optimizer": "choice([sgd,adam])",
    }  # fmt: skip
    drawn = [f"sweep.sample.{key}={text}" for key, text in space.items()]
    population = ("method=fedavg", "sweep.scheduler=pbt", "partition.validation=0.2", "sweep.sampler=random")
    sweep = sweep_of(tmp_path, *population, *drawn)
    rule = sweep.scheduler.make(12)
    assert isinstance(rule, PopulationBasedTraining)
    seen: dict[str, list[Any]] = {key: [] for key in space}
    config: dict[str, Any] = {"payload": {"values": dict(sweep.trials()[0].values), "trial": "a"}}
    before = random.getstate(), np.random.get_state()  # noqa: NPY002  # what Tune draws from
    try:
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        for _ in range(1000):
            config, _ = rule._get_new_config(Mock(), Mock(config=config))
            for key, value in config["payload"]["values"].items():
                seen[key].append(value)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
    assert config["payload"]["trial"] == "a"
    for key, (low, high) in {"local.momentum": (0, 0.95), "local.lr": (0.001, 1)}.items():
        assert low <= min(seen[key]) and max(seen[key]) <= high
        assert len(set(seen[key])) > 100 and {type(value) for value in seen[key]} == {float}
    assert {round(10 * value, 9) for value in seen["local.weight_decay"]} == {0, 1, 2, 3, 4, 5}
    assert set(seen["local.steps"]) == set(range(1, 12)) and {
        type(value) for value in seen["local.steps"]
    } == {int}
    assert set(seen["local.batch"]) == {16, 32, 64} and set(seen["local.optimizer"]) == {"sgd", "adam"}


def test_population_takes_over_no_state_from_further_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resume members are rounds apart; the rounds in between would be missing in its files."""
    taken: list[tuple[str, str]] = []
    monkeypatch.setattr(PopulationBasedTraining, "_exploit", lambda _, __, *pair: taken.append(pair))
    drawn = ("sweep.sample.local.lr=uniform(0.01,0.1)", "sweep.sampler=random", "sweep.samples=2")
    sweep = sweep_of(tmp_path, "method=fedavg", "sweep.scheduler=pbt", "partition.validation=0.2", *drawn)
    rule: Any = sweep.scheduler.make(12)
    rule._trial_state = {"two": Mock(last_train_time=2), "five": Mock(last_train_time=5)}
    rule._exploit(None, "two", "five")
    assert taken == []
    rule._exploit(None, "five", "two")
    assert taken == [("five", "two")]


def test_median_rule_never_pauses_a_trial(tmp_path: Path) -> None:
    """Tune's own rule does, where trials wait that it cannot compare with yet; here a pause could not be saved."""
    tuned = ("sweep.scheduler=median", "sweep.grace=2", "partition.validation=0.2", "sweep.seeds=[0]")
    drawn = ("sweep.sample.local.lr=uniform(0.01,0.1)", "sweep.sampler=random", "sweep.samples=4")
    rule = sweep_of(tmp_path, "method=fedavg", *tuned, *drawn).scheduler.make(6)
    trials = {name: TunesTrial("none", stub=True) for name in "abcdez"}

    def report(trial: str, round: int, value: float) -> str:
        result = {"training_iteration": round, "validation_micro_accuracy": value}
        return rule.on_trial_result(None, trials[trial], result)  # type: ignore[arg-type]  # it asks nobody else

    assert [report("a", round, 0.5) for round in (1, 2, 3)] == ["CONTINUE"] * 3
    rule.on_trial_complete(None, trials["z"], {"training_iteration": 6})  # type: ignore[arg-type]  # failed at once
    assert [report(trial, 3, 0.5) for trial in ("b", "c")] == ["CONTINUE"] * 2
    assert (report("d", 3, 0.6), report("e", 3, 0.4)) == ("CONTINUE", "STOP")  # three to compare with


def test_trial_that_lost_its_actors_is_handed_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a failure of the trial: Tune begins it again, where it fits."""
    (trial,) = sweep_of(tmp_path, "method=fedavg", "sweep.seeds=[0]", "rounds=3", "fleet.restarts=0").trials()
    given = {key: value for key, value in payload(trial, str(tmp_path / "run")).items() if key != "trial"}
    run_round = InProcessSession.run_round

    def lost(session: InProcessSession, round: int) -> RoundReport:
        if round == 2:
            raise ActorsLost("a node went away")
        return run_round(session, round)

    with monkeypatch.context() as patch:
        patch.setattr(InProcessSession, "run_round", lost)
        with pytest.raises(ActorsLost, match="a node went away"):
            TrialRun(**given).step()
    assert read_status(tmp_path / "run").state == "interrupted"
    again = TrialRun(**given)
    while not (result := again.step())["done"]:
        pass
    assert (result["state"], result["round"]) == ("finished", 3)


# Where clients live -------------------------------------------------------------------------------------------

NODE: Node = {"CPU": 4.0, "GPU": 2.0}


def reserved_for(
    trials: int, *settings: str, choice: str = "auto", nodes: tuple[Node, ...] = (NODE,)
) -> tuple[int, int]:
    """(bundles, actors)."""
    found = reservation_for(config_of(*settings), choice, trials, nodes)
    return len(found.bundles), found.actors


def test_small_or_many_trials_need_no_actors() -> None:
    large = ("clients=100", "local.steps=50", "local.batch=64")
    assert reserved_for(1) == (1, 0)  # a round is small
    assert reserved_for(4, *large) == (1, 0)  # the trials fill the cluster
    assert reserved_for(2, *large) == (
        3,
        2,
    )  # two trials share four CPUs; the first bundle is the trial's own
    assert reserved_for(1, *large) == (5, 4)
    assert reserved_for(8, "fleet.actors=3") == (4, 3)  # who asks for actors gets them
    assert reserved_for(8, "clients=8", "fleet.clients_per_actor=4") == (3, 2)
    assert reserved_for(1, *large, choice="in_process") == (1, 0)
    assert reserved_for(8, choice="actors") == (2, 1)
    assert reservation_for(config_of("clients=8"), "auto", 9, (NODE,)).bundles == [{"CPU": 1.0}]


def test_reservation_with_gpus_shares_them_among_small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.sweeps.resources.torch_has_cuda", lambda: True)
    large = ("clients=100", "local.steps=50", "local.batch=64")
    nodes: tuple[Node, ...] = ({"CPU": 8.0}, {"CPU": 16.0, "GPU": 2.0})

    def found(trials: int, *settings: str, choice: str = "auto") -> Reservation:
        return reservation_for(config_of(*settings), choice, trials, nodes)

    assert found(50) == Reservation([{"CPU": 1.0, "GPU": 0.25}], 0, 0.25)  # four small ones on each
    assert found(3).gpus == 0.5 and found(2).gpus == found(1).gpus == 1.0
    assert found(50, *large) == Reservation([{"CPU": 1.0, "GPU": 1.0}], 0, 1.0)  # large ones do not share
    assert found(1, *large) == Reservation([{}, *[{"CPU": 1.0, "GPU": 1.0}] * 2], 2, 1.0)
    assert found(50, "fleet.gpus=0") == Reservation([{"CPU": 1.0}], 0, 0.0)
    assert found(9, "fleet.actors=4") == Reservation([{}, *[{"CPU": 1.0, "GPU": 0.5}] * 4], 4, 0.5)
    fleet = config_of().fleet
    assert [at_a_time(found(50, *each), fleet, nodes) for each in ((), large, ("fleet.gpus=0",))] == [
        8,
        2,
        24,
    ]


def test_dry_run_says_which_devices_and_why_gpus_stay_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("archipelago.sweeps.resources", "archipelago.sweeps.dry_run"):
        monkeypatch.setattr(f"{module}.torch_has_cuda", lambda: True)
    monkeypatch.setattr("archipelago.sweeps.dry_run.nodes_of", lambda fleet: [{"CPU": 16.0, "GPU": 4.0}])
    monkeypatch.setattr("archipelago.sweeps.dry_run.seconds_per_round", lambda config, limit, reserved: 1.0)

    def described(*settings: str) -> dict[str, str]:
        return {row[0]: row[1] for _, rows in describe(sweep_of(tmp_path, *settings)) for row in rows}

    many = described("sweep.seeds=40")
    assert many["devices"] == "0.25 GPU for each process with clients, precision 32"
    assert many["trials at a time"] == "16" and many["seconds per round"] == "1 to 1 on a GPU of the cluster"
    few = described("sweep.seeds=3")
    assert few["devices"] == (
        "1 GPU for each process with clients, precision 32; 1 of 4 GPUs stays idle: there are fewer processes with "
        "clients (3) than GPUs."
    )
    off = described("sweep.seeds=3", "fleet.gpus=0")
    assert off["devices"] == "CPUs, precision 32; 4 of 4 GPUs stay idle: fleet.gpus=0 was set."
    assert off["seconds per round"] == "1 to 1 on this machine's CPU"


def test_calibration_on_a_gpu_serves_all_clients_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is only asked for: torch has none here, and says so in the session."""
    seen: list[InProcessSession] = []
    make = InProcessSession.__init__

    def made(session: InProcessSession, *arguments: Any, **more: Any) -> None:
        make(session, *arguments, **more)
        seen.append(session)

    monkeypatch.setattr(InProcessSession, "__init__", made)
    reserved = Reservation([{}, {"CPU": 1.0, "GPU": 0.5}], 1, 0.5)
    config = config_of("fleet.backend=ray", "rounds=40", "clients=8")
    assert seconds_per_round(config, reserved=reserved) is not None
    assert seconds_per_round(config, reserved=Reservation([{"CPU": 1.0}], 0, 0.0)) is not None
    assert [(len(each.fleet.all_sizes), each.gpus) for each in seen] == [(8, 0.5), (4, 0.0)]


def test_trial_that_no_node_can_hold_is_a_sentence() -> None:
    with refused("capacity", wanted=1):
        reserved_for(9, "fleet.backend=ray", "fleet.cpus=8")


def test_nodesees_what_another_one_wrote_or_does_not(tmp_path: Path) -> None:
    write_text(str(tmp_path / "probe"), _PROBE)
    here = tmp_path.as_uri()
    assert sees(str(tmp_path / "probe")) and sees(join(here, "probe"))
    assert not any(sees(join(where, "none")) for where in (str(tmp_path), here, "nowhere://there"))


# What is shown ------------------------------------------------------------------------------------------------


def test_view_has_a_line_for_each_trial_that_is_over(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, "sweep.methods=[fedavg,ifca]", "sweep.seeds=2")
    directory = SweepDirectory.create(str(tmp_path / "sweep"), sweep)
    stream, now = io.StringIO(), [0.0]
    with SweepView(directory, stream=stream, clock=lambda: now[0]) as view:
        for seed, accuracy in enumerate((0.5, 0.7)):
            now[0] += 10
            directory.set(f"ifca-seed{seed}", "finished")
            shown = {"micro_accuracy": accuracy}
            view.update(f"ifca-seed{seed}", {"round": 4, "rounds": 4, "shown": shown, "done": True})
        directory.set("fedavg-seed0", "failed", "no luck")
        view.update("fedavg-seed0", {"round": 1, "rounds": 4, "done": True})
        view.over("fedavg-seed0")  # shown once
    directory.close()
    assert stream.getvalue().splitlines() == [
        "1/4  ifca  (1/2 seeds)  accuracy 0.5000  30 s left",
        "2/4  ifca  (2/2 seeds)  accuracy 0.6000 ± 0.1000  20 s left",
        "fedavg-seed0 failed: no luck",
        "3/4  fedavg  (1/2 seeds)  7 s left",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_view_on_a_terminal_is_a_table_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    sweep = sweep_of(tmp_path, HERE, "sweep.methods=[fedavg,ifca]", "sweep.seeds=2")
    directory, stream = SweepDirectory.create(str(tmp_path / "sweep"), sweep), Terminal()
    now = [0.0]
    with SweepView(directory, stream=stream, clock=lambda: now[0]) as view:
        view.note("hello")
        now[0] = 90.0
        for trial in ("ifca-seed0", "ifca-seed1"):
            view.started(trial)
        now[0] = 120.0  # the group's own pace: three quarters in half a minute
        directory.set("ifca-seed1", "finished")
        view.update("ifca-seed1", {"round": 4, "rounds": 4, "shown": {"micro_accuracy": 0.25}, "done": True})
        view.update("ifca-seed0", {"round": 2, "rounds": 4, "shown": {"micro_accuracy": 0.75}})
    directory.close()
    last = stream.getvalue()
    assert "hello" in last and "1/4 trials" in last and "3:20 left" in last
    (line,) = [line for line in last.splitlines() if "accuracy 0.5000" in line]
    assert line.split() == ["ifca", "1/2", "75%", "accuracy", "0.5000", "±", "0.2500", "10", "s", "left"]
    assert any(line.split() == ["fedavg", "0/2", "0%"] for line in last.splitlines())


def test_view_of_a_resumed_sweep_knows_what_was_there(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, "sweep.methods=[ifca]", "sweep.seeds=2")
    directory, now = SweepDirectory.create(str(tmp_path / "sweep"), sweep), [0.0]
    metrics = "round,micro_accuracy\n1,0.25\n2,0.5\n3,\n"
    write_text(join(directory.run_address("ifca-seed0"), "metrics.csv"), metrics)
    directory.set("ifca-seed0", "finished")
    with SweepView(directory, quiet=True, clock=lambda: now[0]) as view:
        assert view.group_line("ifca") == ("1/2", "50%", "accuracy 0.5000") and view.time_left() == ""
        view.started("ifca-seed1")
        now[0] = 30.0
        view.update("ifca-seed1", {"round": 1, "rounds": 4, "shown": {"micro_accuracy": 0.7}})
        assert view.group_line("ifca") == ("1/2", "62%", "accuracy 0.6000 ± 0.1000")
        assert view.time_left() == view.time_left("ifca") == "1:30 left"
    directory.close()


def test_view_does_not_count_rounds_of_an_earlier_process_as_pace(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, "sweep.methods=[ifca]", "sweep.seeds=2")
    directory, now = SweepDirectory.create(str(tmp_path / "sweep"), sweep), [0.0]
    with SweepView(directory, quiet=True, clock=lambda: now[0]) as view:
        view.started("ifca-seed0")
        view.update("ifca-seed0", {"round": 50, "rounds": 100, "taken": 50})
        assert view.time_left() == ""
        now[0] = 60.0
        view.update("ifca-seed0", {"round": 51, "rounds": 100, "taken": 50})
        assert view.time_left() == "2:29:00 left"  # 149 rounds at a minute each
    directory.close()


def test_view_counts_rounds_of_a_shared_prefix_neither_as_pace_nor_as_work_to_come(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, "sweep.methods=[ifca,ifca+finetune,fedavg]", "rounds=100")
    directory, now = SweepDirectory.create(str(tmp_path / "sweep"), sweep), [0.0]
    with SweepView(directory, quiet=True, clock=lambda: now[0]) as view:
        view.started("ifca-seed0")
        now[0] = 50.0
        view.update("ifca-seed0", {"round": 50, "rounds": 100, "taken": 0})
        assert view.time_left() == "2:33 left"  # 50 + 3 + 100 rounds at a second each
        now[0] = 100.0
        view.update("ifca-seed0", {"round": 100, "rounds": 100, "taken": 0, "done": True})
        view.started("ifca+finetune-seed0")
        view.update("ifca+finetune-seed0", {"round": 97, "rounds": 100, "taken": 97})
        assert view.time_left() == "1:43 left"
    directory.close()


def test_metric_that_no_trial_reports_is_refused_before_anything_starts(tmp_path: Path) -> None:
    drawn = ("sweep.sampler=random", "sweep.samples=2", "partition.validation=0.2", "method=fedavg")
    place = str(tmp_path / "sweep")
    wrong = sweep_of(
        tmp_path, *drawn, "sweep.sample.local.lr=uniform(0.1,0.2)", "sweep.metric=validation_micro_acuracy"
    )
    with refused(
        "unknown-name",
        says="10",
        kind="metric",
        name="validation_micro_acuracy",
        nearest="validation_micro_accuracy",
    ):
        run_sweep(wrong, place)
    regression = (
        "data=synthetic",
        "data.rotations=1",
        "model=linear_regression",
        "sweep.sample.local.lr=uniform(0.01,0.02)",
    )
    with refused(
        "unknown-name", kind="metric", name="validation_micro_accuracy", nearest="validation_micro_mse"
    ):
        run_sweep(sweep_of(tmp_path, *drawn, *regression), place)
    assert not Path(place).exists()
    assert sweep_of(tmp_path, *drawn, *regression, "sweep.metric=validation_std_mse").mode == "min"


def test_sweep_that_was_refused_leaves_its_name_free(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, "method=ifca", "sweep.seeds=2")
    for place in (str(tmp_path / "sweep"), (tmp_path / "store/sweep").as_uri()):
        directory = SweepDirectory.create(place, sweep)
        directory.discard()
        directory = SweepDirectory.create(place, sweep)
        directory.set("ifca-seed0", "running")
        directory.discard()  # one has begun: it stays
        assert is_sweep(place)
    assert [path.name for path in (tmp_path / "sweep").iterdir()] != []


def test_kill_while_a_sweep_is_made_leaves_its_name_free(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HERE, "method=ifca", "sweep.seeds=2")
    SweepDirectory.create(str(tmp_path / "sweep"), sweep).close()
    (tmp_path / "sweep/sweep.yaml").unlink()  # it is written last
    SweepDirectory.create(str(tmp_path / "sweep"), sweep).close()
    (tmp_path / "sweep/sweep.yaml").unlink()
    (tmp_path / "sweep/notes.txt").write_text("mine")
    with refused("exists"):
        SweepDirectory.create(str(tmp_path / "sweep"), sweep)


def test_log_says_every_minute_how_far_long_trials_are(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "sweep.methods=[fedavg,ifca]", HERE)
    directory, stream, now = SweepDirectory.create(str(tmp_path / "sweep"), sweep), io.StringIO(), [0.0]
    with SweepView(directory, stream=stream, clock=lambda: now[0]) as view:
        for trial in ("fedavg-seed0", "ifca-seed0"):
            directory.set(trial, "running")
            view.started(trial)
        for number in range(1, 11):
            now[0] += 20.0
            view.update("fedavg-seed0", {"round": number, "rounds": 100})
    assert stream.getvalue().splitlines() == [
        "0/2  running: fedavg-seed0 3%, ifca-seed0 0%  1:05:40 left",
        "0/2  running: fedavg-seed0 6%, ifca-seed0 0%  1:04:40 left",
        "0/2  running: fedavg-seed0 9%, ifca-seed0 0%  1:03:40 left",
    ]


def test_dry_run_says_trials_resources_and_time(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "sweep.methods=[fedavg,ifca]", "sweep.seeds=3", HERE)
    parts = {title: dict(row[:2] for row in rows) for title, rows in describe(sweep)}
    trials, resources, seconds = parts
    assert trials == "6 trials: 2 combinations x 3 seeds ([0, 1, 2])"
    assert list(parts[trials]) == ["fedavg", "ifca"] and parts[resources]["trials at a time"] == "1"
    assert parts[seconds]["calibrated"] == "2 of 2 combinations, 10 rounds of 4 clients each"
    assert not list(tmp_path.iterdir())  # nothing was written


def test_dry_run_counts_what_two_trials_share_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.sweeps.dry_run.seconds_per_round", lambda config, limit, reserved: 1.0)
    for methods, seconds in {"[ifca]": 6 + 20, "[ifca,ifca+finetune]": 6 + 20 + 3}.items():
        sweep = sweep_of(tmp_path, HERE, f"sweep.methods={methods}", "rounds=20")
        *_, (_, rows) = describe(sweep)
        assert dict(rows)["the sweep"] == f"about {seconds} s"


def test_calibration_counts_evaluations_as_often_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of four clients takes 10 s, 20 s where both parts of CAM train; an evaluation 4 more."""
    now, limit = [0.0], 1000.0
    run_round = InProcessSession.run_round

    def slow(session: InProcessSession, round: int) -> RoundReport:
        report = run_round(session, round)
        now[0] += 10.0 * report.metrics["cost_models_up"] + 4.0 * ("micro_accuracy" in report.metrics)
        return report

    monkeypatch.setattr(InProcessSession, "run_round", slow)
    seconds = [seconds_per_round(config_of(f"evaluation.every={n}", "rounds=40"), limit, lambda: now[0])
               for n in (1, 4)]  # fmt: skip
    assert seconds == pytest.approx([28.0, 22.0])  # of eight clients
    cam = seconds_per_round(
        config_of("method=ifca+cam", "cam.warm=base", "cam.warmup=0.3", "rounds=40", "evaluation.every=4"),
        limit,
        lambda: now[0],
    )
    assert cam == pytest.approx(0.3 * 20 + 0.7 * 40 + 2)  # the warm-up has its share
    half = seconds_per_round(config_of("participation.fraction=0.5", "rounds=40"), limit, lambda: now[0])
    assert half == pytest.approx(
        20.0 + 8.0
    )  # four of eight train: as long as two of four; eight are evaluated


def test_calibration_ends_when_its_time_is_up() -> None:
    config = config_of("rounds=40", "local.steps=1000000")  # a round of hours
    assert seconds_per_round(config, limit=0.5) is None


def test_calibration_ends_though_its_first_signal_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception raised in a finalizer is dropped, as one in the garbage collector was that hung the whole suite."""
    raised, collecting = [], []
    run_round = InProcessSession.run_round

    def loses_one(session: InProcessSession, number: int) -> object:
        collecting.append(gc.isenabled())
        try:
            return run_round(session, number)
        except BaseException as error:
            raised.append(error)
            return run_round(session, number)

    monkeypatch.setattr(InProcessSession, "run_round", loses_one)
    config = config_of("rounds=40", "local.steps=1000000")
    assert seconds_per_round(config, limit=0.5) is None
    assert len(raised) == 1
    assert collecting == [False] and gc.isenabled(), "the collector rests while it could lose the signal"


# Object stores ------------------------------------------------------------------------------------------------


def test_mirror_sends_what_changed_and_removes_what_is_gone(tmp_path: Path) -> None:
    here, there = tmp_path / "here", f"file://{tmp_path / 'there'}"
    (here / "checkpoints/round-000002").mkdir(parents=True)
    (here / "checkpoints/round-000002/manifest.json").write_text("{}")
    (here / "metrics.csv").write_text("round\n1\n")
    (here / ".lock").write_text("process 1")
    mirror = Mirror(here, there)
    mirror.follow()
    sent = {
        path.relative_to(tmp_path / "there").as_posix()
        for path in (tmp_path / "there").rglob("*")
        if path.is_file()
    }
    assert sent == {"checkpoints/round-000002/manifest.json", "metrics.csv"}
    (here / "metrics.csv").write_text("round\n1\n2\n")
    mirror.follow()  # no new checkpoint: nothing to send
    assert read_text(join(there, "metrics.csv")) == "round\n1\n"
    (here / "checkpoints/round-000002").rename(here / "checkpoints/round-000004")
    mirror.follow()
    assert read_text(join(there, "metrics.csv")) == "round\n1\n2\n"
    assert read_text(join(there, "checkpoints/round-000002/manifest.json")) is None
    copy = local_copy(there)
    assert (copy / "checkpoints/round-000004/manifest.json").read_text() == "{}"
    write_text(join(there, "a/b.txt"), "x")
    assert read_text(join(there, "a/b.txt")) == "x" and read_text(join(there, "none")) is None


def test_checkpoint_that_goes_while_its_folder_is_looked_through_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are written and removed beside the rounds, in a thread of their own."""
    old, there = tmp_path / "run/checkpoints/round-000001", (tmp_path / "store").as_uri()
    old.mkdir(parents=True)
    (old / "manifest.json").write_text("{}")
    (tmp_path / "run/metrics.csv").write_text("round\n1\n")
    listed = os.scandir

    def gone_by_then(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path) == old:  # rmtree lists by a number
            shutil.rmtree(old, ignore_errors=True)
        return listed(path)

    monkeypatch.setattr(os, "scandir", gone_by_then)
    Mirror(tmp_path / "run", there).push()
    assert read_text(join(there, "metrics.csv")) == "round\n1\n"
    assert read_text(join(there, "checkpoints/round-000001/manifest.json")) is None


def test_sweep_resumes_at_an_address_that_only_fsspec_can_open(armed: Path, tmp_path: Path) -> None:
    address = f"memory://{tmp_path.name}/sweep"
    with pytest.raises(ValueError, match="memory"):
        FileSystem.from_uri(address)
    settings = (HERE, "method=fedavg", "sweep.seeds=2", "rounds=3", killers.MODULE[1], "checkpoint.every=1")
    killers.arm("training", after=30, action="raise")  # in the second round of the first trial
    run_sweep(sweep_of(tmp_path, *settings), address, quiet=True)
    assert [row.status for row in read_rows(address)] == ["failed", "finished"]
    resume_sweep(address, quiet=True)
    assert is_sweep(address)
    alone = run_sweep(sweep_of(tmp_path, *settings), str(tmp_path / "undisturbed"), quiet=True)
    with reading(address) as copy:
        assert_equal_sweeps(copy, alone)
    remove_file(join(address, "sweep.yaml"))
    assert not is_sweep(address)


def test_what_a_kill_cut_off_on_its_way_to_an_object_store_is_passed_over(tmp_path: Path) -> None:
    settings = ("method=fedavg", "sweep.seeds=[0]", "rounds=2", "checkpoint.every=1")
    (trial,) = sweep_of(tmp_path, *settings).trials()
    place, address = tmp_path / "store/run", (tmp_path / "store/run").as_uri()
    given = {key: value for key, value in payload(trial, address).items() if key != "trial"}
    write_text(
        join(address, "config.yaml"), "rounds: 2\n"
    )  # a run has a status, too: this one was never whole
    first = TrialRun(**given, metric="micro_loss", watched=True)
    assert first.step()["round"] == 1
    first.close()
    (checkpoint,) = (place / "checkpoints").iterdir()
    (checkpoint / "manifest.json").unlink()
    again = TrialRun(**given, metric="micro_loss", watched=True)
    while not (result := again.step())["done"]:
        pass
    assert result["state"] == "finished", result["reason"]
    assert_equal_runs(
        place,
        run_experiment(config_of(*(s for s in settings if "sweep" not in s)), tmp_path / "alone", quiet=True),
    )
