"""An engine and a network of somebody's own, in a file outside the project: in process, on Ray, by name or by path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lightning_modules.engines import ENGINES
from lightning_modules.networks import NETWORKS
from tests.actors.test_client_views import PORTRAITS
from tests.support.errors import refused
from tests.support.experiments import config_of, outcome, run, session_of

ROOT = Path(__file__).parents[2]

MINE = '''
"""Parts of a researcher's own."""
from dataclasses import dataclass

import torch
from torch import nn

from archipelago.core.settings import setting
from lightning_modules.engines import ENGINES, Engine
from lightning_modules.networks import NETWORKS, DefaultFor


@dataclass
class ClippingOptions:
    """`local.norm_limit=0.1`"""

    norm_limit: float = setting(0.0, "largest norm of a gradient; 0: any", at_least=0)


class ClippingEngine(Engine):
    """The plain loop with clipped gradients."""

    Options = ClippingOptions

    def train_one(self, job):
        with self.ready(job):
            total = 0.0
            for step, index in enumerate(job.batches):
                self.model.zero_grad()
                loss = self.model.module.training_step(self.samples.batch(index), step)
                loss.backward()
                if self.options.norm_limit:
                    nn.utils.clip_grad_norm_(self.model.module.parameters(), self.options.norm_limit)
                    self.notes = ["gradients are clipped"]
                self.model.optimizer.step()
                total += float(loss.detach())
            return self.result(job, total)


def two_layers(input_shape, outputs):
    """Two fully-connected layers, as a plain torch module."""
    features = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, outputs))


@dataclass
class WideOptions:
    """`model.width=...`"""

    width: int = setting(4, "wide: width of the hidden layer", at_least=1)


@NETWORKS.register("NAME", "one wide layer", label="Wide", options=WideOptions,
                   default_for=[DefaultFor(shape=(1, 5, 5))])
def wide(input_shape, outputs, options):
    features = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(features, options.width), nn.Linear(options.width, outputs))


def no_network(input_shape, outputs):
    return "a text"


class NoEngine:
    pass
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A module of a name that no other test has imported, in a folder of its own."""
    name = f"mine_{request.node.name.split('[')[0]}"
    (tmp_path / f"{name}.py").write_text(MINE.replace("NAME", f"wide_of_{name}"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for registry in (ENGINES, NETWORKS):
        for entry in [each for each in registry if name in each]:
            registry.remove(entry)
    sys.modules.pop(name, None)


def test_engine_by_import_path_trains_and_has_options_of_its_own(mine: str) -> None:
    engine = f"local.engine={mine}.ClippingEngine"
    plain, same = session_of("method=ifca+cam"), session_of("method=ifca+cam", engine)
    assert outcome(same, run(same, 2)) == outcome(plain, run(plain, 2))
    clipped = session_of("method=ifca+cam", engine, "local.norm_limit=0.01")
    reports = run(clipped, 2)
    assert outcome(clipped, reports) != outcome(plain, run(plain, 2))
    assert "gradients are clipped" in reports[0].events
    assert ENGINES.entry(f"{mine}.ClippingEngine").about == "The plain loop with clipped gradients."


def test_engine_that_is_none_is_refused_with_a_sentence(mine: str) -> None:
    with refused("wrong-kind", kind="engine", name=f"{mine}.NoEngine"):
        config_of(f"local.engine={mine}.NoEngine")
    with refused("unknown-name", kind="engine", name="lop", nearest="loop"):
        config_of("local.engine=lop")


def test_engine_option_is_refused_beside_another_engine(mine: str) -> None:
    ENGINES.entry(f"{mine}.ClippingEngine")
    with refused("unread", setting="local.norm_limit", says=f"{mine}.ClippingEngine"):
        config_of("local.norm_limit=0.5", "local.engine=loop")


def test_network_by_import_path_is_a_plain_torch_module_with_a_head(mine: str) -> None:
    session = session_of("method=fedper", f"model={mine}.two_layers")
    spec = session.fleet.spec
    assert [entry.name for entry in spec.entries if entry.classifier] == ["network.3.weight"]
    assert len(spec.columns("head")) == spec.size  # all of it is fully connected
    assert spec.size == 64 * 8 + 8 + 8 * 10 + 10
    assert np.isfinite(run(session, 2)[-1].metrics["micro_accuracy"])


def test_network_registered_by_a_plugin_has_options_and_may_be_the_default(mine: str) -> None:
    from lightning_modules.networks import default_network

    config = config_of(f"plugins=[{mine}]", f"model=wide_of_{mine}", "model.width=7")
    assert config.model.width == 7
    assert default_network((1, 5, 5), 3) == f"wide_of_{mine}"
    assert default_network((1, 8, 8), 10) == "cnn_digits"


def test_network_that_makes_no_module_is_refused_with_a_sentence(mine: str) -> None:
    with refused("wrong-result", name=f"{mine}.no_network", says="str"):
        session_of("method=fedavg", f"model={mine}.no_network")


@pytest.mark.ray
def test_third_party_engine_network_and_client_view_on_ray_give_the_bits_of_this_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine_on_ray.py").write_text(MINE.replace("NAME", "wide_on_ray"))
    (tmp_path / "portraits.py").write_text(PORTRAITS.replace("NAME", "portraits"))
    settings = [
        "local.engine=mine_on_ray.ClippingEngine", "local.norm_limit=0.5", "model=mine_on_ray.two_layers",
        "plugins=[portraits]", "method=portraits", "clients=4", "clusters=2", "rounds=2", "data.rotations=2",
        "local.steps=2", "storage=runs",
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    for name, fleet in (
        ("here", ["fleet.backend=in_process"]),
        ("ray", ["fleet.actors=2", "fleet.dashboard=false"]),
    ):
        command = [sys.executable, "-c", "from archipelago.cli.main import command_line; command_line()"]
        done = subprocess.run(
            [*command, *settings, f"name={name}", *fleet],
            cwd=tmp_path,
            env={**env, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    here, ray = ((tmp_path / "runs" / name / "metrics.csv").read_text() for name in ("here", "ray"))
    assert here.splitlines()[-1].split(",")[0] == "2" and "spread" in here.splitlines()[0]
    assert _without_seconds(here) == _without_seconds(ray)


def _without_seconds(metrics: str) -> list[list[str]]:
    rows = [line.split(",") for line in metrics.splitlines()]
    kept = [at for at, name in enumerate(rows[0]) if not name.startswith("seconds")]
    return [[row[at] for at in kept] for row in rows]
