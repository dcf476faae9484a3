"""How a run ends that somebody or something stops: Ctrl-C once and twice, SIGTERM, a full disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from archipelago.runs.status import read_status
from tests.support.runs import assert_equal_runs
from tests.support.warm import Warm

_LONG = [
    "fleet.backend=in_process",
    "rounds=100000",
    "clients=4",
    "local.steps=1",
    "checkpoint.every=1",
    "name=long",
    "storage=runs",
]


def _started(warm: Warm, folder: Path) -> int:
    """The process id of a run that has written its first rounds."""
    pid = warm.begin(_LONG, folder)
    deadline = time.monotonic() + 60
    while not (folder / "runs/long/metrics.csv").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return pid


@pytest.mark.slow
def test_sigterm_ends_a_run_in_this_process_in_order(warm_process: Warm, tmp_path: Path) -> None:
    pid = _started(warm_process, tmp_path)
    os.kill(pid, signal.SIGTERM)
    ended = warm_process.end(pid)
    assert ended.code == 143 and "Traceback" not in ended.error
    assert ended.last_line.startswith("Ended from outside. The run is in runs/long; resume it with:")
    status = read_status(tmp_path / "runs/long")
    assert status.state == "failed" and status.sentence == "ended from outside (signal 15)"
    assert not list((tmp_path / "runs/long").glob(".*.tmp-*"))


@pytest.mark.slow
def test_ctrl_c_twice_has_no_traceback(warm_process: Warm, tmp_path: Path) -> None:
    pid = _started(warm_process, tmp_path)
    for _ in range(3):  # however fast: the first puts things in order, the second ends at once
        os.kill(pid, signal.SIGINT)
        time.sleep(0.001)
    ended = warm_process.end(pid)
    assert ended.code == 130 and "Traceback" not in ended.error, ended.error
    assert ended.last_line.endswith("archipelago resume runs/long")


_FULL = """
import errno, sys
import archipelago.core.files
from archipelago.cli.main import main

written = archipelago.core.files.write_whole

def full(path, text, *, durable=True):
    if path.name == "{name}" and path.exists() and '"rounds_done": 3' in text:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    written(path, text, durable=durable)

for module in list(sys.modules.values()):
    if getattr(module, "write_whole", None) is written:
        module.write_whole = full
sys.exit(main({words!r}))
"""


@pytest.mark.slow
def test_full_disk_says_so_and_the_run_can_be_resumed(warm_process: Warm, tmp_path: Path) -> None:
    words = [word.replace("100000", "4") for word in _LONG]
    script = tmp_path / "full.py"
    script.write_text(_FULL.format(name="status.json", words=words))
    ended = warm_process.python(script, tmp_path)
    assert ended.code == 1 and "Traceback" not in ended.error
    assert (
        "no space is left on the disk" in ended.last_line
        and "resume it with: archipelago resume" in ended.last_line
    )
    ended = warm_process(["resume", "runs/long"], tmp_path)
    assert ended.code == 0, ended.error


@pytest.mark.full
def test_small_disk_that_fills_up_says_so_and_the_run_can_be_resumed(
    warm_process: Warm, tmp_path: Path
) -> None:
    disk = tmp_path / "runs"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("needs root, and the right to mount a small disk")
    words = [word.replace("100000", "60") for word in _LONG]
    try:
        pid = warm_process.begin(words, tmp_path)
        while not (disk / "long/metrics.csv").exists():
            time.sleep(0.005)
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        ended = warm_process.end(pid, 90)
        assert ended.code == 1 and "Traceback" not in ended.error, ended.error
        assert "no space is left on the disk" in ended.last_line and "resume" in ended.last_line
        assert read_status(disk / "long").rounds_done < 60
        (disk / "filler").unlink()
        for command in (["resume", "runs/long"], [*words[:-1], "storage=whole"]):
            ended = warm_process(command, tmp_path, seconds=90)
            assert ended.code == 0, ended.error
        assert_equal_runs(disk / "long", tmp_path / "whole/long")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True, check=False)


@pytest.mark.full
def test_disk_that_is_really_full_says_so(warm_process: Warm, tmp_path: Path) -> None:
    """RLIMIT_FSIZE: no file may grow beyond a few thousand bytes, which the kernel answers with EFBIG."""
    script = tmp_path / "full.py"
    limits = "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limits += "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
    script.write_text(f"{limits}from archipelago.cli.main import main\nsys.exit(main({_LONG!r}))\n")
    ended = warm_process.python(script, tmp_path)
    assert ended.code == 1 and "Traceback" not in ended.error
    assert "no space is left on the disk" in ended.last_line
