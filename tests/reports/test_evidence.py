"""What tells methods apart: partitions and starts, paired differences, guessing, rising curves, dead parts."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from archipelago import run
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import run_experiment
from archipelago.reports.figures_results import result_figures
from archipelago.reports.groups import make_groups
from archipelago.reports.guessing import GUESSES, guessing
from archipelago.reports.health import concerns, dead_parts, fights, still_rising
from archipelago.reports.repeats import Repeat
from archipelago.reports.significance import HELD, paired_difference
from archipelago.reports.summary import write_summary
from archipelago.reports.table_text import as_csv, grid, print_tables
from archipelago.reports.tables import Table, build_tables
from archipelago.runs.files import RunFiles
from archipelago.runs.sweeps import find_trials
from tests.support.written_runs import write_run, write_sweep

FLAT = [0.5] * 20


def tables(*paths: Path, **options: object) -> list[Table]:
    return build_tables(make_groups(find_trials(paths)), **options)  # type: ignore[arg-type]


def on_partition(
    folder: Path, partition: int | None, seed: int, accuracy: float, method: str = "ifca"
) -> Path:
    config = {"partition": {"name": "iid", "seed": partition}}
    name = f"{method}-{partition}-{seed}"
    return write_run(folder / name, method=method, seed=seed, accuracy=[accuracy] * 4, config=config)


# Partitions and starts --------------------------------------------------------------------------------------


def test_spread_is_over_partitions_each_the_mean_of_its_starts(tmp_path: Path) -> None:
    values = {(0, 0): 0.4, (0, 1): 0.6, (1, 0): 0.7, (1, 1): 0.7}
    (table,) = tables(*(on_partition(tmp_path, *key, value) for key, value in values.items()))
    (row,) = table.rows  # a seed of the partition makes no problem of its own
    cell = row.cells["micro_accuracy"]
    assert row.repeats == tuple(Repeat(*key) for key in values)
    assert cell.mean == pytest.approx(60.0) and cell.std == pytest.approx(10.0)  # of 50 and 70
    assert grid(table)[1][2] == "2 x 2"
    assert "over partitions, each the mean of its starts" in table.notes[0]
    (line, _) = csv.DictReader(io.StringIO(as_csv([table])))
    assert line["seeds"] == "0 0/1 1/0 1"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([(3, 0), (3, 1)], "over starts on one partition"),
        ([(0, 5), (1, 5)], "over partitions."),
        ([(None, 0), (None, 1)], "over seeds, each with a partition and a start of its own"),
    ],
)
def test_spread_says_over_what(tmp_path: Path, keys: list[tuple[int | None, int]], words: str) -> None:
    paths = [on_partition(tmp_path, *key, 0.5 + number / 10) for number, key in enumerate(keys)]
    (table,) = tables(*paths)
    assert table.rows[0].cells["micro_accuracy"].std == pytest.approx(5.0)
    assert words in table.notes[0]


def test_paired_difference_is_over_what_both_rows_have(tmp_path: Path) -> None:
    ifca = {(0, 0): 0.5, (1, 1): 0.7, (2, 2): 0.9, (3, 3): 0.1}
    fedavg = {(0, 0): 0.4, (1, 1): 0.72, (2, 2): 0.6}
    paths = [on_partition(tmp_path, *key, value) for key, value in ifca.items()]
    paths += [on_partition(tmp_path, *key, value, "fedavg") for key, value in fedavg.items()]
    (table,) = tables(*paths, against="fedavg")
    found = {row.label: row.cells["micro_accuracy"].paired for row in table.rows}
    assert found["FedAvg"] is None  # the reference itself
    ifca_cell = found["IFCA"]
    assert ifca_cell is not None and ifca_cell.mean == pytest.approx((10 - 2 + 30) / 3)
    assert (ifca_cell.low, ifca_cell.high) == (pytest.approx(-2.0), pytest.approx(30.0))
    assert (ifca_cell.wins, ifca_cell.losses, ifca_cell.pairs) == (2, 1, 3) and not ifca_cell.told_apart
    header, *rows = grid(table)
    assert "+12.67 [-2.00, +30.00] 2/1" in [row[header.index("vs FedAvg")] for row in rows]
    (line, *_) = csv.DictReader(io.StringIO(as_csv([table])))
    assert (line["compared_with"], line["wins"], line["losses"]) == ("FedAvg", "2", "1")
    assert any(
        note.endswith("holds the true difference only 75 times in 100 of 3 pairs.") for note in table.notes
    )


def test_paired_interval_of_many_pairs_is_near_the_normal_one_and_the_same_every_time() -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    one, other = dict(enumerate(rng.normal(1.0, 1.0, 40))), dict.fromkeys(range(40), 0.0)
    found = paired_difference(one, other)
    assert found is not None and found == paired_difference(one, other)
    error = np.std(list(one.values())) / np.sqrt(40)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1)
    assert found.told_apart
    worse = paired_difference(one, other, higher_is_better=False)
    assert worse is not None and (worse.wins, worse.losses) == (found.losses, found.wins)
    assert paired_difference({0: 1.0}, {0: 0.0}) is None


@pytest.mark.parametrize("pairs", HELD)
def test_interval_of_few_pairs_holds_the_true_difference_as_often_as_tables_say(pairs: int) -> None:
    rng = np.random.Generator(np.random.PCG64(pairs))
    drawn = [paired_difference(dict(enumerate(rng.normal(size=pairs))), dict.fromkeys(range(pairs), 0.0))
             for _ in range(500)]  # fmt: skip
    held = sum(each is not None and each.low <= 0 <= each.high for each in drawn)
    assert held / 5 == pytest.approx(HELD[pairs], abs=5)


# Guessing ---------------------------------------------------------------------------------------------------

SMALL = ["clients=6", "clusters=2", "local.steps=2", "fleet.backend=in_process", "model=mlp", "rounds=3",
         "records.rounds=0", "partition=cluster_dirichlet", "partition.groups=2"]  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of CAM on skewed digits."""
    config = load_config(overrides=[*SMALL, "method=ifca+cam", "cam.warmup=0.34"])
    return run_experiment(config, tmp_path_factory.mktemp("real") / "run", quiet=True)


def test_guessing_is_what_a_constant_prediction_scores(real: Path) -> None:
    """Counted again from the samples themselves, with scikit-learn's F1."""
    from sklearn.metrics import f1_score

    from actors.node_data import shared_federation

    config = load_config(overrides=[*SMALL, "method=ifca+cam", "cam.warmup=0.34"])
    federation, _ = shared_federation(config)
    groups, y = federation.groups, np.asarray(federation.y)
    assert groups is not None
    clients = federation.clients
    sizes = np.array([len(client.train) for client in clients])
    found = guessing(RunFiles(real))
    for kind in GUESSES:
        accuracy, f1 = [], []
        for number, client in enumerate(clients):
            alike = (
                [client]
                if kind == "client"
                else [clients[j] for j in np.flatnonzero(groups == groups[number])]
            )
            seen = np.concatenate([y[other.train] for other in alike])
            guess = np.bincount(seen).argmax()
            truth = y[client.test]
            accuracy.append((truth == guess).mean())
            f1.append(f1_score(truth, np.full(len(truth), guess), average="macro", zero_division=0))
        assert found[kind]["micro_accuracy"] == pytest.approx(np.average(accuracy, weights=sizes))
        assert found[kind]["macro_macro_f1"] == pytest.approx(np.mean(f1))
        assert found[kind]["worst10_accuracy"] == pytest.approx(min(accuracy))


def test_tables_and_curves_show_what_guessing_is_worth(real: Path) -> None:
    groups = make_groups(find_trials([real]))
    (table,) = build_tables(groups)
    floor = guessing(RunFiles(real))["client"]["micro_accuracy"]
    cell = table.rows[0].cells["micro_accuracy"]
    assert cell.mean is not None and cell.lift == pytest.approx(cell.mean - 100 * floor)
    assert [row.label for row in table.guesses] == list(GUESSES.values())
    assert len(table.rows) == 1 and not table.compares  # what guesses competes with nobody
    assert grid(table)[-2][0] == GUESSES["client"] and grid(table)[-2][3] == f"{100 * floor:.2f}"
    curves = {
        figure.data["y"]: figure
        for figure in result_figures(groups, [table])
        if figure.family == "convergence"
    }
    (line,) = [one for one in curves["accuracy (%)"].data["series"] if one["name"] == GUESSES["client"]]
    assert line["y"] == [pytest.approx(100 * floor)] * 3 and line["x"] == [1, 2, 3]
    assert not any(one["name"] in GUESSES.values() for one in curves["loss"].data["series"])


def test_a_short_table_leaves_out_lift_differences_and_costs(tmp_path: Path, real: Path) -> None:
    (table,) = tables(real)
    assert "lift" in grid(table)[0] and "lift" not in grid(table, brief=True)[0]
    text = io.StringIO()
    print_tables([table], text, brief=True)
    assert GUESSES["client"] in text.getvalue() and "lift:" not in text.getvalue()
    assert "are in the report." in text.getvalue()


def test_runs_without_a_federation_or_classes_have_no_guess(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old")
    assert guessing(RunFiles(run)) == {}
    (table,) = tables(run)
    assert not table.lifts and table.guesses == []


# Rising -----------------------------------------------------------------------------------------------------


def test_rising_at_the_end_is_reported_in_points_per_ten_rounds(tmp_path: Path) -> None:
    rising = write_run(tmp_path / "a", accuracy=[0.3 + 0.01 * round for round in range(20)])
    settled = write_run(
        tmp_path / "b", accuracy=[0.1] * 10 + [0.6, 0.61, 0.6, 0.61, 0.6, 0.61, 0.6, 0.61, 0.6, 0.61]
    )
    falling = write_run(tmp_path / "c", accuracy=[0.9 - 0.01 * round for round in range(20)])
    assert [still_rising(RunFiles(path)) for path in (rising, settled, falling)] == [
        pytest.approx(10.0),
        0.0,
        0.0,
    ]
    jump = write_run(tmp_path / "d", method="ifca+finetune", accuracy=[0.5] * 17 + [0.9] * 3)
    assert still_rising(RunFiles(jump)) == 0.0  # the last evaluations are of fine-tuned models
    write_summary(rising)
    assert "Still rising at the end: +10.0 points per ten rounds" in (rising / "summary.md").read_text()
    (table,) = tables(rising)
    assert any(note.endswith("over the last fifth): IFCA +10.0.") for note in table.notes)


# Parts ------------------------------------------------------------------------------------------------------


def with_parts(folder: Path, **columns: list[float]) -> RunFiles:
    config = {"cam": {"schedule": "simultaneous"}}
    metrics = {f"part_{name}": values for name, values in columns.items()}
    return RunFiles(write_run(folder, method="ifca+cam", accuracy=FLAT, config=config, metrics=metrics))


def test_a_part_is_dead_if_its_norm_stays_below_a_third(tmp_path: Path) -> None:
    dead = with_parts(tmp_path / "a", shared_norm=[1.0] * 16 + [0.3] * 4, cluster_norm=[1.2] * 20)
    sentence = dead_parts(dead)["shared"]
    assert (
        list(dead_parts(dead)) == ["shared"]
        and sentence.startswith("The shared part is dead")
        and "0.30 of a fresh model's" in sentence
    )
    assert (
        dead_parts(with_parts(tmp_path / "b", shared_norm=[0.3] * 18 + [0.4, 0.3])) == {}
    )  # not all of the fifth
    (table,) = tables(tmp_path / "a")
    assert any(note.endswith("most frequent class): IFCA+CAM, shared part (seed 0).") for note in table.notes)


def test_a_part_is_dead_if_alone_it_is_no_better_than_the_most_frequent_class(
    real: Path, tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(real, folder)
    rows = list(csv.DictReader((folder / "metrics.csv").open(newline="")))
    for alone, dead in (("0.05", True), ("0.95", False)):
        for row in rows:
            row["part_shared_accuracy"] = alone
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        said = dead_parts(RunFiles(folder)).get("shared", "")
        assert bool(said) == dead
        assert not dead or "alone no better (5.0 %)" in said


def test_parts_that_fight_name_the_setting_to_change(tmp_path: Path) -> None:
    swings = {"shared_norm": [1.0] * 20}
    swinging = [1.0, 0.8] * 10
    run = with_parts(tmp_path / "a", **swings)
    assert fights(run) == []  # no objective was written down
    for name, objective, changed, expected in (
        ("b", swinging, [0] * 20, 1),
        ("c", swinging, [3] * 20, 0),  # clusters move: another matter
        ("d", [1 / (1 + round) for round in range(20)], [0] * 20, 0),
        ("e", [1.0, 0.999] * 10, [0] * 20, 0),  # noise of batches
        ("f", [2.0] * 10 + [0.02, 0.01] * 5, [0] * 20, 0),  # as good as converged
    ):
        metrics = {"part_shared_norm": [1.0] * 20, "federated_objective": objective, "changed": changed}
        path = write_run(tmp_path / name, method="ifca+cam", accuracy=FLAT, metrics=metrics,
                         config={"cam": {"schedule": "simultaneous"}})  # fmt: skip
        found = fights(RunFiles(path))
        assert len(found) == expected
        assert not found or "Try cam.schedule=cluster_first instead of simultaneous" in found[0]
    assert any("fight" in sentence for sentence in concerns(RunFiles(tmp_path / "b")))
    (table,) = tables(tmp_path / "b")
    assert any(
        "IFCA+CAM: try cam.schedule=cluster_first instead of simultaneous, or a smaller local.lr (seed 0)."
        in note
        for note in table.notes
    )


def test_parts_that_fight_are_seen_though_the_objective_falls(tmp_path: Path) -> None:
    """The numbers of a real run: `test_a_run_whose_parts_fight_says_so` makes them."""
    objective = [2.18, 1.83, 1.25, 0.83, 1.06, 0.75, 0.61, 0.40, 0.30, 0.25, 0.23, 0.21, 0.27, 0.28, 0.25]
    swinging = [1.0] * 7 + [0.92, 0.72, 0.94, 0.59, 0.95, 0.47, 0.94, 0.58]
    still, moving = [0] * 13 + [6, 6], [1] * 15
    settling = [1 - round / 20 for round in range(15)]
    for name, shared, changed, expected in (
        ("a", swinging, still, 1),
        ("b", swinging, moving, 0),
        ("c", settling, still, 0),
        ("d", [0.5, 0.52] * 7 + [0.5], still, 0),  # noise of batches
    ):
        metrics = {"part_shared_variance": shared, "federated_objective": objective, "changed": changed}
        path = write_run(tmp_path / name, method="ifca+cam", accuracy=FLAT[:15], metrics=metrics,
                         config={"cam": {"schedule": "simultaneous"}})  # fmt: skip
        found = fights(RunFiles(path))
        assert len(found) == expected
        assert not found or "28 % of the variance" in found[0]


@pytest.mark.full
@pytest.mark.parametrize("schedule, said", [("simultaneous", True), ("cluster_first", False)])
def test_a_run_whose_parts_fight_says_so(tmp_path: Path, schedule: str, said: bool) -> None:
    run(
        method="ifca+cam", clusters=4, clients=20, data={"name": "digits", "rotations": 4}, rounds=15,
        local={"lr": 0.05}, cam={"schedule": schedule, "warm": "base"}, fleet={"backend": "in_process"},
        storage=str(tmp_path), name="run",
    )  # fmt: skip
    sentences = (tmp_path / "run" / "summary.md").read_text()
    assert ("The parts fight" in sentences) == said
    assert bool(fights(RunFiles(tmp_path / "run"))) == said


def test_runs_of_cam_measure_their_parts(real: Path) -> None:
    rows = RunFiles(real).metrics
    assert not any(name.startswith("part_") for name in rows[0])  # the warm-up has one part
    for row in rows[1:]:
        assert row["part_cluster_variance"] + row["part_shared_variance"] == pytest.approx(1.0)
        assert row["part_shared_norm"] > 0 and 0 <= row["part_cluster_accuracy"] <= 1
    assert rows[1]["part_shared_norm"] == pytest.approx(
        1.0, abs=0.2
    )  # two rounds of two steps from a fresh model


# Chosen on validation data ----------------------------------------------------------------------------------


def test_a_sweep_that_chooses_ranks_by_validation_data_and_names_the_runner_up(tmp_path: Path) -> None:
    trials = []
    for method, test, validation in (("ifca", 0.9, 0.5), ("fedavg", 0.4, 0.8), ("fesem", 0.5, 0.7)):
        for seed in (0, 1, 2):
            value = test + (seed - 1) / 100 * (method == "fesem")
            metrics = {"validation_micro_accuracy": [validation] * 4}
            write_run(
                tmp_path / f"s/runs/{method}{seed}",
                method=method,
                seed=seed,
                accuracy=[value] * 4,
                metrics=metrics,
            )
            trials.append({"group": method, "seed": seed, "run": f"runs/{method}{seed}"})
    sweep = write_sweep(tmp_path / "s", trials, {"choose": True})
    (table,) = tables(sweep)
    ranks = {row.label: row.cells["micro_accuracy"].rank for row in table.rows}
    assert ranks == {
        "FedAvg": 1,
        "FeSEM": 2,
        "IFCA": 3,
    }  # the best on test data is the worst on validation data
    assert not any(note.startswith("One choice") for note in table.notes)
    (note,) = [note for note in table.notes if note.startswith("Chosen on validation data: FedAvg")]
    assert "accuracy (%) -10.00 [-11.00, -9.00] to the runner-up, FeSEM, 0 wins and 3 losses." in note
    plain = write_sweep(tmp_path / "s", trials)
    assert tables(plain)[0].tuned is None


def test_a_sweep_over_problems_makes_one_choice_for_all_of_them(tmp_path: Path) -> None:
    """Best by validation data in the mean, though each problem has another best; pairs of all problems count."""
    validation = {
        "iid": {"ifca": 0.9, "fedavg": 0.2, "fesem": 0.85},
        "dirichlet": {"ifca": 0.3, "fedavg": 0.9, "fesem": 0.8},
    }
    test = {"ifca": 0.5, "fedavg": 0.6, "fesem": 0.55}
    trials = []
    for partition, methods in validation.items():
        for method, value in methods.items():
            for seed in (0, 1, 2):
                name = f"{method}-{partition}-{seed}"
                bonus = 0.1 * (method == "ifca") * (partition == "iid")
                write_run(tmp_path / f"s/runs/{name}", method=method, seed=seed,
                          accuracy=[test[method] + bonus] * 4, config={"partition": {"name": partition}},
                          metrics={"validation_micro_accuracy": [value] * 4})  # fmt: skip
                trials.append({"group": f"{method} {partition}", "seed": seed, "run": f"runs/{name}"})
    found = tables(write_sweep(tmp_path / "s", trials, {"choose": True}))
    assert len(found) == 2
    said = [note for table in found for note in table.notes if note.startswith("One choice")]
    # FeSEM 82.5, IFCA 60 in the mean; on test data -5 and +5 points, three pairs each.
    assert (
        len(said) == 1 and "(82.50, the runner-up 60.00): FeSEM; on test data accuracy (%) +0.00 [" in said[0]
    )
    assert "3 wins and 3 losses: the two are not told apart." in said[0]
    assert not any(
        "One choice" in note for note in tables(tmp_path / "s", metrics=["micro_accuracy"])[0].notes
    )
