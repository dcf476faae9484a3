"""How the server steps from its model to the next one: the aggregate itself, or an optimizer on what clients changed.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (FedAdagrad, FedAdam, FedYogi; Algorithm 2); Hsu, Qi, Brown,
"Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019 (FedAvgM).

    x_t   the model that clients received      Delta_t   aggregate - x_t      eta, tau   server.lr, server.tau
    m_t, v_t   states, one for each model      beta_1, beta_2   server.beta1, server.beta2

    x_{t+1} = x_t + step(Delta_t)

It acts on the global model and on every cluster model (and on CAM's shared one), each with states of its own, whatever
the aggregation rule and the method. `sgd` with lr 1 and without momentum is the aggregate, to the last bit.

An optimizer of your own is a subclass of `ServerOptimizer` under `@SERVER_OPTIMIZERS.register`, or named by its import
path (`server.optimizer=my_module.Mine`).

Readings

Delta_t
    paper   the plain mean (Algorithm 2)
    here    the aggregate by the chosen rule and weights
    option  aggregation, weights=uniform
First states
    paper   v_{-1} >= tau^2
    here    m_{-1} = 0 and v_{-1} = tau^2, the least that the algorithm allows
    option  server.tau
Bias correction
    paper   none
    here    none
beta_1 of FedAdagrad
    paper   0 in the experiments
    here    0
A cluster without clients in a round
    here    neither moves nor changes its states: its momentum waits
Clusters that are split or added
    here    begin with fresh states
Running statistics of BatchNorm
    here    are no parameters: they are the aggregate's
Precision
    here    steps are computed in float64, states kept in float32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import ServerSettings, setting
from archipelago.strategies.references import Models

Rows = npt.NDArray[np.float64]  # one row for each model
State = dict[str, Rows]


class ServerOptimizer:
    """Turns what clients changed into the server's step. Subclasses give `step`, and `states` if they remember."""

    Options: ClassVar[type] = NoOptions
    states: ClassVar[tuple[str, ...]] = ()  # by name, each of the shape of the models

    def __init__(self, options: Any, lr: float) -> None:
        self.options, self.lr = options, lr

    @property
    def is_identity(self) -> bool:
        """Whether the next model is the aggregate itself."""
        return False

    def start(self, name: str) -> float:
        """What a state is before the first step."""
        return 0.0

    def step(self, update: Rows, state: State) -> Rows:
        """What is added to the models, one row each; `state` holds this round's states and is changed in place."""
        raise NotImplementedError(f"{type(self).__name__} has no step")


SERVER_OPTIMIZERS: Registry[type[ServerOptimizer]] = Registry(
    "server optimizer", section="server", base=ServerOptimizer
)


def chosen(settings: ServerSettings) -> ServerOptimizer:
    """The optimizer that `server.optimizer=...` names."""
    entry = SERVER_OPTIMIZERS.entry(settings.optimizer)
    return entry.value(entry.options_from(settings), settings.lr)


class ServerSteps:
    """The steps of all models of one method, and what the optimizer remembers of each set of models, by its name."""

    def __init__(self, optimizer: ServerOptimizer) -> None:
        self.optimizer = optimizer
        self.state: dict[str, dict[str, npt.NDArray[np.float32]]] = {}

    def __call__(
        self, name: str, before: Models, aggregate: Models, moves: npt.NDArray[np.bool_], parameters: int
    ) -> Models:
        """The models after `before`; only those that `moves` says were fed by clients change."""
        if self.optimizer.is_identity:
            return aggregate
        rows = np.flatnonzero(moves)
        kept = {each: self._rows(name, each, before, parameters) for each in self.optimizer.states}
        state: State = {each: values[rows].astype(np.float64) for each, values in kept.items()}
        start = before.values[rows, :parameters].astype(np.float64)
        step = self.optimizer.step(aggregate.values[rows, :parameters] - start, state)
        values = aggregate.values.copy()
        values[rows, :parameters] = start + step
        for each, table in kept.items():
            table[rows] = state[each]
        self.state[name] = kept
        return Models(values)

    def keep(self, name: str, rows: npt.NDArray[np.int64]) -> None:
        """Continue with these models alone, in this order: what is remembered of the others is forgotten."""
        known = self.state.get(name, {})
        there = {
            each: rows[rows < len(values)] for each, values in known.items()
        }  # a new one has no memory yet
        if known:
            self.state[name] = {each: values[there[each]] for each, values in known.items()}

    def _rows(self, name: str, state: str, models: Models, parameters: int) -> npt.NDArray[np.float32]:
        """A copy of a state with a row for each model; those that were not there before are fresh."""
        rows = np.full((len(models), parameters), self.optimizer.start(state), np.float32)
        known = self.state.get(name, {}).get(state, rows[:0])
        common = min(len(known), len(rows))
        rows[:common] = known[:common]
        return rows


@dataclass
class SgdOptions:
    """`server.momentum=0.9`"""

    momentum: float = setting(
        0.0, "sgd: momentum of the server's steps; above 0 this is FedAvgM", at_least=0, below=1
    )


@SERVER_OPTIMIZERS.register(
    "sgd", "the aggregate, or a part of the way; with server.momentum FedAvgM (Hsu et al. 2019)", label="SGD"
)
class Sgd(ServerOptimizer):
    """v = momentum v + Delta; x + lr v."""

    Options = SgdOptions

    @property
    def is_identity(self) -> bool:
        return self.lr == 1.0 and self.options.momentum == 0.0

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]  # without momentum there is nothing to remember
        return ("v",) if self.options.momentum else ()

    def step(self, update: Rows, state: State) -> Rows:
        if self.options.momentum:
            state["v"] = update = self.options.momentum * state["v"] + update
        return self.lr * update


@dataclass
class AdagradOptions:
    """`server.tau=...`"""

    tau: float = setting(1e-3, "adaptive optimizers: tau, how adaptive steps may become", above=0)


@dataclass
class AdamOptions(AdagradOptions):
    """`server.beta1=... server.beta2=...`"""

    beta1: float = setting(0.9, "adam, yogi: decay of the mean of updates", at_least=0, below=1)
    beta2: float = setting(0.99, "adam, yogi: decay of the mean of squared updates", at_least=0, below=1)


class Adaptive(ServerOptimizer):
    """x + lr m / (sqrt(v) + tau); subclasses say what v becomes."""

    states = ("m", "v")

    def start(self, name: str) -> float:
        return float(self.options.tau) ** 2 if name == "v" else 0.0

    def second(self, v: Rows, squared: Rows) -> Rows:
        """The next v."""
        raise NotImplementedError

    def step(self, update: Rows, state: State) -> Rows:
        decay = getattr(self.options, "beta1", 0.0)
        state["m"] = decay * state["m"] + (1.0 - decay) * update
        state["v"] = self.second(state["v"], update * update)
        step: Rows = self.lr * state["m"] / (np.sqrt(state["v"]) + self.options.tau)
        return step


@SERVER_OPTIMIZERS.register("adagrad", "FedAdagrad (Reddi et al. 2021)", label="Adagrad")
class Adagrad(Adaptive):
    """v + Delta^2."""

    Options = AdagradOptions

    def second(self, v: Rows, squared: Rows) -> Rows:
        return v + squared


@SERVER_OPTIMIZERS.register("adam", "FedAdam (Reddi et al. 2021)", label="Adam")
class Adam(Adaptive):
    """beta_2 v + (1 - beta_2) Delta^2."""

    Options = AdamOptions

    def second(self, v: Rows, squared: Rows) -> Rows:
        found: Rows = self.options.beta2 * v + (1.0 - self.options.beta2) * squared
        return found


@SERVER_OPTIMIZERS.register("yogi", "FedYogi (Reddi et al. 2021)", label="Yogi")
class Yogi(Adaptive):
    """v - (1 - beta_2) Delta^2 sign(v - Delta^2)."""

    Options = AdamOptions

    def second(self, v: Rows, squared: Rows) -> Rows:
        found: Rows = v - (1.0 - self.options.beta2) * squared * np.sign(v - squared)
        return found
