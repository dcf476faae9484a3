"""`report`: what it prints, where it writes, and how a mistake ends."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import archipelago.cli.main
from tests.support.written_runs import write_run


def test_report_writes_tables_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_report_mistakes_are_sentences_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archipelago.cli.main.main(["report"]) == 2
    assert "Expected run directories or sweeps after report" in capsys.readouterr().err
    assert archipelago.cli.main.main(["report", str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_report_as_json_has_the_files_and_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_run(tmp_path / f"run-{seed}", seed=seed)) for seed in (0, 1)]
    words = ["report", *runs, f"out={tmp_path / 'r'}", "figures=no", "--json"]
    assert archipelago.cli.main.main(words) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert found["report"] == str(tmp_path / "r" / "report.html")
    assert sorted(Path(file).name for file in found["files"]) == [
        "report.html", "table.csv", "table.md", "table.tex",
    ]  # fmt: skip
    assert all(Path(file).is_file() for file in found["files"])
    (table,) = found["tables"]
    row = table["rows"][0]
    assert row["method"] == "IFCA" and row["seeds"] == [0, 1] and len(row["values"]) == 2
    assert row["mean"] == pytest.approx(sum(row["values"]) / 2) and row["p"] is None
    with (tmp_path / "r/table.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [each["metric"] for each in table["rows"]] == [each["metric"] for each in written]
    assert float(written[0]["mean"]) == row["mean"]
