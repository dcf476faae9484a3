"""Rows of the committed table are runs again: nothing is lost on the way, and what is declared today decides."""

import csv
import io
from dataclasses import replace

import pytest

from archipelago.strategies.expectations import Known
from benchmarks.behaviour import grid, recorded
from benchmarks.behaviour.cells import Cell, registered
from benchmarks.behaviour.checks import AMBER, NONE, RED, Run, findings, verdict
from benchmarks.behaviour.page import Result, page, table
from benchmarks.behaviour.situations import settings

GROUPS = [0, 1] * 10
GOOD = {
    "accuracy": [0.5, 0.7, *[0.9] * 8], "sizes": [50] * 20, "assignment": GROUPS, "groups": GROUPS, "parts": [],
    "changed": [0] * 10, "participants": [20] * 10, "dropped": [0] * 10, "federated_objective": [0.1] * 10,
    "down": [2.0] * 10, "up": [1.0] * 10, "gradients": [1000] * 10, "seconds": 0.5,
}  # fmt: skip
# By what is wrong: the method, the situation, and what else its run has.
WRONG = {
    "accuracy": ("ifca", "rotations", {"accuracy": [0.5, 0.6, *[0.8] * 8]}),
    "splits": ("cfl", "iid", {"groups": None, "assignment": [0, 1, 2, 0] * 5}),
    "groups": ("ifca", "rotations", {"assignment": [0] * 10 + [1] * 10}),
    "no clusters": ("cfl", "rotations", {"assignment": None}),
    "homogeneity": ("ifca", "twice_clusters", {"assignment": [0, 1, 2, 3, 3] * 4, "down": [4.0] * 10}),
    "idle part": ("ifca+cam", "rotations", {"parts": [{"changed": 0.0, "moved": 1.0, "age": 9}] * 2}),
    "untrained part": ("ifca+cam", "rotations", {"parts": [{"changed": 2.0, "moved": 0.0, "age": 9}]}),
    "falls": ("ifca", "rotations", {"accuracy": [0.9] * 7 + [0.6, 0.9, 0.7]}),
    "churn": ("ifca", "rotations", {"changed": [10] * 10}),
    "not finite": ("ifca", "rotations", {"dropped": [3] * 10}),
    "stands": ("ifca", "rotations", {"accuracy": [0.6] * 10, "federated_objective": [2.0] * 10}),
    "nobody trains": ("ifca", "rotations", {"accuracy": [0.6] * 10, "federated_objective": [None] * 10}),
    "cost": ("ifca", "rotations", {"down": [9.0] * 10, "up": [3.5] * 10}),
}


def made(method, situation, **more):
    return Run(situation, {**GOOD, **more}, GOOD, grid.expectations(method))


@pytest.fixture(scope="module", autouse=True)
def methods():
    registered()


def again(result, tmp_path):
    path = tmp_path / "behaviour.csv"
    path.write_text(table(result))
    return recorded.beside(Result({}, {}, 0.0, "of today"), path), path


@pytest.mark.parametrize("name", WRONG)
def test_recorded_rows_have_the_verdict_and_the_numbers_of_their_runs(name, tmp_path):
    method, situation, more = WRONG[name]
    run = made(method, situation, **more)
    assert any(not found.ok for found in findings(run)), "the run must miss what it is here for"
    result = Result({(method, situation): [run]}, {(method, situation): [4]}, 0.5, "1a2b3c4d5e")
    read, _ = again(result, tmp_path)
    (back,), wanted = read.runs[method, situation], verdict([run])
    found = verdict([back])
    assert (found.state, found.margin) == (wanted.state, pytest.approx(wanted.margin, abs=1e-4))
    assert read.seeds == result.seeds and list(found.missed) == list(wanted.missed)
    for check, misses in wanted.missed.items():
        beside = {miss.text: miss for miss in found.missed[check]}
        assert set(beside) == {miss.text for miss in misses}
        for miss in misses:
            assert beside[miss.text].value == pytest.approx(miss.value, abs=0.006), miss.text
            assert beside[miss.text].known == miss.known
    # Writing it once more changes no byte: the commit stays that of the run.
    assert table(replace(read, code="another")) == table(result)


def test_recorded_rows_are_held_to_what_is_declared_today(tmp_path):
    method, situation, more = WRONG["churn"]
    result = Result(
        {(method, situation): [made(method, situation, **more)]}, {(method, situation): [0]}, 0.5, "1a"
    )
    read, _ = again(result, tmp_path)
    (back,) = read.runs[method, situation]
    assert verdict([back]).state == RED
    for limit, state in ((0.6, AMBER), (0.4, RED)):
        known = Known("oscillation", "rotations", "it is known", limit)
        expects = replace(back.expects, known=(known,))
        assert verdict([replace(back, expects=expects)]).state == state


def test_recorded_rows_that_were_refused_or_broke_stay_so(tmp_path):
    refused = Run(
        "one_cluster", {"refused": "there are two groups", "seconds": 0.1}, GOOD, grid.expectations("oracle")
    )
    failed = Run("iid", {"failed": "ValueError: no", "seconds": 0.1}, GOOD, grid.expectations("ifca"))
    runs = {("oracle", "one_cluster"): [refused], ("ifca", "iid"): [failed]}
    read, _ = again(Result(runs, {key: [0] for key in runs}, 0.2, "1a"), tmp_path)
    found = read.verdicts()
    assert {key: (each.state, each.note) for key, each in found.items()} == {
        ("oracle", "one_cluster"): (NONE, "there are two groups"), ("ifca", "iid"): (RED, "ValueError: no"),
    }  # fmt: skip


def test_recorded_rows_stay_beside_what_is_run_anew_and_the_page_says_of_which_commits(tmp_path):
    keys = [("fedavg", "rotations"), ("ifca", "rotations"), ("ifca", "iid"), ("cfl", "iid")]
    old = {key: [made(*key), made(*key, accuracy=[0.8] * 10)] for key in keys}
    path = tmp_path / "behaviour.csv"
    text = table(Result(old, {key: [0, 1] for key in keys}, 1.0, "aaaaaaaaaa"))
    path.write_text(text.replace("cfl,", "gone,"))
    new = {keys[1]: [made(*keys[1], accuracy=[0.95] * 10)]}
    found = recorded.beside(Result(new, {keys[1]: [0]}, 0.5, "bbbbbbbbbb"), path)
    assert found.runs[keys[1]] == new[keys[1]] and found.seeds[keys[1]] == [0], (
        "its second seed is of other code"
    )
    assert found.seeds[keys[0]] == [0, 1] and ("gone", "iid") not in found.runs
    assert "4 of aaaaaaaaaa, 1 of bbbbbbbbbb" in page(found)
    rows = list(csv.DictReader(io.StringIO(table(found))))
    assert {(row["method"], row["situation"]): row["commit"] for row in rows} == {
        keys[0]: "aaaaaaaaaa", keys[1]: "bbbbbbbbbb", keys[2]: "aaaaaaaaaa",
    }  # fmt: skip


def test_recorded_text_that_no_check_writes_is_an_error():
    with pytest.raises(ValueError, match="TEXTS"):
        recorded.finding("is not as it should be", {})


def test_every_row_of_the_committed_table_is_understood():
    for row in recorded.rows(grid.ROOT / "results" / "behaviour.csv").values():
        recorded.run_of(row)
        found = recorded.Recorded(row["situation"], {}, {}, grid.expectations("fedavg"), row)
        if row["final_accuracy"]:
            assert all(not each.ok and each.text for each in found.found()), row


def test_grid_stops_when_its_minutes_are_over_and_goes_on_from_there(tmp_path):
    cells = grid.whole(["fedavg", "ifca"], ["iid", "rotations"], (0,))
    said = []
    found = grid.facts_of(cells, grid.Kept(tmp_path / "cells.jsonl"), say=said.append, minutes=0)
    assert list(found) == cells[:1] and "3 runs are left" in said[-1]
    grid.facts_of(cells, grid.Kept(tmp_path / "cells.jsonl"), say=said.append, minutes=0)
    assert "1 of them known already, the others in 3 runs" in "".join(said)


def test_cells_that_differ_by_what_a_method_does_not_read_are_one_run():
    at = {method: {grid.identity(Cell(method, situation, 0)) for situation in ("rotations", "one_cluster")}
          for method in ("fedavg", "scaffold", "ifca", "fedem")}  # fmt: skip
    assert {method: len(each) for method, each in at.items()} == {
        "fedavg": 1,
        "scaffold": 1,
        "ifca": 2,
        "fedem": 2,
    }
    assert not any(setting.startswith("clusters=") for setting in settings("fedavg", "one_cluster", 0))
