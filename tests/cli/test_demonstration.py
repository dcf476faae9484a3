"""What the demonstration says after its table is made of the table, and nobody is waited for who is not there."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.cli import demonstration
from archipelago.cli.results import method_labels
from archipelago.reports.build import ReportRequest, build_report
from tests.support.clusters import ROOT
from tests.support.written_runs import write_run

TRUTH = {"fedavg": (0.86, None), "ifca": (0.95, 1.0), "ifca+cam": (0.93, 0.4)}


def findings(folder: Path, truth: dict[str, tuple[float, float | None]]) -> str:
    paths = []
    for method, (accuracy, ari) in truth.items():
        for seed in (0, 1):
            metrics = {"worst10_accuracy": [accuracy - 0.1 * (1 - accuracy)] * 3}
            if ari is not None:
                metrics["ari"] = [1.0 if seed else ari] * 3
            path = folder / f"{method}-{seed}"
            write_run(path, method=method, seed=seed, accuracy=[accuracy] * 3, metrics=metrics)
            paths.append(str(path))
    built = build_report(ReportRequest(paths, out=str(folder / "report"), figures="no"), method_labels)
    return "\n".join(demonstration.findings(built.tables))


def test_findings_are_those_of_the_table(tmp_path: Path) -> None:
    said = findings(tmp_path, TRUTH)
    assert "86.0 %" in said and "95.0 %: +9.0 points (+9.9 for the worst tenth" in said
    assert "IFCA found the groups with every seed." in said
    assert "Not with every seed: IFCA+CAM (ARI 0.70, its worst seed 0.40)." in said
    assert (
        "IFCA to IFCA+CAM: -2.00 points of accuracy" in said and "(more accurate with 0 of 2 seeds)" in said
    )
    assert "here it helped nowhere" in said and "list cam" in said


def test_findings_go_problem_by_problem(tmp_path: Path) -> None:
    """Each with its own numbers, macro-F1 beside accuracy, and how often the add-on won."""
    paths = []
    for turned, gains in ((1, (0.02, -0.01)), (4, (-0.02, -0.04))):
        for seed, gain in enumerate(gains):
            for method, accuracy in (("fesem", 0.9), ("fesem+cam", 0.9 + gain)):
                path = tmp_path / f"{method}-{turned}-{seed}"
                config = {"data": {"name": "digits", "rotations": turned}}
                write_run(path, method=method, seed=seed, accuracy=[accuracy] * 3, config=config)
                paths.append(str(path))
    built = build_report(ReportRequest(paths, out=str(tmp_path / "report"), figures="no"), method_labels)
    said = demonstration.findings(built.tables)
    changed = [line for line in said if "FeSEM to FeSEM+CAM" in line]
    assert [
        ("+0.50 points of accuracy, +0.25 points of macro-F1" in line, "1 of 2" in line) for line in changed
    ] == [(True, True), (False, False)]
    assert "-3.00 points of accuracy" in changed[1] and "0 of 2" in changed[1]
    assert [table.title for table in built.tables] == [line.strip() for line in said if "-" not in line[:4]][
        1:3
    ]
    assert "here it helped in 1 of 2." in said[-1]


def test_findings_admit_that_one_model_is_best(tmp_path: Path) -> None:
    said = findings(tmp_path, {"fedavg": (0.99, None), "ifca": (0.5, 0.1)})
    assert "No other method is better than one model for all" in said and "found the groups" not in said


ASK = """
from archipelago.cli import demonstration
demonstration.SECONDS = {seconds}
demonstration.offer_to_open("file:///report.html")
print("over")
"""


def asked(answer: str | None, tmp_path: Path, **env: str) -> str:
    """What a terminal shows; the browser of the test writes down what it is asked to open."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    kept = {
        name: value for name, value in os.environ.items() if name not in ("CI", "SSH_CONNECTION", "DISPLAY")
    }
    master, slave = pty.openpty()
    code = ASK.format(seconds=5 if answer else 0.1)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT,
        env={**kept, "BROWSER": f"{browser} %s", **env},
    )  # fmt: skip
    os.close(slave)
    if answer:
        os.write(master, answer.encode())
    shown = b""
    while b"over" not in shown:
        shown += os.read(master, 1000)
    assert process.wait(20) == 0
    os.close(master)
    return shown.decode()


@pytest.mark.skipif(os.name != "posix", reason="a terminal of this kind")
def test_report_is_opened_where_somebody_says_so(tmp_path: Path) -> None:
    assert "Open it in a browser?" in asked("y\n", tmp_path, DISPLAY=":0")
    assert (tmp_path / "opened").read_text() == "file:///report.html\n"


@pytest.mark.skipif(os.name != "posix", reason="a terminal of this kind")
def test_report_is_not_opened_without_an_answer_a_screen_or_in_ci(tmp_path: Path) -> None:
    assert "Open it in a browser?" in asked(None, tmp_path, DISPLAY=":0")  # and is over by itself
    assert "Open it" not in asked(None, tmp_path)
    assert "Open it" not in asked(None, tmp_path, DISPLAY=":0", CI="1")
    assert not (tmp_path / "opened").exists()
