"""Atomic writes: a file is there complete or not at all, whatever kills the process that writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from archipelago.core.errors import UserError


def sync_folder(folder: Path) -> None:
    """Make the names inside `folder` durable: a rename is only safe from a power cut after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Write `path` under a temporary name in the same folder and rename it once it is complete.

    `durable=False` skips the two fsyncs: still never half a file after a kill, but after a power cut the
    old content may be back.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_whole(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace the content of `path` by `text` (UTF-8), atomically."""
    with whole_file(path, durable=durable) as file:
        file.write(text.encode())


def check_regular(path: Path) -> None:
    """A `UserError` if `path` is there and no file: a pipe would be waited for, for ever."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise UserError(
            f"Expected {path} to be a file, got {kind}: restore it, or remove it.", code="damaged", file=path
        )


def complete_lines(path: Path) -> str:
    """The text up to the last line break: a file that is being written may end in half a line."""
    check_regular(path)
    try:
        data = path.read_bytes()
        return data[: data.rfind(b"\n") + 1].decode("utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        sentence = f"{path} is damaged ({error}); restore it, or remove it."
        raise UserError(sentence, code="damaged", file=path) from error
