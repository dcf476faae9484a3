"""Finds the kernels in a wheel that was built beforehand, or compiles them with the system's compiler, and loads them.

They are compiled once per machine and version.
`ARCHIPELAGO_KERNELS=avx2` or `avx512` chooses the instruction set (results have the same bits; one is faster); a
`+sanitize` behind it builds with AddressSanitizer and UBSan, for tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from archipelago.core.errors import UserError
from lightning_modules.engines.compiled.recipe import (
    DIGEST,
    FLAGS,
    INSTRUCTIONS,
    PREBUILT,
    digest,
    sources_digest,
)
from lightning_modules.engines.compiled.structures import declared

COMPILERS = ("cc", "gcc", "clang")
NEEDED = {"avx512": {"avx512f", "avx2", "fma"}, "avx2": {"avx2", "fma"}}
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-g1",
    "-O1",
    "-fno-omit-frame-pointer",
)


_BUILDING = threading.Lock()  # of this process; `_only_builder` is for the others
_WAIT = 120.0  # seconds for another process's compiler, which takes three to five; then this one has its own
_DAY = 86400.0
_UNUSED = 30 * _DAY  # kernels that nobody asked for in that time are removed
_background: threading.Thread | None = None


class CannotBuild(Exception):
    """Why there are no kernels here, as a clause of a sentence."""


def processor_flags() -> set[str]:
    """What the processor can do, as Linux says it; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def chosen_instructions() -> tuple[str, bool]:
    """(instruction set, whether to sanitize): the best of this processor, or what the environment says."""
    asked, _, extra = os.environ.get("ARCHIPELAGO_KERNELS", "").partition("+")
    if asked not in ("", *INSTRUCTIONS) or extra not in ("", "sanitize"):
        raise UserError(
            f"Expected ARCHIPELAGO_KERNELS to be one of {', '.join(INSTRUCTIONS)}, got '{asked}': unset it to let "
            "the processor decide.",
            code="unknown-choice", setting="ARCHIPELAGO_KERNELS", given=asked,
        )  # fmt: skip
    has = processor_flags()
    able = [name for name in INSTRUCTIONS if NEEDED[name] <= has]
    if not able:
        raise CannotBuild("this processor has no AVX2 with FMA")
    if asked and asked not in able:
        raise CannotBuild(f"this processor has no {asked}, which ARCHIPELAGO_KERNELS asks for")
    return asked or able[0], bool(extra)


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "archipelago" / "kernels"


def _compiler() -> tuple[str, str]:
    """(path, version) of the first compiler there is; `CC` goes first."""
    for name in (os.environ.get("CC", ""), *COMPILERS):
        path = shutil.which(name) if name else None
        if path:
            # A copy of the environment: this may be a thread, and another one may be changing it.
            said = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False, env=dict(os.environ)
            )
            if said.returncode == 0:
                return path, said.stdout.splitlines()[0] if said.stdout else name
    raise CannotBuild(f"there is no C compiler here ({', '.join(COMPILERS)})")


def library_path() -> Path:
    """The compiled kernels for this processor; who asks while they are being built waits for them."""
    with _BUILDING:
        return _built()


def _prebuilt(instructions: str) -> Path | None:
    """The kernels of an installed wheel (`recipes/kernels/`), if they were built from these sources."""
    found = importlib.util.find_spec(PREBUILT)
    for folder in map(Path, (found and found.submodule_search_locations) or ()):
        file, said = folder / f"{instructions}.so", folder / DIGEST
        if (
            file.is_file()
            and said.is_file()
            and said.read_text().strip() == sources_digest(Path(__file__).parent)
        ):
            return file
    return None


def _built() -> Path:
    """The file, built if it is not there: one per source, compiler and flags.

    A home folder may be shared by machines of several kinds, and several processes may build at once: the name says
    what is inside, and the file appears whole.
    """
    instructions, sanitize = chosen_instructions()
    if not sanitize and (found := _prebuilt(instructions)) is not None:
        return found
    flags = [*FLAGS, *INSTRUCTIONS[instructions], *(SANITIZE if sanitize else ())]
    compiler, version = _compiler()
    folder = Path(__file__).parent
    kept = cache_folder() / f"{instructions}-{digest(folder, version, *flags)[:24]}.so"
    command = [compiler, *flags, str(folder / "kernels.c")]
    if kept.is_file():
        return _used(kept)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with _only_builder(kept):
            if kept.is_file():  # by the process that was waited for
                return kept
            _remove_unused(kept.parent)
            return _compiled(command, kept)
    except OSError:  # a read-only home: this process builds for itself
        own = Path(_own_folder()) / kept.name
        return own if own.is_file() else _compiled(command, own)


@contextlib.contextmanager
def _only_builder(kept: Path) -> Iterator[None]:
    """Cold processes of a machine compile once: the others wait, until the file is there or its builder is gone.

    The lock is on the folder itself and leaves nothing behind. Where a file system has no such locks, everybody builds.
    """
    import fcntl  # not at the top: where there is none, there are no kernels either

    handle = os.open(kept.parent, os.O_RDONLY)
    try:
        until = time.monotonic() + _WAIT
        while not kept.is_file() and time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(handle)


def _used(kept: Path) -> Path:
    """Kernels that are asked for: their time says so, once a day."""
    with contextlib.suppress(OSError):
        if time.time() - kept.stat().st_mtime > _DAY:
            os.utime(kept)
    return kept


def _remove_unused(folder: Path) -> None:
    """Kernels of versions and machines that nobody has any more, and what a killed compiler left."""
    for file in folder.glob("*.so"):
        with contextlib.suppress(OSError):
            age = time.time() - file.stat().st_mtime
            if age > (_DAY if file.name.startswith(".building-") else _UNUSED):
                file.unlink()


@functools.cache
def _own_folder() -> str:
    return tempfile.mkdtemp(prefix="archipelago-kernels-")


def _compiled(command: list[str], kept: Path) -> Path:
    handle, name = tempfile.mkstemp(dir=kept.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", name, "-lm"], capture_output=True, text=True, check=False, env=dict(os.environ)
        )
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [
                f"code {done.returncode}"
            ]
            raise CannotBuild(f"{command[0]} could not compile the kernels ({lines[0].strip()[:160]})")
        Path(name).replace(kept)
    finally:
        Path(name).unlink(missing_ok=True)
    return kept


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels of this process; raises CannotBuild."""
    path = library_path()
    try:
        return declared(ctypes.CDLL(str(path)))
    except OSError as error:
        if path.parent == cache_folder():
            path.unlink(missing_ok=True)  # whatever it is, the next process shall not stumble over it
        raise CannotBuild(f"the compiled kernels could not be loaded ({str(error)[:160]})") from error


def build_in_background() -> None:
    """Begin to compile while the process does other things; `library` is for who needs the result."""
    global _background
    if _background is not None and _background.is_alive():
        return

    def build() -> None:
        with contextlib.suppress(CannotBuild, UserError):  # said by whoever needs the library
            library_path()

    _background = threading.Thread(target=build, name="kernels", daemon=True)
    _background.start()
