"""Parts of somebody else's, in a file outside the project, survive a kill: `resume` gives the undisturbed bits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clusters import ROOT
from tests.support.experiments import TINY
from tests.support.runs import assert_equal_runs
from tests.support.sweeps import assert_equal_sweeps, rows_of

PARTS = '''
"""A metric, an aggregation rule, a clustering rule, an engine, a network and a sampler of a researcher's own."""
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

import archipelago
from archipelago.core.metrics import METRICS
from archipelago.strategies import AGGREGATION, CLUSTERING
from archipelago.sweeps.samplers import SAMPLERS, Sampler
from lightning_modules.engines import ENGINES, Engine
from lightning_modules.networks import NETWORKS


@METRICS.register("doubt", "one minus the largest probability", label="doubt", better="lower", tasks=("classes",))
def doubt(evaluated):
    return float(1 - evaluated.outputs.double().softmax(dim=1).max(dim=1).values.mean())


@AGGREGATION.register("third_quartile", "the third quartile of each coordinate")
def third_quartile(uploads):
    return uploads.by_coordinate(lambda values: np.quantile(values, 0.75, axis=0))


@CLUSTERING.register("by_first", "equal parts by the first feature")
def by_first(task):
    labels = np.empty(len(task.features), np.int64)
    labels[np.argsort(task.features[:, 0], kind="stable")] = np.arange(len(labels)) * task.clusters // len(labels)
    return labels


@ENGINES.register("clipped", "the plain loop with clipped gradients")
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


@NETWORKS.register("tanh_layers", "two layers and a hyperbolic tangent")
def tanh_layers(input_shape, outputs):
    features = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, outputs))


@SAMPLERS.register("steps", "ever smaller values")
class Steps(Sampler):
    count = 3

    def points(self, combination):
        return [{key: 0.3 / 2**n for key in self.goal.space} for n in range(3)]


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
    "aggregation rule": ("method=fedavg", "aggregation=third_quartile"),
    "clustering rule": ("method=fesem", "fesem.clustering=by_first"),
    "engine": ("method=ifca+cam", "local.engine=clipped"),
    "network": ("method=ifca", "model=tanh_layers"),
}
EVERYTHING = (
    "method=fesem+cam", "fesem.clustering=by_first", "aggregation=third_quartile", "local.engine=clipped",
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


def killed_and_resumed(theirs: Path, *words: str) -> None:
    """A run that is killed after three of five rounds and resumed, beside one that is not."""
    line = tiny(*words, "rounds=5", "callbacks=[own_parts.KilledOnce]")
    (theirs / "kill").touch()
    typed(theirs, *line, "name=killed", expected=-9)
    assert len((theirs / "runs/killed/metrics.csv").read_text().splitlines()) <= 4
    typed(theirs, "resume", "runs/killed", "then", *line, "name=whole")
    assert_equal_runs(theirs / "runs/killed", theirs / "runs/whole")
    assert "micro_doubt" in (theirs / "runs/killed/metrics.csv").read_text()


def test_own_metric_rules_engine_and_network_killed_and_resumed(theirs: Path) -> None:
    killed_and_resumed(theirs, *EVERYTHING, "fleet.backend=in_process")


@pytest.mark.full
@pytest.mark.parametrize("kind", CHOSEN)
def test_own_part_of_one_kind_killed_and_resumed(kind: str, theirs: Path) -> None:
    killed_and_resumed(theirs, *CHOSEN[kind], "fleet.backend=in_process")


@pytest.mark.full
@pytest.mark.ray
def test_own_metric_rules_engine_and_network_killed_and_resumed_on_two_actors(theirs: Path) -> None:
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


@pytest.mark.full
@pytest.mark.ray
def test_own_sampler_killed_and_resumed_on_ray_tune(theirs: Path) -> None:
    log, address = theirs / "log", theirs / "runs/killed"
    typed(theirs, *sampled("fleet.backend=in_process", "rounds=20"), "name=whole")
    words = [
        *sampled("fleet.backend=ray", "rounds=20", "sweep.concurrent=1"),
        "fleet.dashboard=false",
        "name=killed",
    ]
    with log.open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-c", CODE, *words], cwd=theirs, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: any(row.status == "finished" for row in rows_of(address).values())
              if (address / "trials.csv").exists() else False, driver, log)  # fmt: skip
    finally:
        os.killpg(driver.pid, 9)  # its own cluster with it
        driver.wait()
    typed(theirs, "resume", "runs/killed")
    assert {row.status for row in rows_of(address).values()} == {"finished"}
    assert_equal_sweeps(address, theirs / "runs/whole")
