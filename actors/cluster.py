"""Joining a Ray cluster, or starting a local one and ending exactly what was started."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.settings import FleetSettings
from archipelago.core.signals import ended_in_order

_PATIENCE = 10.0  # seconds until a host that does not answer is taken for one that is not there
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


def autoscales() -> bool:
    """Whether somebody starts nodes for what the cluster is asked for and does not have."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get  # Ray has no public word for it

    kinds: set[str] = set()
    with contextlib.suppress(Exception):  # a cluster that says nothing about it has none
        status = json.loads(_internal_kv_get(b"__autoscaling_status") or b"{}")
        kinds |= {*status.get("autoscaler_report", {}).get("node_type_mapping", {}).values()}
    with contextlib.suppress(Exception):
        found = get_cluster_status(ray.get_runtime_context().gcs_address)
        kinds |= {node.ray_node_type_name for node in [*found.active_nodes, *found.idle_nodes]}
    # Without an autoscaler every node is of a kind of its own, called after it.
    return any(kind and not kind.startswith("node_") for kind in kinds)


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
        with private_cluster():
            ray.init(address="local", include_dashboard=fleet.dashboard, **options)
        where = "a local Ray cluster"
    else:
        _refuse_silence(address)
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise UserError(_not_connected(address, error), code="unreachable", address=address) from error
        where = f"the Ray cluster at {address}"
    try:
        dashboard = _dashboard()
        with ended_in_order():  # Ray's own handler of SIGTERM, which `ray.init` installs, aborts the process
            yield where + (f", dashboard http://{dashboard}" if dashboard else "")
    finally:
        ray.shutdown()


@contextmanager
def private_cluster() -> Iterator[None]:
    """A cluster that is started inside is for this machine alone: on its loopback address, with a token of this user's.

    Ray would listen on every address of the machine (0.0.0.0). Told that this system has no clusters, as it is told on
    macOS, it keeps its server, raylet, workers, agents and metrics on 127.0.0.1; they inherit the variable.
    """
    from ray._private import ray_constants

    _keep_token_private()
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, enabled = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _keep_token_private() -> None:
    """Make the file of Ray's token before Ray does, which makes it readable for everybody; mend one that is."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(os.urandom(32).hex())
    except FileExistsError:
        if path.stat().st_uid == os.getuid() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)
    except OSError:  # no home that can be written: Ray will say what it needs
        return


def _refuse_silence(address: str) -> None:
    """A `UserError` at once where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return  # auto, or a name that only Ray knows
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except OSError as error:
        raise UserError(_not_connected(address, error), code="unreachable", address=address) from error


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
