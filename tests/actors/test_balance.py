"""Layouts that are balanced before every barrier, the estimate behind them, and the one move after measuring."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import rebalancing
from actors.balance import balanced, barriers, fitted, loads, lower_bound, makespan
from actors.participation import participants
from actors.rebalancing import Rebalancing, expected_costs, stage_work, upcoming
from archipelago.core.randomness import generator
from archipelago.core.settings import ParticipationSettings
from tests.support.experiments import plan_of


def dirichlet(clients: int, samples: int = 50_000) -> np.ndarray[Any, Any]:
    """Sizes of clients, the largest about a hundred times the smallest."""
    return np.maximum(10, generator(0, "sizes").dirichlet(np.ones(clients)) * samples * clients / 200).astype(
        np.int64
    )


def ifca_round(sizes: Any, K: int = 10, steps: int = 10, batch: int = 32) -> Any:
    """Forward passes of losses, training and evaluation; steps of training make clients alike, losses do not."""
    return np.stack([K * sizes, 3.0 * steps * np.minimum(sizes, batch), 0.2 * sizes])


@pytest.mark.parametrize("actors", [2, 8, 32, 128])
@pytest.mark.parametrize("clients", [200, 1000])
def test_ifca_round_is_within_a_fifth_of_what_no_layout_can_beat(clients: int, actors: int) -> None:
    costs = ifca_round(dirichlet(clients))
    assert makespan(costs, balanced(costs, actors)) <= 1.2 * lower_bound(costs, actors)
    # What a layout by training alone makes of it, at 200 clients and 32 actors.
    if (clients, actors) == (200, 32):
        assert makespan(costs, balanced(costs[1:2], actors)) > 1.4 * lower_bound(costs, actors)


def test_sum_of_stages_is_not_enough() -> None:
    """Every client costs the same in all; two train long, two have many losses to compute."""
    costs = np.array([[3.0, 3.0, 1.0, 1.0], [1.0, 1.0, 3.0, 3.0]])
    assert makespan(costs, [[0, 1], [2, 3]]) == 12.0
    assert makespan(costs, balanced(costs, 2)) == lower_bound(costs, 2) == 8.0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    clients=st.integers(1, 30),
    actors=st.integers(1, 10),
    rows=st.integers(1, 12),
)
def test_every_client_has_one_actor_and_no_actor_is_idle(
    seed: int, clients: int, actors: int, rows: int
) -> None:
    actors = min(actors, clients)
    rng = np.random.default_rng(seed)
    costs = rng.random((rows, clients)) * (rng.random((rows, clients)) < 0.5)
    layout = balanced(costs, actors)
    assert sorted(itertools.chain(*layout)) == list(range(clients))
    assert len(layout) == actors and all(layout)
    assert lower_bound(costs, actors) <= makespan(costs, layout) * (1 + 1e-9)
    assert layout == balanced(costs, actors)  # no draw in it


def best_of_all(costs: Any, actors: int) -> float:
    """By trying every layout."""
    found = np.inf
    for place in itertools.product(range(actors), repeat=costs.shape[1]):
        blocks = [[c for c, at in enumerate(place) if at == actor] for actor in range(actors)]
        found = min(found, makespan(costs, blocks)) if all(blocks) else found
    return float(found)


@pytest.mark.parametrize("seed", range(6))
def test_balanced_is_close_to_the_best_of_all_layouts(seed: int) -> None:
    costs = np.random.default_rng(seed).random((3, 7))
    best = best_of_all(costs, 3)
    assert lower_bound(costs, 3) <= best * (1 + 1e-9)
    assert makespan(costs, balanced(costs, 3)) <= 1.08 * best


@pytest.mark.parametrize(
    ("clients", "fraction", "actors", "limit"), [(200, 0.1, 32, 1.2), (1000, 0.1, 32, 1.35)]
)
def test_participants_are_spread_over_the_actors(
    clients: int, fraction: float, actors: int, limit: float
) -> None:
    """Fifty rounds that are known in advance; balanced without them, a round waits for who has several at once."""
    costs = ifca_round(dirichlet(clients))
    stages = dict(zip(("losses", "train", "evaluate"), costs, strict=True))
    chosen = ParticipationSettings(fraction=fraction)
    rounds = [participants(chosen, np.arange(clients), 0, round).ids for round in range(1, 51)]
    table = barriers(stages, rounds)
    assert table.shape == (2 * 50 + 1, clients)
    bound = lower_bound(table, actors)
    spread = makespan(table, balanced(table, actors)) / bound
    assert spread <= limit < makespan(table, balanced(costs, actors)) / bound


def test_what_clients_cost_is_found_from_what_blocks_took() -> None:
    rng = np.random.default_rng(0)
    work = rng.integers(1, 100, (2, 40)).astype(float) * (rng.random((2, 40)) < 0.7)
    layouts = [balanced(rng.random((1, 40)), 6) for _ in range(2)]
    true = np.where(work > 0, 0.5 + 0.02 * work, 0.0)
    seconds = np.stack([loads(true[[r]], layout)[0] for r, layout in enumerate(layouts)])
    usual = np.where((work > 0).any(axis=0), work.sum(axis=0) / np.maximum((work > 0).sum(axis=0), 1), np.nan)
    known = np.isfinite(usual)
    found = fitted(work, layouts, seconds)
    assert np.allclose(found[known], 0.5 + 0.02 * usual[known]) and np.isfinite(found).all()
    # Seconds that have nothing to do with the work are shared by those who took part.
    assert (fitted(work, layouts, np.ones_like(seconds)) >= 0).all()


SETTINGS = ("method=ifca", "clusters=3", "partition=quantity", "clients=24", "data.rotations=1")


def test_expected_costs_have_a_row_for_every_barrier() -> None:
    plan = plan_of(*SETTINGS)
    sizes, tests = plan.server.sizes, np.array([len(client.test) for client in plan.clients])
    assert plan.passes == 3  # IFCA computes the losses of all K models
    losses, train, evaluate = expected_costs(plan)
    assert np.array_equal(losses, 3 * sizes) and np.array_equal(evaluate, tests)
    assert np.array_equal(train, 3 * stage_work(plan)["train"])
    without = expected_costs(plan_of("method=fedavg", *SETTINGS[2:]))
    assert not without[0].any() and np.array_equal(without[1:], [train, evaluate])
    partial = plan_of(*SETTINGS, "participation.fraction=0.5", "rounds=7")
    assert len(expected_costs(partial)) == 2 * 7 + 1
    assert len(upcoming(partial, 1)) == 7 and len(upcoming(partial, 6)) == 2
    assert plan_of("ensemble=[fedavg,ifca*2]").passes == 4


def seconds_of(costs: dict[str, Any], layout: Any) -> list[dict[str, float]]:
    return [{stage: float(cost[block].sum()) for stage, cost in costs.items()} for block in layout]


def test_after_the_first_rounds_clients_move_once_to_where_the_seconds_say() -> None:
    """Losses take far longer here than was expected of them: a layout by training alone has to go."""
    plan = replace(plan_of(*SETTINGS), passes=0.0)
    sizes, work = plan.server.sizes, stage_work(plan)
    true = {"losses": 0.1 + 0.5 * sizes, "train": 0.01 * work["train"], "evaluate": 0.001 * work["evaluate"]}
    before = balanced(work["train"][None], 4)
    watching = Rebalancing(plan)
    waiting = rebalancing.WARM_UP + rebalancing.MEASURED - 1
    for round in range(1, waiting + 1):
        assert watching.measured(round, before, seconds_of(true, before)) is None and not watching.over
    found = watching.measured(waiting + 1, before, seconds_of(true, before))
    assert found is not None and watching.over
    layout, share = found
    costs = np.stack(list(true.values()))
    assert makespan(costs, layout) <= 1.1 * lower_bound(costs, 4)
    assert share == pytest.approx(makespan(costs, layout) / makespan(costs, before), rel=0.05)
    assert share < rebalancing.GAIN


def test_clients_stay_where_a_move_would_gain_little() -> None:
    plan = plan_of(*SETTINGS)
    costs = dict(zip(("losses", "train", "evaluate"), 1e-3 * expected_costs(plan), strict=True))
    layout = balanced(expected_costs(plan), 4)
    watching = Rebalancing(plan)
    for round in range(1, rebalancing.WARM_UP + rebalancing.MEASURED + 1):
        assert watching.measured(round, layout, seconds_of(costs, layout)) is None
    assert watching.over
