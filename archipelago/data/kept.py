"""Arrays that were given a name, kept where other processes find them: one .npz file for each name.

In the cache of this user (`ARCHIPELAGO_CACHE`, else ~/.cache/archipelago), each written atomically. On a cluster,
that folder must be one that all nodes share.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.files import whole_file

Array = NDArray[Any]
_ABOUT = ("content", "host", "process", "started")


def cache_folder(what: str) -> Path:
    """Where this user's divisions and arrays are kept."""
    return Path(os.environ.get("ARCHIPELAGO_CACHE") or "~/.cache/archipelago").expanduser() / what


def kept_at(name: str) -> Path | None:
    """The file of the arrays with this name, if there is one."""
    path = _file(name)
    return path if path is not None and path.is_file() else None


def kept_names() -> list[str]:
    """The names of all arrays that are kept."""
    return sorted(path.stem for path in cache_folder("arrays").glob("*.npz"))


def keep(name: str, arrays: Mapping[str, Array]) -> None:
    """Keep arrays under a name; a folder that cannot be written is done without, and this process alone has them."""
    path = _file(name)
    if path is None:
        raise UserError(
            f"Expected a name of letters, digits, - and _ for the arrays, got '{name}'.",
            code="wrong-name", name=name,
        )  # fmt: skip
    content, before = content_of(arrays), _about(path)
    if before.get("content") == content:
        return
    if _alive(before):
        raise UserError(
            f"Process {before['process']} uses other arrays under the name '{name}', and would find these in their "
            "place: choose another name, or wait until it has ended.",
            code="name-taken", name=name,
        )  # fmt: skip
    about = {"content": content, **_maker(os.getpid())}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, durable=False) as file:
            np.savez(file, **arrays, **{key: np.array(value) for key, value in about.items()})  # type: ignore[arg-type]


def kept_content(name: str) -> str:
    """A hash of the arrays with this name, as they are now; nothing, where they cannot be read."""
    path = kept_at(name)
    return "" if path is None else _about(path).get("content", "")


def read_kept(name: str) -> dict[str, Array]:
    """The arrays kept under a name."""
    path = _file(name)
    try:
        with np.load(path, allow_pickle=False) as archive:  # type: ignore[arg-type]  # OSError says what is wrong
            return {key: archive[key] for key in archive.files if key not in _ABOUT}
    # Whatever a damaged archive makes zipfile, zlib or NumPy raise means the same to the user.
    except Exception as error:
        raise UserError(
            f"The arrays '{name}' cannot be read from {path} ({error}): give them again with use_arrays.",
            code="unreadable", name=name, path=path,
        ) from error  # fmt: skip


def _file(name: str) -> Path | None:
    return cache_folder("arrays") / f"{name}.npz" if re.fullmatch(r"[\w-]+", name) else None


def _about(path: Path) -> dict[str, str]:
    """What the file says of itself; nothing, where it is not there or damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: str(archive[key]) for key in _ABOUT}
    except Exception:  # see read_kept
        return {}


def _maker(process: int) -> dict[str, str]:
    started = psutil.Process(process).create_time()  # a number may be given to another process later
    return {"host": socket.gethostname(), "process": str(process), "started": f"{started:.2f}"}


def _alive(about: Mapping[str, str]) -> bool:
    """Whether the arrays were kept by another process of this machine that is still running."""
    process = int(about.get("process", os.getpid()))
    with contextlib.suppress(psutil.Error):
        return process != os.getpid() and _maker(process).items() <= about.items()
    return False


def content_of(arrays: Mapping[str, Array]) -> str:
    """A hash of names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    feed(digest, arrays)
    return digest.hexdigest()


def feed(digest: hashlib.blake2b, arrays: Mapping[str, Array]) -> None:
    """Add arrays to a hash."""
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
