"""How far it is from the entry point to the arithmetic: one round of `ifca+cam` in this process.

Counts the frames from `archipelago.cli.main.main` down to the loss of a batch, this project's and all of them, and the
project's files whose code that round runs. Neither number depends on the machine: a layer that only passes things on
shows up here as a frame and as a file.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.machine import ROOT, clean_environment
from benchmarks.tables import table, verdict

SETTINGS = (
    "method=ifca+cam", "cam.warmup=0", "rounds=1", "clients=4", "clusters=2", "model=mlp", "local.steps=2",
    "fleet.backend=in_process",
)  # fmt: skip
LIMIT = 20  # frames: as few as it has had; one more is a layer that only passes things on
LOSS = ("lightning_modules/base.py", "loss")  # of a batch
ROUND = "run_round"  # the first function of this name is where a round begins


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """The counts, from a process of its own: what this one has imported and cached is nobody's frame."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.frames"],
        cwd=ROOT,
        env=clean_environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    found = dict(json.loads(done.stdout))
    return {"limit": LIMIT, "kept": found["frames"] <= LIMIT, **found}


def report(result: dict[str, Any]) -> str:
    """The counts, and the way down."""
    title = (
        f"One round of ifca+cam: {result['frames']} of this project's frames ({result['all_frames']} with those of "
        f"libraries) below main, to the loss of a batch, limit {result['limit']}: "
        f"{verdict(result['frames'], result['limit'])}; the round runs code of {result['files']} files, the whole "
        f"command of {result['command_files']}, of {result['loaded_files']} that are loaded"
    )
    rows = [[str(depth), name] for depth, name in enumerate(result["way"])]
    files = [[file] for file in result["round_files"]]
    return f"{table(title, ['frame', 'function'], rows)}\n{table('What the round runs', ['file'], files)}"


class Watch:
    """A profile function: which files run, and the frames above the first loss of a training batch."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.round_files: set[str] = set()
        self.way: list[str] = []
        self.all_frames = 0
        self._round: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame is self._round:
            self._round = None
        if event != "call" or (file := own_file(frame)) is None:
            return
        self.files.add(file)
        if self._round is None and frame.f_code.co_name == ROUND and not self.round_files:
            self._round = frame
        if self._round is not None:
            self.round_files.add(file)
        if not self.way and (file, frame.f_code.co_name) == LOSS:
            self._look_up(frame)

    def _look_up(self, frame: FrameType) -> None:
        above: list[FrameType] = []
        at: FrameType | None = frame
        while at is not None:
            above.append(at)
            if at.f_code.co_name == "main" and own_file(at) == "archipelago/cli/main.py":
                break
            at = at.f_back
        if not any(each.f_code.co_name == "training_step" for each in above):
            return  # the losses that a method asks for
        self.all_frames = len(above)
        self.way = [
            f"{file}: {each.f_code.co_name}"
            for each in reversed(above)
            if (file := own_file(each)) is not None
        ]


def own_file(frame: FrameType) -> str | None:
    """The path of this project's file that a frame is in, from the top of the repository."""
    return _own_file(frame.f_code.co_filename)


@functools.cache  # asked for every call of the command
def _own_file(name: str) -> str | None:
    path = Path(name)
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "benchmarks") or ".venv" in path.parts:
        return None
    return str(path.relative_to(ROOT))


def main() -> None:
    """Run the command in this process and print the counts as JSON."""
    from archipelago.cli.main import main as command

    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="archipelago-frames-") as folder:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            sys.setprofile(watch)
            try:
                code = command([*SETTINGS, f"storage={folder}", "name=frames"])
            finally:
                sys.setprofile(None)
    if code != 0 or not watch.way:
        raise RuntimeError(f"the run ended with code {code}:\n{said.getvalue()}")
    paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    loaded = [
        Path(path) for path in paths if path and Path(path).is_relative_to(ROOT) and ".venv" not in path
    ]
    counts = {
        "frames": len(watch.way) - 1,  # below main
        "all_frames": watch.all_frames - 1,
        "files": len(watch.round_files),
        "command_files": len(watch.files),
        "loaded_files": len({path for path in loaded if not path.is_relative_to(ROOT / "benchmarks")}),
        "way": watch.way,
        "round_files": sorted(watch.round_files),
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
