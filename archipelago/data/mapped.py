"""Memory-mapped copies of data sets that are slow to decode or larger than memory.

A copy is made once, atomically, in a folder named by the hash of its content. Processes
on one node share its pages; what leaves memory is read again from the file. Another process is sent the
address of the file, never its content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.files import sync_folder, write_whole
from archipelago.core.settings import DataSettings
from archipelago.core.signals import ended_in_order
from archipelago.data.apportion import Integers
from archipelago.data.files import remove_leftovers, root_of, this_process

Array = NDArray[Any]

LAYOUT = 1  # changes whenever stored copies are written in another way
IN_MEMORY = 10**9  # bytes up to which data.mapped=auto reads a copy into memory
CHUNK = 512  # images decoded at a time
_OPTIONAL = ("owners", "sources")
_TEMPORARY = ".making-"


class MappedArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only array in a file. It pickles as the file's address; a part of it pickles as its content."""

    address: str | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.address = None  # a view or a result is not the file

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.address is None:
            return np.asarray(self).__reduce_ex__(protocol)
        return open_mapped, (self.address,)


def open_mapped(address: str) -> MappedArray:
    """The array in the .npy file at `address`, of which nothing is read yet."""
    try:
        array = np.load(address, mmap_mode="r", allow_pickle=False).view(MappedArray)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The memory-mapped samples {address} cannot be opened on {socket.gethostname()} ({error}): put "
            "data.cache on storage that all nodes share, or set data.mapped=no.",
            code="unreadable", path=address,
        ) from error  # fmt: skip
    array.address = address
    return array


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to make a copy: samples in `chunks`, in order, training samples first; all else at once."""

    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Array]]
    y: Integers
    train: int
    owners: Integers | None = None
    sources: Integers | None = None


@dataclass(frozen=True, eq=False)
class Stored:
    """A copy, opened: `x` is a `MappedArray` or, where it is small enough, an array in memory."""

    x: Array
    y: Integers
    train: int
    owners: Integers | None
    sources: Integers | None

    def parts(self) -> dict[str, Any]:
        """Arguments of `Dataset`: both parts of everything, and the whole where it is mapped."""
        cut = self.train
        named: dict[str, Any] = {
            "x_train": self.x[:cut],
            "y_train": self.y[:cut],
            "x_test": self.x[cut:],
            "y_test": self.y[cut:],
        }
        for key in _OPTIONAL:
            values = getattr(self, key)
            if values is not None:
                named |= {f"{key}_train": values[:cut], f"{key}_test": values[cut:]}
        return {**named, "stored": self.x if isinstance(self.x, MappedArray) else None}


def stored(
    settings: DataSettings,
    name: str,
    inputs: Iterable[Path],
    options: Sequence[object],
    recipe: Callable[[], Recipe],
    inside: str = "mapped",
) -> Stored:
    """The copy made from these input files (distinguished by name, size and time) with these options.

    `inside` is the folder of copies in `data.root`, where no other is set.
    """
    cache = _cache_folder(settings, inside)
    index = cache / f"{name}-{_key(inputs, options)}.json"
    try:
        folder = cache / str(json.loads(index.read_text())["content"])
        return _open(folder, settings)
    except (UserError, OSError, ValueError, KeyError):  # never made, or removed or damaged since
        pass
    with ended_in_order():
        digest = _make(cache, name, recipe())
    write_whole(index, json.dumps({"content": digest}))
    return _open(cache / digest, settings)


def cache_choices(settings: DataSettings, inside: str) -> list[Path]:
    """Where copies may be: `data.cache`, else in `data.root`, or (read-only roots) in the default root."""
    if settings.cache:
        return [Path(settings.cache).expanduser()]
    root = root_of(settings)
    return [
        (root if root.is_dir() else root.parent) / inside,
        Path(DataSettings().root).expanduser() / "mapped",
    ]


def _cache_folder(settings: DataSettings, inside: str) -> Path:
    choices = cache_choices(settings, inside)
    for folder in choices:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK) or any(folder.iterdir()):
            return folder
    raise UserError(
        f"Expected a folder that one can write to for memory-mapped copies, got {choices[-1]}: set data.cache.",
        code="unwritable", path=choices[-1],
    )  # fmt: skip


def _key(inputs: Iterable[Path], options: Sequence[object]) -> str:
    digest = hashlib.blake2b(repr((LAYOUT, *options)).encode(), digest_size=10)
    for path in inputs:
        about = path.stat()
        digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _make(cache: Path, name: str, recipe: Recipe) -> str:
    """Write a copy under a temporary name and rename it to the hash of its content, which is returned."""
    remove_leftovers(cache, _TEMPORARY)
    work = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{name}-", suffix=this_process(), dir=cache))
    made = work / "made"
    try:
        made.mkdir()
        digest = hashlib.blake2b(repr((recipe.shape, recipe.train)).encode(), digest_size=16)
        with (made / "x.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "|u1", "fortran_order": False, "shape": recipe.shape}
            )
            written = 0
            for chunk in _with_progress(recipe.chunks(), f"Storing {name}", recipe.shape[0]):
                samples = np.ascontiguousarray(chunk, dtype=np.uint8)
                if samples.shape[1:] != recipe.shape[1:]:
                    raise ValueError(f"a chunk of shape {samples.shape} does not fit {recipe.shape}")
                digest.update(samples.data)
                file.write(samples.data)
                written += len(samples)
            if written != recipe.shape[0]:
                raise ValueError(f"{written} samples were written, expected {recipe.shape[0]}")
            file.flush()
            os.fsync(file.fileno())
        known = {"y": recipe.y, **{key: getattr(recipe, key) for key in _OPTIONAL}}
        small = {key: values for key, values in known.items() if values is not None}
        for key, values in small.items():
            digest.update(key.encode() + np.ascontiguousarray(values).tobytes())
            np.save(made / f"{key}.npy", values)
        about = {"train": recipe.train, "shape": recipe.shape, "arrays": list(small), "files": _stamps(made)}
        write_whole(made / "about.json", json.dumps(about))
        place = cache / digest.hexdigest()
        if place.exists() and not _whole(place):
            place.rename(work / "damaged")  # who has it open keeps it; it goes with the working folder
        if not place.exists():
            try:
                made.rename(place)
            except OSError:  # another process was faster with the same content
                if not place.exists():
                    raise
        sync_folder(cache)
        return digest.hexdigest()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Size and time of every array of a copy: as long as they are the same, its content is not read again."""
    found = sorted(folder.glob("*.npy"))
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in found}


def _digest(folder: Path, about: Mapping[str, Any]) -> str:
    """The hash of a copy's content, which is the name that it should have."""
    x = np.load(folder / "x.npy", mmap_mode="r", allow_pickle=False)
    digest = hashlib.blake2b(repr((tuple(about["shape"]), about["train"])).encode(), digest_size=16)
    for start in range(0, len(x), CHUNK):
        digest.update(np.ascontiguousarray(x[start : start + CHUNK]).data)
    for key in ("y", *_OPTIONAL):
        if (folder / f"{key}.npy").exists():
            digest.update(key.encode() + np.load(folder / f"{key}.npy").tobytes())
    return digest.hexdigest()


def _verify(folder: Path, about: dict[str, Any]) -> None:
    """A `ValueError` if files were changed since they were written, and their content is not the name's any more."""
    if about.get("files") == _stamps(folder):
        return
    if _digest(folder, about) != folder.name:
        raise ValueError(f"the content of {folder} is not the one that its name stands for")
    with contextlib.suppress(OSError):  # copied, or written by an older version: not to be read again
        write_whole(folder / "about.json", json.dumps({**about, "files": _stamps(folder)}))


def _open(folder: Path, settings: DataSettings) -> Stored:
    about = json.loads((folder / "about.json").read_text())
    _verify(folder, about)
    x: Array = open_mapped(str((folder / "x.npy").resolve()))
    if settings.mapped == "no" or (settings.mapped == "auto" and x.nbytes <= IN_MEMORY):
        x = np.array(x)
    small = {
        key: np.load(folder / f"{key}.npy")
        for key in ("y", *_OPTIONAL)
        if key in about.get("arrays", ()) or (folder / f"{key}.npy").exists()
    }
    if list(x.shape) != about["shape"] or {len(values) for values in small.values()} != {len(x)}:
        raise ValueError(f"the files in {folder} do not fit each other")
    return Stored(x, small["y"], int(about["train"]), *(small.get(key) for key in _OPTIONAL))


def _whole(folder: Path) -> bool:
    """Whether a copy can be read: all of its files there, none of them cut."""
    try:
        _open(folder, DataSettings(mapped="yes"))
    except (UserError, OSError, ValueError, KeyError):
        return False
    return True


def in_chunks(read: Callable[[int], Array], order: Integers) -> Iterator[Array]:
    """Samples read one by one, by as many threads as there are CPUs (Pillow decodes without Python's lock)."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(order), CHUNK):
            yield np.stack(list(pool.map(read, order[start : start + CHUNK].tolist())))


def _with_progress(chunks: Iterable[Array], title: str, total: int) -> Iterator[Array]:
    """A progress bar on a terminal, one line elsewhere; both on the error stream."""
    if not sys.stderr.isatty():
        print(f"{title}: {total} samples, once ...", file=sys.stderr)
        yield from chunks
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        for chunk in chunks:
            yield chunk
            progress.advance(task, len(chunk))
