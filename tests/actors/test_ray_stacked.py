"""The engine `stacked` on Ray actors: nothing of what it keeps as tables is lost when actors die or clients move."""

from __future__ import annotations

from pathlib import Path

import pytest

import actors.ray_actors
from actors.reports import RoundReport
from archipelago.experiments.runner import resume, run_experiment
from archipelago.runs.checkpoints import load
from tests.support import killers
from tests.support.callbacks import OnRound, Stop
from tests.support.experiments import config_of
from tests.support.runs import assert_equal_runs, events

# Momentum and private models as tables, absent clients, chunks of one shape in every packing.
SETTINGS = (
    "method=ditto", "rounds=5", "checkpoint.every=2", "local.momentum=0.9", "participation.fraction=0.75",
    "local.engine=stacked", "local.chunk=2", "determinism=exact",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.ray
def test_stacked_actor_killed_then_resumed_in_another_packing_gives_the_same_bits(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.ray_actors, "ServerActor", killers.MurderousServer)
    armed: list[Path] = []

    def on_round(report: RoundReport) -> None:
        if report.round == 2:
            armed.append(killers.arm("client-before-commit"))
        if report.round == 4:
            raise Stop

    config = config_of(*SETTINGS, "fleet.backend=ray", "fleet.actors=3", "fleet.cpus=0.5")
    run = tmp_path / "run"
    with pytest.raises(Exception, match="Stop"):
        run_experiment(config, run, callbacks=[OnRound(on_round)], quiet=True)
    assert len(armed) == 1 and not armed[0].exists(), "nobody was killed"
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("actors: 3", "actors: 2"))
    resume(run, quiet=True)
    assert len(load(run / "checkpoints/round-000005")) == 3  # the shards of two actors, and the server
    assert sum(event.startswith("Lost an actor") for event in events(run)) == 1
    assert not [event for event in events(run) if "client by client" in event]
    whole = run_experiment(config_of(*SETTINGS), tmp_path / "undisturbed", quiet=True)
    assert_equal_runs(run, whole)
