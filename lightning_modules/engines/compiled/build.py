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


_BUILDING = threading.Lock()


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
            "the processor decide."
        )
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
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
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
    if kept.is_file():
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        return _compiled([compiler, *flags, str(folder / "kernels.c")], kept)
    except OSError:  # a read-only home: this process builds for itself
        return _compiled([compiler, *flags, str(folder / "kernels.c")], Path(_own_folder()) / kept.name)


@functools.cache
def _own_folder() -> str:
    return tempfile.mkdtemp(prefix="archipelago-kernels-")


def _compiled(command: list[str], kept: Path) -> Path:
    handle, name = tempfile.mkstemp(dir=kept.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", name, "-lm"], capture_output=True, text=True, check=False)
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

    def build() -> None:
        with contextlib.suppress(CannotBuild, UserError):  # said by whoever needs the library
            library_path()

    threading.Thread(target=build, name="kernels", daemon=True).start()
