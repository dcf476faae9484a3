"""Errors of Ray actors, as the driver should see them."""

from __future__ import annotations

from typing import Any

from archipelago.core.errors import ClientFailure, UserError


class ActorsLost(RuntimeError):
    """An actor, or the node it lived on, is gone; the run can resume from its last checkpoint."""


class SurfacedErrors:
    """A context manager around calls of actors.

    Ray's many ways to say that a process or a node is gone become one error, and what went wrong inside a
    client or was wrong with the request is raised as it was raised there.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from ray import exceptions

        gone = (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.ObjectLostError,
            exceptions.NodeDiedError,
            exceptions.ActorPlacementGroupRemoved,
            exceptions.OutOfMemoryError,
            exceptions.ActorUnschedulableError,
            exceptions.TaskPlacementGroupRemoved,
            exceptions.TaskUnschedulableError,
            exceptions.LocalRayletDiedError,
            exceptions.RpcError,
        )
        cause = error
        while isinstance(cause, exceptions.RayTaskError):  # of one that waited for another one's result
            cause = cause.cause
        if cause is not error and isinstance(cause, ClientFailure | UserError | ActorsLost):
            raise cause from error
        # Of Ray's system errors only those of a connection: a module that is missing there would be missing again.
        broken = isinstance(cause, exceptions.RaySystemError) and any(
            word in str(cause) for word in ("raylet", "Broken pipe", "Connection reset")
        )
        if broken or (isinstance(cause, gone) and not getattr(cause, "actor_init_failed", False)):
            assert cause is not None
            raise ActorsLost(_in_short(cause)) from error


def _in_short(error: BaseException) -> str:
    """Who died and why, from Ray's several lines about it."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = {key: value for key, _, value in (line.partition(": ") for line in lines) if value}
    who = said.get("name") or said.get("class_name")
    return f"{who} (pid {said.get('pid', 'unknown')})" if who else lines[0]
