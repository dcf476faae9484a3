"""Reports from Python: figures by name, tables as data frames."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure as Drawn

from archipelago.reports import api
from archipelago.reports.figures import FIGURES
from tests.support.errors import refused
from tests.support.written_runs import write_run, write_sweep

CLUSTERED = {"cluster_sizes": [[2, 2], [3, 1], [3, 1], [3, 1]]}


def test_figure_names_are_those_of_makers_with_data(tmp_path: Path) -> None:
    names = api.figure_names(write_run(tmp_path / "run", metrics=CLUSTERED))
    assert {"cluster_sizes", "convergence", "bars", "time"} <= set(names)
    assert "examples" in FIGURES and "examples" not in names  # the run has no images
    assert "cluster_sizes" not in api.figure_names(write_run(tmp_path / "other", method="fedavg"))


def test_draw_returns_a_figure_of_matplotlib(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", metrics=CLUSTERED)
    drawn = api.draw(path, "cluster_sizes")
    assert isinstance(drawn, Drawn)
    assert drawn.axes[0].get_ylabel() == "clients"
    for name in api.figure_names(path):
        assert isinstance(api.draw(path, name), Drawn)
    assert api.draw(path, "sizes").axes[0].get_ylabel() == "clients"  # as its file in a report is called


def test_draw_of_what_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    with refused("unknown-name", says="'time'", kind="figure", name="tims"):
        api.draw(path, "tims")
    with refused("not-recorded", name="examples"):
        api.draw(path, "examples")


def test_tables_are_a_data_frame_of_numbers(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{method}-{seed}", method=method, seed=seed, accuracy=[value + 0.1 * seed] * 4)
             for method, value in (("ifca", 0.5), ("fedavg", 0.25)) for seed in (0, 1)]  # fmt: skip
    frame = api.tables(paths)
    accuracy = frame[frame["metric"] == "accuracy (%)"].set_index("method")
    assert accuracy.loc["IFCA", "mean"] == pytest.approx(55.0)
    assert accuracy.loc["IFCA", "rank"] == 1 and accuracy.loc["FedAvg", "rank"] == 2
    assert accuracy.loc["IFCA", "seeds"] == "0 1"
    assert set(api.tables(paths, metrics=["micro_loss"])["metric"]) == {"loss"}


def test_figures_of_a_sweep_compare_its_groups(tmp_path: Path) -> None:
    trials = []
    for method in ("ifca", "fedavg"):
        run = write_run(tmp_path / "s" / "runs" / method, method=method)
        trials.append({"group": method, "run": run.relative_to(tmp_path / "s").as_posix()})
    path = write_sweep(tmp_path / "s", trials)
    assert "convergence" in api.figure_names(path)
    assert len(api.draw(path, "convergence").axes[0].lines) == 2
