"""Parts of somebody else's, in a file outside the project, survive a kill: `resume` gives the undisturbed bits.

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
from tests.support.experiments import TINY
from tests.support.runs import assert_equal_runs
from tests.support.sweeps import assert_equal_sweeps, rows_of

PARTS = '''
"""One of each kind of a researcher's own: metric, add-on, rules, engine, network, sampler, scheduler."""
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

import archipelago
from archipelago.core.metrics import METRICS
from archipelago.strategies import AGGREGATION, CLUSTERING
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.penalties import Proximal
from archipelago.sweeps.samplers import SAMPLERS, Sampler
from archipelago.sweeps.schedulers import SCHEDULERS, Scheduler
from lightning_modules.engines import ENGINES, Engine
from lightning_modules.networks import NETWORKS


@METRICS.register("doubt", "one minus the largest probability", label="doubt", better="lower", tasks=("classes",))
def doubt(evaluated):
    return float(1 - evaluated.outputs.double().softmax(dim=1).max(dim=1).values.mean())


@ADDONS.register("leash", "a pull to the cluster's model that slackens from round to round", label="Leash")
class Leash(Addon):
    state = ("rounds",)
    rounds = 0  # done: a resumed run that began at 0 again would pull harder

    def penalties(self, base, fleet, c):
        return [] if c is None else [Proximal(2.0 / (1 + self.rounds), base.clusters[c])]

    def after_round(self, base, fleet):
        self.rounds += 1


@AGGREGATION.register("third_quartile", "the third quartile of each coordinate", label="Third quartile")
def third_quartile(uploads):
    return uploads.by_coordinate(lambda values: np.quantile(values, 0.75, axis=0))


@CLUSTERING.register("by_first", "equal parts by the first feature", label="First feature")
def by_first(task):
    labels = np.empty(len(task.features), np.int64)
    labels[np.argsort(task.features[:, 0], kind="stable")] = np.arange(len(labels)) * task.clusters // len(labels)
    return labels


@ENGINES.register("clipped", "the plain loop with clipped gradients", label="Clipped loop")
class Clipped(Engine):
    def train_one(self, job):
        with self.ready(job):
            total = 0.0
            for step, index in enumerate(job.batches):
                self.model.zero_grad()
                loss = self.model.module.training_step(self.samples.batch(index), step)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.module.parameters(), 0.5)
                self.model.optimizer.step()
                total += float(loss.detach())
            return self.result(job, total)


@NETWORKS.register("tanh_layers", "two layers and a hyperbolic tangent", label="Tanh network")
def tanh_layers(input_shape, outputs):
    features = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, outputs))


@SAMPLERS.register("steps", "ever smaller values", label="Steps")
class Steps(Sampler):
    count = 3

    def points(self, combination):
        return [{key: 0.3 / 2**n for key in self.goal.space} for n in range(3)]


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


class KilledOnce(archipelago.Callback):
    """The process is killed after the round that a file asks for, as soon as its checkpoint is there."""

    def on_round(self, run, report):
        order = Path("kill")
        if order.exists() and report.round == 3:
            order.unlink()
            os.kill(os.getpid(), 9)
'''

CHOSEN = {
    "metric": (),
    "add-on": ("method=ifca+leash",),
    "aggregation rule": ("method=fedavg", "aggregation=third_quartile"),
    "clustering rule": ("method=fesem", "fesem.clustering=by_first"),
    "engine": ("method=ifca+cam", "local.engine=clipped"),
    "network": ("method=ifca", "model=tanh_layers"),
}
EVERYTHING = (
    "method=fesem+leash+cam", "fesem.clustering=by_first", "aggregation=third_quartile", "local.engine=clipped",
    "model=tanh_layers",
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
    (tmp_path / "own_parts.py").write_text(PARTS)
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
    return [*kept, *words, "plugins=[own_parts]", "storage=runs", "checkpoint.every=1"]


def labels_of(run: Path) -> dict[str, str]:
    words = read_vocabulary(run)
    assert words is not None
    return {**words.methods, **words.others}


def killed_and_resumed(theirs: Path, *words: str) -> None:
    """A run that is killed after three of five rounds and resumed, beside one that is not."""
    line = tiny(*words, "rounds=5", "callbacks=[own_parts.KilledOnce]")
    (theirs / "kill").touch()
    typed(theirs, *line, "name=killed", expected=-9)
    assert len((theirs / "runs/killed/metrics.csv").read_text().splitlines()) <= 4
    typed(theirs, "resume", "runs/killed", "then", *line, "name=whole")
    assert_equal_runs(theirs / "runs/killed", theirs / "runs/whole")
    assert "micro_doubt" in (theirs / "runs/killed/metrics.csv").read_text()


def test_own_metric_add_on_rules_engine_and_network_killed_and_resumed(theirs: Path) -> None:
    killed_and_resumed(theirs, *EVERYTHING, "fleet.backend=in_process")
    assert labels_of(theirs / "runs/killed") == {
        "fesem": "FeSEM", "leash": "Leash", "cam": "CAM", "third_quartile": "Third quartile",
        "by_first": "First feature", "clipped": "Clipped loop", "tanh_layers": "Tanh network",
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", CHOSEN)
def test_own_part_of_one_kind_killed_and_resumed(kind: str, theirs: Path) -> None:
    killed_and_resumed(theirs, *CHOSEN[kind], "fleet.backend=in_process")


@pytest.mark.full
@pytest.mark.ray
def test_own_metric_add_on_rules_engine_and_network_killed_and_resumed_on_two_actors(theirs: Path) -> None:
    killed_and_resumed(theirs, *EVERYTHING, "fleet.backend=ray", "fleet.actors=2", "fleet.dashboard=false")
    line = tiny(*EVERYTHING, "rounds=5", "fleet.backend=in_process", "callbacks=[own_parts.KilledOnce]")
    typed(theirs, *line, "name=here")
    assert_equal_runs(theirs / "runs/killed", theirs / "runs/here")


def until(reached: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    while not reached():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)


def sampled(*words: str) -> list[str]:
    drawn = ("sweep.sampler=steps", "sweep.sample.local.lr=uniform(0.01,0.3)", "partition.validation=0.2")
    return tiny("method=fedavg", *drawn, "sweep.seeds=[0,1]", *words)


@pytest.mark.full
def test_own_sampler_killed_and_resumed(theirs: Path) -> None:
    """Trials run in the sweep's own process, which is killed in the first one's third round."""
    line = sampled("fleet.backend=in_process", "rounds=4", "callbacks=[own_parts.KilledOnce]")
    (theirs / "kill").touch()
    typed(theirs, *line, "name=killed", expected=-9)
    statuses = [row.status for row in rows_of(theirs / "runs/killed").values()]
    assert statuses == ["running", *["waiting"] * 5]
    typed(theirs, "resume", "runs/killed", "then", *line, "name=whole")
    groups = [row.group for row in rows_of(theirs / "runs/killed").values()]
    assert groups[::2] == [f"fedavg | local.lr={lr}" for lr in (0.3, 0.15, 0.075)]
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
def test_own_sampler_killed_and_resumed_on_ray_tune(theirs: Path) -> None:
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
