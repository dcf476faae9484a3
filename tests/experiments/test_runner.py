"""Runs that are refused, cut off at their very end, or lose their place: nothing is lost, and no name is used up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from actors.placement import actor_count
from actors.session import ActorsLost, InProcessSession
from archipelago import open_run
from archipelago.core.errors import UserError
from archipelago.experiments import runner
from archipelago.experiments.callbacks import platform_callbacks
from archipelago.experiments.runner import resume, run_experiment
from tests.support.callbacks import StopAfter
from tests.support.errors import refused
from tests.support.experiments import config_of, plan_of
from tests.support.runs import assert_equal_runs


class FromAnActor(Exception):
    """As Ray hands over what an actor raised."""

    cause = UserError("No.")


@pytest.mark.parametrize("error", [UserError("No."), FromAnActor("No.")])
def test_run_that_is_refused_leaves_its_name_free(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(runner, "InProcessSession", refuse)
        with pytest.raises(type(error)):
            run_experiment(config_of(), tmp_path / "run", quiet=True)
    assert not list(tmp_path.iterdir())
    run_experiment(config_of("rounds=1"), tmp_path / "run", quiet=True)


def test_run_with_rounds_is_kept_whatever_stops_it(tmp_path: Path) -> None:
    with refused("users-code"):
        run_experiment(
            config_of("checkpoint.every=1"), tmp_path / "run", callbacks=[StopAfter(2)], quiet=True
        )
    resume(tmp_path / "run", quiet=True)
    assert_equal_runs(tmp_path / "run", run_experiment(config_of(), tmp_path / "alone", quiet=True))


def test_run_without_capacity_after_a_loss_is_no_mistake_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss the cluster may be full; the run can be resumed later."""

    class Lost(InProcessSession):
        began = 0

        def __init__(self, *arguments: Any) -> None:
            Lost.began += 1
            if Lost.began > 1:
                raise UserError("The cluster is full.")
            super().__init__(*arguments)

        def run_round(self, round: int) -> Any:
            if round == 3:
                raise ActorsLost("a node went away")
            return super().run_round(round)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "InProcessSession", Lost)
        with pytest.raises(ActorsLost, match=r"no capacity to continue: The cluster is full\."):
            run_experiment(config_of("checkpoint.every=1"), tmp_path / "run", quiet=True)
    resume(tmp_path / "run", quiet=True)
    assert open_run(tmp_path / "run").status.state == "finished"


def test_run_that_was_ended_before_its_summary_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(platform_callbacks, "write_summary", killed)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(config_of("rounds=1"), tmp_path / "run", quiet=True)
    assert open_run(tmp_path / "run").status.state == "finished"
    resume(tmp_path / "run", quiet=True)
    alone = run_experiment(config_of("rounds=1"), tmp_path / "alone", quiet=True)
    ours, theirs = ((path / "summary.md").read_text().splitlines() for path in (tmp_path / "run", alone))
    assert ours[2:10] == theirs[2:10]
    with refused("finished"):
        resume(tmp_path / "run", quiet=True)


def test_run_says_what_it_computes_on_in_its_first_line_and_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_experiment(config_of("determinism=seeded", "rounds=1"), tmp_path / "run")
    sentence = "CPU; engine loop, precision 32, determinism exact"
    output = capsys.readouterr()
    assert f"8 clients in this process (1 block): {sentence}" in output.out + output.err
    assert f"Computed on {sentence}." in (path / "summary.md").read_text()
    found = json.loads((path / "environment.json").read_text())["compute"]
    assert found == {
        "devices": {"CPU": 1},
        "blocks": 1,
        "gpus_per_actor": 0.0,
        "engine": "loop",
        "precision": "32",
        "determinism": "exact",
        "notes": [],
        "sentence": sentence,
    }


def test_resume_on_another_device_is_an_event_and_is_kept_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of GPUs that is resumed on the CPU: the only thing that differs is what its session says."""
    compute = InProcessSession.compute

    def on_a_gpu(session: InProcessSession) -> Any:
        return dataclasses.replace(
            compute(session), devices={"A GPU": 2}, gpus_per_actor=1.0, determinism="seeded"
        )

    config = config_of("rounds=4", "checkpoint.every=1")
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(InProcessSession, "compute", on_a_gpu)
        with refused("users-code"):
            run_experiment(config, path, callbacks=[StopAfter(2)], quiet=True)
    resume(path, quiet=True)
    environment = json.loads((path / "environment.json").read_text())
    assert environment["compute"]["devices"] == {"A GPU": 2}
    assert environment["resumed"][0]["compute"]["devices"] == {"CPU": 1}
    events = "\n".join(open_run(path).events["text"])
    assert (
        "Computes on CPU; engine loop, precision 32, determinism exact from here on; before, on 2 x A GPU"
        in events
    )
    summary = (path / "summary.md").read_text()
    assert "Computed on 2 x A GPU, one per actor; engine loop" in summary and "Computed on CPU;" in summary


def test_run_that_began_on_gpus_keeps_them_after_a_loss(tmp_path: Path) -> None:
    """fleet.gpus=auto is a number from the first session on: a cluster without GPUs is no place to go on."""
    plan = dataclasses.replace(plan_of("fleet.backend=ray"), gpus=1.0)
    assert plan.sized([{"CPU": 8.0}]).gpus == 1.0
    with refused("capacity", wanted=1, capacity=0):
        actor_count(plan.sized([{"CPU": 8.0}]), 8, [{"CPU": 8.0}], shrink=True)
