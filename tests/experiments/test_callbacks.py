"""Callbacks: their order, what they see, what happens when one raises, and a third party's in every place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import archipelago
from actors.session import ActorsLost, InProcessSession
from archipelago import Callback, open_run
from archipelago.experiments import runner
from archipelago.experiments.callbacks import CALLBACKS
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import resume, run_experiment
from archipelago.sweeps.runner import run_sweep
from tests.support.callbacks import StopAfter
from tests.support.errors import refused
from tests.support.experiments import TINY, config_of
from tests.support.runs import assert_equal_runs, events
from tests.support.sweeps import sweep_of
from tests.support.third_party import write_module

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Recorder(Callback):
    """Writes down every call, with what the run directory says at that moment."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for hook in HOOKS:
            setattr(self, hook, self._recording(hook))

    def _recording(self, hook: str) -> Any:
        def record(run: Any, *arguments: Any) -> None:
            said = [getattr(each, "round", each) for each in arguments if not isinstance(each, str)]
            self.calls.append((hook, run.round, open_run(run.path).status.state, *said))

        return record

    def hooks(self) -> list[str]:
        return [call[0] for call in self.calls]


def test_callback_hooks_are_called_in_the_documented_order(tmp_path: Path) -> None:
    recorder = Recorder()
    run_experiment(
        config_of("checkpoint.every=2", "rounds=3"), tmp_path / "run", callbacks=[recorder], quiet=True
    )
    assert recorder.calls == [
        ("on_start", 0, "running"),
        ("on_session", 0, "running"),
        ("on_round", 1, "running", 1),
        ("on_round", 2, "running", 2),
        ("on_checkpoint", 2, "running", 2),
        ("on_round", 3, "running", 3),
        ("on_checkpoint", 3, "running", 3),
        ("on_complete", 3, "running"),
        ("on_end", 3, "finished"),
        ("on_close", 3, "finished"),
    ]


def test_callbacks_change_no_byte_of_a_run(tmp_path: Path) -> None:
    one = run_experiment(config_of(), tmp_path / "one", callbacks=[Recorder()], quiet=True)
    assert_equal_runs(one, run_experiment(config_of(), tmp_path / "other", quiet=True))


def test_callback_sees_metrics_and_models_of_the_round(tmp_path: Path) -> None:
    seen: list[tuple[int, int, Any]] = []

    class Looker(Callback):
        def on_round(self, run: Any, report: Any) -> None:
            assert run.history[-1]["micro_accuracy"] == report.metrics["micro_accuracy"]
            seen.append((report.round, len(run.history), run.models()["clusters"].shape[0]))

    run_experiment(config_of("rounds=2"), tmp_path / "run", callbacks=[Looker()], quiet=True)
    assert seen == [(1, 1, 2), (2, 2, 2)]


@pytest.mark.parametrize(
    ("hook", "state", "rounds"),
    [("on_round", "failed", 2), ("on_complete", "failed", 3), ("on_end", "finished", 3)],
)
def test_callback_that_raises_stops_the_run_with_a_sentence_and_the_run_resumes(
    hook: str, state: str, rounds: int, tmp_path: Path
) -> None:
    class Broken(Callback):
        def _break(self, run: Any, *arguments: Any) -> None:
            if run.round >= 2:
                raise ValueError("the disk of the callback is full")

    setattr(Broken, hook, Broken._break)
    config = config_of("checkpoint.every=1", "rounds=3")
    with refused("users-code", says=("Broken", hook, "the disk of the callback is full")) as caught:
        run_experiment(config, tmp_path / "run", callbacks=[Broken()], quiet=True)
    assert "in round 2" in str(caught.value) or hook != "on_round"
    status = open_run(tmp_path / "run").status
    assert (status.state, status.rounds_done) == (state, rounds)
    if state == "failed":
        assert status.sentence == str(caught.value)
        resume(tmp_path / "run", quiet=True)
    assert_equal_runs(tmp_path / "run", run_experiment(config, tmp_path / "alone", quiet=True))


def test_callback_that_cannot_start_leaves_the_name_free(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_start(self, run: Any) -> None:
            raise ValueError("no")

    with refused("users-code"):
        run_experiment(config_of(), tmp_path / "run", callbacks=[Broken()], quiet=True)
    assert not (tmp_path / "run").exists()


def test_callback_that_raises_while_a_run_ends_hides_no_other_error(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_failure(self, run: Any, error: BaseException) -> None:
            raise ValueError("again")

        on_close = on_failure  # type: ignore[assignment]  # wrong arguments are an error too

    with refused("users-code"):
        run_experiment(config_of(), tmp_path / "run", callbacks=[Broken(), StopAfter(2)], quiet=True)
    assert sum("failed in on_" in event for event in events(tmp_path / "run")) == 2


def test_callback_hears_of_lost_actors_and_of_rounds_that_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(InProcessSession):
        lost = False

        def run_round(self, round: int) -> Any:
            if round == 4 and not Lost.lost:
                Lost.lost = True
                raise ActorsLost("a node went away")
            return super().run_round(round)

    monkeypatch.setattr(runner, "InProcessSession", Lost)
    recorder = Recorder()
    run_experiment(config_of("checkpoint.every=2"), tmp_path / "run", callbacks=[recorder], quiet=True)
    begins = recorder.hooks().index("on_rollback")
    assert recorder.calls[begins] == ("on_rollback", 2, "running", 2)
    assert [call[3] for call in recorder.calls if call[0] == "on_round"] == [1, 2, 3, 3, 4]
    assert recorder.hooks()[begins : begins + 3] == ["on_rollback", "on_event", "on_session"]
    assert "on_failure" not in recorder.hooks()


def test_callback_of_no_such_name_is_refused_with_the_nearest() -> None:
    with refused("unknown-name", kind="callback", name="early_stoping", nearest="early_stopping"):
        load_config(overrides=["callbacks=[early_stoping]"], env={})


def test_callback_options_without_the_callback_are_refused() -> None:
    with refused("unread", setting="early_stopping"):
        load_config(overrides=["early_stopping.patience=3"], env={})


def test_callback_base_class_is_public() -> None:
    assert archipelago.Callback is Callback and CALLBACKS.base is Callback


# A third party's ----------------------------------------------------------------------------------------------


def diary(run: Path) -> list[str]:
    return (run / "diary.txt").read_text().splitlines()


def expected(run: Path, word: str = "round") -> list[str]:
    metrics = open_run(run).metrics
    rounds = [f"{word} {r} {a!r}" for r, a in zip(metrics["round"], metrics["micro_accuracy"], strict=True)]
    return ["start 0", *rounds, f"end {len(metrics)} ['clusters.safetensors']"]


@pytest.mark.parametrize("way", ["plug-in", "import path"])
def test_third_party_callback_runs_in_process(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_module(tmp_path, f"mine_{way[:2]}", monkeypatch)
    section = f"{module}_diary"  # it registers itself: its options have one section, however it is named
    named = (
        [f"plugins=[{module}]", f"callbacks=[{section}]"]
        if way == "plug-in"
        else [f"callbacks=[{module}.Diary]"]
    )
    run = run_experiment(config_of(*named, f"{section}.word=lap", "rounds=2"), tmp_path / "run", quiet=True)
    assert diary(run) == expected(run, "lap")


def test_third_party_callback_and_logger_in_a_sweep_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_module(tmp_path, "mine_sweep", monkeypatch)
    wanted = (
        f"plugins=[{module}]",
        f"callbacks=[{module}_diary]",
        f"loggers=[{module}_lines]",
        "sweep.seeds=[0,1]",
        "rounds=2",
        "fleet.backend=in_process",
    )
    run_sweep(sweep_of(tmp_path, *wanted), str(tmp_path / "swept"), quiet=True)
    for trial in sorted((tmp_path / "swept/runs").iterdir()):
        assert diary(trial) == expected(trial)
        lines = (trial / f"{module}_lines.jsonl").read_text().splitlines()
        assert lines[0] == '{"method": "ifca", "group": "swept"}' and len(lines) == 3


def test_third_party_callback_and_logger_after_a_kill_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_module(tmp_path, "mine_killed", monkeypatch)
    named = [f"callbacks=[{module}.Diary]", f"loggers=[{module}.Lines]"]
    settings = [
        *(each for each in TINY if not each.startswith("rounds")),
        *named,
        "rounds=60",
        "checkpoint.every=5",
    ]
    code = (
        "from archipelago.experiments.config import load_config\n"
        "from archipelago.experiments.runner import run_experiment\n"
        f"run_experiment(load_config(None, {settings!r}), 'run', quiet=True)"
    )
    root = str(Path(archipelago.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}
    )
    run, deadline = tmp_path / "run", time.monotonic() + 120
    while not any((run / "checkpoints").glob("round-0*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert open_run(run).status.state == "interrupted"
    resume(run, quiet=True)
    once = list(dict.fromkeys(line for line in diary(run) if not line.startswith("start")))
    assert once == expected(run)[1:]  # what was run again was reported again, with the same bits
    assert sum(line.startswith("start") for line in diary(run)) == 2
    steps = {line for line in (run / "Lines.jsonl").read_text().splitlines() if "step" in line}
    assert len(steps) == len(open_run(run).metrics)


@pytest.mark.ray
def test_third_party_callback_and_logger_on_ray_with_two_actors(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_module(tmp_path, "mine_ray", monkeypatch)
    named = (f"callbacks=[{module}.Diary]", f"loggers=[{module}.Lines]", "rounds=2")
    run = run_experiment(
        config_of(*named, "fleet.backend=ray", "fleet.actors=2"), tmp_path / "run", quiet=True
    )
    assert diary(run) == expected(run)
    assert_equal_runs(run, run_experiment(config_of(*named), tmp_path / "here", quiet=True))
    assert (run / "Lines.jsonl").read_text() == (tmp_path / "here/Lines.jsonl").read_text()
