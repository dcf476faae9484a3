"""Parts of somebody else's, of every kind and in a file outside the project, survive a kill: `resume` gives their bits.

And a report calls them by the labels that they declare.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from archipelago.core.vocabulary import read_vocabulary
from tests.support.clusters import ROOT
from tests.support.documents import python
from tests.support.experiments import TINY
from tests.support.runs import assert_equal_runs
from tests.support.sweeps import assert_equal_sweeps, rows_of

# All that the page on extending shows, one part of every kind, and what a test needs, as one file.
PARTS = (
    python("docs/extending.md")
    + '''
import os
from pathlib import Path


@ADDONS.register("leash", "a pull to the cluster's model that slackens from round to round", label="Leash")
class Leash(Addon):
    state = ("rounds",)
    rounds = 0  # done: a resumed run that began at 0 again would pull harder

    def penalties(self, base, fleet, c):
        return [] if c is None else [Proximal(2.0 / (1 + self.rounds), base.clusters[c])]

    def after_round(self, base, fleet):
        self.rounds += 1


@SCHEDULERS.register("halfway", "stops every trial but the first in the middle", label="Halfway rule")
class Halfway(Scheduler):
    stops = True

    def make(self, rounds):
        from ray.tune.schedulers import FIFOScheduler

        class Rule(FIFOScheduler):
            first = None

            def on_trial_result(self, controller, trial, result):
                self.first = self.first or trial.trial_id
                late = result["training_iteration"] >= rounds // 2 and trial.trial_id != self.first
                return self.STOP if late else self.CONTINUE

        return Rule()


class KilledOnce(ar.Callback):
    """The process is killed after the round that a file asks for, as soon as its checkpoint is there."""

    def on_round(self, run, report):
        order = Path("kill")
        if order.exists() and report.round == 3:
            order.unlink()
            os.kill(os.getpid(), 9)
'''
)

# What leaves clients, how the server steps, the recipe, the data: of any method with a global or cluster model.
HOOKS = {
    "update transform": ("update=[halve]",),
    "attack": ("participation.attackers=0.25", "attack=silence"),
    "server optimizer": ("server.optimizer=signs", "server.lr=0.01"),
    "optimizer": ("local.optimizer=sign_descent", "local.lr=0.001"),
    "learning-rate schedule": ("local.schedule=halved",),
    "augmentation": ("local.augment=[dim]",),
    "drift": ("data.drift=[upside_down@3:0.5]",),
    "partition": ("partition=stripes",),
}
# By kind of part: a small run that has one of somebody's own.
CHOSEN = {
    "metric": (),
    "aggregation rule": ("method=fedavg", "aggregation=third_quartile"),
    "clustering rule": ("method=fesem", "fesem.clustering=by_first"),
    "descriptor": ("method=fesem", "fesem.features=brightness"),
    "adoption rule": ("method=ifca", "adoption=smallest", "holdout_clients=0.25"),
    "add-on": ("method=fedavg+tether",),
    "add-on that remembers": ("method=ifca+leash",),
    "engine": ("method=ifca+cam", "local.engine=clipped"),
    "model": ("method=ifca", "model=tanh_layers"),
    **{kind: ("method=ifca", *words) for kind, words in HOOKS.items()},
}
EVERY_HOOK = tuple(word for words in HOOKS.values() for word in words)
EVERYTHING = (
    "method=fesem+leash+cam", "fesem.clustering=by_first", "fesem.features=brightness", "aggregation=third_quartile",
    "adoption=smallest", "holdout_clients=0.25", "local.engine=clipped", "model=tanh_layers", *EVERY_HOOK,
)  # fmt: skip
# Several commands in one process, which saves the seconds that starting one takes.
CODE = """
import sys
from archipelago.cli.main import main

words = [[]]
for word in sys.argv[1:]:
    words.append([]) if word == "then" else words[-1].append(word)
sys.exit(max(main(each) for each in words))
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "my_parts.py").write_text(PARTS)
    return tmp_path


def typed(folder: Path, *words: str, expected: int = 0) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], cwd=folder, env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == expected, done.stdout + done.stderr


def tiny(*words: str) -> list[str]:
    replaced = {word.partition("=")[0] for word in words} | {"model.hidden"}
    kept = [word for word in TINY if word.partition("=")[0] not in replaced]
    return [*kept, *words, "plugins=[my_parts]", "storage=runs", "checkpoint.every=1"]


def labels_of(run: Path) -> dict[str, str]:
    words = read_vocabulary(run)
    assert words is not None
    return {**words.methods, **words.others}


def killed_and_resumed(theirs: Path, *words: str) -> None:
    """A run that is killed after three of five rounds and resumed, beside one that is not."""
    line = tiny(*words, "rounds=5", "callbacks=[my_parts.KilledOnce]")
    (theirs / "kill").touch()
    typed(theirs, *line, "name=killed", expected=-9)
    assert len((theirs / "runs/killed/metrics.csv").read_text().splitlines()) <= 4
    typed(theirs, "resume", "runs/killed", "then", *line, "name=whole")
    assert_equal_runs(theirs / "runs/killed", theirs / "runs/whole")
    assert "micro_doubt" in (theirs / "runs/killed/metrics.csv").read_text()


def test_own_parts_of_every_kind_killed_and_resumed(theirs: Path) -> None:
    killed_and_resumed(theirs, *EVERYTHING, "fleet.backend=in_process")
    declared = {
        "fesem": "FeSEM", "leash": "Leash", "cam": "CAM", "third_quartile": "Third quartile",
        "by_first": "First feature", "clipped": "Clipped loop", "tanh_layers": "Tanh network",
        "my_parts.KilledOnce": "KilledOnce",
    }  # fmt: skip
    assert declared.items() <= labels_of(theirs / "runs/killed").items()


@pytest.mark.full
@pytest.mark.parametrize("kind", CHOSEN)
def test_own_part_of_one_kind_killed_and_resumed(kind: str, theirs: Path) -> None:
    killed_and_resumed(theirs, *CHOSEN[kind], "fleet.backend=in_process")


@pytest.mark.full
@pytest.mark.ray
def test_own_parts_of_every_kind_killed_and_resumed_on_two_actors(theirs: Path) -> None:
    killed_and_resumed(theirs, *EVERYTHING, "fleet.backend=ray", "fleet.actors=2", "fleet.dashboard=false")
    line = tiny(*EVERYTHING, "rounds=5", "fleet.backend=in_process", "callbacks=[my_parts.KilledOnce]")
    typed(theirs, *line, "name=here")
    assert_equal_runs(theirs / "runs/killed", theirs / "runs/here")


def until(reached: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    while not reached():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)


def sampled(*words: str) -> list[str]:
    drawn = ("sweep.sampler=halves", "sweep.sample.local.lr=uniform(0.01,0.3)", "partition.validation=0.2")
    parts = [word for word in EVERYTHING if not word.startswith("local.lr=")]
    return tiny(*parts, *drawn, "loggers=[lines]", "sweep.seeds=[0,1]", *words)


@pytest.mark.full
def test_own_sampler_and_parts_in_a_sweep_killed_and_resumed(theirs: Path) -> None:
    """Trials run in the sweep's own process, which is killed in the first one's third round."""
    line = sampled("fleet.backend=in_process", "rounds=4", "callbacks=[my_parts.KilledOnce]")
    (theirs / "kill").touch()
    typed(theirs, *line, "name=killed", expected=-9)
    statuses = [row.status for row in rows_of(theirs / "runs/killed").values()]
    assert statuses == ["running", *["waiting"] * 5]
    typed(theirs, "resume", "runs/killed", "then", *line, "name=whole")
    groups = [row.group for row in rows_of(theirs / "runs/killed").values()]
    assert groups[::2] == [f"fesem+leash+cam | local.lr={lr}" for lr in (0.1, 0.05, 0.025)]
    assert_equal_sweeps(theirs / "runs/killed", theirs / "runs/whole")


def killed_on_ray_tune(theirs: Path, *words: str) -> None:
    """A sweep called `killed` whose driver dies with its cluster once a trial is over, and that is resumed."""
    log, address = theirs / "log", theirs / "runs/killed"
    with log.open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-c", CODE, *words, "name=killed"], cwd=theirs,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: any(row.status == "finished" for row in rows_of(address).values())
              if (address / "trials.csv").exists() else False, driver, log)  # fmt: skip
    finally:
        os.killpg(driver.pid, 9)  # its own cluster with it
        driver.wait()
    assert any(row.status not in ("finished", "stopped") for row in rows_of(address).values())
    typed(theirs, "resume", "runs/killed")


ON_TUNE = ("fleet.backend=ray", "fleet.dashboard=false", "rounds=20", "sweep.concurrent=1")


@pytest.mark.full
@pytest.mark.ray
def test_own_sampler_and_parts_killed_and_resumed_on_ray_tune(theirs: Path) -> None:
    typed(theirs, *sampled("fleet.backend=in_process", "rounds=20"), "name=whole")
    killed_on_ray_tune(theirs, *sampled(*ON_TUNE))
    assert {row.status for row in rows_of(theirs / "runs/killed").values()} == {"finished"}
    assert_equal_sweeps(theirs / "runs/killed", theirs / "runs/whole")


@pytest.mark.full
@pytest.mark.ray
def test_own_scheduler_killed_and_resumed_on_ray_tune(theirs: Path) -> None:
    """What trials reported before the kill is reported to it again: the first trial stays the first."""
    line = sampled(*ON_TUNE, "sweep.scheduler=halfway")
    killed_on_ray_tune(theirs, *line)
    rows = list(rows_of(theirs / "runs/killed").values())
    assert [row.status for row in rows] == ["finished", *["stopped"] * 5]
    assert {row.reason for row in rows[1:]} == {"stopped by halfway after round 10"}
    typed(theirs, *line, "name=whole")
    assert_equal_sweeps(theirs / "runs/killed", theirs / "runs/whole")
