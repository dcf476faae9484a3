"""Runs from the command line: how they end, how they are stopped and resumed, and the exit codes."""

from __future__ import annotations

import errno
import io
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import archipelago.cli.run
import archipelago.experiments.runner
from actors.ray_errors import ActorsLost
from actors.reports import RoundReport
from actors.session import InProcessSession
from archipelago.core.errors import UserError
from archipelago.core.signals import EndedFromOutside
from archipelago.reports.summary import print_table
from tests.support.clusters import ROOT
from tests.support.command_line import IN_PROCESS


def test_run_stopped_when_it_is_finished_is_not_to_be_resumed(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the report is made."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(archipelago.cli.run, "show_results", stop)
    code, _, error = command(*IN_PROCESS, "name=mine")
    assert code == 130
    assert error.endswith("The run is finished, in runs/mine; its report: archipelago report runs/mine\n")


def test_run_ends_in_a_table_and_its_path(command: Any, tmp_path: Path) -> None:
    code, out, error = command(*IN_PROCESS, "name=first")
    assert code == 0, error
    assert out.splitlines()[-1].startswith("Results: runs/first ")
    table = io.StringIO()
    print_table(tmp_path / "runs" / "first", table)
    assert table.getvalue() in out
    assert "accuracy" in table.getvalue()
    assert (tmp_path / "runs" / "first" / "summary.md").is_file()
    code, _, error = command(*IN_PROCESS, "name=first")
    assert code == 2
    assert "exists already" in error


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (KeyboardInterrupt(), 130, "Stopped."),
        (EndedFromOutside(143), 143, "Ended from outside."),
        (ActorsLost("ClientActor (pid 7)"), 1, "Failed: ClientActor (pid 7). Once that is mended"),
        (
            OSError(errno.ENOSPC, "No space left on device", "x"),
            1,
            "Failed: no space is left on the disk for x.",
        ),
    ],
)
def test_run_that_is_stopped_says_how_to_resume_it_and_that_works(
    raised: BaseException,
    code: int,
    expected: str,
    command: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = InProcessSession.run_round

    def stopped(session: InProcessSession, round: int) -> RoundReport:
        if round == 3:
            raise raised
        return whole(session, round)

    monkeypatch.setattr(InProcessSession, "run_round", stopped)
    arguments = [*IN_PROCESS, "rounds=4", "checkpoint.every=1", "name=stopped"]
    arguments.remove("rounds=2")
    given, _, error = command(*arguments)
    assert given == code
    last = error.splitlines()[-1]
    assert last.startswith(expected)
    assert "Traceback" not in error
    advice = last.partition("archipelago ")[2]
    assert advice == "resume runs/stopped"
    monkeypatch.setattr(InProcessSession, "run_round", whole)
    given, out, error = command(*shlex.split(advice))
    assert given == 0, error
    assert "Results: runs/stopped" in out
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert command(*arguments[:-1], "name=whole")[0] == 0
    stopped_metrics, whole_metrics = (
        tmp_path / "runs" / name / "metrics.csv" for name in ("stopped", "whole")
    )
    assert stopped_metrics.read_bytes() == whole_metrics.read_bytes()


def test_run_that_fails_before_its_directory_exists_says_so(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(archipelago.experiments.runner, "run_experiment", fail)
    code, _, error = command("name=never")
    assert code == 1
    assert "no such luck" in error
    last = error.splitlines()[-1]
    assert last.startswith("Failed: RuntimeError: no such luck (test_run_command.py, line ")
    assert "Nothing was written. The traceback is in " in last and "Traceback" not in error


def test_run_with_a_mistake_that_only_an_actor_sees_ends_in_a_sentence(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RayTaskError(Exception):
        cause = UserError("Expected this, got that.")

    def fail(*arguments: object, **more: object) -> None:
        raise RayTaskError("a long remote traceback")

    monkeypatch.setattr(archipelago.experiments.runner, "run_experiment", fail)
    assert command("name=never") == (2, "", "Expected this, got that.\n")


@pytest.mark.slow
def test_run_stopped_by_ctrl_c_in_the_terminal(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "platform.launch", *IN_PROCESS[:2], "rounds=100000", "checkpoint.every=1",
         f"storage={tmp_path}", "name=long"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # As in a terminal: tests that were started in the background inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "long" / "metrics.csv").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert error.splitlines()[-1].endswith(
        f"resume it with: python -m platform.launch resume {tmp_path / 'long'}"
    )
    assert "Traceback" not in error


def test_choose_clusters_tries_and_chooses(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import archipelago.experiments.choose_clusters

    monkeypatch.setattr(archipelago.experiments.choose_clusters, "LARGEST", 3)
    code, out, error = command(
        "choose-clusters", "method=fesem", *IN_PROCESS, "clients=8", "data.rotations=2"
    )
    assert code == 2 and "Expected clients once" in error
    given = [word for word in IN_PROCESS if not word.startswith("clients=")]
    code, out, error = command("choose-clusters", "method=fesem", *given, "clients=8", "data.rotations=2")
    assert code == 0, error
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["clusters=1", "clusters=2", "clusters=3"]
    losses = [float(line.split()[3]) for line in lines[:3]]
    chosen = int(lines[3].split()[0].removeprefix("clusters="))
    assert lines[3].startswith(f"clusters={chosen} was chosen") and chosen <= 1 + losses.index(min(losses))
    assert lines[4].endswith(f"clusters={chosen}") and "method=fesem" in lines[4]
    code, _, error = command("choose-clusters", "method=fedavg")
    assert code == 2 and "clustered method" in error


def test_idle_run_ends_with_exit_code_1_and_one_sentence(command: Any, tmp_path: Path) -> None:
    code, _, error = command("fleet.backend=in_process", "clients=4", "local.lr=1e38", "rounds=9", "name=bad")
    last = error.splitlines()[-1]
    assert code == 1 and "Traceback" not in error
    assert last.startswith("Failed: Nobody trained in rounds 1 to 3") and last.endswith("is in runs/bad.")
