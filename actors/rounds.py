"""What belongs to the round that is running, shared by all views of a fleet, and what the round costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actors.exposure import Exposure
from archipelago.strategies.references import Indices

if TYPE_CHECKING:
    from actors.trained import Trained

BACKWARD = 2.0  # a backward pass in forward passes


class Count(Enum):
    """What the ledger makes of a model that a request refers to."""

    SENT = "on its way to the client"
    HELD = "with the client already"
    NOT = "neither"


class Ledger:
    """Counts what a round moves, stores and computes: models, samples forward and backward.

    A model that a client gets twice in a round is sent once, and a result leaves a client once.
    """

    def __init__(self) -> None:
        self._held: list[npt.NDArray[Any]] = []  # so that an address means one model for the whole round
        self._down: dict[int, npt.NDArray[np.bool_]] = {}  # address of a model -> which clients got it
        self._stored: dict[int, npt.NDArray[np.bool_]] = {}  # address of a model -> which clients have it
        self._own: dict[str, set[int]] = {}  # private model -> clients that use it
        self._up: dict[str, set[int]] = {}
        self._described = self._described_bytes = 0.0  # descriptors that clients sent, in models and in bytes
        # Bytes by handle and client, where they are no plain model's.
        self._sent: dict[str, dict[int, float]] = {}
        # How many clients are behind what the server learns; None: not asked.
        self.exposure: Exposure | None = None
        self.gradients = self.forwards = 0.0
        self.first = 0  # clients that got a model to begin their own with
        self.unit = (
            0.0  # samples of the largest training: what FedAvg would train on (some may be of few clients)
        )

    def down(
        self, models: npt.NDArray[Any], ids: Indices, rows: Indices | None, clients: int, count: Count
    ) -> None:
        """Clients `ids`, of `clients` in all, need a model, all models of an array, or one row each (-1: none)."""
        if count is Count.NOT:
            return
        self._held.append(models)
        for k, model in enumerate(np.atleast_2d(models)):
            chosen = ids if rows is None else ids[rows == k]
            for table in (self._stored, self._down) if count is Count.SENT else (self._stored,):
                table.setdefault(model.ctypes.data, np.zeros(clients, bool))[chosen] = True

    def own(self, name: str, ids: Indices) -> None:
        """Clients `ids` use a private model."""
        self._own.setdefault(name, set()).update(ids.tolist())

    def up(self, handle: str, ids: Indices) -> None:
        """Clients `ids` deliver their result of a call."""
        self._up.setdefault(handle, set()).update(ids.tolist())

    def send(self, numbers: int, size: int) -> None:
        """Clients deliver numbers that are no model; a model has `size` of them."""
        self._described += numbers / max(size, 1)
        self._described_bytes += 4.0 * numbers

    def sends(self, handle: str, ids: Indices, sent: npt.NDArray[np.float64]) -> None:
        """Bytes that clients `ids` send of a call if they deliver it; 0 of a model as it is."""
        if np.nansum(sent) > 0:
            self._sent[handle] = dict(zip(ids.tolist(), np.nan_to_num(sent).tolist(), strict=True))

    def compute(self, gradients: Any, forwards: Any) -> None:
        """Samples that went backward, and samples that only went forward."""
        self.gradients += float(np.nansum(gradients))
        self.forwards += float(np.nansum(forwards))

    def train(self, gradients: Any, forwards: Any, received: Any, seen: Any = None) -> None:
        """A local training; `received` has a 1 for each client that was sent the model to begin its own with.

        `seen`: samples of the mini-batches of its steps, each counted once; None where it has steps of its own number.
        """
        self.unit = max(self.unit, 0.0 if seen is None else float(np.nansum(seen)))
        self.first += int(np.nansum(received))
        self.compute(gradients, forwards)

    def metrics(self, participants: int, one_training: float) -> dict[str, float]:
        """Per participant; computation as a multiple of one local training, which is what FedAvg does."""
        count = max(participants, 1)
        stored = sum(int(has.sum()) for has in self._stored.values()) + sum(map(len, self._own.values()))
        work = (1.0 + BACKWARD) * self.gradients + self.forwards
        unit = self.unit or one_training
        costs = {
            "cost_models_stored": stored / count,
            "cost_models_down": (int(sum(sent.sum() for sent in self._down.values())) + self.first) / count,
            "cost_models_up": (sum(len(ids) for ids in self._up.values()) + self._described) / count,
            "cost_gradients": self.gradients / count,
            "cost_forwards": self.forwards / count,
        }
        if self._sent:
            sent = [
                self._sent[name].get(i, 0.0)
                for name, ids in self._up.items()
                if name in self._sent
                for i in ids
            ]
            costs["cost_bytes_up"] = (sum(sent) + self._described_bytes) / count
        if unit:
            costs["cost_computation"] = work / ((1.0 + BACKWARD) * unit)
        return costs


class RoundState:
    """Begins anew with every attempt at a round (`start`); `release` lets go of its models."""

    def __init__(self) -> None:
        self.start(0, {})

    def start(self, number: int, step_share: dict[int, float], rate: float = 1.0) -> None:
        """Begin an attempt at round `number`, with the share of the steps that stragglers manage."""
        self.number = number
        self.rate = rate  # what learning rates are multiplied with
        self.step_share = step_share
        self.events: list[str] = []  # what a user should know of this round
        self.seconds: dict[str, float] = {}  # spent waiting for the clients, by what they were asked
        self.dropped: dict[str, set[int]] = {}  # by prefix: members of an ensemble drop for themselves
        self.passes = (0.0, 0.0)  # samples that went forward to find the best of K models, and those of all K
        self.ledger = Ledger()
        self.objectives: dict[str, tuple[Indices, npt.NDArray[np.float64]]] = {}
        self.release()

    def release(self) -> None:
        """Let go of the round's models."""
        self.placed: dict[Any, tuple[npt.NDArray[Any], Any]] = {}
        self.first_trained: Trained | None = None
        self._gives_way: str | None = None  # the prefix whose next training takes the first one's place
        self._handles = 0

    def compare(self, trained: Trained, compared: bool, prefix: str) -> None:
        """Keep the round's first training; one that is not to be compared gives way to the same method's next."""
        if self.first_trained is None or (compared and prefix == self._gives_way):
            self.first_trained, self._gives_way = trained, None if compared else prefix

    def next_handle(self, slot: str) -> str:
        """A name for the models that the next call makes."""
        self._handles += 1
        return f"{self._handles}:{slot}"

    def count_passes(self, done: float, of: float) -> None:
        """A search for the best of K models is over."""
        self.passes = (self.passes[0] + float(done), self.passes[1] + float(of))

    def spent(self) -> dict[str, float]:
        """Seconds by stage; `share_best`: of all samples under all K models, how many the searches looked at."""
        done, of = self.passes
        return {**self.seconds, "share_best": done / of} if of else dict(self.seconds)

    @contextmanager
    def timed(self, method: str) -> Iterator[None]:
        """Add the time of a call to `seconds`."""
        started = time.perf_counter()
        yield
        self.seconds[method] = self.seconds.get(method, 0.0) + time.perf_counter() - started
