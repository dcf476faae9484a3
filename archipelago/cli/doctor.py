"""`doctor`: what this machine or cluster has, and what a run would use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from archipelago.cli.app import Described
from archipelago.cli.output import count, print_json, print_table
from archipelago.cli.ray_probe import RayProbe
from archipelago.cli.request import Request
from archipelago.cli.words import AsJson, refuse_surplus
from archipelago.core.errors import UserError

Rows = list[tuple[str, str]]  # (fact, value)

PACKAGES = (
    "archipelago-fl", "ray", "lightning", "torch", "torchvision", "torchmetrics", "medmnist", "scikit-learn",
    "omegaconf", "numpy",
)  # fmt: skip


@dataclass(kw_only=True)
class Doctor(Request):
    """Say what this machine or cluster has; whatever is missing is only said."""

    as_json: bool = False

    def execute(self) -> None:
        """Print the facts, each as soon as it is known."""
        ray = RayProbe(os.environ)  # asks in the background while torch is imported
        try:
            document: dict[str, dict[str, str]] = {}
            for key, title, rows in facts(ray):
                document[key] = dict(rows)
                if not self.as_json:
                    print_table(title, rows)
            if self.as_json:
                print_json(document)
        finally:
            ray.close()


def facts(ray: RayProbe) -> Iterator[tuple[str, str, Rows]]:
    """(key in JSON, title, rows) of every table."""
    yield "machine", "This machine", _machine()
    yield "packages", "Packages", _packages()
    if plugins := _plugins():
        yield "plugins", "Plug-ins of installed packages", plugins
    yield "data_sets", "Data sets", _data_sets()
    yield "ray", "Ray", ray.rows()
    yield "run", "What a run with the default settings would use", _plan(ray)


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

        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError) as error:  # a driver that does not fit is worth reading, not a crash
        return [*rows, ("GPUs", f"not readable: {error}")]
    rows += [
        (f"GPU {i}", f"{each.name}, {each.total_memory / 2**30:.1f} GB") for i, each in enumerate(devices)
    ]
    return rows if devices else [*rows, ("GPUs", "none")]


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


def _plan(ray: RayProbe) -> Rows:
    """The answers that a run would find for itself."""
    from actors.placement import actor_count
    from archipelago.experiments.config import check, full_schema, gpu_count
    from archipelago.experiments.plan import engine_of

    config = full_schema()()
    fleet = config.fleet
    here = {"CPU": float(os.cpu_count() or 1), "GPU": float(gpu_count())}
    try:
        if ray.address != "local" and ray.nodes is None:
            raise UserError(
                "unknown, because the Ray cluster does not answer: unset RAY_ADDRESS to run here."
            )
        actors = actor_count(fleet, config.clients, ray.nodes or [here])
        share = f"{count(fleet.cpus, 'CPU')}" + (f" and {count(fleet.gpus, 'GPU')}" if fleet.gpus else "")
        placement = f"{count(actors, 'client actor')} of {share} each, for {count(config.clients, 'client')}"
    except UserError as error:
        placement = str(error)
    engine = f"{engine_of(config)} ({'GPU' if fleet.gpus else 'CPU'})"
    try:
        check(config)
        storage = f"{Path(config.storage).expanduser().resolve()} (can be written)"
    except UserError as error:
        storage = str(error)
    return [
        ("experiment", f"{config.method} on {config.data.name}, {count(config.rounds, 'round')}"),
        ("actors", placement),
        ("engine", engine),
        ("storage", storage),
    ]


def doctor(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    as_json: AsJson = False,
) -> Doctor:
    """Say what this machine or cluster has: processors, packages, data sets, Ray, and what a run would use.

    Whatever is missing is only said; nothing is started and nothing is written.
    """
    refuse_surplus(ctx, words, 0, "doctor")
    return Doctor(as_json=as_json)


COMMAND = Described(
    "doctor",
    doctor,
    "[--json]",
    "what this machine or cluster has",
    [("What is here", "doctor"), ("The same facts for another program", "doctor --json")],
)
