"""What a round may ask of a GPU, counted on the shadow device: a performance test on any laptop.

CIFAR-10's size: 250 images of 3x32x32 for a client on average, in the ragged numbers of cluster-wise Dirichlet, ten
steps of 32 and the LeNet-like network. The device's arithmetic is left out (`dry`), which changes no count.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import pytest

from benchmarks.workload import Workload
from tests.support.experiments import plan_of
from tests.support.methods import compositions
from tests.support.shadow import Counts
from tests.support.shadow_session import shadow_session

ENGINE = "stacked"


@dataclass(frozen=True)
class Budget:
    """The most that a stage may ask for in a round; copies and bytes in both directions together."""

    operations: int
    copies: int
    megabytes: float
    synchronisations: int

    def broken_by(self, found: Counts, models: int = 0) -> list[str]:
        """What is over the budget, `models` bytes of whole models aside."""
        asked = {
            "operations": (found.operations, self.operations),
            "copies": (found.copies, self.copies),
            "megabytes": ((found.bytes - models) / 1e6, self.megabytes),
            "synchronisations": (found.synchronisations, self.synchronisations),
        }
        return [f"{name}: {value:g} > {most:g}" for name, (value, most) in asked.items() if value > most]


TRAIN = Budget(operations=2_000, copies=10, megabytes=5.0, synchronisations=3)
LOSSES = Budget(operations=1_500, copies=10, megabytes=5.0, synchronisations=2)
EVALUATE = Budget(operations=500, copies=5, megabytes=1.0, synchronisations=2)


@dataclass(frozen=True)
class Round:
    """A round's counts by stage, and the bytes of whole models among them."""

    counts: dict[str, Counts]
    models: dict[str, int]
    lines: dict[str, str]  # tables by line, for whoever has to mend a broken budget


@lru_cache(maxsize=8)
def second_round(
    engine: str,
    method: str,
    clients: int,
    determinism: str = "seeded",
    dry: bool = True,
    samples: int = 250,
    steps: int = 10,
) -> Round:
    """Of an experiment in full swing: momenta are there, models come from a round before.

    `determinism=exact` fixes the number of clients in a chunk, so that there its operations grow with the clients.
    """
    workload = Workload(ragged=True, clients=clients, samples=samples)
    plan = workload.plan(
        f"method={method}", "clusters=10", f"local.engine={engine}", "fleet.backend=in_process", "evaluation.every=1",
        f"local.steps={steps}",
    )  # fmt: skip
    plan = dataclasses.replace(plan, block=dataclasses.replace(plan.block, determinism=determinism))
    with shadow_session(plan, dry=dry) as shadow:
        shadow.run_round(1)
        first = len(shadow.device.copies)
        counts = shadow.run_round(2) | shadow.all_losses(10)
        assert not shadow.device.mixed, [str(each) for each in shadow.device.mixed]
        assert shadow.reports[-1].metrics["participants"] == clients
        models = {stage: shadow.model_bytes(stage, first) for stage in counts}
        return Round(counts, models, {stage: shadow.device.table(stage) for stage in counts})


def check(budget: Budget, stage: str, found: Round, *, models_excepted: bool = False) -> None:
    broken = budget.broken_by(found.counts[stage], found.models[stage] if models_excepted else 0)
    assert not broken, f"{stage}: {', '.join(broken)}; both rounds by line:\n{found.lines[stage]}"


@pytest.mark.parametrize("clients", [24, 200])
def test_device_budget_of_training(clients):
    check(TRAIN, "train", second_round(ENGINE, "ifca", clients))


@pytest.mark.parametrize("stage", ["best", "losses"])
@pytest.mark.parametrize("clients", [24, 200])
def test_device_budget_of_losses_under_ten_models(clients, stage):
    """All of them, and the assignment, which needs to know the least."""
    check(LOSSES, stage, second_round(ENGINE, "ifca", clients), models_excepted=True)


@pytest.mark.parametrize("clients", [24, 200])
def test_device_budget_of_evaluation(clients):
    # Ten cluster models of CIFAR-10's size are 2.5 MB, which have to get there once.
    check(EVALUATE, "evaluate", second_round(ENGINE, "ifca", clients), models_excepted=True)


@pytest.mark.full
def test_device_budget_is_counted_the_same_with_the_arithmetic():
    with_it, without = (second_round(ENGINE, "fedavg", 10, "seeded", dry, 20).counts for dry in (False, True))
    assert with_it == without


def test_device_budget_of_evaluation_includes_a_single_model():
    check(EVALUATE, "evaluate", second_round(ENGINE, "fedavg", 24))


def test_device_budget_does_not_grow_with_the_number_of_clients():
    """At their true size: everybody's samples still fit one forward pass."""
    few, many = (second_round(ENGINE, "ifca", clients).counts for clients in (100, 200))
    for stage in ("train", "best", "losses", "evaluate"):
        for what in ("operations", "copies", "synchronisations"):
            a, b = getattr(few[stage], what), getattr(many[stage], what)
            assert abs(a - b) <= 0.1 * max(a, b), f"{stage}, {what}: {a} at 100 clients, {b} at 200"


def test_device_budget_of_training_holds_in_the_exact_tier_within_a_chunk():
    check(TRAIN, "train", second_round(ENGINE, "ifca", 24, "exact"))


def test_device_budget_is_broken_by_one_client_after_the_other():
    """The budgets mean something: `loop` breaks each of them, with operations that grow with the clients."""
    clients, steps = 24, 3
    found = second_round("loop", "ifca", clients, samples=20, steps=steps)
    for budget, stage in ((TRAIN, "train"), (LOSSES, "losses"), (EVALUATE, "evaluate")):
        broken = budget.broken_by(found.counts[stage], found.models[stage])
        assert {each.partition(":")[0] for each in broken} >= {"operations", "copies", "synchronisations"}, (
            stage
        )
    assert found.counts["train"].operations > 30 * clients * steps


# --- every tensor where it belongs ------------------------------------------------------------------------

MORE = (  # what methods do not ask for by themselves
    "evaluation.clusterability=true",
    "partition.validation=0.2",
    "evaluation.train=true",
    "participation.stragglers=0.5",
    "local.momentum=0.9",
)


# What `loop` does of a method is the method's own and the same requests; the other engine's batches are not.
ENGINES = [ENGINE, pytest.param("loop", marks=pytest.mark.full)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", compositions())
def test_every_method_keeps_its_tensors_on_the_device(method, engine):
    with shadow_session(plan_of(f"method={method}", f"local.engine={engine}", *MORE)) as shadow:
        assert getattr(shadow.session.fleet.blocks[0], "batched", False) == (engine == ENGINE)
        counts = [shadow.run_round(round) for round in (1, 2)]
    assert not shadow.device.mixed, [str(each) for each in shadow.device.mixed[:5]]
    assert any(each.get("train", Counts()).operations or each["gradients"].operations for each in counts)


@pytest.mark.parametrize("engine", [ENGINE, "loop"])
@pytest.mark.parametrize(
    "settings",
    [
        ("model=cnn_fashion", "local.optimizer=adam"),
        ("ensemble=[fedavg,ifca]", "combine=vote"),
        ("records.rounds=2", "rounds=2", "method=ifca"),
        (
            "data=synthetic",
            "method=fedsoft",
            "data.rotations=1",
            "data.sources=2",
            "data.samples=1200",
            "partition=mixture",
            "model=linear",
        ),
    ],
    ids=lambda settings: settings[0],
)
def test_other_models_data_and_predictions_keep_their_tensors_on_the_device(settings, engine):
    with shadow_session(plan_of(f"local.engine={engine}", *settings)) as shadow:
        assert getattr(shadow.session.fleet.blocks[0], "batched", False) == (engine == ENGINE)
        for round in (1, 2):
            shadow.run_round(round)
    assert not shadow.device.mixed, [str(each) for each in shadow.device.mixed[:5]]
    assert shadow.device.counts.operations
