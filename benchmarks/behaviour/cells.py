"""One cell of the grid: a run in this process, and the plain facts of it that expectations are held against."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.wire import model_key
from archipelago.core.errors import UserError
from archipelago.core.plugins import load_built_in
from archipelago.strategies.references import Private, Rows
from benchmarks.behaviour.situations import settings

COSTS = {"down": "cost_models_down", "up": "cost_models_up", "gradients": "cost_gradients"}
COLUMNS = ("changed", "participants", "dropped", "federated_objective", *COSTS)
EVERYWHERE = "benchmarks.behaviour.parts"  # registers what the situations need
_FEDERATIONS: dict[str, Any] = {}


@dataclass(frozen=True)
class Cell:
    """A method in a situation with a seed; `length` times as many rounds as the situation has."""

    method: str
    situation: str
    seed: int
    length: int = 1

    def __str__(self) -> str:
        longer = f", {self.length} times as long" if self.length > 1 else ""
        return f"{self.method} in {self.situation}, seed {self.seed}{longer}"


def registered(bases: Iterable[str] = (), addons: bool = True) -> list[str]:
    """Every base there is (or those named), alone and with each add-on that fits; plug-ins' included."""
    load_built_in()
    importlib.import_module(EVERYWHERE)
    from archipelago.strategies import ADDONS, METHODS, parse_method

    found = []
    for base in sorted(bases or METHODS):
        found.append(base)
        for addon in sorted(ADDONS) if addons else ():
            try:
                parse_method(f"{base}+{addon}")
            except UserError:
                continue
            found.append(f"{base}+{addon}")
    return found


def run_cell(cell: Cell) -> dict[str, Any]:
    """The facts of a run; `refused` where the platform says that it makes no sense, `failed` where it broke."""
    began = time.process_time()
    try:
        facts = _run(cell)
    except UserError as error:
        facts = {"refused": str(error)}
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        facts = {"failed": f"{type(error).__name__}: {error}"}
    return {**facts, "seconds": round(time.process_time() - began, 3)}


def _run(cell: Cell) -> dict[str, Any]:
    import torch

    from actors.session import InProcessSession
    from archipelago.experiments.config import load_config
    from archipelago.experiments.plan import make_plan
    from archipelago.strategies import parts_of

    torch.set_num_threads(1)
    config = load_config(None, settings(cell.method, cell.situation, cell.seed, cell.length))
    federation = _federation(config)
    session = InProcessSession(make_plan(config, federation))
    facts = Facts(session, any(entry.value.additive for entry in parts_of(cell.method)))
    try:
        for round in range(1, config.rounds + 1):
            facts.add(session.run_round(round))
        return facts.all()
    finally:
        session.close()


def _federation(config: Any) -> Any:
    """The federation of a run; the last one is kept, since cells of one situation and seed follow each other."""
    from archipelago.data import build_federation

    wanted = repr((config.data, config.partition, config.clients, config.seed))
    if wanted not in _FEDERATIONS:
        _FEDERATIONS.clear()
        _FEDERATIONS[wanted] = build_federation(config.data, config.partition, config.clients, config.seed)
    return _FEDERATIONS[wanted]


class Facts:
    """What is written down of a run, round by round."""

    def __init__(self, session: Any, additive: bool) -> None:
        self.additive = additive  # whether clients may predict with a sum of models
        self.server, self.fleet = session.server, session.server.fleet
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.measured: dict[str, list[Any]] = {"round": [], "accuracy": [], "loss": []}
        self.first_losses: dict[int, Any] = {}  # of each model of a sum, alone, when it was first seen
        self.first_rounds: dict[int, int] = {}
        self.last: Any = None

    def add(self, report: Any) -> None:
        """One round."""
        metrics = report.metrics
        for name, column in self.columns.items():
            column.append(metrics.get(COSTS.get(name, name)))
        if "micro_accuracy" in metrics:
            self.measured["round"].append(report.round)
            self.measured["accuracy"].append(round(metrics["micro_accuracy"], 5))
            self.measured["loss"].append(_finite(metrics["micro_loss"]))
            prediction = self.sum(least=1) if self.additive else None
            for part in range(len(prediction.models)) if prediction is not None else ():
                if part not in self.first_losses:
                    self.first_losses[part] = self.loss_of(prediction, [part])
                    self.first_rounds[part] = report.round
        self.last = report

    def all(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        groups, assignment = self.server.setup.groups, self.last.assignment
        return {
            **self.measured,
            **self.columns,
            "groups": None if groups is None else groups.tolist(),
            "assignment": None if assignment is None else assignment.tolist(),
            "sizes": self.server.setup.sizes.tolist(),
            "clients": [round(float(value), 4) for value in self.last.clients["accuracy"]],
            "parts": self.parts(),
        }

    # --- the models of a sum ----------------------------------------------------------------------------

    @property
    def everyone(self) -> Any:
        """All clients."""
        return self.fleet.select(np.arange(self.server.setup.clients))

    def sum(self, least: int = 2) -> Any:
        """What clients predict with if it is a sum of models; None if not, or if they train before they predict."""
        if self.server.method.tunes:
            return None
        prediction = self.server.method.prediction(self.everyone)
        enough = len(prediction.models) >= least and prediction.combine.startswith("logit")
        return prediction if enough else None

    def loss_of(self, prediction: Any, chosen: Sequence[int]) -> Any:
        """Test loss of each client under some models of a sum; NaN for clients that hold none of them."""
        from archipelago.strategies.references import Prediction

        holds = np.stack([self.holds(prediction, part) for part in chosen], axis=1).any(axis=1)
        clients = np.flatnonzero(holds)
        models = [_of(prediction.models[part], clients) for part in chosen]
        weights = None if prediction.weights is None else prediction.weights[np.ix_(clients, chosen)]
        losses = np.full(len(holds), np.nan)
        found = self.fleet.select(clients).evaluate(Prediction(models, weights, prediction.combine), "test")
        losses[clients] = found["loss"]
        return losses

    def holds(self, prediction: Any, part: int) -> Any:
        """Which clients predict with a model of the sum."""
        model, rows = prediction.models[part], np.ones(self.server.setup.clients, bool)
        if isinstance(model, Rows):
            rows = model.rows >= 0
        elif isinstance(model, Private) and model.default is None:  # whoever has trained one
            states = {client: state for block in self.fleet.snapshot() for client, state in block.items()}
            rows = np.array([model_key(model.name) in states[client] for client in range(len(rows))])
        return rows if prediction.weights is None else rows & (prediction.weights[:, part] > 0)

    def parts(self) -> list[dict[str, Any]]:
        """For each model of a sum: the mean test loss without it, and how far it is from what it was at first."""
        prediction = self.sum() if self.additive else None
        if prediction is None:
            return []
        every = list(range(len(prediction.models)))
        whole, found = self.loss_of(prediction, every), []
        for part in every:
            without = self.loss_of(prediction, [other for other in every if other != part])
            moved = np.abs(self.loss_of(prediction, [part]) - self.first_losses[part])
            found.append(
                {
                    "loss": _finite(_mean(whole)),
                    "without": _finite(_mean(without)),
                    "changed": _finite(_largest(np.abs(without - whole))),
                    "moved": _finite(_largest(moved)),
                    "age": self.last.round - self.first_rounds[part],
                }
            )
        return found


def _of(model: Any, clients: Any) -> Any:
    """A reference for some of the clients that it is for."""
    return Rows(model.models, model.rows[clients]) if isinstance(model, Rows) else model


def _mean(values: Any) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _largest(values: Any) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else float("nan")


def _finite(value: Any) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
