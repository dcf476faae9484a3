"""Processes that kill themselves with SIGKILL at a chosen place, once, on request.

A test arms a place by writing a file into the folder that every worker of the shared cluster knows from its
environment (`tests/conftest.py` sets it before the cluster starts). Whoever comes to that place first takes
the file away and dies, or fails; later visitors, and runs that nobody armed, continue as if nothing were there.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import archipelago.core.torchvision_operators  # isort: skip  # noqa: F401  (must come before lightning)
import ray
import torch
from torch import Tensor

import actors.block_measures
from actors.ray_actors import RayFleet, ServerActor
from archipelago.core.settings import LocalSettings, ModelSettings
from archipelago.runs import trees
from lightning_modules.base import FederatedModule
from lightning_modules.networks import build_network

FOLDER = "ARCHIPELAGO_TEST_FOLDER"
MODULE = ("model=auto", "model.target=tests.support.killers.MortalModule")


def arm(place: str, after: int = 0, action: str = "kill") -> Path:
    """Let whoever comes to `place` for the (after + 1)-th time die ("kill"), fail ("raise"), end itself
    ("exit": `sys.exit(0)`) or diverge ("nan").

    Visits are counted by each process for itself, from the moment the place is armed.
    """
    path = _file(place)
    path.write_text(f"{action} {after}")
    return path


def _file(place: str) -> Path:
    return Path(os.environ[FOLDER]) / place


_visits: dict[tuple[str, int], int] = {}


def _visit(place: str) -> float:
    """Do what the process must do at an armed place; gives back a factor for its result."""
    if FOLDER not in os.environ:
        return 1.0
    try:
        armed = _file(place).stat().st_mtime_ns  # a place that is armed again starts to count again
        action, after = _file(place).read_text().split()
        _visits[place, armed] = _visits.get((place, armed), 0) + 1
        if _visits[place, armed] <= int(after):
            return 1.0
        _file(place).unlink()  # only one process succeeds
    except FileNotFoundError:
        return 1.0
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "exit":
        sys.exit(0)
    if action == "raise":
        raise ArithmeticError("told to fail by a test")
    return math.nan


def _mortal_writing() -> None:
    """In a client actor, whoever writes an array into a file comes to the place `saving`."""
    whole = trees._bytes

    def mortal(array: Any) -> Any:
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
            _visit("saving")
        return whole(array)

    trees._bytes = mortal


_mortal_writing()


class MortalModule(FederatedModule):
    """A small network whose process can die in the middle of a training step or of an evaluation."""

    def __init__(self, input_shape: tuple[int, ...], classes: int | None, local: LocalSettings) -> None:
        network = build_network(ModelSettings(name="linear"), input_shape, classes)
        super().__init__(network, classes=classes, local=local)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        factor = _visit("training")
        return super().training_step(batch, batch_idx) * factor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not torch.is_grad_enabled():
            _visit(_asked_for())
        return super().forward(x)


def _asked_for() -> str:
    """Which pass over its samples a client is in: `evaluation`, or the `losses` that a method asked for."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == actors.block_measures.__file__ and frame.f_code.co_name in (
            "losses",
            "best",
            "evaluate",
        ):
            return "evaluation" if frame.f_code.co_name == "evaluate" else "losses"
        frame = frame.f_back
    return "forward"


class MurderousFleet(RayFleet):
    """Kills the first client actor, or its own server, just before the clients are asked something."""

    def _call(
        self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any] = ()
    ) -> dict[int, Any]:
        _visit(f"server-before-{method}")
        if (place := _file(f"client-before-{method}")).exists():
            place.unlink()
            os.kill(ray.get(self.actors[0].about.remote())["pid"], signal.SIGKILL)
        return super()._call(method, arguments, arrays)


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"watch": 1})
class MurderousServer(ServerActor.__ray_metadata__.modified_class.__ray_actor_class__):  # type: ignore[misc,attr-defined]  # the class that Ray wrapped
    """A ServerActor whose fleet is a `MurderousFleet`."""

    fleet_class = MurderousFleet
