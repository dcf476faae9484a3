"""What a node keeps for the trials of a sweep, without Ray: the same bits as a run that loads its own data."""

from __future__ import annotations

import dis
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.node_data import NodeData, NodeFederations, shared_federation
from archipelago.data import DATASETS, build_federation, use_arrays
from archipelago.experiments.config import load_config
from archipelago.experiments.plan import make_plan
from tests.support.errors import refused
from tests.support.settings import data_settings, partition_settings

ROOM = 10**9


def asked(seed: int, partition: str = "iid", **data: Any) -> tuple[Any, ...]:
    return data_settings(**data), partition_settings(name=partition, alpha=1.0), 8, seed


def test_one_loading_serves_every_seed_and_partition() -> None:
    node = NodeFederations(ROOM)
    given = [node.get(*asked(seed, name)) for name in ("iid", "dirichlet") for seed in range(20)]
    again = [node.get(*asked(seed, name)) for name in ("iid", "dirichlet") for seed in range(20)]
    loaded, built = node.about()
    assert (len(loaded), len(built)) == (1, 40)
    assert all(x is given[0][1] and y is given[0][2] for _, x, y in given)
    assert all(one[0] is other[0] for one, other in zip(given, again, strict=True))


def test_shifted_samples_are_copies_and_the_data_set_stays_as_it_is() -> None:
    node = NodeFederations(ROOM)
    _, plain, labels = node.get(*asked(0))
    before = plain.tobytes(), labels.tobytes()
    _, turned, _ = node.get(*asked(0, rotations=4))
    _, _, swapped = node.get(*asked(0, label_swaps=2))
    assert len(node.loaded) == 1 and (plain.tobytes(), labels.tobytes()) == before
    assert turned.tobytes() != before[0] and swapped.tobytes() != before[1]


def test_samples_that_depend_on_the_seed_are_loaded_for_each() -> None:
    node = NodeFederations(ROOM)
    first, second = (node.get(*asked(seed, name="synthetic", samples=400)) for seed in (0, 1))
    assert len(node.loaded) == 2 and first[1].tobytes() != second[1].tobytes()


@pytest.mark.parametrize("name", [name for name in DATASETS if not DATASETS.find(name).seeded])
def test_data_set_for_all_seeds_does_not_look_at_the_seed(name: str) -> None:
    code = DATASETS.find(name).load.__code__  # type: ignore[attr-defined]  # all of them are functions
    used = {word for step in dis.get_instructions(code) for word in np.ravel(np.array(step.argval, object))}
    assert code.co_varnames[2] == "seed" and "seed" not in used


@pytest.mark.parametrize("data", [{}, {"rotations": 4}, {"name": "synthetic", "samples": 400}])
def test_what_is_shared_has_the_bits_of_what_is_built(data: dict[str, Any]) -> None:
    config = replace(
        load_config(None, []),
        data=data_settings(**data),
        clients=8,
        seed=3,
        partition=partition_settings(validation=0.2),
    )
    shared, references = shared_federation(config)
    own = build_federation(config.data, config.partition, config.clients, config.seed)
    assert references is None
    assert (shared.x.tobytes(), shared.y.tobytes()) == (own.x.tobytes(), own.y.tobytes())
    assert shared.fingerprint == own.fingerprint and shared.address == own.address
    assert not shared.x.flags.writeable and not shared.y.flags.writeable
    for left, right in zip(shared.clients, own.clients, strict=True):
        assert (left.train == right.train).all() and (left.validation == right.validation).all()


def test_what_there_is_no_room_for_is_the_longest_unused() -> None:
    one = data_settings(), data_settings(test_fraction=0.5)
    size = sum(array.nbytes for array in NodeFederations(ROOM).get(*asked(0))[1:])
    node = NodeFederations(int(1.5 * size))  # enough for one data set, and for one that is shifted
    node.get(*asked(0))
    node.get(one[1], *asked(0)[1:])
    node.get(*asked(0))
    assert len(node.loaded) == 3  # each displaced the other
    node.get(*asked(0, rotations=4)), node.get(*asked(1, rotations=4)), node.get(*asked(1, rotations=4))
    assert len(node.loaded) == 3 and len(node.built) == 5
    node.get(*asked(0, rotations=4))
    assert len(node.loaded) == 3 and len(node.built) == 6


def test_arrays_that_replace_others_are_loaded() -> None:
    node, y = NodeFederations(ROOM), np.arange(40) % 2
    try:
        for value in (1, 2, 2):
            use_arrays("replaced", (np.full((40, 3), value, np.uint8), y))
            assert (node.get(*asked(0, name="replaced"))[1] == value).all()
    finally:
        DATASETS.remove("replaced")
    assert (len(node.loaded), len(node.built)) == (2, 2)


def test_run_sends_pixels_as_bytes_and_copies_nothing() -> None:
    config = load_config(None, ["clients=4", "clusters=2", "data.rotations=2"])
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    plan = make_plan(config, federation)
    assert plan.x is federation.x and plan.y is federation.y  # what RaySession puts into the object store
    assert plan.x.dtype == np.uint8 and plan.x.shape == (1797, 1, 8, 8)


@pytest.mark.ray
def test_node_keeps_pixels_as_bytes_in_the_object_store(ray_cluster: Path) -> None:
    import ray

    node = NodeData(ROOM)
    x = ray.get(node.get(*asked(0))[1])
    assert x.dtype == np.uint8 and x.nbytes == 1797 * 64
    assert not x.flags.writeable and not x.flags.owndata  # read where it is, not copied


def test_wrong_partition_is_reported_before_anything_is_loaded() -> None:
    node = NodeFederations(ROOM)
    with refused("unknown-name", name="nonsense"):
        node.get(*asked(0, "nonsense"))
    assert node.loaded == []
