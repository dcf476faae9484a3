"""Joining a Ray cluster, or starting a local one and ending exactly what was started."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.settings import FleetSettings
from archipelago.core.signals import ended_in_order

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def cluster_address(fleet: FleetSettings) -> str | None:
    """The cluster a run would join; None means a local one of its own."""
    return fleet.address or os.environ.get("RAY_ADDRESS") or None


def nodes_of(fleet: FleetSettings) -> list[dict[str, float]]:
    """The resources of each node that a run would find, without starting a cluster for the answer."""
    import ray

    if ray.is_initialized():
        return live_nodes()
    if fleet.backend == "in_process" or cluster_address(fleet) in (None, "local"):
        from actors.devices import machine_gpus

        return [{"CPU": float(os.cpu_count() or 1), "GPU": float(machine_gpus())}]
    with connected(fleet):
        return live_nodes()


def live_nodes() -> list[dict[str, float]]:
    """The resources of every node that is alive, on the cluster that this process is connected to."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def connected(fleet: FleetSettings, name: str | None = None) -> Iterator[str]:
    """Be connected to Ray: an existing connection is used and left alone. Yields one line about it.

    `name` is what the Ray dashboard calls this job.
    """
    import ray

    if ray.is_initialized():
        yield "the Ray cluster this process is connected to"
        return
    address = cluster_address(fleet)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "configure_logging": True}
    # Ray names a submitted job by its submission id and takes no other name; the dashboard shows its command beside it.
    if name is not None and _SUBMITTED not in os.environ:
        options["job_config"] = ray.job_config.JobConfig(metadata={"job_name": name})
    if address is None:
        # "local": without it Ray would join whatever cluster somebody started on this machine.
        ray.init(address="local", include_dashboard=fleet.dashboard, **options)
        where = "a local Ray cluster"
    else:
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise UserError(_not_connected(address, error)) from error
        where = f"the Ray cluster at {address}"
    try:
        dashboard = _dashboard()
        with ended_in_order():  # Ray's own handler of SIGTERM, which `ray.init` installs, aborts the process
            yield where + (f", dashboard http://{dashboard}" if dashboard else "")
    finally:
        ray.shutdown()


def _not_connected(address: str, error: Exception) -> str:
    import ray

    # Ray wraps a refusal in a failure to connect and keeps the reason in the text of what it came from.
    if isinstance(error, ray.exceptions.AuthenticationError) or "AuthToken" in str(error.__cause__):
        return (
            f"Expected the token of the Ray cluster at '{address}', got a wrong one or none: set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what `ray get-auth-token` says on its head node."
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"Expected a Ray cluster at '{address}', got none that answers ({reason}): start one with "
        "`ray start --head`, check RAY_ADDRESS, or unset it to run locally."
    )


def _dashboard() -> str:
    import ray

    worker = ray._private.worker.global_worker
    return getattr(worker.node, "webui_url", "") or ""
