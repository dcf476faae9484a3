"""Reports for Python: the figures of a run or sweep by name, tables as a data frame.

figure_names("runs/mine")                       # cluster_sizes, flow, ...
draw("runs/mine", "cluster_sizes")              # a matplotlib figure, shown inline by a notebook
tables(["runs/mine", "runs/other"])             # one row for each group and metric, as in table.csv
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.core.errors import UserError
from archipelago.core.registry import nearest
from archipelago.core.vocabulary import Labels, registered_labels
from archipelago.reports import figures_run  # noqa: F401  (registers the figures of a run)
from archipelago.reports.drawing import draw as draw_figure
from archipelago.reports.figures import FIGURES, Figure, without_lone_choices
from archipelago.reports.figures_results import problems
from archipelago.reports.groups import Group, make_groups
from archipelago.reports.published import find_table
from archipelago.reports.significance import check_test
from archipelago.reports.table_text import as_csv
from archipelago.reports.tables import Table, build_tables
from archipelago.runs.sweeps import find_trials, table_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawn


def figure_names(path: str | Path, *, labels: Labels = registered_labels) -> list[str]:
    """The figures that a run or sweep can show: what `draw` takes."""
    return list(_figures(path, labels))


def draw(path: str | Path, name: str, *, labels: Labels = registered_labels) -> Drawn:
    """One figure of a run or sweep, by its name in `figure_names` or that of its file in a report."""
    found = _figures(path, labels)
    by_file = {figure.name: figure for figure in found.values()}
    if name not in found and name not in by_file:
        known = nearest(name, found)
        if name in FIGURES:
            raise UserError(
                f"Expected a figure that {path} has data for, got '{name}': its runs wrote none. {known}",
                code="not-recorded", name=name,
            )  # fmt: skip
        raise UserError(
            f"Unknown figure '{name}' of {path}. {known}",
            code="unknown-name", kind="figure", name=name, path=path,
        )  # fmt: skip
    return draw_figure(found.get(name) or by_file[name])


def tables(
    paths: Sequence[str | Path],
    *,
    metrics: Sequence[str] = (),
    test: str = "t",
    against: str | None = None,
    table: str = "",
    labels: Labels = registered_labels,
) -> pd.DataFrame:
    """Runs and sweeps compared: a row for each group and metric, with means over seeds, ranks and costs.

    The options are those of the command `report`: columns of metrics.csv, the test and the row that others are tested
    against, a published table (`thesis-2023:3.1`).
    """
    import pandas as pd

    check_test(test)
    named = table or table_of(paths)
    groups = make_groups(find_trials(paths), labels)
    made = build_tables(
        groups,
        test=test,
        against=against,
        published=find_table(named) if named else None,
        metrics=metrics,
    )
    return pd.read_csv(io.StringIO(as_csv(made)), dtype={"seeds": str, "values": str, "note": str})


def _figures(path: str | Path, labels: Labels) -> dict[str, Figure]:
    """Name -> figure: the registered name for the first one of its maker, the name of its file for the others."""
    groups = make_groups(find_trials([path]), labels)
    made = _comparison(groups, build_tables(groups)) if groups else {}
    if len(groups) == 1 and len(groups[0].runs) == 1:
        made |= {name: maker(groups[0].runs[0]) for name, maker in FIGURES.of("run").items()}
    every = without_lone_choices([figure for figures in made.values() for figure in figures])
    found: dict[str, Figure] = {}
    at = 0
    for name, figures in made.items():
        for number in range(len(figures)):
            found[every[at].name if number else name] = every[at]
            at += 1
    return found


def _comparison(groups: Sequence[Group], tables: Sequence[Table]) -> dict[str, list[Figure]]:
    """The figures that compare groups, by the name of their maker."""
    shown = problems(groups, tables)
    return {
        name: [figure for problem in shown for figure in maker(problem)]
        for name, maker in FIGURES.of("problem").items()
    }
