"""One bad input of the trial: what is there, what is typed, and how it must be answered."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.warm import Ended, Warm

PEAK = 900  # MB: what the imports hold, and a tiny experiment beside it, which takes 500
# What a command line adds that is to run a tiny experiment in {folder}/runs, in this process.
TINY = "fleet.backend=in_process rounds=2 clients=4 local.steps=1 storage={folder}/runs name=x"

Make = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Case:
    """`words` as typed; {folder} is where `make` made its files, from the runs in a second folder that it is given."""

    name: str
    words: str
    says: str  # part of the sentence; {folder} again
    code: int = 2
    make: Make | None = None
    script: str = ""  # Python instead of words
    leaves: tuple[str, ...] = ()  # what may be new or changed in the folder, as beginnings of paths
    begins: bool = False  # something begins, and says so, before the mistake shows

    def run(self, warm: Warm, folder: Path, runs: Path) -> list[str]:
        """What is wrong with how it was answered, in words; nothing if all is well."""
        folder.mkdir()
        if self.make is not None:
            self.make(folder, runs)
        script = folder.with_name(f"{folder.name}.py")
        if self.script:
            script.write_text(self.script.replace("{folder}", str(folder)))
        before, elsewhere = contents(folder), _elsewhere(warm)
        words = [word.replace("{folder}", str(folder)) for word in shlex.split(self.words)]
        ended = warm.python(script, folder) if self.script else warm(words, folder)
        faults = self._judged(ended, self.says.replace("{folder}", str(folder)))
        beside = changes(elsewhere, _elsewhere(warm), _ELSEWHERE)
        return [*changes(before, contents(folder), self.leaves), *beside, *faults]

    def _judged(self, ended: Ended, says: str) -> list[str]:
        faults = []
        if ended.code is None:
            faults.append("hang")
        elif ended.code != self.code:
            faults.append("wrong success" if ended.code == 0 else f"exit code {ended.code}, not {self.code}")
        if "Traceback" in ended.error + ended.output:
            faults.append("traceback")
        if ended.megabytes > PEAK:
            faults.append(f"{ended.megabytes:.0f} MB")
        answer = ended.last_line if self.code else ended.error + ended.output
        if not says or says not in answer:
            faults.append(f"does not say {says!r}")
        if self.code == 2 and not self.begins and (ended.error.count("\n") != 1 or ended.output):
            faults.append("more than one sentence")
        if (
            self.code
            and not ended.last_line.endswith((".", "?", ")"))
            and "resume it with" not in ended.last_line
        ):
            faults.append("no sentence")
        if faults:
            faults.append(f"{ended.seconds:.1f} s, said: {ended.error[-1500:]}{ended.output[-300:]}")
        return faults


# What a command may leave in the user's home: caches, also those that libraries make when they are imported, and which
# runs were made here.
_ELSEWHERE = (
    "home/.cache", "home/.local", "home/.config", "home/.triton", "home/.medmnist", "tmp/torchinductor_",
)  # fmt: skip


def _elsewhere(warm: Warm) -> dict[str, str]:
    """The user's home and the folder for temporary files, which nobody looks into after a mistake."""
    places = {"home": warm.home, "tmp": warm.temporary}
    return {
        f"{name}/{path}": what for name, place in places.items() for path, what in contents(place).items()
    }


def changes(before: dict[str, str], after: dict[str, str], allowed: tuple[str, ...] = ()) -> list[str]:
    """What was lost, changed or left behind, the first of each."""
    found: dict[str, str] = {}
    for path in sorted({*before, *after}):
        if before.get(path) != after.get(path) and not path.startswith(allowed or ("\0",)):
            what = "lost" if path not in after else "left behind" if path not in before else "changed"
            found.setdefault(what, f"{what}: {path}")
    return list(found.values())


def contents(folder: Path) -> dict[str, str]:
    """Every path below a folder and a digest of what it is; links are not followed, lock files left out."""
    found = {}
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(base) / name
            kind = path.lstat()
            if name == ".lock" or "__pycache__" in path.parts:
                continue
            if stat.S_ISLNK(kind.st_mode):
                text = f"link to {path.readlink()}"
            elif stat.S_ISREG(kind.st_mode):
                text = f"{kind.st_size} {hashlib.blake2b(_some(path, kind.st_size)).hexdigest()}"
            else:
                text = str(stat.S_IFMT(kind.st_mode))
            found[path.relative_to(folder).as_posix()] = text
    return found


def _some(path: Path, size: int) -> bytes:
    """The content, or of a large file its beginning."""
    if not os.access(path, os.R_OK):
        return b""
    with path.open("rb") as file:
        return file.read(min(size, 1 << 24))
