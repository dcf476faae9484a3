"""The best of K models: the answer of all K losses, bit by bit, for fewer forward passes."""

import numpy as np
import pytest
from torch import nn

from actors.best import Search, best_of_all
from actors.block import ClientBlock
from archipelago.core.settings import ModelSettings
from archipelago.strategies.base import lowest
from archipelago.strategies.references import Models
from lightning_modules.base import FederatedModule
from tests.support.experiments import outcome, run, session_of
from tests.support.scalar import scalar_fleet

SIX = ("clients=6", "model=mlp", "model.hidden=[16]")


@pytest.fixture(autouse=True)
def worth(monkeypatch):
    """These networks are so small that a search would not bother."""
    monkeypatch.setattr(Search, "worth", 0.0)


def all_losses(monkeypatch):
    def best(self, request, *arrays):
        sizes = np.array([len(self.clients[client].train) for client in request.clients])
        return best_of_all(self.losses(request, *arrays), sizes)

    monkeypatch.setattr(ClientBlock, "best", best)


def share(fleet):
    return fleet.seconds["share_best"]


def trained_models(session, count):
    """Models as different as those of clusters: each trained by one client alone, for a while."""
    fleet = session.fleet
    values = fleet.initial(count).values
    for step in range(8):
        fleet.begin(step + 1)
        made = fleet.train(start=Models(values.copy())[np.arange(count)], slot="alone")
        values = made.gather()
    return values


def assert_same(fleet, models, **given):
    losses = fleet.losses(models, on_top_of=given.get("on_top_of"))
    chosen, loss = fleet.best(models, **given)
    assert chosen.tolist() == lowest(losses).tolist()
    assert loss.tobytes() == losses[np.arange(len(chosen)), chosen].tobytes()


def test_best_is_the_lowest_of_all_losses_bit_by_bit_however_close_they_are():
    session = session_of(*SIX, "data.rotations=2", "local.lr=0.2", "local.steps=10")
    values, rng = trained_models(session, 6), np.random.default_rng(0)
    fleet = session.fleet
    last, shares = None, []
    for number in range(1, 25):
        fleet.begin(number)
        noise = rng.choice([0.0, 1e-8, 1e-6, 1e-3, 0.1], size=(6, 1))
        models = values[rng.permutation(6) if number % 5 == 0 else np.arange(6)]
        models = models + np.float32(noise * rng.standard_normal(models.shape))
        if number % 3 == 0:
            models[rng.integers(6)] = models[rng.integers(6)]  # ties
        models = Models(models.astype(np.float32))
        under = values[rng.integers(6)].copy() if number % 4 == 0 else None
        first = None if last is None or number % 6 == 0 else np.where(rng.random(6) < 0.3, 5, last)
        assert_same(fleet, models, on_top_of=under, first=first)
        last = lowest(fleet.losses(models))
        shares.append(share(fleet))
    assert min(shares) < 0.4  # trials happened


@pytest.mark.parametrize("method", ["ifca", "ifca+cam", "fesem", "fesem+cam"])
@pytest.mark.parametrize("more", [(), ("participation.fraction=0.5", "evaluation.batch=50")])
def test_best_gives_runs_the_bits_of_all_losses(monkeypatch, method, more):
    settings = (f"method={method}", "clusters=3", "local.lr=0.2", *more)
    searched = session_of(*settings)
    found = outcome(searched, run(searched, 6))
    all_losses(monkeypatch)
    entire = session_of(*settings)
    assert found == outcome(entire, run(entire, 6))


@pytest.mark.parametrize(("method", "most"), [("ifca", 0.5), ("ifca+cam", 0.6)])
def test_best_takes_half_of_the_passes_once_clusters_differ(method, most):
    more = ("cam.warmup=0",) if "cam" in method else ()
    session = session_of(
        f"method={method}",
        "clients=12",
        "clusters=6",
        "data.rotations=4",
        "local.steps=10",
        "local.lr=0.1",
        *more,
    )
    reports = run(session, 14)
    assert reports[0].timings["share_best"] >= 1.0
    assert np.median([report.timings["share_best"] for report in reports[10:]]) <= most


def test_best_resumed_or_packed_otherwise_is_the_same():
    from tests.support.experiments import checkpoint_of

    settings = ("method=ifca", "clusters=3", "local.lr=0.2")
    straight, half = session_of(*settings), session_of(*settings, blocks=[[0, 5], [1, 2, 3], [4, 6, 7]])
    reports = run(straight, 6)
    run(half, 3)
    rest = session_of(*settings, checkpoint=checkpoint_of(half))
    more = run(rest, 3, first=4)
    assert outcome(straight, reports[3:]) == outcome(rest, more)
    assert reports[3].timings["share_best"] <= more[0].timings["share_best"]  # nothing was remembered


def test_best_ties_go_to_the_lowest_index_whatever_is_tried_first():
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, 2.0)]])
    models = Models(np.float32([[5.0], [1.0], [1.0], [3.0]]))
    for first in (0, 1, 2, 3, -1):
        chosen, loss = fleet.best(models, first=np.full(2, first))
        assert (chosen.tolist(), loss.tolist()) == ([1, 1], [1.0, 1.0])


def test_best_ignores_losses_that_are_not_finite_and_drops_clients_without_any():
    fleet = scalar_fleet([[(1.0, 2.0)], [(np.nan, 2.0)]])
    models = Models(np.float32([[np.nan], [np.inf], [1.0], [1e30]]))
    for first in (0, 2, 3):
        chosen, loss = fleet.best(models, first=np.full(2, first))
        assert chosen.tolist() == [2, 0] and loss[0] == 1.0 and np.isnan(loss[1])
    assert fleet.dropped == {1}
    assert "was not finite under any model" in fleet.events[0]


def test_best_asks_an_unchanged_model_nothing_and_a_changed_one_again():
    session = session_of(*SIX, "local.lr=0.2", "local.steps=10")
    values, fleet = trained_models(session, 6), session.fleet

    def asked(models, **given):
        fleet.begin(9)
        assert_same(fleet, Models(models.copy()), **given)
        return share(fleet)

    assert asked(values) == 1.0
    assert asked(values) == 0.0
    values[2] *= np.float32(1.01)
    assert 0.0 < asked(values) <= 0.5
    assert asked(values, on_top_of=values[0].copy()) > 1 / 6  # other outputs, other losses
    assert asked(values) > 0.0
    assert asked(values[:4]) > 0.0  # another K


def test_best_remembers_up_to_its_capacity():
    session = session_of(*SIX)
    fleet, models = session.fleet, session.fleet.initial(3)
    search = session.fleet.blocks[0]._searches.setdefault(
        "", Search(session.fleet.blocks[0].forward, capacity=4000)
    )
    for expected in (1.0, pytest.approx(1.0, abs=0.3)):
        fleet.begin(1)
        assert_same(fleet, models)
        assert share(fleet) == expected
    assert 0 < len(search._known) < 6 and 0 <= search.capacity < 4000


def test_best_and_losses_cost_the_same_in_a_deployment():
    session = session_of(*SIX)
    fleet, models = session.fleet, session.fleet.initial(3)
    costs = []
    for ask in (fleet.losses, fleet.best, fleet.best):
        fleet.begin(1)
        ask(models)
        costs.append(fleet.cost(6, 1.0))
    assert costs[0] == costs[1] == costs[2]
    assert share(fleet) == 0.0


class Signed(FederatedModule):
    """A loss that may be negative: a part of the samples says nothing about the rest."""

    def __init__(self, classes, local):
        super().__init__(nn.Linear(1, 1, bias=False), classes=classes, local=local)

    def loss(self, outputs, y, reduction="none"):
        losses = (outputs.reshape(y.shape) * y).float()
        return losses if reduction == "none" else losses.mean()


class Wrong(Signed):
    loss_is_never_negative = True


class Honest(FederatedModule):
    """A loss of its own that is a square."""

    loss_is_never_negative = True

    def __init__(self, classes, local):
        super().__init__(nn.Linear(1, 1, bias=False), classes=classes, local=local)

    def loss(self, outputs, y, reduction="none"):
        return nn.functional.huber_loss(outputs.reshape(y.shape), y, reduction=reduction)


class Mixing(FederatedModule):
    """Outputs that depend on the other samples of the batch, in evaluation mode too."""

    def __init__(self, classes, local):
        network = nn.Sequential(nn.BatchNorm1d(1, track_running_stats=False), nn.Linear(1, 1))
        super().__init__(network, classes=classes, local=local)


def many(seed, count=120):
    rng = np.random.default_rng(seed)
    # Sorted, so that the samples of a piece are unlike the others.
    x = np.sort(rng.standard_normal(count))
    return list(zip(x.tolist(), (2.0 * x + rng.standard_normal(count)).tolist(), strict=True))


@pytest.mark.parametrize(
    ("module", "saves"), [(Signed, False), (Wrong, False), (Honest, True), (Mixing, False)]
)
def test_best_of_a_users_module(module, saves):
    target = ModelSettings(name="auto", target=f"{__name__}.{module.__name__}")
    fleet = scalar_fleet([many(0), many(1)], model=target)
    size, rng, shares = fleet.spec.size, np.random.default_rng(1), []
    for number in range(1, 6):
        fleet.begin(number)
        models = rng.standard_normal((4, size)).astype(np.float32) * 5
        models[1] = models[0] + np.float32(1e-3)
        assert_same(fleet, Models(models), first=np.array([3, 2]))
        shares.append(share(fleet))
    assert (min(shares) < 1.0) == saves


def test_best_notices_a_negative_loss_where_its_module_promised_none():
    target = ModelSettings(name="auto", target=f"{__name__}.Wrong")
    fleet = scalar_fleet([many(0)], model=target)
    assert_same(fleet, Models(np.float32([[0.0], [1.0], [-1.0]])), first=np.array([0]))
