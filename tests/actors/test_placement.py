"""Placement arithmetic: how many actors, which clients where, and the sentence when the cluster is too small."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.placement import actor_count, capacity, fits, layout
from archipelago.core.settings import FleetSettings
from tests.support.errors import refused

LAPTOP = {"CPU": 8.0}
GPU_NODE = {"CPU": 16.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("node", "cpus", "gpus", "expected"),
    [
        (LAPTOP, 1, 0, 8),
        (LAPTOP, 3, 0, 2),
        (LAPTOP, 0.5, 0, 16),
        (LAPTOP, 0.1, 0, 80),  # 8 / 0.1 is 79.99999999999999 in floating point
        (LAPTOP, 16, 0, 0),
        (LAPTOP, 1, 0.5, 0),
        (GPU_NODE, 1, 1, 2),
        (GPU_NODE, 1, 0.5, 4),
        (GPU_NODE, 1, 0.4, 4),  # two on each device: a share never spans two devices
        (GPU_NODE, 1, 0.34, 4),
        (GPU_NODE, 1, 1 / 3, 6),
        (GPU_NODE, 1, 0.1, 16),  # 20 shares, but 16 CPUs
        (GPU_NODE, 1, 0.6, 2),
        (GPU_NODE, 1, 2, 1),
        (GPU_NODE, 8, 0.25, 2),
        ({"GPU": 2.0}, 1, 0.5, 0),
        ({"CPU": 4.0, "GPU": 1.5}, 1, 0.5, 2),  # what is left of a device may be less than a share of one
        ({}, 1, 0, 0),
    ],
)
def test_how_many_fit_on_a_node(node: dict[str, float], cpus: float, gpus: float, expected: int) -> None:
    assert fits(node, cpus, gpus) == expected


def test_cluster_holds_what_its_nodes_hold() -> None:
    # 3 CPUs each: neither node holds the two that 6 CPUs together would promise.
    nodes = [{"CPU": 3.0}, {"CPU": 3.0}]
    assert capacity(nodes, FleetSettings(cpus=2.0, gpus=0.0)) == 2
    assert capacity([*nodes, GPU_NODE], FleetSettings(cpus=2.0, gpus=0.0)) == 10
    assert capacity([*nodes, GPU_NODE], FleetSettings(gpus=0.25)) == 8
    assert capacity([], FleetSettings(gpus=0.0)) == 0


def test_how_many_are_started() -> None:
    nodes = [LAPTOP]
    assert actor_count(FleetSettings(gpus=0.0), 20, nodes) == 8
    assert actor_count(FleetSettings(gpus=0.0), 3, nodes) == 3  # never more than clients
    assert actor_count(FleetSettings(actors=5, gpus=0.0), 20, nodes) == 5
    assert actor_count(FleetSettings(actors=5, gpus=0.0), 3, nodes) == 3
    assert actor_count(FleetSettings(clients_per_actor=1, gpus=0.0), 8, nodes) == 8
    assert actor_count(FleetSettings(clients_per_actor=3, gpus=0.0), 20, nodes) == 7


def test_after_a_loss_what_is_left_is_taken() -> None:
    left = [{"CPU": 2.0}]
    assert actor_count(FleetSettings(actors=5, gpus=0.0), 20, left, shrink=True) == 2
    assert actor_count(FleetSettings(clients_per_actor=1, gpus=0.0), 20, left, shrink=True) == 2
    assert actor_count(FleetSettings(actors=1, gpus=0.0), 20, left, shrink=True) == 1
    with refused("capacity", wanted=1, capacity=0):
        actor_count(FleetSettings(gpus=0.0), 20, [], shrink=True)


@pytest.mark.parametrize(
    ("fleet", "nodes", "wanted", "capacity", "remedy"),
    [
        (FleetSettings(actors=9, gpus=0.0), [LAPTOP], 9, 8, "fleet.actors=8"),
        (FleetSettings(actors=1, gpus=0.5), [LAPTOP], 1, 0, "fleet.gpus=0"),
        (FleetSettings(actors=6, gpus=0.4), [GPU_NODE, {"CPU": 1.0}], 6, 4, "fleet.actors=4"),
        (FleetSettings(cpus=32.0, gpus=0.0), [GPU_NODE], 1, 0, "fleet.cpus"),
    ],
)
def test_actor_count_refuses_what_does_not_fit_and_names_the_remedy(
    fleet: FleetSettings, nodes: list[dict[str, float]], wanted: int, capacity: int, remedy: str
) -> None:
    with refused("capacity", wanted=wanted, capacity=capacity) as caught:
        actor_count(fleet, 20, nodes)
    assert remedy in str(caught.value)


def test_blocks_of_a_fixed_number_are_in_order() -> None:
    assert layout(np.ones(4), 4, clients_per_actor=1) == [[0], [1], [2], [3]]
    assert layout(np.array([9.0, 1, 1, 1, 1]), 2, clients_per_actor=3) == [[0, 1, 2], [3, 4]]


def test_blocks_of_a_fixed_number_that_no_longer_fit_are_balanced_by_cost() -> None:
    assert layout(np.array([9.0, 1, 1, 1, 1]), 2, clients_per_actor=1) == [[0], [1, 2, 3, 4]]


@given(
    costs=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40),
    actors=st.integers(1, 12),
)
def test_every_client_sits_in_one_block_and_no_block_is_empty_or_far_too_heavy(
    costs: list[float], actors: int
) -> None:
    actors = min(actors, len(costs))
    blocks = layout(np.array(costs), actors)
    assert sorted(itertools.chain(*blocks)) == list(range(len(costs)))
    assert len(blocks) == actors and all(blocks)
    # Whoever made the heaviest block heaviest was put where the load was at most the mean of all the others.
    heaviest = max(sum(costs[client] for client in block) for block in blocks)
    assert heaviest <= (sum(costs) + (actors - 1) * max(costs)) / actors * (1 + 1e-9)
