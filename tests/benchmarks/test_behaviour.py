"""The suite of behaviour: it notices methods that misbehave, keeps what it has run, and shows what it found."""

import csv
import io

import pytest

from archipelago.strategies import ADDONS, METHODS
from archipelago.strategies.expectations import Expectations, Known
from benchmarks.behaviour import collected, grid
from benchmarks.behaviour.cells import Cell, registered
from benchmarks.behaviour.checks import AMBER, GREEN, RED, Run, verdict
from benchmarks.behaviour.page import cell_text, page, table

CELLS = [
    Cell("fedavg", "iid", 0),
    Cell("dead_part", "iid", 0),
    Cell("splits_at_random", "iid", 0),
    Cell("ifca+cam", "rotations", 0),
    Cell("fedavg", "rotations", 0),
]


REDUCED = grid.reduced()  # before any other methods are registered
OURS = frozenset(METHODS)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    from tests.support import misbehaving  # registers its methods

    kept = grid.Kept(tmp_path_factory.mktemp("behaviour") / "cells.jsonl")
    names = registered()
    assert {"splits_at_random", "dead_part", "splits_at_random+cam"} <= set(names), (
        "third parties' are taken too"
    )
    yield grid.facts_of(CELLS, kept), kept
    for name in ("splits_at_random", "dead_part"):
        METHODS.remove(name)
    assert misbehaving


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    kept = grid.Kept(tmp_path_factory.mktemp("reduced") / "cells.jsonl")
    return grid.facts_of(grid.with_baselines(REDUCED), kept)


def run_of(facts, cell):
    return Run(cell.situation, facts[cell], facts[grid.baseline(cell)], grid.expectations(cell.method))


def test_method_that_splits_clients_at_random_is_red(facts):
    found = verdict([run_of(facts[0], CELLS[2])])
    assert found.state == RED and "splits" in found.missed


def test_model_of_a_sum_that_is_never_trained_is_red(facts):
    found = verdict([run_of(facts[0], CELLS[1])])
    assert found.state == RED and "parts" in found.missed
    assert not verdict([run_of(facts[0], CELLS[3])]).missed.get("parts"), "both models of this sum learn"


def test_baseline_is_as_expected(facts):
    assert verdict([run_of(facts[0], CELLS[0])]).state == GREEN


def test_no_method_of_the_reduced_grid_is_red(reduced):
    """`make check-all` runs the whole."""
    verdicts = collected(REDUCED, reduced).verdicts()
    assert {where: each.missed for where, each in verdicts.items() if each.state == RED} == {}
    # What these are known for is elsewhere: here they have to be as expected without a reason.
    for method in ("fedavg", "ifca", "fesem", "wecfl", "cfl"):
        assert verdicts[method, "rotations"].state == GREEN, method
    assert verdicts["cfl", "iid"].state == GREEN


def test_reduced_grid_has_every_base_but_dear_ones_and_every_addon():
    methods = {cell.method for cell in REDUCED}
    assert set(ADDONS) <= {part for method in methods for part in method.split("+")[1:]}
    assert set(grid.DEAR) <= OURS and OURS - set(grid.DEAR) <= methods


def test_reason_that_is_declared_turns_red_into_amber_up_to_its_limit(facts):
    run = run_of(facts[0], CELLS[2])
    for limit, state in ((4.0, AMBER), (1.0, RED)):
        expects = Expectations(splits_iid=False, below_fedavg=1.0, falls_back=1.0,
                               known=(Known("splits", "iid", "it is broken", limit),))  # fmt: skip
        assert verdict([Run(run.situation, run.facts, run.baseline, expects)]).state == state


def test_reason_for_bases_that_begin_with_one_cluster_is_none_for_others():
    excuses = {
        method: grid.expectations(method).excuse("groups", "rotations") for method in ("cfl+cam", "fesem+cam")
    }
    assert excuses["cfl+cam"] is not None and excuses["cfl+cam"].grows and excuses["fesem+cam"] is None


def test_reason_needs_words_and_known_names():
    for wrong in (("groups", "iid", ""), ("group", "iid", "why"), ("groups", "iit", "why")):
        with pytest.raises(ValueError, match="expected"):
            Known(*wrong, limit=0.1)


def test_finished_cells_are_kept_and_a_cut_line_is_forgotten(facts, monkeypatch):
    _, kept = facts
    with kept.path.open("a") as file:
        file.write('["half a li')
    monkeypatch.setattr(grid, "run_cell", lambda cell: pytest.fail(f"{cell} was run again"))
    again = grid.facts_of(CELLS, grid.Kept(kept.path))
    assert again == facts[0]


def test_page_and_the_table_show_every_cell(facts):
    result = collected(CELLS, facts[0])
    text = page(result)
    for (method, _), found in result.verdicts().items():
        assert f"`{method}`" in text and cell_text(found) in text
    rows = list(csv.DictReader(io.StringIO(table(result))))
    assert len(rows) == len(CELLS)
    assert "alike" in next(row["missed"] for row in rows if row["method"] == "splits_at_random")


@pytest.mark.full
def test_femam_finds_rotations_with_its_defaults_and_keeps_up_with_fesem_where_few_take_part(tmp_path):
    """All four clustered levels, patience and personal models; the same three times as long where 20% take part."""
    rotations = grid.whole(["femam"], ["rotations"])
    few = grid.whole(["femam", "fesem"], ["participation"])
    made = grid.facts_of(grid.with_baselines([*rotations, *few]), grid.Kept(tmp_path / "cells.jsonl"))
    assert verdict([run_of((made,), cell) for cell in rotations]).state == GREEN
    final = {cell: run_of((made,), cell).final() for cell in few}
    for cell in few[::2]:
        beside = next(other for other in few[1::2] if other.seed == cell.seed)
        assert final[cell] >= final[beside] - 0.02, cell
