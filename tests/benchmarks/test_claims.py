"""The runs behind results/cam-claims.md and results/mixture-weights.md, on very little work."""

import numpy as np

from benchmarks import aliasing, collapse, mixtures
from benchmarks.claims import METHODS, outcome, report, with_outliers
from tests.support.experiments import plan_of

SMALL = ("rounds=2", "clients=8", "local.steps=2")


def test_outliers_are_some_clients_with_other_labels_and_nobody_else():
    plan = plan_of()
    changed, outlying = with_outliers(plan, 0.25)
    assert outlying.sum() == 2
    for client, samples in enumerate(plan.clients):
        same = np.array_equal(changed.y[samples.train], plan.y[samples.train])
        assert same is not outlying[client]


def test_seeds_change_the_models_and_not_the_federation():
    first, again, other = (outcome("outliers", "ifca", seed, *SMALL) for seed in (0, 0, 1))
    assert first == again != other


def test_report_names_every_method():
    ends = {
        method: [vars(outcome("initialisation", method, s, *SMALL)) for s in (0, 1)] for method in METHODS[:3]
    }
    text = report(
        {"seeds": 2, "settings": {"initialisation": ["rounds=2"]}, "outcomes": {"initialisation": ends}}
    )
    assert all(method in text for method in METHODS[:3])


def test_table_of_the_collapse_has_a_line_for_every_method_and_common_part(monkeypatch):
    monkeypatch.setattr(collapse, "COMMON_PARTS", (0.0, 5.0))
    lines = collapse.report(collapse.run(None, miniature=True)).splitlines()
    for method in collapse.METHODS:
        assert sum(line.startswith(f"{method}  ") for line in lines) == 2


def test_aliasing_is_all_that_the_two_sides_differ_in():
    few = ("data=digits", "data.rotations=2", "clients=4", "clusters=2", "local.steps=2")
    copies, aliased = aliasing.Loop(few, aliased=False), aliasing.Loop(few, aliased=True)
    before = [aliasing._vector(model) for model in copies.server]
    assert all(np.array_equal(a, aliasing._vector(b)) for a, b in zip(before, aliased.server, strict=True))
    copies.round(1), aliased.round(1)
    assert np.array_equal(copies.c, aliased.c)  # nobody has moved yet
    for loop, theirs in ((copies, False), (aliased, True)):
        assert {any(held is model for model in loop.server) for held in loop.held} == {theirs}
    # A client that moves to the other cluster overwrites the model that it had.
    client, old = 0, int(aliased.c[0])
    aliased.best = lambda _: 1 - old if _ == client else int(aliased.c[_])
    aliased.train = lambda *_: None
    other = aliasing._vector(aliased.server[1 - old]).copy()
    assert not np.array_equal(aliasing._vector(aliased.server[old]), other)
    aliased.round(2)
    assert np.allclose(aliasing._vector(aliased.server[old]), other)


def test_estimated_weights_are_compared_with_the_true_shares(monkeypatch):
    monkeypatch.setattr(mixtures, "SPLITS", ("10:90",))
    result = mixtures.run(1, miniature=True)
    assert [row["larger"] for row in result["rows"]] == [[0.9], [0.9]]
    lines = mixtures.report(result).splitlines()
    for method in mixtures.METHODS:
        assert sum(line.split()[:2] == ["10:90", method] for line in lines) == 1
    truth = np.array([[0.1, 0.9], [0.9, 0.1]])
    assert mixtures.error(truth[:, ::-1], truth) == (0.0, 0.9)  # whichever is called first
    assert np.allclose(mixtures.error(np.full((2, 2), 0.5), truth), (0.4, 0.5))
