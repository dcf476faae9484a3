"""`partition.seed`: the data, its division and who is held out, apart from the seed of the start."""

from __future__ import annotations

import numpy as np

from archipelago.data import build_federation
from archipelago.data.division import Task
from archipelago.data.federation import labels_of
from archipelago.data.partition_cache import address
from tests.support.experiments import config_of, plan_of, run, session_of


def test_partition_follows_its_own_seed_and_the_start_the_other() -> None:
    given = [("seed=5", "partition.seed=3"), ("seed=3",), ("seed=5",)]
    more = ("holdout_clients=0.25", "partition=dirichlet")
    plans = [plan_of(*seeds, *more) for seeds in given]
    samples = [[client.train.tolist() for client in plan.clients] for plan in plans]
    assert samples[0] == samples[1] != samples[2]
    apart, data, start = (session_of(*seeds, *more) for seeds in given)
    assert np.array_equal(apart.server.held_out, data.server.held_out)
    models = [session.fleet.initial(1)[0] for session in (apart, start, data)]
    assert np.array_equal(models[0], models[1]) and not np.array_equal(models[0], models[2])


def test_equal_seeds_are_one_partition_and_one_address() -> None:
    settings = [config_of("partition.seed=3", "seed=9"), config_of("seed=3")]
    made = [build_federation(c.data, c.partition, c.clients, c.seed) for c in settings]
    assert made[0].fingerprint == made[1].fingerprint


def test_default_changes_no_address() -> None:
    config = config_of()
    from archipelago.data import load_dataset

    labels = labels_of(load_dataset(config.data, 0))
    task = Task(labels, config.partition, 8, 0)
    other = Task(labels, config_of("partition.seed=4").partition, 8, 0)  # the seed in force is the task's
    assert address(task) == address(other)


def test_seed_that_is_said_twice_changes_no_bit() -> None:
    plain, said = session_of("seed=2"), session_of("seed=2", "partition.seed=2")
    for one, other in zip(run(plain, 2), run(said, 2), strict=True):
        assert one.metrics["micro_loss"] == other.metrics["micro_loss"]
    assert plan_of("seed=2", "partition.seed=2").server.partition_seed == 2
