"""TensorBoard logs, read back as TensorBoard reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import Logger

from archipelago import open_run
from archipelago.experiments.loggers import LOGGERS
from archipelago.experiments.runner import resume, run_experiment
from archipelago.sweeps.runner import run_sweep
from tests.support.callbacks import StopAfter
from tests.support.errors import refused
from tests.support.experiments import config_of
from tests.support.runs import events
from tests.support.sweeps import sweep_of


def scalars(run: Path, name: str) -> dict[int, float]:
    """Step -> value over all event files, in order; the newest wins, as after a purge."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[int, float] = {}
    for file in sorted((run / "tensorboard").glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                if value.tag == name:
                    found[event.step] = value.simple_value
    return found


def test_tensorboard_has_every_round_once_after_a_stop_too(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with refused("users-code"):
        run_experiment(
            config_of("tensorboard=true", "checkpoint.every=2"), path, callbacks=[StopAfter(4)], quiet=True
        )
    assert list(scalars(path, "micro_accuracy")) == [1, 2, 3]
    resume(path, quiet=True)
    metrics = open_run(path).metrics
    assert scalars(path, "micro_accuracy") == pytest.approx(
        dict(zip(metrics["round"], metrics["micro_accuracy"], strict=True))
    )
    assert set(scalars(path, "seconds/round")) == {1, 2, 3, 4}
    assert set(scalars(path, "cluster_size/0")) == {1, 2, 3, 4}


class Diary(Logger):
    """Somebody's own logger that appends a line a round, and none twice."""

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._file = Path(save_dir) / "rounds.txt"
        self._file.parent.mkdir(exist_ok=True)

    name = property(lambda self: "diary")
    version = property(lambda self: 0)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """None are kept."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self._file.open("a") as file:
            file.write(f"{step} {metrics['micro_accuracy']!r}\n")


@pytest.fixture
def diary() -> Iterator[str]:
    LOGGERS.register("diary", "a line a round", keeps_rounds=True, files=r"rounds\.txt")(Diary)
    yield "diary"
    LOGGERS.remove("diary")


def test_tensorboard_and_own_logger_have_rounds_that_were_taken_over(tmp_path: Path, diary: str) -> None:
    wanted = (
        "sweep.methods=[ifca,ifca+finetune]",
        "tensorboard=true",
        f"loggers=[{diary}]",
        "rounds=6",
        "fleet.backend=in_process",
    )
    run_sweep(sweep_of(tmp_path, *wanted), str(tmp_path / "sweep"), quiet=True)
    path = tmp_path / "sweep/runs/ifca+finetune-seed0"
    metrics = open_run(path).metrics
    accuracies = dict(zip(metrics["round"], metrics["micro_accuracy"], strict=True))
    assert any("Rounds 1 to 3 are those" in text for text in events(path))
    assert scalars(path, "micro_accuracy") == pytest.approx(accuracies)
    lines = [line.split() for line in (path / "diary/rounds.txt").read_text().splitlines()]
    # The other trial's file came along whole: a logger that keeps rounds drops what is later itself, as TensorBoard's.
    assert {int(number) for number, _ in lines} == {1, 2, 3, 4, 5, 6}
    assert {int(number): float(value) for number, value in lines} == accuracies


def test_tensorboard_is_written_only_if_it_is_asked_for(tmp_path: Path) -> None:
    run_experiment(config_of("rounds=1"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run/tensorboard").exists()
