"""`launch report`: what it prints, where it writes, and how a mistake ends."""

from __future__ import annotations

from pathlib import Path

import pytest

import archipelago.cli.main
from tests.support.written_runs import write_run


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / f"run-{seed}", seed=seed)) for seed in (0, 1)]
    assert (
        archipelago.cli.main.main(["report", *runs, f"out={tmp_path / 'r'}", "figures=no", "test=wilcoxon"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "IFCA" in printed and f"Report: {tmp_path / 'r' / 'report.html'}" in printed
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "report.html", "table.csv", "table.md", "table.tex",
    ]  # fmt: skip


def test_mistakes_are_sentences_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert archipelago.cli.main.main(["report"]) == 2
    assert "Expected run directories or sweeps after report" in capsys.readouterr().err
    assert archipelago.cli.main.main(["report", str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err
