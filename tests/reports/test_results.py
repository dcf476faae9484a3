"""The pages under results/ say what the runs beside them say."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from archipelago.reports.build import ReportRequest, build_report

RESULTS = Path(__file__).parents[2] / "results"
KEPT = sorted(path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("table.csv"))


@pytest.mark.parametrize("name", KEPT)
def test_the_tables_are_those_of_the_runs(name: str, tmp_path: Path) -> None:
    """A sweep, or the runs of several sweeps: one for each partition."""
    kept = RESULTS / name
    paths = [kept] if (kept / "sweep.yaml").is_file() else sorted((kept / "runs").iterdir())
    build_report(ReportRequest([str(path) for path in paths], out=str(tmp_path), figures="no"))
    for file in ("table.md", "table.csv", "table.tex"):
        assert (tmp_path / file).read_text() == (kept / file).read_text(), (
            f"make it again: python -m platform.launch report results/{name}{'' if paths == [kept] else '/runs/*'} "
            f"out=results/{name}"
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


@pytest.mark.parametrize("name", [name for name in KEPT if (RESULTS / f"{name}.md").is_file()])
def test_a_page_has_the_numbers_of_its_table(name: str) -> None:
    """Accuracy, lift, macro-F1 and lift of every row."""
    with (RESULTS / name / "table.csv").open(newline="") as file:
        found = {(row["method"], row["metric"]): row for row in csv.DictReader(file) if row["mean"]}
    rows = rows_of((RESULTS / f"{name}.md").read_text(), "The table")
    assert {row[0] for row in rows} == {method for method, _ in found}
    for method, *cells in rows:
        for metric, ours, above in zip(
            ("accuracy (%)", "macro-F1 (%)"), cells[0:4:2], cells[1:4:2], strict=True
        ):
            row = found[method, metric]
            spread = f" ± {float(row['std']):.2f}" if row["std"] else ""
            assert ours == f"{float(row['mean']):.2f}{spread}"
            assert above == (row["lift"] and f"{float(row['lift']):+.2f}")


def test_the_readme_shows_rows_of_the_converged_table() -> None:
    rows = rows_of((RESULTS / "cifar10-converged.md").read_text(), "The table")
    shown = rows_of((RESULTS.parent / "README.md").read_text(), "On real data")
    assert len(shown) >= 4 and all(row in [each[:5] for each in rows] for row in shown)
