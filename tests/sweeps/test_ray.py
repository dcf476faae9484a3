"""Sweeps on Ray Tune, on a real cluster: kills, placement groups, shares of GPUs, metrics, tuning."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.telemetry import COUNTERS, GAUGES
from archipelago import open_run
from archipelago.experiments.config import config_from_yaml
from archipelago.experiments.runner import run_experiment
from archipelago.runs.directory import RunDirectory
from archipelago.runs.storage import join, local_copy
from archipelago.sweeps.runner import resume_sweep, run_sweep
from archipelago.sweeps.trial import TrialRun
from archipelago.sweeps.tune import TuneSweep
from tests.support.clusters import ROOT
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs, events
from tests.support.s3 import s3_server
from tests.support.sweeps import assert_equal_sweeps, rows_of, settings_of, sweep_of

pytestmark = pytest.mark.ray


def finished(address: Path) -> int:
    file = address / "trials.csv"
    return file.read_text().count(",finished,") if file.exists() else 0


def killed(typed: Sequence[str], log: Path, when: Callable[[], bool]) -> None:
    """Start a sweep by the command line, on this process's cluster, and kill it with SIGKILL when it is so far."""
    gcs = ray.get_runtime_context().gcs_address
    with log.open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-m", "platform.launch", *typed, f"fleet.address={gcs}"],
            cwd=ROOT, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        while not when():
            assert driver.poll() is None, log.read_text()
            time.sleep(0.005)
    finally:
        driver.kill()
        driver.wait()


KILLED = (
    "sweep.methods=[ifca+finetune,fedavg,ifca]",
    "sweep.seeds=[0,1]",
    "rounds=25",
    "checkpoint.every=4",
    "sweep.concurrent=2",
)


def test_sweep_killed_with_sigkill_is_resumed_to_the_same_bits(ray_cluster: Path, tmp_path: Path) -> None:
    address, log = tmp_path / "killed", tmp_path / "log"
    checkpoint = address / "runs/ifca-seed0/checkpoints/round-000004"
    typed = [*settings_of(*KILLED), f"storage={tmp_path}", "name=killed"]
    killed(typed, log, lambda: finished(address) >= 2 and checkpoint.exists())
    kept = {name: (address / row.run / "metrics.csv").stat().st_mtime_ns
            for name, row in rows_of(address).items() if row.status == "finished"}  # fmt: skip
    assert 2 <= len(kept) < 6, log.read_text()
    resume_sweep(str(address), quiet=True)
    for seed in (0, 1):  # what a trial that trains the same had done was not done again
        assert any(f"Rounds 1 to 22 are those of ifca-seed{seed}" in text
                   for text in events(address / f"runs/ifca+finetune-seed{seed}"))  # fmt: skip
    assert all(
        (address / "runs" / name / "metrics.csv").stat().st_mtime_ns == at for name, at in kept.items()
    )
    undisturbed = run_sweep(
        sweep_of(tmp_path, *KILLED, "fleet.backend=in_process"), str(tmp_path / "whole"), quiet=True
    )
    assert_equal_sweeps(address, undisturbed)
    alone = config_of("method=ifca+finetune", "seed=1", *KILLED[2:4])
    assert_equal_runs(
        address / "runs/ifca+finetune-seed1", run_experiment(alone, tmp_path / "alone", quiet=True)
    )


@pytest.mark.full
def test_killed_sweep_in_an_object_store_resumes_from_there(ray_cluster: Path, tmp_path: Path) -> None:
    """Where the store is, is said in its address; the workers' keys are those of their environment."""
    with s3_server() as (_, objects):
        place = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        storage = f"s3://bucket/results?endpoint_override={place}&scheme=http&region=us-east-1"
        address, root = join(storage, "killed"), "bucket/results/killed"
        typed = [*settings_of(*KILLED), f"storage={storage}", "name=killed"]

        def far_enough() -> bool:
            done = objects.get(f"{root}/trials.csv", b"").count(b",finished,")
            return done >= 2 and any(f"{root}/runs/ifca-seed0/checkpoints/" in key for key in list(objects))

        killed(typed, tmp_path / "log", far_enough)
        assert {row.status for row in rows_of(address).values()} >= {"finished", "running"}
        resume_sweep(address, quiet=True)
        whole = sweep_of(tmp_path, *KILLED, "fleet.backend=in_process")
        undisturbed = run_sweep(whole, str(tmp_path / "whole"), quiet=True)
        found = local_copy(address)
        assert_equal_sweeps(found, undisturbed)
        assert any("Rounds 1 to 22 are those" in text for text in events(found / "runs/ifca+finetune-seed1"))


@pytest.mark.full
def test_actors_of_a_trial_are_in_its_placement_group_with_shares_of_a_gpu(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a GPU for each trial's one client actor, two trials at a time."""
    settings = ("method=ifca", "sweep.seeds=[0,1]", "rounds=12", "evaluation.every=6")
    seen: list[tuple[set[str], dict[str, float]]] = []
    groups: dict[str, set[str]] = {}  # actor -> placement groups that it was seen in
    processes: set[str] = set()
    reported = TuneSweep.reported

    def look(sweep: TuneSweep, trial: str, result: Any) -> None:
        seen.append(_names_and_use())
        for name, group in _groups().items():
            groups.setdefault(name, set()).add(group)
        processes.update(_trial_processes())
        reported(sweep, trial, result)

    monkeypatch.setattr(TuneSweep, "reported", look)
    monkeypatch.setattr("archipelago.sweeps.trial.QUIET_SECONDS", 0.0)
    sweep = sweep_of(tmp_path, *settings, "fleet.actors=1", "fleet.gpus=0.25")
    address = run_sweep(sweep, str(tmp_path / "sweep"), quiet=True)
    names = set().union(*(names for names, _ in seen))
    wanted = {f"ifca-digits-seed{seed}/{part}" for seed in (0, 1) for part in ("server", "clients-0")}
    assert wanted <= names
    # One group for each trial: the one that Tune made for it, which holds its server and its client actor.
    assert set(groups) == wanted and all(len(found) == 1 for found in groups.values())
    first, second = (
        {*groups[f"ifca-digits-seed{seed}/server"], *groups[f"ifca-digits-seed{seed}/clients-0"]}
        for seed in (0, 1)
    )
    assert len(first) == len(second) == 1
    assert processes <= {
        f"trials-from-ifca-digits-seed{seed}@{group}" for seed, (group,) in enumerate([first, second])
    }
    assert processes
    # All that is reserved are the trials' placement groups: their actors have no other place to be in.
    assert {used["GPU"] for _, used in seen} <= {0.25, 0.5} and {used["CPU"] for _, used in seen} <= {
        1.0,
        2.0,
    }
    alone = sweep_of(tmp_path, *settings, "fleet.backend=in_process")
    assert_equal_sweeps(address, run_sweep(alone, str(tmp_path / "alone"), quiet=True))


@pytest.mark.full
@pytest.mark.parametrize(("asked", "share"), [("0.25", 0.25), ("auto", 0.5)])
def test_trial_in_a_process_of_its_own_reserves_its_share_of_a_gpu(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, share: float
) -> None:
    """Small trials have no actors; on nodes that only declare a GPU, they say that torch has none.

    Three small trials on two GPUs: auto lets two of them share one.
    """
    monkeypatch.setattr("archipelago.sweeps.resources.torch_has_cuda", lambda: True)
    settings = ("method=ifca", "sweep.seeds=[0,1,2]", "rounds=4")
    used: list[dict[str, float]] = []
    reported = TuneSweep.reported

    def look(sweep: TuneSweep, trial: str, result: Any) -> None:
        used.append(_names_and_use()[1])
        reported(sweep, trial, result)

    monkeypatch.setattr(TuneSweep, "reported", look)
    sweep = sweep_of(tmp_path, *settings, f"fleet.gpus={asked}")
    address = run_sweep(sweep, str(tmp_path / "sweep"), quiet=True)
    assert {each["GPU"] for each in used} <= {share, 2 * share, 3 * share}
    for row in rows_of(address).values():
        assert any(
            text.startswith(f"The block of clients computes on the CPU although fleet.gpus={share}")
            for text in open_run(Path(address) / row.run).events["text"]
        )
        # What was asked for is kept, so that a resume elsewhere finds its own devices.
        kept = open_run(Path(address) / row.run).config["fleet"]["gpus"]
        assert kept == ("auto" if asked == "auto" else share)
    alone = sweep_of(tmp_path, *settings, "fleet.backend=in_process")
    assert_equal_sweeps(address, run_sweep(alone, str(tmp_path / "alone"), quiet=True))


def _groups() -> dict[str, str]:
    """The placement group of every server and client actor, as the actors themselves say."""
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if "/server" in entry["name"] or "/clients-" in entry["name"]:
            with contextlib.suppress(ray.exceptions.RayActorError, ValueError):  # ended in this moment
                actor = ray.get_actor(entry["name"], namespace=entry["namespace"])
                found[entry["name"].rpartition("-")[0]] = ray.get(actor.about.remote())["group"]
    return found


def _trial_processes() -> set[str]:
    """NAME@GROUP of the processes that trials run in, as Ray's dashboard has them: without one, from its table."""
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import ActorTableData

    rows = state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    actors = [ActorTableData.FromString(row) for row in rows]
    return {f"{each.repr_name}@{each.placement_group_id.hex()}" for each in actors if each.repr_name}


def _names_and_use() -> tuple[set[str], dict[str, float]]:
    """Names of the actors that are alive, without what makes them unique, and what is reserved."""
    names = {entry["name"].rpartition("-")[0] for entry in ray.util.list_named_actors(all_namespaces=True)}
    total, free = ray.cluster_resources(), ray.available_resources()
    return names, {name: total[name] - free.get(name, 0.0) for name in ("CPU", "GPU")}


def test_metrics_endpoint_reports_every_round(ray_cluster: Path, tmp_path: Path) -> None:
    """What Prometheus would scrape; data is loaded once for all trials of a node."""
    built: list[tuple[list[str], list[str]]] = []

    def look(view: object) -> None:
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["name"].startswith("data/"):
                with contextlib.suppress(ray.exceptions.RayActorError, ValueError):
                    actor = ray.get_actor(entry["name"], namespace=entry["namespace"])
                    built.append(ray.get(actor.about.remote()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("archipelago.sweeps.view.SweepView.over", lambda view, trial: look(view))
        methods = ("sweep.methods=[ifca,fedavg,fesem]", "update=[quantise]")
        sweep = sweep_of(tmp_path, *methods, "sweep.seeds=[5,6]", "sweep.concurrent=2")
        run_sweep(sweep, str(tmp_path / "metered"), quiet=True)
    loaded, federations = max(built, key=lambda keys: len(keys[1]))
    assert (len(loaded), len(federations)) == (1, 2)
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    wanted = {f"ray_{name}" for name in (*GAUGES, *COUNTERS)}
    deadline = time.monotonic() + 60
    while True:
        page = _page(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")
        lines = [line for line in page.splitlines() if 'run="ifca-seed5"' in line]
        found = {line.split("{")[0] for line in lines}
        if wanted <= found or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert wanted <= found
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines}
    metrics = open_run(tmp_path / "metered/runs/ifca-seed5").metrics
    assert values["ray_archipelago_round"] == 4 == values["ray_archipelago_rounds_total"]
    assert values["ray_archipelago_accuracy"] == pytest.approx(metrics["micro_accuracy"].iloc[-1])
    assert values["ray_archipelago_macro_f1"] == pytest.approx(metrics["micro_macro_f1"].iloc[-1])
    sizes = _by_tag(lines, "cluster_size", "cluster")
    assert [sizes[key] for key in sorted(sizes)] == metrics["cluster_sizes"].iloc[-1]
    run = open_run(tmp_path / "metered/runs/ifca-seed5")
    seconds = _by_tag(lines, "round_seconds", "stage")
    with (run.path / "timings.csv").open() as file:
        *_, last = csv.DictReader(file)
    written = {
        stage: float(value)
        for stage, value in last.items()
        if stage != "round" and value and not stage.startswith("share_")  # no seconds
    }
    written["round"] = written.pop("total")  # as the stages are called in a report
    assert {stage: seconds[stage] for stage in written} == pytest.approx(written)
    size = 4 * run.models["clusters"].shape[1]
    down, up = (
        metrics["cost_models_down"] * size,
        metrics["cost_bytes_up"],
    )  # what quantisation left of updates
    for direction, each in {"down": down, "up": up}.items():
        moved = _by_tag(lines, "bytes_total", "direction")[direction]
        assert moved == pytest.approx((each * metrics["participants"]).sum())
    assert any('method="ifca"' in line and 'data="digits"' in line and 'seed="5"' in line for line in lines)


def _by_tag(lines: Sequence[str], name: str, tag: str) -> dict[str, float]:
    """The values of a metric of several kinds, by kind."""
    chosen = [line for line in lines if line.startswith(f"ray_archipelago_{name}{{")]
    return {line.split(f'{tag}="')[1].split('"')[0]: float(line.split()[-1]) for line in chosen}


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


TUNED = ("method=fedavg", "partition.validation=0.2", "rounds=6", "sweep.grace=2", "sweep.reduction=2",
         "sweep.interval=2", "sweep.sample.local.lr=loguniform(0.001,0.5)")  # fmt: skip


def curves(address: str | Path) -> dict[str, str]:
    return {
        name: (Path(address) / row.run / "metrics.csv").read_text()
        for name, row in rows_of(address).items()
        if row.run
    }


@pytest.mark.full
@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_scheduler_stops_trials_and_every_curve_is_the_undisturbed_one(
    ray_cluster: Path, tmp_path: Path, scheduler: str
) -> None:
    # More trials than slots: whoever cannot be compared with others yet continues all the same.
    settings = (*TUNED, "sweep.sampler=random", "sweep.samples=8", "sweep.concurrent=2", "sweep.seeds=[0]")
    address = run_sweep(
        sweep_of(tmp_path, *settings, f"sweep.scheduler={scheduler}"), str(tmp_path / "tuned"), quiet=True
    )
    rows = rows_of(address)
    assert {row.status for row in rows.values()} <= {"finished", "stopped"} and len(rows) == 8
    assert any(
        row.status == "stopped" and f"stopped by {scheduler} after round" in row.reason
        for row in rows.values()
    )
    whole = curves(
        run_sweep(
            sweep_of(tmp_path, *settings, "fleet.backend=in_process"), str(tmp_path / "whole"), quiet=True
        )
    )
    for name, curve in curves(address).items():
        assert whole[name].startswith(curve) and curve.count("\n") >= 3


@pytest.mark.full
def test_killed_sweep_with_a_scheduler_resumes(ray_cluster: Path, tmp_path: Path) -> None:
    """Under ASHA every trial's curve is the undisturbed one, as far as it ran."""
    drawn = (*TUNED, "sweep.sampler=random", "sweep.samples=6", "sweep.concurrent=2", "sweep.seeds=[0]")
    settings = (*drawn, "sweep.scheduler=asha", "checkpoint.every=1")
    address = tmp_path / "tuned"

    def far_enough() -> bool:
        return sum(file.read_bytes().count(b"\n") > 3 for file in address.glob("runs/*/metrics.csv")) >= 3

    typed = [*settings_of(*settings), f"storage={tmp_path}", "name=tuned"]
    killed(typed, tmp_path / "log", far_enough)
    assert any(row.status == "running" for row in rows_of(address).values())
    resume_sweep(str(address), quiet=True)
    assert {row.status for row in rows_of(address).values()} <= {"finished", "stopped"}
    alone = sweep_of(tmp_path, *drawn, "fleet.backend=in_process")
    whole = curves(run_sweep(alone, str(tmp_path / "whole"), quiet=True))
    for name, curve in curves(address).items():
        assert whole[name].startswith(curve) and curve.count("\n") >= 3


@pytest.mark.full
def test_killed_population_keeps_the_values_it_had_come_to(ray_cluster: Path, tmp_path: Path) -> None:
    """And every curve is the undisturbed one: each stretch between two exchanges, run again by itself, is the same."""
    population = ("sweep.sampler=random", "sweep.samples=4", "sweep.concurrent=2", "sweep.scheduler=pbt")
    longer = ("rounds=12", "checkpoint.keep=12", "sweep.seeds=[0]")
    settings = (*(each for each in TUNED if each != "rounds=6"), *population, *longer)
    address = tmp_path / "tuned"

    def moved() -> bool:
        return any("Took over" in file.read_text() for file in address.glob("runs/*/events.jsonl"))

    typed = [*settings_of(*settings), f"storage={tmp_path}", "name=tuned"]
    killed(typed, tmp_path / "log", moved)
    resume_sweep(str(address), quiet=True)
    assert [row.status for row in rows_of(address).values()] == ["finished"] * 4
    for row in rows_of(address).values():
        run = address / row.run
        assert list(open_run(run).metrics["round"]) == list(range(1, 13))
        # Values change where a state was taken over, and nowhere else.
        noted, now = events(run), open_run(run).config["local"]["lr"]
        for entry in json.loads((run / "schedule.json").read_text()):
            value = entry["values"]["local.lr"]
            assert value == now or any(f"continues with local.lr={value:.6g}." in text for text in noted)
            now = value
        stretches_run_again(run, tmp_path / "again")


def stretches_run_again(run: Path, folder: Path) -> None:
    """Fail unless the rounds that follow each exchange of states are what its checkpoint and its values lead to."""
    rows = (run / "metrics.csv").read_text().splitlines()
    settings, whole = (run / "config.yaml").read_text(), len(rows) - 1
    schedule = json.loads((run / "schedule.json").read_text()) if (run / "schedule.json").exists() else []
    ends = [*(entry["round"] for entry in schedule), whole]
    drawn = {"local.lr": open_run(run).config["local"]["lr"]}
    for number, (entry, end) in enumerate(zip([{"round": 0, "values": drawn}, *schedule], ends, strict=True)):
        begun, again = entry["round"], folder / f"{run.name}-{number}"
        if begun:
            shutil.copytree(run, again)
            with RunDirectory.open(again) as copy:
                copy.truncate(begun)
            (again / "schedule.json").write_text(json.dumps([entry]))
        trial = TrialRun(str(again), settings, entry["values"])
        while not (result := trial.step())["done"]:
            pass
        assert result["state"] == "finished", result
        found = (again / "metrics.csv").read_text().splitlines()
        assert found[0] == rows[0] and found[begun + 1 : end + 1] == rows[begun + 1 : end + 1]


@pytest.mark.full
def test_population_exchanges_states(ray_cluster: Path, tmp_path: Path) -> None:
    settings = (
        *TUNED,
        "sweep.sampler=random",
        "sweep.samples=4",
        "sweep.concurrent=2",
        "sweep.scheduler=pbt",
    )
    address = run_sweep(sweep_of(tmp_path, *settings, "sweep.seeds=[0]"), str(tmp_path / "tuned"), quiet=True)
    assert [row.status for row in rows_of(address).values()] == ["finished"] * 4
    noted = [text for row in rows_of(address).values() for text in events(Path(address) / row.run)]
    assert any("Took over the state of" in text for text in noted)
    assert not (Path(address) / ".tune").exists()
    assert all(len(open_run(Path(address) / row.run).metrics) == 6 for row in rows_of(address).values())


@pytest.mark.full
def test_optuna_suggests_points_and_resumes_after_a_stop(ray_cluster: Path, tmp_path: Path) -> None:
    settings = (*TUNED, "sweep.sampler=optuna", "sweep.samples=4", "sweep.seeds=[0,1]", "sweep.concurrent=2")
    stopped: list[str] = []

    def stop(view: object, trial: str) -> None:
        stopped.append(trial)
        if len(stopped) == 3:
            signal.raise_signal(signal.SIGINT)  # Ctrl-C

    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("archipelago.sweeps.view.SweepView.over", stop)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(sweep_of(tmp_path, *settings), str(tmp_path / "tuned"), quiet=True)
    assert signal.getsignal(signal.SIGINT) is before
    address = resume_sweep(str(tmp_path / "tuned"), quiet=True)
    rows = rows_of(address)
    assert {row.status for row in rows.values()} == {"finished"} and len(rows) == 8
    assert len({row.group for row in rows.values()}) == 4
    assert all("local.lr=" in row.group for row in rows.values())


@pytest.mark.full
def test_killed_sweep_with_a_sampler_resumes(ray_cluster: Path, tmp_path: Path) -> None:
    """Optuna suggests by what was found; every trial, whatever was suggested, is the run that it would be alone."""
    drawn = ("sweep.sampler=optuna", "sweep.samples=4", "sweep.seeds=[0,1]", "sweep.concurrent=2")
    settings = (*(each for each in TUNED if each != "rounds=6"), *drawn, "rounds=25", "checkpoint.every=4")
    address = tmp_path / "tuned"

    def far_enough() -> bool:
        begun = {file.parts[-3] for file in address.glob("runs/*/checkpoints/round-*")}
        return finished(address) >= 3 and len(begun) > finished(address)

    typed = [*settings_of(*settings), f"storage={tmp_path}", "name=tuned"]
    killed(typed, tmp_path / "log", far_enough)
    before = {name: row for name, row in rows_of(address).items() if row.status == "finished"}
    kept = {name: curve for name, curve in curves(address).items() if name in before}
    assert any(row.status == "running" for row in rows_of(address).values())
    resume_sweep(str(address), quiet=True)
    rows = rows_of(address)
    assert {row.status for row in rows.values()} == {"finished"} and len(rows) == 8
    assert len({row.group for row in rows.values()}) == 4
    assert {name: rows[name] for name in before} == before  # what was suggested and found stays
    assert {name: curves(address)[name] for name in kept} == kept
    for name, row in rows.items():
        config = config_from_yaml((address / row.run / "config.yaml").read_text())
        alone = run_experiment(
            dataclasses.replace(config, fleet=dataclasses.replace(config.fleet, backend="in_process")),
            tmp_path / "alone" / name, quiet=True,
        )  # fmt: skip
        assert_equal_runs(address / row.run, alone)


@pytest.mark.full
def test_killed_sweep_with_a_sampler_and_a_scheduler_resumes(ray_cluster: Path, tmp_path: Path) -> None:
    """What tune_configs/tuning.yaml asks for: points of Optuna, judged by ASHA; finished ones are reported again."""
    drawn = ("sweep.sampler=optuna", "sweep.samples=4", "sweep.seeds=[0,1]", "sweep.concurrent=2")
    settings = (*(each for each in TUNED if each != "rounds=6"), *drawn, "rounds=12", "checkpoint.every=1")
    address = tmp_path / "tuned"

    def far_enough() -> bool:
        if not (address / "trials.csv").exists():
            return False
        begun = {file.parts[-3] for file in address.glob("runs/*/checkpoints/round-*")}
        over = sum(row.status in ("finished", "stopped") for row in rows_of(address).values())
        return over >= 3 and len(begun) > over

    typed = [*settings_of(*settings, "sweep.scheduler=asha"), f"storage={tmp_path}", "name=tuned"]
    killed(typed, tmp_path / "log", far_enough)
    before = {name: row for name, row in rows_of(address).items() if row.status in ("finished", "stopped")}
    kept = {name: curve for name, curve in curves(address).items() if name in before}
    assert len({row.group for row in before.values()}) < len(
        before
    )  # a point with both of its seeds is among them
    resume_sweep(str(address), quiet=True)
    rows = rows_of(address)
    assert {row.status for row in rows.values()} <= {"finished", "stopped"} and len(rows) == 8
    assert len({row.group for row in rows.values()}) == 4
    assert {name: rows[name] for name in before} == before
    assert {name: curves(address)[name] for name in kept} == kept


@pytest.mark.full
def test_tuning_command_of_the_documents(ray_cluster: Path, tmp_path: Path) -> None:
    """On less work: fewer rounds and points; sampler, scheduler and everything else as in the file."""
    page = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("archipelago") and "tuning.yaml" in line]
    gcs = ray.get_runtime_context().gcs_address
    less = (
        "rounds=6",
        "sweep.samples=3",
        "sweep.grace=2",
        "name=tuned",
        f"storage={tmp_path}",
        f"fleet.address={gcs}",
    )
    done = subprocess.run(
        [sys.executable, "-m", "platform.launch", *shlex.split(line, comments=True)[1:], *less],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "tuned")
    assert {row.status for row in rows.values()} <= {"finished", "stopped"}
    assert len({row.group for row in rows.values()}) == 3
    assert "Report: " in done.stdout
