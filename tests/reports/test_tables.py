"""Tables of several runs: means, spreads, ranks and tests by hand, published values, formats, what was not run."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy import stats

from archipelago.reports.build import ReportRequest, build_report
from archipelago.reports.figures_results import result_figures
from archipelago.reports.groups import Group, make_groups
from archipelago.reports.page import page
from archipelago.reports.published import (
    Published,
    deviations,
    find_table,
    method_names,
    published_for,
    published_results,
)
from archipelago.reports.repeats import Repeat
from archipelago.reports.significance import holm, paired_p
from archipelago.reports.summary import write_summary
from archipelago.reports.table_text import as_csv, latex, markdown, print_tables
from archipelago.reports.tables import Table, build_tables
from archipelago.runs.sweeps import find_trials
from tests.support.errors import mistake, refused
from tests.support.written_runs import write_run, write_sweep

LAST = {0: 0.5, 1: 0.7, 2: 0.9}  # the mean of the last three rounds of IFCA, by seed


def compare(folder: Path) -> list[Path]:
    """IFCA with means 0.5, 0.7, 0.9 (mean 0.7) and FedAvg 0.2, 0.3, 0.1 (mean 0.2) over seeds 0, 1, 2."""
    runs = []
    for seed, value in LAST.items():
        rounds = [0.0, value - 0.05, value, value + 0.05]
        runs.append(write_run(folder / f"ifca-{seed}", seed=seed, accuracy=rounds,
                              metrics={"cluster_sizes": [[2, 2]] * 4}))  # fmt: skip
    for seed, value in {0: 0.2, 1: 0.3, 2: 0.1}.items():
        runs.append(
            write_run(folder / f"fedavg-{seed}", method="fedavg", seed=seed, accuracy=[0.0, *[value] * 3])
        )
    return runs


def seeds(*numbers: int) -> tuple[Repeat, ...]:
    """Runs whose partition has the seed of everything else."""
    return tuple(Repeat(number, number) for number in numbers)


def tables(paths: list[Path], **options: object) -> list[Table]:
    return build_tables(make_groups(find_trials(paths)), **options)  # type: ignore[arg-type]


def test_means_and_spreads_over_seeds_of_the_means_of_the_last_rounds(tmp_path: Path) -> None:
    (table,) = tables(compare(tmp_path))
    ifca, fedavg = table.rows
    assert (ifca.label, ifca.clusters, ifca.repeats) == ("IFCA", 2, seeds(0, 1, 2))
    assert (fedavg.label, fedavg.clusters) == ("FedAvg", None)
    cell = ifca.cells["micro_accuracy"]
    assert cell.mean == pytest.approx(70.0)
    assert cell.std == pytest.approx(100 * math.sqrt(0.08 / 3))  # deviations 0.2, 0, 0.2; ddof 0
    assert (cell.rank, fedavg.cells["micro_accuracy"].rank) == (1, 2)
    assert fedavg.cells["micro_macro_f1"].mean == pytest.approx(10.0)
    assert (ifca.costs["models_stored"], ifca.costs["computation"]) == (3.0, 1.5)
    assert ifca.costs["models_down"] == 2.0 and ifca.costs["minutes"] == pytest.approx(4 / 60)


def test_bytes_really_sent_and_epsilon_are_in_table_figure_and_summary(tmp_path: Path) -> None:
    """Models of 1,000 numbers: two are received, and of one 500, 700, 300 and 100 bytes are delivered."""
    metrics = {"cost_bytes_up": [500, 700, 300, 100], "epsilon": [1.0, 1.5, 1.75, 2.125]}
    paths = [write_run(tmp_path / "noisy", metrics=metrics), write_run(tmp_path / "plain", method="fedavg")]
    for path in paths:
        (path / "models").mkdir()
        save_file({"model": np.zeros((1, 1000), np.float32)}, path / "models/model.safetensors")
    groups = make_groups(find_trials(paths))
    (table,) = made = build_tables(groups)
    noisy, plain = table.rows
    assert noisy.costs["megabytes_up"] == pytest.approx(0.0004)
    assert noisy.costs["megabytes"] == pytest.approx(0.008 + 0.0004)
    assert plain.costs["megabytes"] == pytest.approx(0.012) and "megabytes_up" not in plain.costs
    assert noisy.cells["epsilon"].mean == 2.125  # of the whole run, and no mean over rounds
    assert plain.cells["epsilon"].mean is None
    assert "| epsilon |" in markdown(made) and "| MB delivered |" in markdown(made)
    (figure,) = (
        each for each in result_figures(groups, made) if each.data.get("x") == "megabytes moved per client"
    )
    spent = {line["name"].split()[0]: line["x"] for line in figure.data["series"]}
    assert spent["IFCA"] == pytest.approx([0.0085, 0.0172, 0.0255, 0.0336])
    assert spent["FedAvg"] == pytest.approx([0.012, 0.024, 0.036, 0.048])
    assert "Client-level privacy: epsilon 2.12 at update.delta" in write_summary(paths[0]).read_text()
    assert "privacy" not in write_summary(paths[1]).read_text()


def test_significance_is_paired_over_seeds_and_named(tmp_path: Path) -> None:
    (table,) = tables(compare(tmp_path))
    # Differences 0.3, 0.4, 0.8: mean 0.5, standard deviation sqrt(0.07), t = 0.5 / sqrt(0.07 / 3).
    t = 0.5 / math.sqrt(0.07 / 3)
    by_hand = 1 - t / math.sqrt(t * t + 2)  # the t distribution with two degrees of freedom
    assert table.rows[1].cells["micro_accuracy"].p == pytest.approx(by_hand)
    assert table.rows[0].cells["micro_accuracy"].p is None  # the reference itself
    assert any("paired t-test over seeds, two-sided, against the best row" in note for note in table.notes)
    (other,) = tables(compare(tmp_path / "again"), test="wilcoxon", against="fedavg")
    assert other.rows[0].cells["micro_accuracy"].p == pytest.approx(0.25)  # 2 / 2^3
    assert any(
        "Wilcoxon signed-rank test over seeds, two-sided, against FedAvg" in note for note in other.notes
    )


def test_paired_p_is_scipys_and_knows_its_limits() -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    one, other = rng.normal(size=5), rng.normal(size=5)
    found = paired_p(dict(enumerate(one)), dict(enumerate(other)))
    assert found == pytest.approx(stats.ttest_rel(one, other).pvalue)
    shared = paired_p({0: 1.0, 1: 2.0, 2: 4.0, 7: 9.0}, {0: 0.0, 1: 1.5, 2: 2.0, 8: 3.0})
    assert shared == paired_p({0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.0, 1: 1.5, 2: 2.0})  # seeds that both have
    assert paired_p({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0}) is None  # one and the same difference
    assert paired_p({0: 1.0, 1: math.nan}, {0: 0.0, 1: 1.0}) is None
    assert holm({}) == {}
    assert holm({"a": 0.6, "b": 0.5}) == {"b": 1.0, "a": 1.0}


def test_worse_loss_is_a_larger_one(tmp_path: Path) -> None:
    (table,) = tables(compare(tmp_path), metrics=["micro_loss"])
    assert [row.cells["micro_loss"].rank for row in table.rows] == [1, 2]
    assert table.rows[0].cells["micro_loss"].mean == pytest.approx(0.3)
    with refused("unknown-name", kind="metric", name="micro_los", nearest="micro_loss"):
        tables(compare(tmp_path / "again"), metrics=["micro_los"])


def test_only_finished_runs_count_and_the_others_say_why(tmp_path: Path) -> None:
    runs = compare(tmp_path / "runs")
    broken = write_run(tmp_path / "runs/x", method="wecfl", state="failed", sentence="Client 3 failed.")
    write_run(tmp_path / "sweep/runs/a", seed=0)
    sweep = write_sweep(
        tmp_path / "sweep",
        [
            {"group": "ifca", "seed": 0, "run": "runs/a"},
            {"group": "ifca", "seed": 1, "status": "failed", "reason": "out of memory", "run": "runs/b"},
            {"group": "cfl", "seed": 0, "status": "waiting"},
        ],
    )
    found = tables([*runs, broken, sweep])
    rows = {row.label: row for table in found for row in table.rows}
    assert rows["WeCFL"].cells["micro_accuracy"].mean is None and rows["WeCFL"].repeats == ()
    assert rows["WeCFL"].note == "seed 0: failed after 4 rounds (Client 3 failed.)"
    assert rows["cfl"].note == "seed 0: waiting" and rows["cfl"].cells["micro_accuracy"].mean is None
    (sweeps,) = [row for table in found for row in table.rows if row.note.startswith("seed 1: failed")]
    assert sweeps.note == "seed 1: failed (out of memory)" and sweeps.repeats == seeds(0, 1, 2)
    text = io.StringIO()
    print_tables(found, text)
    assert "  WeCFL" in text.getvalue().splitlines()  # nothing but its name
    assert "out of memory" in text.getvalue()


def test_what_a_sweep_knows_of_a_run_that_was_stopped_or_lost(tmp_path: Path) -> None:
    trials = []
    for seed, (status, reason) in enumerate(
        [
            ("stopped", "stopped by asha after round 4"),
            ("failed", "its process or node was lost"),
            ("running", ""),
        ]
    ):
        write_run(tmp_path / f"sweep/runs/{seed}", seed=seed, state="running")
        trials.append(
            {"group": "ifca", "seed": seed, "status": status, "reason": reason, "run": f"runs/{seed}"}
        )
    ((row,),) = (table.rows for table in tables([write_sweep(tmp_path / "sweep", trials)]))
    assert row.note.split("; ") == [
        "seed 0: stopped after 4 rounds (stopped by asha after round 4)",
        "seed 1: failed after 4 rounds (its process or node was lost)",
        "seed 2: running after 4 rounds",
    ]


def tuned_sweep(folder: Path, **settings: object) -> Path:
    """Three rates, of two methods: IFCA's 0.1 is best on test data, its 0.2 on validation data."""
    trials = []
    points = [("ifca", 0.1, 0.9, 0.5), ("ifca", 0.2, 0.7, 0.6), ("fedavg", 0.3, 0.3, 0.4)]
    for number, (method, rate, test, validation) in enumerate(points):
        write_run(
            folder / f"runs/{number}", method=method, accuracy=[test] * 4, config={"local": {"lr": rate}},
            metrics={"validation_micro_accuracy": [validation] * 4, "validation_micro_loss": [validation] * 4},
        )  # fmt: skip
        trials.append({"group": f"{method} | local.lr={rate}", "run": f"runs/{number}"})
    return write_sweep(folder, trials, settings)


def test_what_was_tuned_is_ranked_by_validation_and_never_by_test(tmp_path: Path) -> None:
    drawn = {"sampler": "random", "sample": {"local.lr": "uniform(0, 1)"}}
    (table,) = tables([tuned_sweep(tmp_path / "drawn", **drawn)])
    assert [each.name for each in table.metrics] == [
        "micro_accuracy",
        "micro_macro_f1",
        "validation_micro_accuracy",
    ]
    for name in (each.name for each in table.metrics):
        assert [row.cells[name].rank for row in table.rows] == [2, 1, 3]
    assert table.rows[1].cells["validation_micro_accuracy"].mean == pytest.approx(60.0)
    assert [note for note in table.notes if note.startswith("Best by validation")] == [
        "Best by validation: IFCA (lr=0.2), accuracy (%) on validation data 60.00; accuracy (%) on test data 70.00.",
        "Best by validation: FedAvg (lr=0.3), accuracy (%) on validation data 40.00; accuracy (%) on test data 30.00.",
    ]
    text = page("x", make_groups(find_trials([tmp_path / "drawn"])), [table], [], [], tmp_path)
    assert "chosen on validation data, its test accuracy (%): IFCA (lr=0.2)" in text
    by_loss = {**drawn, "metric": "validation_micro_loss"}
    (table,) = tables([tuned_sweep(tmp_path / "loss", **by_loss)])
    assert [row.cells["micro_accuracy"].rank for row in table.rows] == [2, 3, 1]
    (table,) = tables([tuned_sweep(tmp_path / "max", **by_loss, mode="max")])
    assert [row.cells["micro_accuracy"].rank for row in table.rows] == [2, 1, 3]
    # A second seed of all but the best, which a scheduler stopped: it does not win by the one that is left.
    for number in (0, 2):
        again = tmp_path / f"drawn/runs/{number}"
        text = (again / "config.yaml").read_text().replace("seed: 0", "seed: 1")
        shutil.copytree(again, tmp_path / f"drawn/runs/{number}-again")
        (tmp_path / f"drawn/runs/{number}-again/config.yaml").write_text(text)
        with (tmp_path / "drawn/trials.csv").open("a") as file:
            name = "fedavg | local.lr=0.3" if number else "ifca | local.lr=0.1"
            file.write(f"more{number},{name},1,finished,,runs/{number}-again\n")
    (table,) = tables([tmp_path / "drawn"])
    assert [row.cells["micro_accuracy"].rank for row in table.rows] == [1, None, 2]
    (table,) = tables([tuned_sweep(tmp_path / "grid")])  # compares, and chooses nothing
    assert [row.cells["micro_accuracy"].rank for row in table.rows] == [1, 2, 3]
    assert [each.name for each in table.metrics] == ["micro_accuracy", "micro_macro_f1"]


def test_members_of_a_population_are_rows_with_the_values_they_came_to(tmp_path: Path) -> None:
    """config.yaml keeps what was drawn; schedule.json has what was taken over, after which round."""
    trials = []
    for seed in (0, 1):
        for member, accuracy in (("0.1", 0.5), ("0.2", 0.75)):
            run = tmp_path / f"sweep/runs/{member}-{seed}"
            metrics = {"micro_accuracy": [accuracy] * 4, "validation_micro_accuracy": [accuracy] * 4}
            write_run(run, method="ifca", seed=seed, config={"local": {"lr": float(member)}}, metrics=metrics)
            trials.append(
                {"group": f"ifca | local.lr={member}", "seed": seed, "run": f"runs/{member}-{seed}"}
            )
    moved = [{"round": 2, "values": {"local.lr": 0.3}}, {"round": 3, "values": {"local.lr": 0.3}}]
    (tmp_path / "sweep/runs/0.2-1/schedule.json").write_text(json.dumps(moved))
    asked = {"scheduler": "pbt", "sample": {"local.lr": "uniform(0.1, 0.2)"}}
    (table,) = tables([write_sweep(tmp_path / "sweep", trials, asked)])
    assert [(row.label, row.cells["micro_accuracy"].rank) for row in table.rows] == [
        ("IFCA (lr=0.1, seed=0)", 3),
        ("IFCA (lr=0.2, seed=0)", 1),
        ("IFCA (lr=0.1, seed=1)", 3),
        ("IFCA (lr=0.2 (rounds 1-2), 0.3 (3-4), seed=1)", 1),
    ]


def test_where_data_was_kept_tells_no_runs_apart(tmp_path: Path) -> None:
    kept = [
        {"data": {"name": "digits"}, "partition": {"name": "iid", "cache": True}},
        {
            "data": {"name": "digits", "cache": "elsewhere", "mapped": True},
            "partition": {"name": "iid", "cache": False},
        },
    ]
    for seed, config in enumerate(kept):
        write_run(tmp_path / f"{seed}", seed=seed, config={**config, "tensorboard": bool(seed)})
    (table,) = tables([tmp_path / "0", tmp_path / "1"])
    (row,) = table.rows
    assert row.by_repeat("micro_accuracy").keys() == set(seeds(0, 1))


SYNTHETIC = {"name": "synthetic", "weight_scale": 10**0.5, "noise": 1.0, "common_scale": 0.0, "dimension": 10}
FEDSOFT = {
    "data": {**SYNTHETIC, "sources": 2},
    "partition": {"name": "mixture", "mixture": "10:90", "size_range": [100, 200]},
    "clients": 100,
    "local": {"optimizer": "adam"},
}


def test_cluster_models_stand_beside_fedsofts_by_what_they_are_for(tmp_path: Path) -> None:
    """Two seeds that number their models differently; the paper's c1 serves theta_0, and its c0 theta_1."""
    for seed, matrix in enumerate([[[70.0, 30.0], [20.0, 60.0]], [[40.0, 80.0], [70.0, 30.0]]]):
        metrics = {"cluster_sizes": [[2, 2]] * 4, "centre_mse": [matrix] * 4}
        write_run(tmp_path / f"{seed}", method="fedsoft", seed=seed, config=FEDSOFT, metrics=metrics)
    main, centres = tables([tmp_path / "0", tmp_path / "1"], published=find_table("fedsoft:1"))
    assert not main.has_published and not centres.compares
    assert centres.title == f"{main.title}: cluster models on ground-truth distributions"
    assert [each.label for each in centres.metrics] == [
        "model for 0: mean squared error",
        "model for 1: mean squared error",
    ]
    got = [[(cell.mean, cell.published.mean if cell.published else None) for cell in row.cells.values()]
           for row in centres.rows]  # fmt: skip
    assert got == [[(35.0, 29.5), (75.0, 68.4)], [(65.0, 58.6), (25.0, 21.8)]]
    assert centres.rows[0].by_repeat("centre_mse[*,0]") == dict(zip(seeds(0, 1), (30.0, 40.0), strict=True))
    lines = list(csv.DictReader(io.StringIO(as_csv([main, centres]))))
    (line,) = [each for each in lines if each["method"] == "FedSoft on distribution 1"
               and each["metric"].startswith("model for 1")]  # fmt: skip
    assert (line["values"], line["published_mean"], line["rank"]) == ("20.0 30.0", "21.8", "")
    assert latex([main, centres]).count(r"\begin{table}") == 2
    assert any(note.startswith("Published: fedsoft-2022, Table 1 (Y. Ruan") for note in centres.notes)
    assert not any("Not as published" in note for note in centres.notes)


def test_every_published_number_has_a_run_that_leads_to_it() -> None:
    """FedSoft's tables: no line of the file is out of reach."""
    reached = set()
    for method in ("fedsoft", "ifca", "fedem"):
        for mixture in ("10:90", "30:70", "linear", "random"):
            partition = {"name": "mixture", "mixture": mixture}
            for data, clusters in (
                ({**SYNTHETIC, "sources": 2}, 2),
                ({**SYNTHETIC, "sources": 8}, 8),
                ({"name": "emnist_cases", "rotations": 1}, 2),
                ({"name": "emnist_cases", "rotations": 2}, 4),
            ):
                config = {"method": method, "data": data, "partition": partition}
                for table in ("1", "2", "3", "4"):
                    reached |= set(published_for(config, clusters, ("fedsoft-2022", table)).values())
    printed = {each for each in published_results() if each.source == "fedsoft-2022"}
    assert len(printed) == 130 and reached == printed
    assert {each.metric.partition("[")[0] for each in printed} == {
        "centre_mse", "centre_accuracy", "best_centre_accuracy", "train_macro_accuracy",
    }  # fmt: skip
    others = ({"sources": 4}, {"weight_scale": 10.0}, {"dimension": 5}, {"noise": 0.0}, {"common_scale": 1.0})
    for other in (
        {},
        *others,
    ):  # more ground-truth models than centres; another generator than FedSoft's tables have
        data = {**SYNTHETIC, "sources": 2, **other}
        found = published_for({"method": "fedsoft", "data": data, "partition": partition}, 2)
        assert bool(found) == (not other), other


def test_problems_are_tables_and_settings_that_differ_are_in_the_label(tmp_path: Path) -> None:
    for number, (alpha, mu) in enumerate([(0.1, 0.5), (0.1, 1.0), (10.0, 0.5)]):
        config = {
            "partition": {"name": "dirichlet", "alpha": alpha},
            "fedprox": {"mu": mu},
            "name": f"r{number}",
        }
        write_run(tmp_path / f"r{number}", method="fedprox", config=config)
    first, second = tables(sorted(tmp_path.iterdir()))
    assert first.title == "digits, dirichlet, alpha=0.1"
    assert [row.label for row in first.rows] == ["FedProx (mu=0.5)", "FedProx (mu=1.0)"]
    assert [row.label for row in second.rows] == ["FedProx (mu=0.5)"]


THESIS = {
    "data": {"name": "fashion_mnist"},
    "partition": {"name": "cluster_dirichlet", "alpha": 0.1, "alpha_within": 10.0, "compat": "fedbase"},
    "clusters": 5,
    "clients": 200,
    "local": {"steps": 10, "batch": 32, "lr": 0.001},
}


def test_published_values_stand_beside_what_was_run_and_rows_that_were_not_are_empty(tmp_path: Path) -> None:
    sizes = {"cluster_sizes": [[1, 1, 1, 1, 0]] * 4}
    write_run(tmp_path / "a", method="fesem", accuracy=[0.9] * 4, config=THESIS, metrics=sizes)
    write_run(tmp_path / "b", method="fedavg", accuracy=[0.8] * 4, config=THESIS)
    (table,) = tables([tmp_path / "a", tmp_path / "b"], published=find_table("3.1"))
    rows = {(row.label, row.clusters): row for row in table.rows}
    fesem = rows["FeSEM", 5].cells["micro_accuracy"]
    assert fesem.published is not None and (fesem.published.mean, fesem.published.std) == (94.64, 1.54)
    assert fesem.difference == pytest.approx(90.0 - 94.64)
    assert rows["FedAvg", None].cells["micro_macro_f1"].published.mean == 57.24  # type: ignore[union-attr]
    not_run = rows["WeCFL", 10]
    assert not_run.cells["micro_accuracy"].mean is None and not_run.cells["micro_accuracy"].rank is None
    assert not_run.note == "not run" and not_run.cells["micro_accuracy"].published is not None
    assert len(table.rows) == 2 + 10  # of the twelve rows of this problem in Table 3.1
    assert any("rounds=4 (thesis-2023: 100)" in note for note in table.notes)
    assert any(note.startswith("Published: thesis-2023, Table 3.1 (J. Ma") for note in table.notes)
    lines = list(csv.DictReader(io.StringIO(as_csv([table]))))
    (line,) = [each for each in lines if each["method"] == "WeCFL" and each["clusters"] == "5"
               and each["metric"] == "accuracy (%)"]  # fmt: skip
    assert (line["mean"], line["difference"], line["published_mean"]) == ("", "", "94.64")


def test_published_number_needs_the_papers_setting() -> None:
    config = {"method": "fesem", **THESIS}
    assert published_for(config, 5)["micro_accuracy"].mean == 94.64
    assert published_for(config, 7) == {}
    assert published_for({**config, "partition": {**config["partition"], "alpha": 1.0}}, 5) == {}
    assert published_for({**config, "method": "fesem+prox"}, 5) == {}
    for compat, there in (
        ("fedbase", True),
        ("fedbase-0.6.8", True),
        ("none", False),
    ):  # divided as the paper's code does
        assert (
            bool(published_for({**config, "partition": {**config["partition"], "compat": compat}}, 5))
            == there
        )
    other = {"method": "ifca", "data": {"name": "femnist"}, "partition": {"name": "natural"}}
    assert published_for(other, 3)["macro_macro_f1"].method == "HypoCluster"
    assert deviations(config | {"rounds": 100}, ["thesis-2023"]) == []


CIFAR = {
    "method": "fedavg", "data": {"name": "cifar10"},
    "partition": {"name": "cluster_dirichlet", "alpha": 0.1, "alpha_within": 10.0, "groups": 10, "group_sizes": [],
                  "compat": "fedbase"},
    "clients": 200, "rounds": 100, "local": {"steps": 10, "batch": 32, "lr": 0.001, "epochs": None},
}  # fmt: skip


@pytest.mark.parametrize(
    "other", [{"data": {"name": "cifar10", "rotations": 4}}, {"data": {"name": "cifar10", "label_swaps": 2}},
              {"aggregation": {"name": "median"}}],
)  # fmt: skip
def test_another_problem_or_method_has_no_published_number(other: dict[str, object]) -> None:
    assert published_for(CIFAR, None)["micro_accuracy"].mean == 24.38
    assert published_for({**CIFAR, **other}, None) == {}


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"model": {"name": "resnet18"}}, "model.name=resnet18 (thesis-2023: cnn_cifar or cnn_fashion)"),
        ({"participation": {"fraction": 0.1}}, "participation.fraction=0.1 (thesis-2023: 1.0)"),
        ({"local": {"epochs": 20}}, "local.epochs=20 (thesis-2023: None)"),
        ({"partition": {**CIFAR["partition"], "groups": 2}}, "partition.groups=2 (thesis-2023: 10)"),  # type: ignore[dict-item]
        ({"method": "fedprox", "fedprox": {"mu": 0.0}}, "fedprox.mu=0.0 (thesis-2023: 0.95)"),
    ],
)
def test_whatever_else_is_not_the_papers_is_said(other: dict[str, object], note: str) -> None:
    assert deviations({**CIFAR, "model": {"name": "auto"}}, ["thesis-2023"]) == []
    assert deviations({**CIFAR, **other}, ["thesis-2023"]) == [note]


def test_sweep_says_which_published_table_it_repeats(tmp_path: Path) -> None:
    partition = {"name": "dirichlet", "alpha": 0.1, "compat": "fedbase"}
    config = {**CIFAR, "method": "ifca+con", "partition": partition, "clusters": 10}
    clusters = {"cluster_sizes": [[2, 2]] * 4}
    run = write_run(tmp_path / "s/runs/a", method="ifca+con", config=config, metrics=clusters)
    trial = {"group": "ifca+con", "seed": 0, "run": run.relative_to(tmp_path / "s").as_posix()}

    def shown(**sweep: str) -> Published | None:
        write_sweep(tmp_path / "s", [trial], sweep)
        built = build_report(ReportRequest([str(tmp_path / "s")], figures="no"))
        return built.tables[0].rows[0].cells["micro_accuracy"].published

    earliest, own = shown(), shown(table="thesis-2023:6.3")
    assert earliest is not None and own is not None
    assert (earliest.table, own.table) == ("4.3", "6.3") and earliest.mean != own.mean


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"method": "wecfl+con+cks"}, "WeCFL-CON&CKS"),
        ({"method": "wecfl+few_shots+con", "con": {"form": "rep"}}, "WeCFL-CON-rep"),
        ({"method": "ifca+cam", "rounds": 100, "cam": {"warmup": 0.2}}, "IFCA-CAM(warmup=20)"),
        ({"ensemble": ["fedavg+finetune", "ifca+finetune"]}, "FedAvg-Finetune+IFCA-Finetune"),
        ({"ensemble": ["fedprox*10"]}, "FedProx+"),
        ({"method": "fesem", "aggregation": {"name": "matched"}}, "FeSEM-MA"),
        ({"method": "feddws"}, "FedDist+WS"),
    ],
)
def test_every_kind_of_method_name_is_one_the_papers_print(config: dict[str, object], name: str) -> None:
    assert method_names(config)[0] == name
    assert name in {each.method for each in published_results()}


def test_every_published_row_of_the_thesis_has_a_config_that_leads_to_it() -> None:
    """No name in the file is left that the mapping cannot make, the 2 published under two spellings included."""
    bases = ["fedavg", "fedprox", "ifca", "fesem", "wecfl", "fedsgd", "feddane", "feddist", "feddws", "local", "cfl",
             "robust", "fedsoft", "fedem"]  # fmt: skip
    configs: list[dict[str, object]] = [{"method": base} for base in bases]
    for base in ("ifca", "fesem", "wecfl"):
        configs += [{"method": f"{base}+{rest}", "rounds": 100, "cam": {"warmup": 0.3}}
                    for rest in ("cam", "cks", "con", "con+cks", "cam+finetune")]  # fmt: skip
        configs += [{"method": f"{base}+con", "con": {"form": "rep"}}]
        configs += [{"ensemble": ["fedavg", base]}, {"ensemble": ["fedavg+finetune", f"{base}+finetune"]}]
    configs += [
        {"method": "ifca+cam", "rounds": 100, "cam": {"warmup": n / 100}} for n in (0, 10, 20, 30, 40, 50)
    ]
    configs += [{"ensemble": [f"{base}*5"]} for base in ("fedavg", "fedprox")]
    configs += [{"method": "fesem", "aggregation": {"name": "matched"}}]
    made = {name for config in configs for name in method_names(config)}
    assert {each.method for each in published_results()} <= made


def test_tables_are_found_by_number() -> None:
    assert find_table("3.1") == ("thesis-2023", "3.1")
    assert find_table("fesem-2022:2") == find_table("fesem:2") == ("fesem-2022", "2")
    with refused("ambiguous", says=("fedsoft-2022:2", "fesem-2022:2"), setting="table", given="2"):
        find_table("2")
    with refused("unknown-name", says="table=9.9", kind="published table", name="9.9"):
        find_table("9.9")
    assert len(published_results()) == 2934


def test_formats(tmp_path: Path) -> None:
    found = tables(compare(tmp_path))
    text = markdown(found)
    assert "| IFCA | 2 | 3 | **70.00 ± 16.33** | 1 |" in text
    assert "| FedAvg |  | 3 | <u>20.00 ± 8.16</u> | 2 |" in text
    source = latex(found)
    assert r"IFCA & 2 & 3 & \textbf{70.00 $\pm$ 16.33} & 1 &" in source
    assert r"\underline{20.00 $\pm$ 8.16}" in source
    for word in (r"\toprule", r"\midrule", r"\bottomrule", r"accuracy (\%)"):
        assert word in source
    assert source.count("{") - source.count(r"\{") == source.count("}") - source.count(r"\}")
    (line,) = [each for each in csv.DictReader(io.StringIO(as_csv(found)))
               if each["method"] == "IFCA" and each["metric"] == "accuracy (%)"]  # fmt: skip
    assert line["seeds"] == "0 1 2"
    assert [float(value) for value in line["values"].split()] == pytest.approx([50.0, 70.0, 90.0])
    assert float(line["mean"]) == found[0].rows[0].cells["micro_accuracy"].mean


class Terminal(io.StringIO):
    """What a terminal of `COLUMNS` shows."""

    def isatty(self) -> bool:
        return True


def test_table_wider_than_the_terminal_is_brief_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tables(compare(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for columns in (100, 400):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_tables(found, stream := Terminal())
        shown[columns] = stream.getvalue()
    assert "vs best" in shown[400] and "vs best" not in shown[100]
    assert "are in the report" in shown[100] and "are in the report" not in shown[400]
    assert "70.00 ± 16.33" in shown[100]


def test_problems_stand_side_by_side_in_latex(tmp_path: Path) -> None:
    paths = compare(tmp_path / "a")
    paths.append(write_run(tmp_path / "b", accuracy=[0.5] * 4, config={"data": {"name": "other"}}))
    source = latex(tables(paths))
    assert source.count(r"\begin{table}") == 3
    assert r"\multicolumn{2}{c}{digits, iid} & \multicolumn{2}{c}{other, iid}" in source


def test_group_counts_a_seed_once(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", accuracy=[0.5] * 4)
    other = write_run(tmp_path / "b", accuracy=[0.9] * 4)
    (group,) = make_groups(find_trials([one, other, one]))
    assert isinstance(group, Group) and len(group.runs) == 2
    assert group.by_repeat("micro_accuracy") == {Repeat(0, 0): 0.5}
    assert group.std("micro_accuracy") is None


def test_request_and_its_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, expected in [
        ([], mistake("missing-word", wanted="run directory")),
        (["x", "tes=t"], mistake("unknown-option", option="tes", says="'test'")),
        (["--out"], mistake("unknown-option", option="--out")),
        (["x", "test=u"], mistake("unknown-name", kind="test", name="u")),
        (["x", "figures=maybe"], mistake("unknown-choice", says="all")),
    ]:
        with expected():
            ReportRequest.parse(words)
    with refused("not-found", path=tmp_path / "none"):
        build_report(ReportRequest.parse([str(tmp_path / "none")]))
    compare(tmp_path / "runs")
    with refused("not-found", says=("6", "fedavg-0")):
        build_report(ReportRequest.parse([str(tmp_path / "runs")]))
    with refused("unknown-name", kind="row", name="cfl"):
        build_report(ReportRequest.parse([str(tmp_path / "runs/ifca-0"), "against=cfl"]))
    assert not (tmp_path / "runs/ifca-0/report").exists()
    assert ReportRequest(["a"]).folder == Path("a/report") and ReportRequest(["a", "b"]).folder == Path(
        "report"
    )
