"""The pages under results/ say what the runs beside them say."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from archipelago.reports.build import ReportRequest, build_report
from archipelago.reports.repeats import mean, std
from archipelago.reports.significance import paired_difference
from archipelago.reports.summary import figures_of
from archipelago.runs.files import RunFiles
from benchmarks import attacks, cam_study, clustered, kept, privacy

RESULTS = Path(__file__).parents[2] / "results"
KEPT = sorted(path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("table.csv"))
PAGES = {  # kept tables that a page shows -> the page, and the heading
    **{name: (f"{name}.md", "The table") for name in KEPT if (RESULTS / f"{name}.md").is_file()},
    "cifar10-converged/warm-ups": ("cifar10-converged.md", "Fixed warm-ups"),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_tables_are_those_of_the_runs(name: str, tmp_path: Path) -> None:
    """A sweep, or the runs of several sweeps: one for each partition."""
    kept = RESULTS / name
    paths = [kept] if (kept / "sweep.yaml").is_file() else sorted((kept / "runs").iterdir())
    with (kept / "table.csv").open(newline="") as file:
        against = next((row["compared_with"] for row in csv.DictReader(file) if row["compared_with"]), "best")
    named = "" if against == "best" else against
    build_report(ReportRequest([str(path) for path in paths], out=str(tmp_path), figures="no", against=named))
    for file in ("table.md", "table.csv", "table.tex"):
        assert (tmp_path / file).read_text() == (kept / file).read_text(), (
            f"make it again: python -m platform.launch report results/{name}{'' if paths == [kept] else '/runs/*'} "
            f"out=results/{name}{f' against={named}' if named else ''}"
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


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_numbers_of_its_table(name: str) -> None:
    """Accuracy, lift, macro-F1 and lift of every row, and the differences to the row that it is compared with."""
    with (RESULTS / name / "table.csv").open(newline="") as file:
        found = {(row["method"], row["metric"]): row for row in csv.DictReader(file) if row["mean"]}
    page, heading = (RESULTS / PAGES[name][0]).read_text(), PAGES[name][1]
    rows = rows_of(page, heading)
    assert {row[0] for row in rows} == {method for method, _ in found}
    header = page.split(f"## {heading}\n")[1].split("\n|", 1)[1].splitlines()[0]
    columns = [cell.strip().partition(" vs ") for cell in header.strip("|").split("|")][5:]
    for method, *cells in rows:
        for metric, ours, above in zip(
            ("accuracy (%)", "macro-F1 (%)"), cells[0:4:2], cells[1:4:2], strict=True
        ):
            row = found[method, metric]
            spread = f" ± {float(row['std']):.2f}" if row["std"] else ""
            assert ours == f"{float(row['mean']):.2f}{spread}"
            assert above == (row["lift"] and f"{float(row['lift']):+.2f}")
        for (metric, versus, other), difference in zip(columns, cells[4:], strict=True):
            if not versus:
                continue
            row = found[method, f"{metric} (%)"]
            if not row["paired"]:  # the other row itself, a row of guessing, or one partition
                assert difference == ""
                continue
            assert (
                row["compared_with"] == other or not found[other, f"{metric} (%)"]["paired"]
            )  # it is the best
            mean, low, high = (float(row[each]) for each in ("paired", "paired_low", "paired_high"))
            assert difference == f"{mean:+.2f} [{low:+.2f}, {high:+.2f}] {row['wins']}/{row['losses']}"


@pytest.mark.parametrize("name", [path.parent.name for path in sorted(RESULTS.glob("*/one-partition"))])
def test_a_page_has_the_numbers_of_its_runs_on_one_partition(name: str) -> None:
    runs = {each.name: RunFiles(each) for each in sorted((RESULTS / name / "one-partition").iterdir())}
    runs |= {each.name: RunFiles(each) for each in sorted((RESULTS / name / "runs").iterdir())}
    rows = rows_of((RESULTS / f"{name}.md").read_text(), "One partition")
    assert {row[0] for row in rows} >= {path.name for path in (RESULTS / name / "one-partition").iterdir()}
    for trial, _, *shown in rows:
        final = figures_of(runs[trial])["final"]
        assert shown == [f"{100 * final[metric]:.2f}" for metric in ("micro_accuracy", "micro_macro_f1")]


def test_the_table_of_cams_defaults_is_that_of_its_runs() -> None:
    lines = [json.loads(line) for line in (RESULTS / "cam-defaults.jsonl").read_text().splitlines()]
    page = (RESULTS / "cam-defaults.md").read_text()
    shown = page.split("<!-- study -->\n```text\n")[1].split("```\n<!-- /study -->")[0]
    assert shown.strip() == cam_study.report({"seeds": 3, "lines": lines}).strip()
    default = [line for line in lines if line["case"][3:5] == ["cluster_first", "auto"]]
    assert len(default) > 20 and all(line["ari"] == 1.0 for line in default)  # what the page says of it
    assert all(line["parts"]["part_shared_variance"] > 0.1 for line in default)


def test_the_readme_shows_rows_of_the_converged_table() -> None:
    rows = rows_of((RESULTS / "cifar10-converged.md").read_text(), "The table")
    text = (RESULTS.parent / "README.md").read_text()
    lines = [
        line.strip("|").split("|")
        for line in text.partition("## On real data")[2].splitlines()
        if line[:1] == "|"
    ]
    methods, _, accuracy, macro_f1 = (
        [cell.strip() for cell in line] for line in lines
    )  # a column for each method
    shown = list(zip(methods[1:], accuracy[1:], macro_f1[1:], strict=True))
    assert len(shown) >= 4 and all(row in [(each[0], each[1], each[3]) for each in rows] for row in shown)


def test_the_best_composition_is_that_of_its_runs() -> None:
    runs = [json.loads(line) for line in (RESULTS / "best-composition.jsonl").read_text().splitlines()]
    rows = rows_of((RESULTS / "best-composition.md").read_text(), "The table")
    problems = ("rotated", "skewed")

    def values(method: str, problem: str, metric: str = "micro_accuracy") -> dict[int, float]:
        return {
            run["seed"]: 100 * run[metric]
            for run in runs
            if (run["method"], run["problem"]) == (method, problem)
        }

    def against_fesem(method: str, problem: str, metric: str = "micro_accuracy") -> str:
        found = paired_difference(values(method, problem, metric), values("fesem", problem, metric))
        if method == "fesem" or found is None:
            return ""
        return f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}] {found.wins}/{found.losses}"

    chosen_by = []
    for method, _, *shown in rows:
        of = {problem: values(method, problem) for problem in problems}
        assert all(sorted(each) == [0, 1, 2, 3, 4] for each in of.values())
        chosen_by.append(
            mean([mean([*values(method, p, "validation_micro_accuracy").values()]) for p in problems])
        )
        spread = {p: f"{mean([*of[p].values()]):.2f} ± {std([*of[p].values()]):.2f}" for p in problems}
        assert shown == [
            f"{chosen_by[-1]:.2f}", spread["rotated"], against_fesem(method, "rotated"), spread["skewed"],
            against_fesem(method, "skewed"), against_fesem(method, "skewed", "micro_macro_f1"),
        ]  # fmt: skip
    assert {row[0] for row in rows} == {run["method"] for run in runs}
    assert chosen_by == sorted(chosen_by, reverse=True)


@pytest.mark.parametrize(
    ("benchmark", "asked"),
    [
        (attacks, lambda: kept.trials("attacks-small")),
        (clustered, clustered.trials),
        (privacy, lambda: kept.trials("privacy-small")),
    ],
    ids=["attacks", "clustered", "privacy"],
)
def test_a_page_has_the_tables_of_the_trials_that_are_kept(
    benchmark: ModuleType, asked: Callable[[], list[Any]]
) -> None:
    lines = [json.loads(line) for line in benchmark.KEPT.read_text().splitlines()]
    command = f"python -m benchmarks {benchmark.__name__.rpartition('.')[2]}"
    page = benchmark.KEPT.with_suffix(".md").read_text()
    assert command in page and benchmark.report({"found": lines}) in page, f"paste what `{command}` prints"
    known = {trial.name: (trial.group, trial.seed) for trial in asked()}
    for line in lines:
        assert known[line["trial"]] == (line["group"], line["seed"])
    assert len({line["trial"] for line in lines}) == len(lines)
