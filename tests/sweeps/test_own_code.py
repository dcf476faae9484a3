"""Samplers, schedulers and methods of somebody else's, in a folder outside the project: as good in a sweep as ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from archipelago import open_run
from archipelago.runs.sweeps import sweep_trials
from archipelago.sweeps.config import load_sweep
from archipelago.sweeps.directory import SweepDirectory
from archipelago.sweeps.samplers import SAMPLERS, Sampler
from archipelago.sweeps.schedulers import SCHEDULERS, Scheduler
from tests.support.clusters import ROOT
from tests.support.errors import refused
from tests.support.experiments import TINY
from tests.support.sweeps import assert_equal_sweeps, rows_of, sweep_of

SEARCH = '''
"""A sampler that is chosen by import path, and a scheduler and a sampler that register themselves."""
from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.sweeps.samplers import SAMPLERS, Sampler
from archipelago.sweeps.schedulers import SCHEDULERS, Scheduler


@dataclass(frozen=True)
class LadderOptions:
    """`sweep.rungs=...`"""

    rungs: int = setting(3, "ladder: points", at_least=1)


class Ladder(Sampler):
    """Tenths of the last learning rate while that helps, then the double of it."""

    Options = LadderOptions
    adaptive = True

    @property
    def count(self):
        return self.options.rungs

    def searcher(self, combination, known):
        from ray.tune.search import Searcher

        class Search(Searcher):
            def __init__(self, goal):
                super().__init__(metric=goal.metric, mode=goal.mode)
                self.lr, self.seen = 0.1, []

            def suggest(self, trial_id):
                if self.seen:
                    self.lr = self.lr / 10 if self.seen == sorted(self.seen) else self.lr * 2
                return {"local.lr": self.lr}

            def on_trial_complete(self, trial_id, result=None, error=False):
                if result:
                    self.seen.append(result[self.metric])

        return Search(self.goal)


@SAMPLERS.register("halves", "each point the half of the one before", label="Halves", )
class Halves(Sampler):
    Options = LadderOptions

    @property
    def count(self):
        return self.options.rungs

    def points(self, combination):
        return [{key: 0.2 / 2**n for key in self.goal.space} for n in range(self.options.rungs)]


@dataclass(frozen=True)
class CutOptions:
    """`sweep.after=...`"""

    after: int = setting(1, "cut: rounds of every trial but the first", at_least=1)


@SCHEDULERS.register("cut", "stops all but the first trial", label="Cut")
class Cut(Scheduler):
    Options = CutOptions
    stops = True

    def make(self, rounds):
        from ray.tune.schedulers import FIFOScheduler

        class Rule(FIFOScheduler):
            first, after, metric = None, self.options.after, self.goal.metric

            def on_trial_result(self, controller, trial, result):
                self.first = self.first or trial
                assert 0 <= result[self.metric] <= 1
                late = result["training_iteration"] >= self.after and trial is not self.first
                return self.STOP if late else self.CONTINUE

        return Rule()
'''

METHODS = '''
"""A method at an import path, and one that registers itself."""
from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS
from archipelago.strategies.fedavg import FedAvg
from archipelago.strategies.ifca import IFCA


@dataclass
class SlowOptions:
    """`slow.pause=...`"""

    pause: float = setting(0.0, "seconds of sleep in a round", at_least=0)


@METHODS.register("slow", "FedAvg that takes its time", label="Slow FedAvg")
class Slow(FedAvg):
    Options = SlowOptions

    def round(self, fleet):
        import time

        time.sleep(self.options.pause)
        return super().round(fleet)


class Mine(IFCA):
    """IFCA under another name."""
'''

DRIVER = (
    "import sys; __file__ = sys.argv[0] = sys.argv.pop(1)\n"
    "from archipelago.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def command(*words: str) -> list[str]:
    """The command line in another folder; where the project is, Ray's workers learn from the script's place."""
    return [sys.executable, "-c", DRIVER, str(ROOT / "launch"), *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        command(*words), cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def killed(folder: Path, when: Callable[[], bool], *words: str) -> None:
    """Start a sweep there, and kill its driver with SIGKILL when it has come so far."""
    log = folder / "log"
    with log.open("wb") as output:
        driver = subprocess.Popen(
            command(*words), cwd=folder, env=environment(), stdout=output, stderr=output
        )
    try:
        while not when():
            assert driver.poll() is None, log.read_text()
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.wait()


def tiny(*settings: str) -> list[str]:
    replaced = {each.partition("=")[0] for each in settings} | {"fleet.backend"}
    return [*(each for each in TINY if each.partition("=")[0] not in replaced), *settings, "storage=results"]


def cluster() -> str:
    import ray

    return f"fleet.address={ray.get_runtime_context().gcs_address}"


@pytest.mark.parametrize(
    ("setting", "code", "values"),
    [
        ("sweep.sampler=optun", "unknown-name", {"kind": "sampler", "name": "optun", "nearest": "optuna"}),
        ("sweep.scheduler=asa", "unknown-name", {"kind": "scheduler", "name": "asa", "nearest": "asha"}),
        ("sweep.sampler=nobody_has.This", "plugin", {"name": "nobody_has"}),
        ("sweep.sampler=collections.OrderedDict", "wrong-kind", {"kind": "sampler", "name": "collections.OrderedDict"}),
    ],
)  # fmt: skip
def test_registry_answers_a_wrong_sampler_or_scheduler_before_ray_starts(
    setting: str, code: str, values: dict[str, str]
) -> None:
    with refused(code, **values):
        load_sweep(None, ["method=fedavg", "sweep.seeds=2", setting], env={})


def test_sampler_without_its_package_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    drawn = ["sweep.sampler=optuna", "sweep.sample.local.lr=uniform(0.1,0.2)", "partition.validation=0.2"]
    with refused("needs-package", package="optuna"):
        load_sweep(None, ["method=fedavg", *drawn], env={})


def test_sampler_registered_in_this_process_draws_the_points(own_entries: None) -> None:
    @SAMPLERS.register("corners", "both ends", label="Corners")
    class Corners(Sampler):
        @property
        def count(self) -> int:
            return 2

        def points(self, combination: int) -> list[dict[str, object]]:
            return [{"local.lr": 0.1 * (combination + 1)}, {"local.lr": 0.9}]

    words = ["sweep.methods=[fedavg,ifca]", "sweep.sampler=corners", "sweep.sample.local.lr=uniform(0.1,0.9)"]
    sweep = load_sweep(None, [*words, "partition.validation=0.2"], env={})
    assert sweep is not None and sweep.planned == sweep.most == 4
    assert [trial.values["local.lr"] for trial in sweep.trials()] == [0.1, 0.9, 0.2, 0.9]


def test_scheduler_that_exchanges_states_is_known_as_a_population_by_reports(
    own_entries: None, tmp_path: Path
) -> None:
    """By what it declares, from the sweep's directory alone: a report never imports it."""

    @SCHEDULERS.register("tournament", "winners hand their state on", label="Tournament")
    class Tournament(Scheduler):
        exchanges = True

        def make(self, rounds: int) -> object:
            raise AssertionError("nothing is run here")

    drawn = ("sweep.sampler=random", "sweep.samples=2", "sweep.sample.local.lr=uniform(0.1,0.2)")
    found = {}
    for scheduler in ("tournament", "asha"):
        words = (
            "method=fedavg",
            f"sweep.scheduler={scheduler}",
            "sweep.seeds=2",
            "partition.validation=0.2",
            *drawn,
        )
        directory = SweepDirectory.create(str(tmp_path / scheduler), sweep_of(tmp_path, *words))
        directory.close()
        found[scheduler] = {trial.population for trial in sweep_trials(tmp_path / scheduler)}
    assert found == {"tournament": {True}, "asha": {False}}


def test_sampler_and_scheduler_are_named_in_their_own_files_only() -> None:
    """What others must know is declared by the entry; `settings.py` has the two defaults."""
    own = {ROOT / "archipelago/sweeps/samplers.py", ROOT / "archipelago/sweeps/schedulers.py"}
    own |= {
        ROOT / "archipelago/runs/format.py"
    }  # makes declarations of a sweep.yaml from before there were any
    compared = re.compile(r"(sampler|scheduler)\b[^\n]{0,4} (==|!=|in|not in) [(\"]")
    names = re.compile(f'"({"|".join({*SAMPLERS, *SCHEDULERS} - {"grid", "random", "none", "median"})})"')
    for path in {*(ROOT / "archipelago").rglob("*.py"), *(ROOT / "actors").rglob("*.py")} - own:
        found = compared.findall(path.read_text()) + names.findall(path.read_text())
        assert not found, (path, found)


def test_sampler_of_a_plugin_in_a_sweep_without_ray(tmp_path: Path) -> None:
    (tmp_path / "own_search.py").write_text(SEARCH)
    drawn = ["sweep.sampler=halves", "sweep.rungs=2", "sweep.sample.local.lr=uniform(0.01,0.2)"]
    words = tiny("method=fedavg", "rounds=1", "partition.validation=0.2", *drawn, "plugins=[own_search]")
    run(tmp_path, *words, "fleet.backend=in_process", "name=halved")
    rows = rows_of(tmp_path / "results/halved")
    assert [row.group for row in rows.values()] == ["fedavg | local.lr=0.2", "fedavg | local.lr=0.1"]
    assert {row.status for row in rows.values()} == {"finished"}


@pytest.mark.ray
def test_plugin_that_workers_cannot_import_ends_the_sweep_with_its_sentence(
    ray_cluster: Path, tmp_path: Path
) -> None:
    """The first trial's process says so: none is started again, no other trial begins, and a resume is possible."""
    mark = tmp_path / "tried"
    (tmp_path / "here_only.py").write_text(
        f"import os\nopen({str(mark)!r}, 'a').write('x')\nassert os.environ['ONLY_HERE'], 'not on this machine'\n"
    )
    words = tiny("method=fedavg", "rounds=2", "sweep.seeds=6", "sweep.concurrent=1", "plugins=[here_only]")
    done = subprocess.run(
        command(*words, cluster(), "name=refused"), cwd=tmp_path,
        env={**environment(), "ONLY_HERE": "yes"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "'here_only'" in done.stderr and "ONLY_HERE" in done.stderr
    assert len(mark.read_text()) <= 2, "in the driver and in one trial's process"
    rows = list(rows_of(tmp_path / "results/refused").values())
    assert [row.status for row in rows] == ["failed", *["waiting"] * 5]
    assert "here_only" in rows[0].reason


@pytest.mark.full
@pytest.mark.ray
def test_sampler_and_scheduler_of_somebody_else_on_ray_tune(ray_cluster: Path, tmp_path: Path) -> None:
    """The sampler by import path, the scheduler by the name that a plug-in gives it; options of both are settings."""
    (tmp_path / "own_search.py").write_text(SEARCH)
    chosen = ["sweep.sampler=own_search.Ladder", "sweep.rungs=3", "sweep.scheduler=cut", "sweep.after=2"]
    drawn = ["sweep.sample.local.lr=loguniform(0.0001,1)", "partition.validation=0.2", "sweep.concurrent=1"]
    run(tmp_path, *tiny("method=fedavg", "rounds=3", *chosen, *drawn), cluster(), "name=searched")
    rows = list(rows_of(tmp_path / "results/searched").values())
    assert [(row.status, row.reason) for row in rows] == [
        ("finished", ""),
        ("stopped", "stopped by cut after round 2"),
        ("stopped", "stopped by cut after round 2"),
    ]
    assert [row.group for row in rows][:2] == ["fedavg | local.lr=0.1", "fedavg | local.lr=0.01"]
    assert [len(open_run(tmp_path / "results/searched" / row.run).metrics) for row in rows] == [3, 2, 2]


@pytest.mark.full
@pytest.mark.ray
def test_methods_of_somebody_else_in_a_sweep_that_is_killed_and_resumed(
    ray_cluster: Path, tmp_path: Path
) -> None:
    """To the same bits as an undisturbed sweep: on Ray Tune the trials import them, after a kill `resume` does."""
    (tmp_path / "own_methods.py").write_text(METHODS)
    methods = ["sweep.methods=[slow,own_methods.Mine,fedavg]", "plugins=[own_methods]", "slow.pause=0.02"]
    words = tiny(*methods, "sweep.seeds=[0,1]", "rounds=20", "checkpoint.every=4", "sweep.concurrent=2")
    address = tmp_path / "results/killed"

    def far_enough() -> bool:
        file = address / "trials.csv"
        done = file.read_text().count(",finished,") if file.exists() else 0
        return done >= 1 and len(list(address.glob("runs/*/checkpoints/round-000004"))) >= 1

    killed(tmp_path, far_enough, *words, cluster(), "name=killed")
    assert {row.status for row in rows_of(address).values()} >= {"finished"}
    assert any(row.status != "finished" for row in rows_of(address).values())
    run(tmp_path, "resume", "results/killed")
    run(tmp_path, *words, "fleet.backend=in_process", "name=whole")
    assert list(rows_of(address)) == [
        f"{method}-seed{seed}" for method in ("slow", "own_methods.mine", "fedavg") for seed in (0, 1)
    ]
    assert {row.status for row in rows_of(address).values()} == {"finished"}
    assert_equal_sweeps(address, tmp_path / "results/whole")
    slow, plain = ((address / f"runs/{name}-seed0/metrics.csv").read_bytes() for name in ("slow", "fedavg"))
    assert slow == plain
