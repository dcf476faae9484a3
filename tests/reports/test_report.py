"""The report of real runs: its numbers are the run directory's, it is one file, and a real browser draws all of it."""

from __future__ import annotations

import base64
import csv
import gzip
import html
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import archipelago
import archipelago.reports.drawing
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import run_experiment
from archipelago.reports.build import DETAILED, Report, ReportRequest, _for_papers, build_report
from archipelago.reports.drawing import draw, draw_figures
from archipelago.reports.figures import Figure, numbers, without_lone_choices
from archipelago.reports.figures_results import result_figures
from archipelago.reports.figures_run import flow_data, run_figures, sprite
from archipelago.reports.groups import make_groups
from archipelago.reports.page import figures_in
from archipelago.reports.table_text import latex
from archipelago.reports.tables import build_tables
from archipelago.runs.files import RunFiles
from archipelago.runs.sweeps import find_trials
from tests.support.browser import CHROMIUM, look
from tests.support.callbacks import OnRound
from tests.support.errors import refused
from tests.support.written_runs import write_csv, write_run, write_sweep

SMALL = [
    "clients=6",
    "clusters=2",
    "local.steps=2",
    "fleet.backend=in_process",
    "model=mlp",
    "data.rotations=2",
    "partition.holdout=0.5",  # a set per rotation, which no client sees
]
RUNS = {
    "ifca-0": ["method=ifca", "rounds=4", "records.tsne=true"],
    "ifca-1": ["method=ifca", "rounds=4", "seed=1"],
    "fedsoft": ["method=fedsoft", "rounds=4"],
    "femam": ["method=femam", "rounds=4", "femam.levels=[1,2]", "femam.schedule=[2,1]"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    storage = tmp_path_factory.mktemp("runs")
    found = {}
    for name, overrides in RUNS.items():
        config = load_config(overrides=[*SMALL, *overrides, f"storage={storage}", f"name={name}"], env={})
        found[name] = run_experiment(config, quiet=True)
    return found


@pytest.fixture(scope="module")
def report(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("report")
    return build_report(ReportRequest([str(path) for path in runs.values()], out=str(folder), figures="no"))


@pytest.fixture(scope="module")
def figures(report: Report) -> list[dict[str, Any]]:
    return figures_in((report.folder / "report.html").read_text())


def one(figures: list[dict[str, Any]], family: str, **choice: str) -> Mapping[str, Any]:
    fitting = [
        each for each in figures if each["family"] == family and choice.items() <= each["choice"].items()
    ]
    assert fitting, f"{family} {choice}: {[(each['family'], each['choice']) for each in figures]}"
    return fitting[0]["data"]


def series(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    (found,) = [each for each in data["series"] if each["name"].startswith(name)]
    return found


# Numbers ----------------------------------------------------------------------------------------------------


def test_curves_are_the_metrics_of_the_run_directories(
    figures: list[dict[str, Any]], runs: dict[str, Path]
) -> None:
    columns = {
        "accuracy (%)": ("micro_accuracy", 100.0),
        "macro-F1 (%)": ("micro_macro_f1", 100.0),
        "loss": ("micro_loss", 1.0),
    }
    for label, (column, scale) in columns.items():
        data = one(figures, "convergence", metric=label)
        values = np.stack([archipelago.open_run(runs[name]).metrics[column] for name in ("ifca-0", "ifca-1")])
        found = series(data, "IFCA")
        assert found["x"] == [1, 2, 3, 4]
        assert found["y"] == pytest.approx(scale * values.mean(axis=0), rel=1e-12)
        assert found["high"] == pytest.approx(scale * (values.mean(axis=0) + values.std(axis=0)), rel=1e-5)
        assert found["low"] == pytest.approx(scale * (values.mean(axis=0) - values.std(axis=0)), rel=1e-5)
        alone = series(data, "FedSoft")
        assert alone["y"] == [
            scale * value for value in archipelago.open_run(runs["fedsoft"]).metrics[column]
        ]
        assert alone["low"] is None


def test_tables_and_bars_are_the_means_of_the_last_rounds(
    report: Report, figures: list[dict[str, Any]], runs: dict[str, Path]
) -> None:
    ends = [
        archipelago.open_run(runs[name]).metrics["micro_accuracy"][-3:].mean()
        for name in ("ifca-0", "ifca-1")
    ]
    bars = one(figures, "bars", metric="accuracy (%)")
    at = bars["names"].index("IFCA, K = 2")
    assert bars["values"][at] == pytest.approx(100 * np.mean(ends), rel=1e-12)
    assert bars["errors"][at] == pytest.approx(100 * np.std(ends), rel=1e-9)
    rows = list(csv.DictReader((report.folder / "table.csv").open()))
    (row,) = [row for row in rows if row["method"].startswith("IFCA") and row["metric"] == "accuracy (%)"]
    assert float(row["mean"]) == bars["values"][at]
    shown = f"{100 * np.mean(ends):.2f} ± {100 * np.std(ends):.2f}"
    assert shown in (report.folder / "table.md").read_text()
    assert shown in html.unescape((report.folder / "report.html").read_text())


def test_page_says_what_runs_computed_on(report: Report) -> None:
    sentence = "Computed on CPU; engine loop, precision 32, determinism exact."
    assert f"<p>{sentence}</p>" in html.unescape((report.folder / "report.html").read_text())


def test_clusters_are_the_runs(figures: list[dict[str, Any]], runs: dict[str, Path]) -> None:
    run = archipelago.open_run(runs["ifca-0"])
    sizes = one(figures, "sizes", run="IFCA, K = 2, seed 0")
    assert [[each["y"][at] for each in sizes["series"]] for at in range(4)] == list(
        run.metrics["cluster_sizes"]
    )
    flow = one(figures, "flow", run="IFCA, K = 2, seed 0")
    table = run.assignments.pivot(index="client", columns="round", values="cluster")
    for link in flow["links"]:
        source, target = flow["nodes"][link["source"]], flow["nodes"][link["target"]]
        first, second = (int(flow["columns"][node["column"]].split()[1]) for node in (source, target))
        assert link["count"] == ((table[first] == source["color"]) & (table[second] == target["color"])).sum()
    assert sum(link["count"] for link in flow["links"]) == 6 * (len(flow["columns"]) - 1)
    truth = one(figures, "ground-truth", run="IFCA, K = 2, seed 0")
    last = run.clients[run.clients["round"] == 4]
    for link in truth["links"]:
        group, cluster = (truth["nodes"][link[end]]["color"] for end in ("source", "target"))
        assert link["count"] == ((last["group"] == group) & (last["cluster"] == cluster)).sum()


def test_client_models_are_the_records(figures: list[dict[str, Any]], runs: dict[str, Path]) -> None:
    run = archipelago.open_run(runs["ifca-0"])
    for projection, record, columns in (("PCA", "models", ("pc_0", "pc_1")), ("t-SNE", "tsne", ("x", "y"))):
        data = one(figures, "map", run="IFCA, K = 2, seed 0", projection=projection)
        table = run.record(record)
        last = table[table["round"] == 4]
        panel = data["panels"][-1]
        assert panel["title"] == "round 4" and panel["client"] == list(last["client"])
        assert panel["x"] == [float(value) for value in last[columns[0]]]
        assert panel["y"] == [float(value) for value in last[columns[1]]]
    cosine = one(figures, "cosine", run="IFCA, K = 2, seed 0", round="round 4")
    table = run.record("cosine")
    table = table[table["round"] == 4].pivot(index="client", columns="other", values="cosine")
    order = [int(name.split()[1].rstrip(",")) for name in cosine["x"]]
    assert np.allclose(np.asarray(cosine["z"]), table.loc[order, order], atol=5e-4)
    centres = np.asarray(one(figures, "centres", run="IFCA, K = 2, seed 0")["z"])
    models = run.models["clusters"].astype(np.float64)
    by_hand = models[0] @ models[1] / np.linalg.norm(models[0]) / np.linalg.norm(models[1])
    assert centres[0, 1] == pytest.approx(by_hand, abs=5e-5)


def test_clients_weights_and_levels_are_the_runs(
    figures: list[dict[str, Any]], runs: dict[str, Path]
) -> None:
    tables = [archipelago.open_run(runs[name]).clients for name in ("ifca-0", "ifca-1")]
    means = [table[table["round"] > 1].groupby("client")["accuracy"].mean() for table in tables]
    found = series(one(figures, "clients"), "IFCA")
    assert found["values"] == pytest.approx(list(100 * np.concatenate(means)), rel=1e-12)
    soft = archipelago.open_run(runs["fedsoft"])
    u = soft.record("u")
    last = u[u["round"] == 4].set_index("client")
    bars = one(figures, "weights-clients")
    for k, each in enumerate(bars["series"]):
        assert each["y"] == [last[f"u_{k}"][int(name.split()[1])] for name in bars["at"]]
    groups = soft.clients[soft.clients["round"] == 4].set_index("client")["group"]
    lines = one(figures, "weights-rounds")
    by_group = series(lines, "group 1, model 0")
    assert by_group["y"][-1] == pytest.approx(last["u_0"][groups == 1].mean(), rel=1e-12)
    many = archipelago.open_run(runs["femam"])
    levels = many.record("levels")
    levels = levels[levels["round"] == 4]
    drawn = one(figures, "levels")
    held = levels[~levels["pruned"]].set_index(["client", "level"])["cluster"]
    for row, name in zip(drawn["z"], drawn["y"], strict=True):
        for value, column in zip(row[1:], drawn["x"][1:], strict=True):
            assert value == held.get((int(name.split()[1]), int(column.split()[1])), -1)
    added = many.metrics["levels"].diff()[1:] > 0
    curve = series(one(figures, "convergence", metric="accuracy (%)"), "FeMAM")
    assert curve["marks"] == list(many.metrics["round"][1:][added]) and len(curve["marks"]) >= 1


def test_costs_are_the_runs(figures: list[dict[str, Any]], runs: dict[str, Path]) -> None:
    run = archipelago.open_run(runs["fedsoft"])
    moved = one(figures, "communication")
    at = [name.startswith("FedSoft") for name in moved["at"]].index(True)
    assert moved["series"][0]["y"][at] == pytest.approx(run.metrics["cost_models_down"].mean(), rel=1e-12)
    work = series(one(figures, "work", cost="seconds"), "FedSoft")
    assert work["x"] == pytest.approx(list(run.timings["total"].cumsum()), rel=1e-5)
    size = run.models["clusters"].shape[1]
    moved_so_far = (
        (run.metrics["cost_models_down"] + run.metrics["cost_models_up"]) * size * 4 / 1e6
    ).cumsum()
    data = series(one(figures, "work", cost="megabytes moved per client"), "FedSoft")
    assert data["x"] == pytest.approx(list(moved_so_far), rel=1e-5)
    stages = one(figures, "time")
    assert stages["at"][at].startswith("FedSoft") and len(stages["series"]) > 2
    medians = run.timings.fillna(0.0).median().drop("round")  # a stage that a round did without took no time
    medians["server and the rest"] = 2 * medians["total"] - medians.sum()
    for each in stages["series"]:
        assert each["y"][at] == pytest.approx(medians.get(each["name"], 0.0), rel=1e-9)


def test_models_on_distributions_are_those_of_the_run(
    figures: list[dict[str, Any]], runs: dict[str, Path]
) -> None:
    run = archipelago.open_run(runs["fedsoft"])
    matrices = 100 * np.asarray(run.metrics["centre_accuracy"].tolist())
    title = next(
        each["choice"]["run"] for each in figures if each["choice"].get("run", "").startswith("FedSoft")
    )
    assert np.allclose(one(figures, "distributions", run=title)["z"], matrices[-1], rtol=1e-9)
    lines = one(figures, "distributions-rounds", run=title)
    for d, k in np.ndindex(2, 2):
        assert series(lines, f"distribution {d}, model {k}")["y"] == pytest.approx(
            matrices[:, d, k], rel=1e-9
        )


def test_every_figure_that_the_runs_can_show_is_there(figures: list[dict[str, Any]]) -> None:
    families = {each["family"] for each in figures}
    assert families == {
        "convergence", "bars", "clients", "work", "time", "communication", "sizes", "flow", "ground-truth", "map",
        "cosine", "centres", "examples", "weights-rounds", "weights-clients", "levels", "parts", "labels", "similarity",
        "distributions", "distributions-rounds",
    }  # fmt: skip


def test_example_images_are_the_recorded_pixels() -> None:
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 1, 3, 4)
    found = sprite(images)
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["image"]))))
    assert picture.shape == (3, 9, 4) and (found["width"], found["height"]) == (9, 3)
    assert np.array_equal(picture[:, :4, 0], images[0, 0]) and np.array_equal(picture[:, 5:, 2], images[1, 0])
    assert (picture[:, 4, 3] == 0).all()  # the gap is empty


def test_examples_of_a_cluster_are_images_of_its_clients(
    figures: list[dict[str, Any]], runs: dict[str, Path]
) -> None:
    recorded = load_file(runs["ifca-0"] / "records" / "examples.safetensors")
    last = archipelago.open_run(runs["ifca-0"]).assignments.query("round == 4").set_index("client")["cluster"]
    rows = one(figures, "examples", run="IFCA, K = 2, seed 0")["rows"]
    assert {row["name"] for row in rows} == {f"cluster {k}" for k in set(last)}
    for row in rows:
        k = int(row["name"].split()[1])
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(row["image"]))))
        tiles = [picture[:, left : left + 8, 0].tobytes() for left in range(0, row["width"], 9)]
        mine = {
            image[0].tobytes()
            for image, owner in zip(recorded["images"], recorded["client"], strict=True)
            if last[int(owner)] == k
        }
        assert tiles and set(tiles) <= mine and row["about"].split()[0] == str((last == k).sum())


def test_flows_count_clients() -> None:
    data = flow_data(["a", "b"], [np.array([0, 0, 1]), np.array([1, 1, -1])], str)
    assert [(node["column"], node["name"], node["size"]) for node in data["nodes"]] == [
        (0, "0", 2), (0, "1", 1), (1, "-1", 1), (1, "1", 2),
    ]  # fmt: skip
    assert [(link["source"], link["target"], link["count"]) for link in data["links"]] == [
        (0, 3, 2),
        (1, 2, 1),
    ]


def test_choices_of_one_are_none() -> None:
    def figure(family: str, **choice: str) -> Figure:
        return Figure(family, "results", "t", "c", "lines", {}, choice)

    made = without_lone_choices(
        [figure("a", problem="x", metric="m"), figure("a", problem="x", metric="n"), figure("b", problem="x")]
    )
    assert [dict(each.choice) for each in made] == [{"metric": "m"}, {"metric": "n"}, {}]
    assert [each.name for each in made] == ["a-m", "a-n", "b"]
    assert numbers([1, None, np.nan, np.inf]) == [1.0, None, None, None]


def test_models_on_distributions_are_the_metrics(tmp_path: Path) -> None:
    centres = [[[0.5, 0.25]], [[0.75, 0.125]]]
    path = write_run(tmp_path / "run", accuracy=[0.1, 0.2], metrics={"centre_accuracy": centres})
    found = figures_in(
        (build_report(ReportRequest([str(path)], figures="no")).folder / "report.html").read_text()
    )
    lines = one(found, "distributions-rounds")
    assert [each["y"] for each in lines["series"]] == [[50.0, 75.0], [25.0, 12.5]]
    assert one(found, "distributions")["z"] == [[75.0, 12.5]]


def test_bars_and_heatmap_of_the_federation_by_group(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    clients = {"round": [4] * 3, "client": [0, 1, 2], "group": [1, 0, 1], "accuracy": [0.5, 0.6, 0.7]}
    pq.write_table(pa.table(clients), path / "clients.parquet")
    (path / "federation").mkdir()
    facts = {"clients": 3, "classes": 2, "sources": 1}
    (path / "federation" / "facts.json").write_text(json.dumps(facts))
    pq.write_table(
        pa.table({"client": [0, 1, 2], "group": [1, 0, 1]}), path / "federation" / "clients.parquet"
    )
    counts = {"client": [0, 0, 1, 2, 2], "part": ["train", "train", "train", "train", "test"], "source": [0] * 5,
              "label": [0, 1, 1, 0, 1], "samples": [3, 4, 5, 6, 7]}  # fmt: skip
    pq.write_table(pa.table(counts), path / "federation" / "counts.parquet")
    built = build_report(ReportRequest([str(path)], figures="no"))
    found = figures_in((built.folder / "report.html").read_text())
    data, names = one(found, "labels"), ["client 1 (group 0)", "client 0 (group 1)", "client 2 (group 1)"]
    assert data["at"] == names
    assert [each["y"] for each in data["series"]] == [[0, 3, 6], [5, 4, 0]]
    # Shares of class 0: 0, 3/7 and 1.
    data = one(found, "similarity")
    assert data["x"] == data["y"] == names and data["edges"] == [0.5] and data["range"] == [0, 1]
    assert data["blocks"] == [{"at": 0, "name": "group 0"}, {"at": 1, "name": "group 1"}]
    assert data["z"] == [[1.0, 0.57, 0.0], [0.57, 1.0, 0.43], [0.0, 0.43, 1.0]]
    (caption,) = [each["caption"] for each in found if each["family"] == "similarity"]
    assert "mean similarity 0.29 between groups, 0.43 within" in caption


def compared(*paths: Path) -> dict[str, list[Figure]]:
    """Family -> the figures that compare these runs."""
    groups = make_groups(find_trials(paths))
    found: dict[str, list[Figure]] = {}
    for figure in result_figures(groups, build_tables(groups)):
        found.setdefault(figure.family, []).append(figure)
    return found


def write_table(path: Path, **columns: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_whiskers_end_inside_the_axis(tmp_path: Path) -> None:
    wide = [write_run(tmp_path / f"a{n}", seed=n, accuracy=[value] * 4) for n, value in enumerate((0.6, 0.9))]
    narrow = [
        write_run(tmp_path / f"b{n}", method="fedavg", seed=n, accuracy=[value] * 4)
        for n, value in enumerate((0.74, 0.75))
    ]
    figure = compared(*wide, *narrow)["bars"][0]
    low, high = figure.data["range"]
    assert 0 < low < 60 and high > 90 and "The axis does not begin at 0." in figure.caption
    assert draw(figure).axes[0].get_xlim() == (low, high)
    # Room around bars far from each other reaches 0, and nothing is said.
    far = [
        write_run(tmp_path / name, method=name, accuracy=[value] * 4)
        for name, value in (("cfl", 0.1), ("ifca", 0.9))
    ]
    figure = compared(*far)["bars"][0]
    assert figure.data["range"][0] == 0 and "begin" not in figure.caption
    # So does one that stands alone.
    figure = compared(far[1])["bars"][0]
    assert figure.data["range"][0] == 0 and figure.data["range"][1] > 90 and "begin" not in figure.caption


def test_axis_of_few_rounds_has_whole_rounds_on_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", accuracy=[0.1, 0.2, 0.3, 0.4])
    (figure,) = [each for each in compared(run)["convergence"] if each.choice["metric"] == "accuracy (%)"]
    low, high = (axes := draw(figure).axes[0]).get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1, 2, 3, 4]


def test_metric_that_is_nowhere_finite_has_no_bars(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics={"micro_macro_f1": [float("nan")] * 4})
    assert [figure.choice["metric"] for figure in compared(run)["bars"]] == ["accuracy (%)"]
    diverged = write_run(tmp_path / "diverged", accuracy=[float("nan")] * 4)
    names = [file.name for file in build_report(ReportRequest([str(diverged)])).files]
    assert "report.html" in names and not any(name.startswith("bars") for name in names)


def test_costs_and_levels_are_those_of_finished_seeds(tmp_path: Path) -> None:
    """The first seed failed before its first round; the others took 1 and 3 seconds a round."""
    broken = write_run(
        tmp_path / "0", method="femam", seed=0, accuracy=[], config={"rounds": 4}, state="failed"
    )
    paths = [broken]
    for seed, seconds, moved in ((1, 1.0, 2.0), (2, 3.0, 4.0)):
        metrics = {"levels": [1, 1, 2, 3], "cost_models_down": [moved] * 4, "cost_models_up": [0.0] * 4}
        paths.append(write_run(tmp_path / f"{seed}", method="femam", seed=seed, metrics=metrics))
        write_csv(paths[-1] / "timings.csv", {"round": [1, 2, 3, 4], "total": [seconds] * 4})
        (paths[-1] / "models").mkdir()
        save_file({"model": np.zeros((1, 1000), np.float32)}, paths[-1] / "models/model.safetensors")
    found = compared(*paths)
    assert all(
        series["marks"] == [3, 4] for figure in found["convergence"] for series in figure.data["series"]
    )
    x = {figure.choice["cost"]: figure.data["series"][0]["x"] for figure in found["work"]}
    assert x["seconds"] == [2.0, 4.0, 6.0, 8.0]
    assert x["megabytes moved per client"] == pytest.approx([0.012, 0.024, 0.036, 0.048])


def test_of_two_runs_of_one_seed_all_figures_show_the_one_that_the_table_counts(tmp_path: Path) -> None:
    paths = []
    for name, value in (("first", 0.5), ("second", 0.9)):
        metrics = {"cost_models_down": [10 * value] * 4}
        paths.append(write_run(tmp_path / name, accuracy=[value] * 4, metrics=metrics))
        write_csv(paths[-1] / "timings.csv", {"round": [1, 2, 3, 4], "total": [value] * 4})
        clients = {"round": [4, 4], "client": [0, 1], "accuracy": [value, value]}
        write_table(paths[-1] / "clients.parquet", **clients)
    found = compared(*paths)
    assert found["convergence"][0].data["series"][0]["y"] == [50.0] * 4
    assert found["bars"][0].data["values"] == [50.0]
    assert found["clients"][0].data["series"][0]["values"] == [50.0, 50.0]
    assert found["communication"][0].data["series"][0]["y"] == [5.0]
    (seconds,) = [figure for figure in found["work"] if figure.choice["cost"] == "seconds"]
    assert seconds.data["series"][0]["x"] == [0.5, 1.0, 1.5, 2.0]
    assert sum(series["y"][0] for series in found["time"][0].data["series"]) == 0.5


def test_clients_that_were_held_out_are_not_among_those_that_train(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config={"holdout_clients": 0.5})
    clients = {"round": [4, 4], "client": [0, 1], "accuracy": [0.25, 0.75], "held_out": [False, True]}
    write_table(run / "clients.parquet", **clients)
    (figure,) = compared(run)["clients"]
    assert figure.data["series"][0]["values"] == [25.0] and figure.data["series"][0]["clients"] == 1
    assert "held out are not among them" in figure.caption
    everyone = write_run(tmp_path / "everyone")
    write_table(everyone / "clients.parquet", **{**clients, "held_out": [False, False]})
    assert "held out" not in compared(everyone)["clients"][0].caption


def write_levels(run: Path, levels: list[list[int]]) -> Path:
    """A record of which model each client has at each level; -1 has none."""
    cluster = np.asarray(levels)
    at = np.repeat(np.arange(1, len(levels) + 1), cluster.shape[1])
    client = np.tile(np.arange(cluster.shape[1]), len(levels))
    write_table(run / "records/levels-000004.parquet", level=at, client=client,
                cluster=np.maximum(cluster, 0).ravel(), pruned=(cluster < 0).ravel())  # fmt: skip
    return run


def inside(run: Path, family: str) -> Figure:
    (found,) = [figure for figure in run_figures(RunFiles(run), "run") if figure.family == family]
    return found


def test_models_of_a_level_are_distinguished_by_lines_where_colours_repeat(tmp_path: Path) -> None:
    personal = list(range(50))
    run = write_levels(
        write_run(tmp_path / "many", method="femam"), [[0] * 50, [c // 25 for c in personal], personal]
    )
    figure = inside(run, "levels")
    z = np.asarray(figure.data["z"])
    assert sorted(map(tuple, figure.data["cuts"])) == [(1, 24), *((2, row) for row in range(49))]
    for column, above in figure.data["cuts"]:
        assert z[above, column] != z[above + 1, column]
    assert "equal colours" not in figure.caption and "colours repeat after 10" in figure.caption
    lines = draw(figure).axes[0].collections[0].get_segments()
    assert sorted((int(line[:, 0].mean()), float(line[0, 1])) for line in lines) == [
        (column, above + 0.5) for column, above in sorted(map(tuple, figure.data["cuts"]))
    ]
    few = write_levels(write_run(tmp_path / "few", method="femam"), [[0, 0, 0], [1, 0, -1]])
    figure = inside(few, "levels")
    assert figure.data["z"] == [[0, -1], [0, 0], [0, 1]] and "and so do equal colours" in figure.caption
    assert draw(inside(write_levels(write_run(tmp_path / "one"), [[0, 0]]), "levels")).axes


def test_every_ground_truth_level_is_a_column_beside_those_found(tmp_path: Path) -> None:
    run = write_levels(write_run(tmp_path / "run", method="femam"), [[0, 0, 0], [1, 0, 0]])
    # A fourth client is held out: no method has a model for it.
    clients = {
        "client": [0, 1, 2, 3],
        "group": [2, 1, 0, 0],
        "level_1": [1, 0, 0, 0],
        "level_2": [2, 1, 0, 0],
    }
    write_table(run / "federation/clients.parquet", **clients)
    write_table(
        run / "federation/counts.parquet", client=[0], part=["train"], source=[0], label=[0], samples=[1]
    )
    (run / "federation/facts.json").write_text(json.dumps({"clients": 4, "classes": None, "sources": 1}))
    data = inside(run, "levels").data
    assert data["x"] == ["ground-truth level 1", "ground-truth level 2", "level 1", "level 2"]
    assert data["y"] == ["client 2", "client 1", "client 0"]
    assert data["z"] == [[0, 0, 0, 0], [0, 1, 0, 0], [1, 2, 0, 1]]


def test_weights_of_many_clients_are_those_of_all_groups(tmp_path: Path) -> None:
    run, many = write_run(tmp_path / "run", method="fedsoft"), np.arange(600)
    write_table(run / "records/u-000004.parquet", client=many, u_0=many / 600, u_1=1 - many / 600)
    write_table(run / "clients.parquet", round=[4] * 600, client=many, group=many % 450 // 150)
    figure = inside(run, "weights-clients")
    shown = [int(name.split()[1]) for name in figure.data["at"]]
    assert len(shown) == 400 and {client % 450 // 150 for client in shown} == {0, 1, 2}
    assert figure.data["series"][0]["y"] == [client / 600 for client in shown]
    assert "ground-truth groups" in figure.caption and "400 of 600 clients, evenly chosen" in figure.caption


def test_lone_row_is_not_the_best_in_latex(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", method="fedavg", accuracy=[0.05] * 4)]
    paths.append(write_run(tmp_path / "c", accuracy=[0.9] * 4, config={"data": {"name": "other"}}))
    source = latex(build_tables(make_groups(find_trials(paths))))
    overview = source[source.index("All problems") :]
    assert r"\textbf{30.00}" in overview and "90.00" in overview and r"\textbf{90.00}" not in overview


# The file ---------------------------------------------------------------------------------------------------


def test_page_is_one_small_file_that_needs_nothing(report: Report) -> None:
    path = report.folder / "report.html"
    assert path.stat().st_size < 5_000_000
    text = re.sub(r'<script type="application/octet-stream".*?</script>', "", path.read_text(), flags=re.S)
    assert re.findall(r"""src\s*=\s*["'](?!data:)""", text) == [] and "<link" not in text
    links = re.findall(r"""href\s*=\s*["']([^"']*)""", text)  # within the page, or to files of its runs
    assert links and all(link.startswith("#") or (path.parent / link).is_file() for link in links)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text and 'name="viewport"' in text


def test_equal_runs_give_equal_files(report: Report, runs: dict[str, Path], tmp_path: Path) -> None:
    again = build_report(
        ReportRequest(
            [str(path) for path in runs.values()], out=str(report.folder.parent / "again"), figures="no"
        )
    )
    for file in again.files:
        assert file.read_bytes() == (report.folder / file.name).read_bytes()


def test_every_figure_is_a_png_and_an_svg_too(tmp_path: Path) -> None:
    built = build_report(ReportRequest([str(write_run(tmp_path / "run"))]))
    names = {each["name"] for each in figures_in((built.folder / "report.html").read_text())}
    files = {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert {path.name for path in (built.folder / "figures").iterdir()} == files and len(files) >= 10
    assert {path.name for path in built.files} >= files


def test_of_very_many_figures_those_of_one_run_are_files_unless_all_are_asked_for() -> None:
    overview = [Figure("bars", "results", "t", "c", "bars", {}, {"metric": str(n)}) for n in range(40)]
    inside = [
        Figure("flow", "clusters", "t", "c", "flow", {}, {"run": run, "n": str(n)})
        for run in "ab"
        for n in range(30)
    ]
    assert [f.choice.get("run") for f in _for_papers([*overview, *inside], "yes")] == [None] * 40 + ["a"] * 30
    assert _for_papers([*overview, *inside], "all") == [*overview, *inside]
    assert _for_papers([*overview, *inside[:40]], "yes") == [*overview, *inside[:40]]


def test_each_kind_of_figure_is_drawn_and_equal_figures_are_equal_files(
    figures: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {each["kind"]: {key: value for key, value in each.items() if key != "name"} for each in figures}
    chosen = [Figure(**entry) for entry in entries.values()]
    assert set(entries) == {
        "lines",
        "stack",
        "bars",
        "spread",
        "flow",
        "scatter",
        "heatmap",
        "images",
        "holdings",
    }
    monkeypatch.setattr(archipelago.reports.drawing, "_WORTH_A_PROCESS", 1)
    files = draw_figures(chosen, tmp_path / "a", processes=2)
    assert len(files) == 18
    for file in files:
        if file.suffix == ".svg":
            assert ElementTree.parse(file).getroot().tag.endswith("svg")
        else:
            assert np.asarray(Image.open(file).convert("L")).std() > 3  # something is on it
    # The second of two is drawn by another process: here, the same file.
    for file in draw_figures(chosen[1:2], tmp_path / "b"):
        assert file.read_bytes() == (tmp_path / "a" / file.name).read_bytes()


def test_names_of_runs_are_text_and_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    path = write_run(tmp_path / "run", config={"data": {"name": evil}, "note": evil}, method="<b>x</b>")
    (path / "events.jsonl").write_text('{"round": 1, "text": "<img src=x onerror=alert(1)>"}\n')
    text = (build_report(ReportRequest([str(path)], figures="no")).folder / "report.html").read_text()
    assert "<script>alert" not in text and "<img src=x" not in text and "<b>x</b>" not in text
    assert html.escape(evil) in text


def test_reports_of_what_is_not_finished_or_not_there(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare", accuracy=[], state="failed", sentence="No data.")
    assert "No data." in (build_report(ReportRequest([str(bare)])).folder / "table.md").read_text()
    sweep = write_sweep(tmp_path / "sweep", [{"group": "a", "status": "failed", "reason": "it broke"}])
    built = build_report(ReportRequest([str(sweep)]))
    assert built.folder == sweep / "report" and "it broke" in (built.folder / "report.html").read_text()
    running = write_run(
        tmp_path / "running", state="running", metrics={"micro_loss": [0.5, float("nan"), float("inf"), 0.1]}
    )
    found = figures_in((build_report(ReportRequest([str(running)])).folder / "report.html").read_text())
    assert one(found, "convergence", metric="loss")["series"][0]["y"] == [0.5, None, None, 0.1]


def test_run_that_was_killed_between_two_checkpoints_is_shown_as_far_as_it_is_written(
    tmp_path: Path,
) -> None:
    settings = [*SMALL, "method=ifca", "rounds=8", "checkpoint.every=4", f"storage={tmp_path}", "name=killed"]

    def stop(report: Any) -> None:
        if report.round == 6:
            shutil.copytree(tmp_path / "killed", tmp_path / "copy")  # what a SIGKILL would leave

    run_experiment(load_config(overrides=settings, env={}), callbacks=[OnRound(stop)], quiet=True)
    found = figures_in(
        (build_report(ReportRequest([str(tmp_path / "copy")])).folder / "report.html").read_text()
    )
    assert len(one(found, "convergence", metric="loss")["series"][0]["y"]) == 6
    assert one(found, "map")["panels"]


def test_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    with (path / "metrics.csv").open("a") as file:
        file.write("5" + ",0.1" * 20 + "\n")  # more cells than columns
    with refused("damaged", says="metrics.csv"):
        build_report(ReportRequest([str(path)]))


def test_many_groups_show_some_from_the_inside_and_say_so(tmp_path: Path) -> None:
    sizes = {"cluster_sizes": [[2, 2]] * 2}
    paths = [str(write_run(tmp_path / f"r{n}", accuracy=[0.1, 0.2], config={"local": {"lr": n}}, metrics=sizes))
             for n in range(DETAILED + 2)]  # fmt: skip
    built = build_report(ReportRequest(paths, out=str(tmp_path / "report"), figures="no"))
    text = (built.folder / "report.html").read_text()
    assert f"the {DETAILED} groups of best rank; 2 more" in text
    assert len([each for each in figures_in(text) if each["family"] == "sizes"]) == DETAILED


# A browser --------------------------------------------------------------------------------------------------

# A new user's machine may have none; CI must have one (.ci/run installs it), so that nothing is skipped in silence.
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="no chromium here: apt install chromium"
)
READY = "document.documentElement.dataset.ready === 'yes' || document.documentElement.dataset.failed !== undefined"
# What is drawn has marks on the screen: paths of a plot, or images that have loaded.
MARKS = """((card) => card.querySelector('img')
    ? [...card.querySelectorAll('img')].filter((image) => image.naturalWidth > 0).length
    : card.querySelectorAll('.plot .main-svg path, .plot .main-svg image, .plot rect.node-rect').length)"""
PAUSE = "((milliseconds) => new Promise((go) => setTimeout(go, milliseconds)))"
QUESTIONS = {
    "failed": "document.documentElement.dataset.failed || ''",
    "families": "[...document.querySelectorAll('[data-family]')].map((card) => card.dataset.family)",
    "marks": f"[...document.querySelectorAll('[data-family]')].map({MARKS})",
    "waiting": "document.querySelectorAll('.waiting').length",  # grounds that say that something is to come
    "width": "document.documentElement.scrollWidth",
    "resources": """performance.getEntriesByType('resource').map((entry) => entry.name)
        .filter((name) => !/^(data|blob):/.test(name))""",
    "background": "getComputedStyle(document.body).backgroundColor",
}


def left_the_file(requests: list[str]) -> list[str]:
    return [url for url in requests if not url.startswith(("data:", "blob:", "file:///"))]


@needs_browser
def test_browser_draws_every_figure_and_asks_nobody(report: Report, figures: list[dict[str, Any]]) -> None:
    clicks = """(() => {
        const card = document.querySelector('[data-family=convergence]'), plot = card.querySelector('.plot');
        const before = plot.data.filter((trace) => trace.visible === 'legendonly').length;
        card.querySelector('.chip').click();
        const hidden = plot.data.filter((trace) => trace.visible === 'legendonly').map((trace) => trace.legendgroup);
        return [before, [...new Set(hidden)]];
    })()"""
    choose = """(() => {
        const select = document.querySelector('[data-family=sizes] select[data-key=run]');
        select.value = select.options[1].value; select.dispatchEvent(new Event('change'));
        return [...document.querySelectorAll('select[data-key=run]')].filter((each) =>
            [...each.options].some((o) => o.value === select.value)).map((each) => each.value === select.value);
    })()"""
    # The mouse over a point of a curve: what is hovered over, and what is written there.
    hover = """new Promise((done) => {
        const plot = document.querySelector('[data-family=convergence] .plot');
        const ground = plot.querySelector('.nsewdrag');
        plot.scrollIntoView();
        plot.on('plotly_hover', (event) => setTimeout(() => done([
            event.points.map((point) => [point.data.legendgroup, point.x, point.y]),
            [...plot.querySelectorAll('.hoverlayer text')].map((text) => text.textContent)])));
        const box = plot.querySelectorAll('.scatterlayer .point')[1].getBoundingClientRect();
        ground.dispatchEvent(new MouseEvent('mousemove', { bubbles: true, clientX: box.left + box.width / 2,
            clientY: box.top + box.height / 2 }));
        setTimeout(() => done([]), 5000);
    })"""
    axis = "document.querySelector('[data-family=bars] .plot').layout.xaxis.range"
    questions = {**QUESTIONS, "hover": hover, "clicks": clicks, "choose": choose, "axis": axis}
    seen = look(report.folder / "report.html", questions, ready=READY)
    assert seen.answers["failed"] == "" and seen.errors == []
    assert left_the_file(seen.requests) == [] and seen.answers["resources"] == []
    assert [url for url in seen.requests if url.startswith("file:")] == [
        (report.folder / "report.html").as_uri()
    ]
    assert sorted(seen.answers["families"]) == sorted({each["family"] for each in figures})
    assert all(count > 0 for count in seen.answers["marks"]), seen.answers
    assert seen.answers["clicks"][0] == 0 and len(seen.answers["clicks"][1]) == 1  # a method, with its band
    points, texts = seen.answers["hover"]
    drawn = one(figures, "convergence", metric="accuracy (%)")
    assert {(name, y) for name, x, y in points} == {
        (each["name"], each["y"][each["x"].index(points[0][1])]) for each in drawn["series"]
    }
    assert all(any(f"{y:.4g}" in text for text in texts) for _, _, y in points), (points, texts)
    assert all(seen.answers["choose"])  # one choice of a run moves every figure that offers it
    assert seen.answers["axis"] == one(figures, "bars")["range"] and seen.answers["waiting"] == 0


@needs_browser
def test_browser_draws_what_every_choice_offers(report: Report, figures: list[dict[str, Any]]) -> None:
    # Runs and problems in the order of their first figure: choosing one moves all cards, which is done once each.
    every = f"""(async () => {{
        const marks = {MARKS}, drawn = [], order = new Map(), pause = {PAUSE};
        const about = (figure) => JSON.stringify([figure.choice.run, figure.choice.problem]);
        window.report.figures.forEach((figure) => order.set(about(figure), order.get(about(figure)) ?? order.size));
        const sorted = [...window.report.figures].sort((one, other) => order.get(about(one)) - order.get(about(other)));
        for (const figure of sorted) {{
            const card = document.querySelector(`[data-family="${{figure.family}}"]`);
            const plot = card.querySelector('.plot');
            for (const select of card.querySelectorAll('select')) {{
                const value = figure.choice[select.dataset.key];
                if (select.value !== value) {{ select.value = value; select.dispatchEvent(new Event('change')); }}
            }}
            const late = Date.now() + 10000;
            while (plot.dataset.drawn !== figure.name && Date.now() < late) {{ await pause(5); }}
            await Promise.all([...card.querySelectorAll('img')].map((image) => image.decode()));
            drawn.push([plot.dataset.drawn, marks(card), card.querySelector('.about').textContent]);
        }}
        return drawn;
    }})()"""
    questions = {"every": every, "failed": QUESTIONS["failed"]}
    seen = look(report.folder / "report.html", questions, ready=READY)
    assert seen.answers["failed"] == "" and seen.errors == []
    assert len({each["name"] for each in figures}) == len(figures) > 40
    assert sorted((name, caption) for name, _, caption in seen.answers["every"]) == sorted(
        (each["name"], each["caption"]) for each in figures
    )
    assert all(marks > 0 for _, marks, _ in seen.answers["every"]), seen.answers["every"]


@needs_browser
def test_figure_that_cannot_be_drawn_says_so_and_stops_no_other(
    report: Report, figures: list[dict[str, Any]], tmp_path: Path
) -> None:
    text = (report.folder / "report.html").read_text()
    broken = [{**each, "data": {}} if each["family"] == "bars" else each for each in figures]
    packed = text[text.index('id="figures">') + 13 : text.index("</script>", text.index('id="figures">'))]
    replaced = base64.b64encode(gzip.compress(json.dumps(broken).encode())).decode()
    (tmp_path / "report.html").write_text(text.replace(packed, replaced))
    words = "document.querySelector('[data-family=bars] .plot').textContent"
    seen = look(
        tmp_path / "report.html",
        {**QUESTIONS, "words": words},
        ready="document.documentElement.dataset.ready",
    )
    assert seen.answers["words"].startswith("This figure could not be drawn: ")
    assert seen.answers["failed"].startswith("bars") and seen.errors == []
    without = [
        family
        for family, marks in zip(seen.answers["families"], seen.answers["marks"], strict=True)
        if not marks
    ]
    assert without == ["bars"] and len(seen.answers["families"]) > 10


@needs_browser
def test_what_was_hidden_stays_hidden_in_another_theme(report: Report) -> None:
    hide = """(async () => {
        const pause = PAUSE;
        const card = document.querySelector('[data-family=convergence]'), plot = card.querySelector('.plot');
        const seen = () => [plot.layout.font.color,
            [...new Set(plot.data.filter((trace) => trace.visible === 'legendonly').map((trace) => trace.legendgroup))],
            [...card.querySelectorAll('.chip[aria-pressed=false]')].map((chip) => chip.textContent)];
        card.querySelector('.chip').click();
        const before = seen(), late = Date.now() + 10000;
        document.getElementById('theme').click();
        while (plot.layout.font.color === before[0] && Date.now() < late) { await pause(5); }
        await pause(300);
        const after = seen();
        card.querySelector('.chip').click();
        return [before, after, seen()];
    })()"""
    hide = hide.replace("PAUSE", PAUSE)
    seen = look(report.folder / "report.html", {"hide": hide, "failed": QUESTIONS["failed"]}, ready=READY)
    before, after, shown = seen.answers["hide"]
    assert seen.answers["failed"] == "" and before[0] != after[0]  # drawn again
    assert len(before[1]) == 1 and before[1:] == after[1:] and shown[1:] == [[], []]


@needs_browser
def test_phone_in_the_dark_reads_it_without_scrolling_sideways(report: Report) -> None:
    seen = look(report.folder / "report.html", QUESTIONS, ready=READY, width=390, height=844, dark=True)
    assert seen.answers["failed"] == "" and seen.errors == []
    assert seen.answers["width"] == 390
    assert all(count > 0 for count in seen.answers["marks"])
    shade = [int(value) for value in re.findall(r"\d+", seen.answers["background"])[:3]]
    assert max(shade) < 80


@needs_browser
def test_axis_of_few_rounds_has_whole_rounds_on_the_page_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", accuracy=[0.1, 0.2, 0.3, 0.4])
    built = build_report(ReportRequest([str(run)], figures="no"))
    ticks = (
        "[...document.querySelectorAll('[data-family=convergence] .xtick')].map((tick) => tick.textContent)"
    )
    seen = look(built.folder / "report.html", {"ticks": ticks}, ready=READY)
    assert seen.answers["ticks"] == ["1", "2", "3", "4"]


@needs_browser
def test_cluster_sizes_of_many_rounds_have_rounds_on_their_axis(tmp_path: Path) -> None:
    sizes = {"cluster_sizes": [[2, 2]] * 40}
    run = write_run(tmp_path / "run", accuracy=[0.1] * 40, metrics=sizes)
    built = build_report(ReportRequest([str(run)], figures="no"))
    ticks = "[...document.querySelectorAll('[data-family=sizes] .xtick')].map((tick) => tick.textContent)"
    seen = look(built.folder / "report.html", {"ticks": ticks}, ready=READY)
    assert {"10", "20", "30", "40"} <= set(seen.answers["ticks"])


def test_page_that_is_too_large_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    assert build_report(ReportRequest([str(run)], figures="no")).warning == ""
    monkeypatch.setattr("archipelago.reports.build._LARGEST_PAGE", 1000)
    found = build_report(ReportRequest([str(run)], figures="no"))
    assert "MB with no run shown from the inside" in found.warning
    assert html.escape(found.warning) in (found.folder / "report.html").read_text()
