"""Files of data sets: what to say where they are missing or damaged, and how they are fetched whole.

A fetch works in a folder of its own inside `data.root` and moves what it got into place at the end: whatever
goes wrong, nothing half-downloaded stays.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import socket
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from archipelago.core.errors import UserError
from archipelago.core.program import program
from archipelago.core.settings import DataSettings
from archipelago.core.signals import ended_in_order

# What downloading and unpacking may raise: no network, a broken connection, a broken archive, a wrong checksum.
_FAILURES = (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile, tarfile.TarError)
_TEMPORARY = ".fetching-"
NO_FILES = DataSettings().name  # a data set that is always there


def root_of(settings: DataSettings) -> Path:
    """`data.root` as a path."""
    return Path(settings.root).expanduser()


def md5_of(path: Path) -> str:
    """The MD5 of a file's content, as publishers of data sets give it."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def missing(name: str, looked: Iterable[Path], how: str, instead: str = NO_FILES) -> UserError:
    """The sentence for a data set that is not here: where it was looked for, how to get it, what would serve."""
    places = " or ".join(dict.fromkeys(str(place) for place in looked))
    return UserError(
        f"Data set '{name}' is not here: expected it in {places}. {how} Meanwhile data={instead} needs no files.",
        code="no-data",
        name=name,
    )


def fetch_command(name: str, settings: DataSettings) -> str:
    """What to type to download a data set to where it is looked for."""
    root = "" if settings.root == DataSettings().root else f" data.root={shlex.quote(settings.root)}"
    return f"`{program()} data fetch {name}{root}`"


def fetch_hint(name: str, settings: DataSettings, address: str) -> str:
    """How to get a data set that can be downloaded."""
    return (
        f"Get it with {fetch_command(name, settings)} or data.download=true (it comes from "
        f"{address}), or set data.root to the folder that has it."
    )


class Damaged(UserError):
    """A file of a data set is truncated or corrupt; a `DataSource` adds what to do about it."""

    def __init__(self, name: str, path: Path, why: str) -> None:
        super().__init__(
            f"Data set '{name}': {path} is damaged ({why})", code="damaged", name=name, path=path
        )
        self.name, self.path, self.why = name, path, why

    def __reduce__(self) -> tuple[type[Damaged], tuple[str, Path, str]]:
        return type(self), (self.name, self.path, self.why)  # or it would not survive pickling

    def advised(self, settings: DataSettings, *, fetched: bool) -> UserError:
        """With what to do, which depends on who put the file there."""
        advice, root = "bring it again, whole", root_of(settings)
        if not self.path.is_relative_to(root):
            advice += " (a file of a Debian package: install the package again)"
        elif (
            fetched
        ):  # what a fetch brings is one file or one folder in data.root, and it brings what is not there
            first = root / self.path.relative_to(root).parts[0]
            advice = f"delete {first} and get it again with {fetch_command(self.name, settings)}"
        return UserError(f"{self}: {advice}.", code="damaged", name=self.name, path=self.path)


def check_md5(name: str, published: Iterable[tuple[Path, str]]) -> None:
    """Compare files with the MD5s that their publisher gives."""
    for path, expected in published:
        found = md5_of(path)
        if found != expected:
            raise Damaged(name, path, f"its MD5 is {found}, expected {expected}, {path.stat().st_size} bytes")


def size_of(paths: Iterable[Path]) -> int:
    """Bytes in files and in folders with all they hold."""
    total = 0
    for path in paths:
        if path.is_dir():
            total += sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
        elif path.exists():
            total += path.stat().st_size
    return total


def fetch(
    name: str,
    settings: DataSettings,
    address: str,
    made: Sequence[str],
    download: Callable[[Path], None],
    archives: Iterable[tuple[str, str]] = (),
) -> Path:
    """Let `download` fill an empty folder, then move what it `made` into `data.root`; returns `data.root`.

    `archives` are the downloaded files and their published MD5s, to say which one was wrong.
    """
    root = root_of(settings)
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root, _TEMPORARY)
        work = root / f"{_TEMPORARY}{name}{this_process()}"
        work.mkdir()
    except OSError as error:
        raise UserError(
            f"Data set '{name}' cannot be fetched into data.root={settings.root} ({error.strerror}): set data.root "
            "to a folder one can write to.",
            code="unwritable", path=settings.root,
        ) from error  # fmt: skip
    try:
        with ended_in_order():
            download(work)
            for each in made:
                _replace(work / each, root / each, work)
    except _FAILURES as error:
        raise UserError(
            f"Data set '{name}' could not be fetched from {address} ({_reason(error, work, archives)}): nothing "
            f"was kept; try again, or bring the files there yourself. Meanwhile data={NO_FILES} needs no files.",
            code="cannot-be-fetched", name=name,
        ) from error  # fmt: skip
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return root


def _replace(new: Path, place: Path, work: Path) -> None:
    """Move a file or folder into place; what was there before goes with the working folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.rename(work / f"{place.name}.before")
    new.rename(place)


def _reason(error: BaseException, work: Path, archives: Iterable[tuple[str, str]]) -> str:
    """Why a download failed: the file with the wrong checksum if there is one, else what was raised."""
    for file, expected in archives:
        for path in work.rglob(file):
            found = md5_of(path)
            if found != expected:
                return f"{file} has MD5 {found} after {path.stat().st_size} bytes, expected {expected}"
    while isinstance(error.__context__, _FAILURES):  # medmnist hides the reason behind advice
        error = error.__context__
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def this_process() -> str:
    """How the name of a working folder ends, so that others can tell whether its maker still lives."""
    return f"-{socket.gethostname()}-{os.getpid()}"


def remove_leftovers(root: Path, prefix: str) -> None:
    """Remove working folders that killed processes of this machine left behind."""
    for path in root.glob(f"{prefix}*"):
        host, _, process = path.name.rpartition("-")
        if (
            host.endswith(f"-{socket.gethostname()}")
            and process.isdigit()
            and not psutil.pid_exists(int(process))
        ):
            shutil.rmtree(path, ignore_errors=True)
