"""Divisions under their content address: equal data, settings and seed are divided once, for every method and run.

The address is a hash of all that a division depends on: labels, sources and owners of the samples, the settings of
all partitions and the options of this one, clients, seed, shifts, and the version of the drawing code and of NumPy.
Files are written atomically, so runs, sweeps and nodes can share a folder; one that cannot be read is drawn again,
and a folder that cannot be written is done without. A partition that does not say `cached` is drawn every time: its
code may change, and the address would not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from archipelago.core.files import whole_file
from archipelago.core.settings import PartitionSettings
from archipelago.data.division import Division, Task, divide
from archipelago.data.kept import cache_folder, content_of, feed
from archipelago.data.partitions_core import PARTITIONS, Partitioner

# Raised with every change that makes the same settings and seed give another division.
VERSION = 4
_FORMAT = "archipelago-partition-2"
_ELSEWHERE = ("cache", "seed")  # settings that are not part of the address: the seed in force is, by itself


def address(task: Task) -> str:
    """The content address of a division; options of other partitions are not part of it."""
    entry = PARTITIONS.entry(task.settings.name)
    common = [field.name for field in dataclasses.fields(PartitionSettings) if field.name not in _ELSEWHERE]
    chosen = {name: getattr(task.settings, name) for name in common}
    chosen |= {**dataclasses.asdict(entry.options_from(task.settings)), "name": entry.name}
    labels, rest = task.labels, [task.clients, task.seed, task.variants, task.crossed]
    facts = [VERSION, np.__version__, labels.classes, chosen, *rest]
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    known = {field.name: getattr(labels, field.name) for field in dataclasses.fields(labels)}
    feed(digest, {name: value for name, value in known.items() if isinstance(value, np.ndarray)})
    return digest.hexdigest()


def folder(settings: PartitionSettings) -> Path | None:
    """Where divisions are kept: the setting, else ARCHIPELAGO_CACHE, else the user's cache; None: nowhere."""
    if settings.cache == "off":
        return None
    if settings.cache != "auto":
        return Path(settings.cache).expanduser()
    return cache_folder("partitions")


def divided(split: Partitioner, task: Task) -> Division:
    """What `divide` makes of a task, from the cache where it is there."""
    where = folder(task.settings) if split.cached else None
    path = None if where is None else where / f"{address(task)}.safetensors"
    found = None if path is None else _read(path, task.clients)
    if found is None:
        found = divide(split, task)
        if path is not None:
            with contextlib.suppress(OSError):  # a full disk or a folder of somebody else: nothing is lost
                _write(path, found)
    return found


def _read(path: Path, clients: int) -> Division | None:
    """The division in a file; None unless it was written under this name and is as it was written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            said = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (OSError, SafetensorError):
        return None
    if said.get("format") != _FORMAT or said.get("content") != _signed(path, arrays):
        return None
    found = Division.from_arrays(arrays)
    return found if len(found.clients) == clients else None


def _write(path: Path, division: Division) -> None:
    from safetensors.numpy import save

    arrays = division.arrays()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, durable=False) as file:
        file.write(save(arrays, metadata={"format": _FORMAT, "content": _signed(path, arrays)}))


def _signed(path: Path, arrays: dict[str, np.ndarray]) -> str:
    """The content together with the address it belongs to: a file under another name is not this division."""
    return hashlib.blake2b(f"{path.stem} {content_of(arrays)}".encode(), digest_size=16).hexdigest()
