"""The pages under results/ say what the runs beside them say."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from archipelago.reports.build import ReportRequest, build_report

RESULTS = Path(__file__).parents[2] / "results"
SWEEPS = sorted(path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("sweep.yaml"))


@pytest.mark.parametrize("name", SWEEPS)
def test_the_tables_are_those_of_the_runs(name: str, tmp_path: Path) -> None:
    build_report(ReportRequest([str(RESULTS / name)], out=str(tmp_path), figures="no"))
    for file in ("table.md", "table.csv", "table.tex"):
        assert (tmp_path / file).read_text() == (RESULTS / name / file).read_text(), (
            f"make it again: python -m platform.launch report results/{name} out=results/{name}"
        )


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    lines = page.split(f"## {heading}\n")[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        table.append([re.sub(r"\*\*|</?u>", "", cell).strip() for cell in line.strip("|").split("|")])
    return table


def test_the_page_of_cifar10_has_the_numbers_of_its_table() -> None:
    with (RESULTS / "cifar10/table.csv").open(newline="") as file:
        found = {(row["method"], row["metric"]): row for row in csv.DictReader(file) if row["mean"]}
    rows = rows_of((RESULTS / "cifar10.md").read_text(), "The table")
    assert {row[0] for row in rows} == {method for method, _ in found}
    for method, accuracy, published, f1, published_f1, *_ in rows:
        for metric, ours, theirs in (
            ("accuracy (%)", accuracy, published),
            ("macro-F1 (%)", f1, published_f1),
        ):
            row = found[method, metric]
            assert ours == f"{float(row['mean']):.2f}"
            printed = row["published_mean"] and f"{float(row['published_mean']):.2f}"
            if row["published_std"]:
                printed += f" ± {float(row['published_std']):.2f}"
            assert theirs == printed


def test_the_readme_shows_the_same_table() -> None:
    rows = rows_of((RESULTS / "cifar10.md").read_text(), "The table")
    shown = rows_of((RESULTS.parent / "README.md").read_text(), "A real table: CIFAR-10")
    assert [row[:5] for row in shown] == [row[:5] for row in rows]
