"""Many command lines from one warm process: everything is imported once, then each command is a fork of it.

    with warm() as start:
        ended = start(["rounds=0"], folder)          # what `python -m archipelago rounds=0` would do there
        ended.code, ended.error, ended.seconds, ended.megabytes

A command has a limit of processor time and one of time (it is killed, with its process group, and `code` is None) and a
memory limit. Each costs milliseconds, and nothing that one does to its process reaches another.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 20.0  # of the processor; more is a hang
STARVED = 6.0  # times as many on the clock: of a machine with other things to do, or of one that sleeps
MEGABYTES = 1500  # of memory beyond what the imports hold


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is None if it had to be killed."""

    code: int | None
    output: str
    error: str
    seconds: float
    megabytes: float  # its peak

    @property
    def last_line(self) -> str:
        """What a user reads last."""
        lines = self.error.strip().splitlines()
        return lines[-1] if lines else ""


class Warm:
    """The test's side of a warm process."""

    def __init__(self, process: subprocess.Popen[str], home: Path, temporary: Path) -> None:
        self._process, self._number = process, 0
        self.home, self.temporary = home, temporary

    def __call__(
        self, words: Sequence[str], folder: Path, *, seconds: float = SECONDS, **environment: str
    ) -> Ended:
        """Call the command line with these words in `folder`, to its end."""
        return self._ended(self._ask("start", words, folder, environment), seconds)

    def python(self, script: Path, folder: Path, *, seconds: float = SECONDS, **environment: str) -> Ended:
        """Run a script; a `UserError` of its is a sentence and code 2, as on the command line."""
        return self._ended(self._ask("python", [str(script)], folder, environment), seconds)

    def begin(self, words: Sequence[str], folder: Path, **environment: str) -> int:
        """Call the command line and return at once; the process id is for `signal` and `end`."""
        return int(self._ask("start", words, folder, environment)["pid"])

    def end(self, pid: int, seconds: float = SECONDS) -> Ended:
        """Wait for a command that `begin` started."""
        return self._ended({"pid": pid}, seconds)

    def _ask(
        self, what: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> dict[str, Any]:
        return self._send(
            {"do": what, "words": list(words), "folder": str(folder), "environment": environment}
        )

    def _ended(self, started: Mapping[str, Any], seconds: float) -> Ended:
        return Ended(**self._send({"do": "wait", "pid": started["pid"], "seconds": seconds}))

    def _send(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._number += 1
        self._process.stdin.write(json.dumps({**request, "number": self._number}) + "\n")
        self._process.stdin.flush()
        while True:
            answer = self._process.stdout.readline()
            assert answer, f"the warm process ended with {self._process.wait()}"
            found: dict[str, Any] = json.loads(answer)
            if (
                found.pop("number") == self._number
            ):  # or of a question whose test was cut off by its time limit
                return found


@contextlib.contextmanager
def warm(folder: Path) -> Iterator[Warm]:
    """A warm process with its files (outputs, home) in `folder`; it ends with the block."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("RAY_", "PYTEST"))}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    environment |= {"HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "home/.cache")}
    (folder / "home").mkdir()
    environment.pop("PYTHONWARNINGS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm", str(folder)],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Warm(process, folder / "home", Path(environment.get("TMPDIR", "/tmp")))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(120)


# The warm process ------------------------------------------------------------------------------------------


class _Server:
    def __init__(self, folder: Path, answers: Any) -> None:
        self._folder, self._answers = folder, answers
        self._started: dict[int, tuple[Path, float]] = {}
        status = Path("/proc/self/status").read_text().split()
        self._mapped = int(status[status.index("VmSize:") + 1])

    def serve(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            answer = self._wait(request) if request["do"] == "wait" else self._start(request)
            self._answers.write(json.dumps({**answer, "number": request["number"]}) + "\n")
            self._answers.flush()

    def _start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        files = self._folder / f"command-{time.monotonic_ns()}"
        files.mkdir()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                self._become(request, files)
                code = _call(request)
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 98
            except BaseException:
                sys.excepthook(*sys.exc_info())  # the traceback that a user would see
                code = 97
            finally:
                with contextlib.suppress(BaseException):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        self._started[pid] = (files, began)
        return {"pid": pid}

    def _become(self, request: Mapping[str, Any], files: Path) -> None:
        os.setsid()
        for number, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(files / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        limit = (self._mapped << 10) + (MEGABYTES << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(request["folder"])
        os.environ.update(request["environment"])
        sys.path[0:0] = [request["folder"]]

    def _wait(self, request: Mapping[str, Any]) -> dict[str, Any]:
        pid, limit = int(request["pid"]), float(request["seconds"])
        deadline = time.monotonic() + STARVED * limit
        files, began = self._started.pop(pid)
        killed = False
        while True:
            found, status, used = os.wait4(pid, os.WNOHANG)
            if found:
                break
            if not killed and (time.monotonic() > deadline or _used(pid) > limit):
                killed = True
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it left running
        return {
            "code": None if killed else os.waitstatus_to_exitcode(status),
            "output": (files / "output").read_text(errors="replace"),
            "error": (files / "error").read_text(errors="replace"),
            "seconds": time.monotonic() - began,
            "megabytes": used.ru_maxrss / 1024,
        }


def _used(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _call(request: Mapping[str, Any]) -> int:
    from archipelago.cli.main import main
    from archipelago.core.errors import UserError

    if request["do"] == "start":
        return main(request["words"])
    try:
        runpy.run_path(request["words"][0], run_name="__main__")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _imported() -> None:
    """Whatever a command may import; no thread may be started by it."""
    import archipelago.core.torchvision_operators  # isort: skip
    import lightning
    import matplotlib.figure
    import pandas
    import pyarrow.parquet
    import ray
    import torch

    import archipelago.api
    import archipelago.cli.main
    import archipelago.experiments.new_clients
    import archipelago.experiments.runner
    import archipelago.reports.build
    import archipelago.reports.drawing
    import archipelago.sweeps.dry_run
    import archipelago.sweeps.runner
    from archipelago.core.plugins import load_built_in
    from archipelago.experiments.given import full_schema

    _ = lightning, matplotlib.figure, pandas, pyarrow.parquet, ray, archipelago
    torch.set_num_threads(1)
    load_built_in()
    full_schema()


if __name__ == "__main__":
    spoken = os.fdopen(os.dup(1), "w")  # the pipe; whatever imports print goes elsewhere
    os.dup2(2, 1)
    _imported()
    gc.collect()
    gc.freeze()  # else the first collection of each child copies every page of what is imported
    _Server(Path(sys.argv[1]), spoken).serve()
