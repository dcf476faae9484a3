"""Server optimizers: rounds by hand, identities, states, every method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from archipelago.core.settings import AggregationSettings, ServerSettings, setting
from archipelago.strategies.references import Models
from archipelago.strategies.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer, ServerSteps, chosen
from tests.support.errors import refused
from tests.support.experiments import checkpoint_of, config_of, outcome, run, session_of
from tests.support.methods import compositions
from tests.support.scalar import method_of, scalar_fleet

# Client 0 holds (1, 2), client 1 holds (1, -2): gradients 2 (w - 2) and 2 (w + 2).
TWO = [[(1.0, 2.0)], [(1.0, -2.0)] * 3]
OPTIMIZERS = ("adam", "yogi", "adagrad")


@dataclass
class Settings(ServerSettings):
    """With the options of all of them, as the composed schema has."""

    momentum: float = 0.0
    tau: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99


def rounds_by_hand(count: int, **server: float) -> list[float]:
    """The model of FedAvg after each round; it starts at 1, and clients train with lr 0.1 and no momentum."""
    fleet = scalar_fleet(TWO, lr=0.1)
    fedavg = method_of("fedavg", fleet, server=Settings(**server))
    fedavg.base.model = np.float32([1.0])
    found = []
    for number in range(1, count + 1):
        fleet.begin(number)
        fedavg.round(fleet, number)
        fleet.commit()
        found.append(float(fedavg.base.model[0]))
    return found


# A client's model is w - 0.1 * 2 (w - y) = 0.8 w + 0.2 y, the mean 0.8 w + 0.2 (2 - 3 * 2) / 4 = 0.8 w - 0.2:
# Delta(w) = -0.2 w - 0.2, so Delta(1) = -0.4.
def test_server_sgd_half_way_by_hand() -> None:
    assert rounds_by_hand(2, lr=0.5) == pytest.approx([0.8, 0.62], rel=1e-6)  # 1 - 0.2; 0.8 + 0.5 * -0.36


def test_fedavgm_by_hand() -> None:
    # v = -0.4, w = 0.6; Delta = -0.32, v = 0.5 * -0.4 - 0.32 = -0.52, w = 0.08
    assert rounds_by_hand(2, momentum=0.5) == pytest.approx([0.6, 0.08], rel=1e-5)


def test_fedadam_by_hand() -> None:
    options = {"lr": 0.1, "tau": 0.1, "beta1": 0.5, "beta2": 0.75}
    # m = 0.5 * -0.4 = -0.2; v = 0.75 * 0.01 + 0.25 * 0.16 = 0.0475; w = 1 - 0.1 * 0.2 / (sqrt(0.0475) + 0.1)
    first = 1 - 0.02 / (0.0475**0.5 + 0.1)
    delta = -0.2 * first - 0.2
    m, v = 0.5 * -0.2 + 0.5 * delta, 0.75 * 0.0475 + 0.25 * delta**2
    second = first + 0.1 * m / (v**0.5 + 0.1)
    assert rounds_by_hand(2, optimizer="adam", **options) == pytest.approx([first, second], rel=1e-5)


def test_fedyogi_by_hand() -> None:
    # v = 0.01 - 0.25 * 0.16 * sign(0.01 - 0.16) = 0.05; m = 0.5 * -0.4
    found = rounds_by_hand(1, optimizer="yogi", lr=0.1, tau=0.1, beta1=0.5, beta2=0.75)
    assert found == pytest.approx([1 - 0.02 / (0.05**0.5 + 0.1)], rel=1e-6)


def test_fedadagrad_by_hand() -> None:
    # m = Delta; v = 0.01 + 0.16; then v + 0.04 (1 + w)^2
    first = 1 - 0.1 * 0.4 / (0.17**0.5 + 0.1)
    delta = -0.2 * first - 0.2
    second = first + 0.1 * delta / ((0.17 + delta**2) ** 0.5 + 0.1)
    assert rounds_by_hand(2, optimizer="adagrad", lr=0.1, tau=0.1) == pytest.approx([first, second], rel=1e-5)


def test_server_optimizer_leaves_an_empty_cluster_and_buffers_alone() -> None:
    steps = ServerSteps(chosen(Settings(optimizer="adam", lr=0.1)))
    before = Models(np.float32([[1, 2, 3], [4, 5, 6]]))
    aggregate = Models(np.float32([[2, 3, 9], [4, 5, 6]]))
    for _ in range(2):
        after = steps("main", before, aggregate, np.array([True, False]), parameters=2)
        assert after[1].tolist() == [4, 5, 6] and after[0][2] == 9
        assert 1 < after[0][0] < 1.3
    assert steps.state["main"]["m"][1].tolist() == [0, 0]


def test_server_optimizer_gives_clusters_that_come_later_fresh_states() -> None:
    steps = ServerSteps(chosen(Settings(momentum=0.9)))
    one, two = Models(np.float32([[1.0]])), Models(np.float32([[1.0], [1.0]]))
    steps("main", one, Models(np.float32([[2.0]])), np.array([True]), 1)
    after = steps("main", two, Models(np.float32([[2.0], [2.0]])), np.array([True, True]), 1)
    assert after.values[:, 0].tolist() == pytest.approx([2.9, 2.0])


EVERY = [
    name if name in ("fedavg", "ifca+cam") else pytest.param(name, marks=pytest.mark.full)
    for name in compositions()
]


@pytest.mark.parametrize("method", EVERY)
def test_server_sgd_with_lr_1_is_the_aggregate_and_any_other_server_moves_every_method(method: str) -> None:
    plain, same, adam = (
        session_of(f"method={method}", "rounds=2", *more)
        for more in ((), ("server.optimizer=sgd", "server.lr=1"), _adam(method))
    )
    expected = outcome(plain, run(plain, 2))
    assert outcome(same, run(same, 2)) == expected
    assert (outcome(adam, run(adam, 2)) == expected) == (method == "local")


def _adam(method: str) -> tuple[str, ...]:
    return () if method == "local" else ("server.optimizer=adam", "server.lr=0.01")


def test_server_options_change_the_numbers() -> None:
    base = ("method=fedavg", "server.optimizer=adam", "rounds=2")
    changes = ("server.lr=1", "server.lr=0.02", "server.tau=0.01", "server.beta1=0.5", "server.beta2=0.5")
    sessions = [session_of(*base, change) for change in changes]
    assert len({outcome(session, run(session, 2)) for session in sessions}) == len(changes)


@pytest.mark.parametrize(
    "method", ["ifca+cam", *(pytest.param(n, marks=pytest.mark.full) for n in ("fedem", "cfl"))]
)
def test_server_optimizer_states_are_in_checkpoints_and_no_layout_changes_a_bit(method: str) -> None:
    settings = (f"method={method}", "server.optimizer=yogi", "server.lr=0.05", "participation.fraction=0.75")
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 4))
    first = session_of(*settings, blocks=[[7, 0, 3], [5, 1], [2, 6, 4]])
    reports = run(first, 2)
    second = session_of(*settings, blocks=[[c] for c in range(8)], checkpoint=checkpoint_of(first))
    assert outcome(second, reports + run(second, 2, first=3)) == expected


def test_server_optimizer_learns_where_local_steps_are_small() -> None:
    settings = ("method=fedavg", "data.rotations=1", "local.lr=0.01", "model.hidden=[32]", "local.steps=5")
    plain, adam = session_of(*settings), session_of(*settings, "server.optimizer=adam", "server.lr=0.03")
    accuracy = [run(session, 8)[-1].metrics["micro_accuracy"] for session in (plain, adam)]
    assert accuracy[1] > accuracy[0] + 0.1


def test_server_optimizer_is_refused_where_it_means_nothing() -> None:
    with refused("unread", says="server.optimizer=sgd", setting="server.tau"):
        config_of("method=fedavg", "server.tau=0.1")
    with refused("unread", says="method=local", setting="server.lr"):
        config_of("method=local", "server.lr=0.5")
    with refused("aggregation", says="server.optimizer=sgd", rule="matched"):
        config_of("method=fedavg", "aggregation=matched", "server.lr=0.5")
    with refused("unknown-name", kind="server optimizer", name="adma", nearest="adam"):
        config_of("method=fedavg", "server.optimizer=adma")
    assert config_of("method=fedavg", "server.optimizer=adam", "server.tau=0.1").server.tau == 0.1


def test_server_optimizer_of_ones_own() -> None:
    @dataclass
    class Options:
        most: float = setting(0.1, "longest step of a parameter", above=0)

    @SERVER_OPTIMIZERS.register("test_bounded", "steps of bounded length")
    class Bounded(ServerOptimizer):
        def step(self, update, state):
            return np.clip(self.lr * update, -self.options.most, self.options.most)

    Bounded.Options = Options
    SERVER_OPTIMIZERS.register("test_bounded", "steps of bounded length")(Bounded)
    try:
        session = session_of("method=ifca", "server.optimizer=test_bounded", "server.most=0.001")
        before = session.server.method.models()["clusters"]
        run(session, 1)
        moved = np.abs(session.server.method.models()["clusters"] - before).max()
        assert 0.0009 < moved <= 0.00101
    finally:
        SERVER_OPTIMIZERS.remove("test_bounded")


def test_aggregation_rules_compose_with_server_optimizers() -> None:
    fleet = scalar_fleet([[(1.0, 2.0)], [(1.0, -2.0)], [(1.0, -2.0)]], lr=0.1)
    server, rule = Settings(lr=0.5), AggregationSettings(name="median")
    fedavg = method_of("fedavg", fleet, server=server, aggregation=rule)
    fedavg.base.model = np.float32([1.0])
    fedavg.round(fleet, 1)  # models 1.2, 0.4, 0.4: the median is 0.4, half the way 0.7
    assert float(fedavg.base.model[0]) == pytest.approx(0.7, rel=1e-6)
