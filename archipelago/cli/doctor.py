"""`doctor`: what this machine or cluster has, and what a run would use."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from archipelago.cli.app import Described
from archipelago.cli.output import count, print_json, print_table
from archipelago.cli.ray_probe import RayProbe
from archipelago.cli.request import Request
from archipelago.cli.words import AsJson, Settings, settings_of
from archipelago.core.errors import UserError

if TYPE_CHECKING:
    from archipelago.core.settings import ExperimentSettings

Rows = list[tuple[str, str]]  # (fact, value)

PACKAGES = (
    "archipelago-fl", "ray", "lightning", "torch", "torchvision", "torchmetrics", "medmnist", "scikit-learn",
    "omegaconf", "numpy",
)  # fmt: skip


@dataclass(kw_only=True)
class Doctor(Request):
    """Say what this machine or cluster has; whatever is missing is only said."""

    overrides: list[str] = field(default_factory=list)
    as_json: bool = False

    def execute(self) -> None:
        """Print the facts, each as soon as it is known."""
        config = None
        if self.overrides:
            from archipelago.experiments.config import load_config

            config = load_config(None, self.overrides)
        address = config.fleet.address if config is not None else None
        ray = RayProbe(
            {**os.environ, **({"RAY_ADDRESS": address} if address else {})}
        )  # asks in the background while torch is imported
        try:
            document: dict[str, dict[str, str]] = {}
            for key, title, rows in facts(ray, config):
                document[key] = dict(rows)
                if not self.as_json:
                    print_table(title, rows)
            if self.as_json:
                print_json(document)
        finally:
            ray.close()


def facts(ray: RayProbe, config: ExperimentSettings | None = None) -> Iterator[tuple[str, str, Rows]]:
    """(key in JSON, title, rows) of every table."""
    yield "machine", "This machine", _machine()
    yield "packages", "Packages", _packages()
    if plugins := _plugins():
        yield "plugins", "Plug-ins of installed packages", plugins
    yield "data_sets", "Data sets", _data_sets()
    yield "ray", "Ray", ray.rows()
    if config is not None:
        yield "run", "What a run with these settings would use", _plan(ray, config)
        return
    from archipelago.experiments.config import full_schema

    yield "run", "What a run with the default settings would use", _plan(ray, full_schema()())


def _machine() -> Rows:
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    rows: Rows = [
        ("CPUs", f"{usable} usable of {os.cpu_count()}"),
        ("memory", f"{memory.available / 2**30:.1f} GB free of {memory.total / 2**30:.1f} GB"),
    ]
    try:
        import torch

        from actors.devices import machine_gpus, torch_has_cuda

        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError) as error:  # a driver that does not fit is worth reading, not a crash
        return [*rows, ("GPUs", f"not readable: {error}")]
    rows += [
        (f"GPU {i}", f"{each.name}, {each.total_memory / 2**30:.1f} GB") for i, each in enumerate(devices)
    ]
    if devices:
        return rows
    if not torch_has_cuda() and machine_gpus():
        return [
            *rows,
            ("GPUs", f"{machine_gpus()}, which torch cannot use: it is a CPU build; install its CUDA build"),
        ]
    return [*rows, ("GPUs", "none" if torch_has_cuda() else "none (torch is a CPU build)")]


def _packages() -> Rows:
    from importlib import metadata

    rows: Rows = [("python", sys.version.split()[0])]
    for name in PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _plugins() -> Rows:
    from archipelago.core.plugins import installed_plugins

    return list(installed_plugins().items())


def _data_sets() -> Rows:
    """Those that are here, then the names of the others."""
    from archipelago.data.catalogue import listing
    from archipelago.experiments.config import full_schema

    settings = full_schema()().data
    rows = listing(settings, sizes=False)
    here: Rows = [(name, where) for name, state, _, where in rows if state == "present"]
    absent = [name for name, state, *_ in rows if state == "missing"]
    return [*here, ("not here", f"{', '.join(absent)} (data.root={settings.root}; `data list` says more)")]


def show_plan(config: ExperimentSettings) -> None:
    """What one run would use, on the cluster that it would join."""
    address = config.fleet.address
    ray = RayProbe({**os.environ, **({"RAY_ADDRESS": address} if address else {})})
    try:
        print_table("What this run would use", _plan(ray, config))
    finally:
        ray.close()


def _plan(ray: RayProbe, config: ExperimentSettings) -> Rows:
    """The answers that a run would find for itself."""
    from archipelago.experiments.config import check

    try:
        placement = _placement(ray, config)
    except UserError as error:
        placement = [("actors", str(error))]
    try:
        check(config)
        storage = f"{Path(config.storage).expanduser().resolve()} (can be written)"
    except UserError as error:
        storage = str(error)
    return [
        ("experiment", f"{config.method} on {config.data.name}, {count(config.rounds, 'round')}"),
        *placement,
        ("storage", storage),
    ]


def _placement(ray: RayProbe, config: ExperimentSettings) -> Rows:
    """Actors, devices, and what they promise."""
    from actors.devices import device_names, effective_tier, machine_gpus, torch_has_cuda
    from actors.placement import actor_count, bundle_of, gpus_of, idle_gpus, resolved
    from lightning_modules.engines import engine_entry

    if ray.address != "local" and ray.nodes is None:
        raise UserError(
            "unknown, because the Ray cluster does not answer: unset RAY_ADDRESS to run here.",
            code="unreachable",
        )
    nodes = ray.nodes or [{"CPU": float(os.cpu_count() or 1), "GPU": float(machine_gpus())}]
    fleet, cuda = resolved(config.fleet, config.clients, nodes, cuda=torch_has_cuda()), torch_has_cuda()
    actors = actor_count(fleet, config.clients, nodes)
    gpus = gpus_of(fleet)
    share = " and ".join(count(amount, name) for name, amount in bundle_of(fleet).items())
    kind = "cuda" if gpus else "cpu"
    entry = engine_entry(config.local.engine, kind)
    used = -(-actors // int(1 / gpus + 1e-9)) if gpus else 0
    known = device_names(nodes)
    devices = count(used, "GPU") + (f" ({known})" if known else "")
    devices += ", one per actor" if gpus == 1 else f", {gpus:g} per actor"
    rows: Rows = [
        ("actors", f"{count(actors, 'client actor')} of {share} each, for {count(config.clients, 'client')}"),
        ("devices", devices if gpus else "CPUs"),
        ("engine", f"{entry.name} ({'GPU' if gpus else 'CPU'})"),
        ("precision", config.precision),
        ("determinism", effective_tier(config.determinism, kind, bool(entry.capabilities.get("exact")))),
    ]
    if idle := idle_gpus(config.fleet, fleet, config.clients, actors, nodes, cuda=cuda):
        rows.append(("idle", idle))
    if gpus:
        rows.append(("MPS", _mps(gpus)))
    return rows


def _mps(gpus: float) -> str:
    """Whether NVIDIA's Multi-Process Service is there, which processes on one GPU need to compute together."""
    from actors.devices import mps_directory

    folder = mps_directory()
    if folder is not None:
        return f"runs on this machine ({folder})"
    if gpus >= 1:
        return "does not run on this machine, and is not needed: actors share no GPU (small trials of a sweep do)"
    how = "start `nvidia-cuda-mps-control -d` on every node with GPUs, before Ray"
    if shutil.which("nvidia-cuda-mps-control") is None:
        how += " (it comes with NVIDIA's driver, and is not on the PATH here)"
    return f"does not run on this machine: actors that share a GPU take turns on it; {how}"


def doctor(
    ctx: typer.Context,
    words: Settings = None,
    as_json: AsJson = False,
) -> Doctor:
    """Say what this machine or cluster has: processors, packages, data sets, Ray, and what a run would use.

    Settings say which run, as in fleet.gpus=0.25; without any, the default one. Whatever is missing is only said;
    nothing is started and nothing is written.
    """
    return Doctor(overrides=settings_of(ctx, words), as_json=as_json)


COMMAND = Described(
    "doctor",
    doctor,
    "[--json] [setting=value ...]",
    "what this machine or cluster has",
    [
        ("What is here", "doctor"),
        (
            "What a run with four actors on each GPU would use",
            "doctor fleet.gpus=0.25",
        ),
        ("The same facts for another program", "doctor --json"),
    ],
)
