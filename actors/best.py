"""Which of K models fits a client best, without showing every sample to every model.

A loss is not negative, so a model whose losses on some of the samples already add up to more than another model's on
all of them has lost. The model of the client's last cluster is evaluated first; each of the others is tried on the
samples that it was worst at the last time, as many as it should take. A model that might still win is evaluated as
`losses` does it, on all samples, in the same chunks. So the answer, and every loss that is reported, has the bits
that an evaluation of all K models gives; what a search remembers decides how many samples that takes, and nothing else.

Two evaluations of one sample in different company differ by rounding: a model is out only if it has lost by far more
than that (`_surely`). A module that mixes the samples of a batch is noticed, and evaluated entirely.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.forward import Forward, Index
from archipelago.strategies.base import lowest
from archipelago.strategies.parameters import Matrix, Vector
from lightning_modules.flat import is_value, value_of

Floats = npt.NDArray[np.float64]

WHOLE = 1e-9  # relative rounding of a sum of losses in float64, with room to spare
RELATIVE, ABSOLUTE = (
    1e-2,
    1e-4,
)  # what rounding in float32 can never do to a loss; the latter times the outputs
MIXING = 1e-5  # times the outputs: two samples further apart than this in other company influence each other
PIECE = 16  # samples that a trial takes at least
LONGEST = 0.75  # a trial on more than this share of the samples is not worth its risk
AIM = 1.05  # a trial is made long enough to reach this multiple of what it must exceed


class Negative(Exception):
    """A loss below zero: nothing follows from a part of the samples."""


def best_of_all(losses: Floats, sizes: npt.NDArray[np.int64]) -> Floats:
    """The answer to a `BestRequest` from all K losses: (clients, 3) of model, its loss, samples forward."""
    chosen = lowest(losses)
    return np.column_stack([chosen, losses[np.arange(len(chosen)), chosen], sizes * losses.shape[1]])


@dataclass
class _Known:
    """What was seen of K models on the samples of one client."""

    losses: npt.NDArray[
        np.float32
    ]  # (K, samples) of each model when it was last evaluated there, NaN if never
    version: npt.NDArray[np.int64]  # of the models that the following belong to
    evaluated: npt.NDArray[np.bool_]  # on all samples
    mean: Floats  # of those
    at_least: Floats  # what the sum of all losses of the others exceeds

    def forget(self, changed: npt.NDArray[np.bool_]) -> None:
        """These models are others now; where they were bad before is still a good guess."""
        self.evaluated[changed], self.at_least[changed] = False, 0.0


class Search:
    """The best of K models for clients of a block, request after request (one method's models).

    `capacity`: bytes of losses to remember; a client beyond it is evaluated under all models.
    """

    worth = 5e-4  # seconds: where a whole evaluation takes less, a trial on a part would save nothing

    def __init__(self, forward: Forward, capacity: float = 64e6) -> None:
        self.forward, self.capacity = forward, capacity
        self.models: Matrix | None = None  # of the last request: kept, so that they can be recognised
        self.version = np.zeros(0, np.int64)
        self._known: dict[int, _Known] = {}
        self._plain = False  # whether the last request had nothing under the models
        self._mixes: bool | None = None
        self._forwards = 0  # samples that went forward for the client at hand
        self._seconds = 0.0  # of a whole evaluation of the client at hand

    def start(self, models: Matrix, plain: bool) -> None:
        """Begin a request; `plain`: there is nothing under the models, so an unchanged one has unchanged losses."""
        self._mixes = None
        before, changed = self.models, np.ones(len(models), bool)
        if before is None or before.shape != models.shape:
            self.capacity += sum(known.losses.nbytes for known in self._known.values())
            self._known, self.version = {}, np.zeros(len(models), np.int64)
        elif plain and self._plain:
            changed = np.array([not np.array_equal(a, b) for a, b in zip(before, models, strict=True)])
        self.version, self._plain = self.version + changed, plain
        # Only memory that nobody can write to is still the same at the next request.
        self.models = models if is_value(models) else value_of(models)

    def best(self, client: int, index: Index, under: Tensor | None, first: int) -> tuple[int, float, int]:
        """(the model of least mean loss, ties to the lowest index; that loss; samples that went forward).

        `first` is tried first: the client's last cluster, -1 if there is none. NaN if no loss is finite.
        """
        assert self.models is not None
        self._forwards, known = 0, self._of(client, len(index))
        one = _OneClient(index, self.forward.samples.targets(index), under)
        guess = np.nan_to_num(np.where(known.evaluated, known.mean, _means(known.losses)), nan=np.inf)
        order = sorted(range(len(self.models)), key=lambda k: (k != first, guess[k], k))
        best, least = 0, np.inf
        for k in order:
            if not known.evaluated[k]:
                if known.at_least[k] > least * len(index) * (1 + WHOLE):
                    continue
                if np.isfinite(least) and self._loses(k, one, known, least * len(index)):
                    continue
                self._evaluate(k, one, known)
            if known.mean[k] < least or (known.mean[k] == least < np.inf and k < best):
                best, least = k, float(known.mean[k])
        return best, least if np.isfinite(least) else float("nan"), self._forwards

    def _of(self, client: int, samples: int) -> _Known:
        """What is known of a client, as far as the models are the same."""
        known, count = self._known.get(client), len(self.version)
        if known is None:
            losses = np.full((count, samples), np.nan, np.float32)
            known = _Known(
                losses, self.version.copy(), np.zeros(count, bool), np.zeros(count), np.zeros(count)
            )
            if losses.nbytes <= self.capacity:
                self.capacity -= losses.nbytes
                self._known[client] = known
        known.forget(known.version != self.version)
        known.version = self.version.copy()
        return known

    def _evaluate(self, k: int, one: _OneClient, known: _Known) -> None:
        """The mean loss of a model as `losses` gives it."""
        assert self.models is not None
        started = time.perf_counter()
        outputs = self.forward.outputs(self.models[k], one.index)
        total = outputs if one.under is None else outputs + one.under
        losses = self.forward.losses(total, one.y)
        known.mean[k], known.evaluated[k] = float(losses.to(torch.float64).mean()), True
        known.losses[k] = _checked(losses)
        self._seconds = time.perf_counter() - started
        self._forwards += len(one.index)

    def _loses(self, k: int, one: _OneClient, known: _Known, total: float) -> bool:
        """Whether the losses of a model on some samples add up to more than `total`."""
        guess = np.nan_to_num(known.losses[k], nan=0.0, posinf=0.0)
        if self._seconds < self.worth or len(guess) < 2 * PIECE:
            return False
        order = np.argsort(-guess, kind="stable")
        expected = np.concatenate([[0.0], np.cumsum(guess[order], dtype=np.float64)])
        done, summed, largest = 0, 0.0, 0.0
        while True:
            scale = summed / expected[done] if done and expected[done] > 0 else 1.0
            ahead = summed + scale * (expected - expected[done])
            until = int(np.searchsorted(ahead, AIM * total + len(guess) * ABSOLUTE, side="right"))
            until = -(-max(until, done + 1) // PIECE) * PIECE
            if until > LONGEST * len(guess) or self._mixing(k, one):
                return False
            rows = order[done:until]
            losses, magnitude = self._seen(k, one, rows)
            known.losses[k, rows] = losses
            summed, largest, done = summed + float(losses.sum()), max(largest, magnitude), until
            if not np.isfinite(summed):
                return False
            known.at_least[k] = _surely(summed, done, largest)
            if known.at_least[k] > total * (1 + WHOLE):
                return True

    def _seen(self, k: int, one: _OneClient, rows: Index) -> tuple[Floats, float]:
        """The losses of a model on some of a client's samples, and the largest output."""
        assert self.models is not None
        outputs = self._outputs(self.models[k], one.index[rows])
        at = torch.from_numpy(rows).to(outputs.device)
        outputs = outputs if one.under is None else outputs + one.under[at]
        losses = _checked(self.forward.losses(outputs, one.y[at]))
        return losses.astype(np.float64), float(outputs.abs().max())

    def _outputs(self, vector: Vector, index: Index) -> Tensor:
        """A model's outputs on some samples, which nobody will ask for again."""
        model, samples = self.forward.model, self.forward.samples
        model.load(vector)
        model.module.eval()
        self._forwards += len(index)
        with torch.no_grad():
            chunks = [
                model.module(samples.batch(index[at : at + samples.chunk])[0])
                for at in range(0, len(index), samples.chunk)
            ]
        return torch.cat(chunks)

    def _mixing(self, k: int, one: _OneClient) -> bool:
        """Whether the module lets samples of one batch influence each other; asked once a request."""
        if self._mixes is None:
            assert self.models is not None
            some = one.index[:PIECE]
            together = self._outputs(self.models[k], some)
            alone = self._outputs(self.models[k], some[: PIECE // 2])
            away = (together[: PIECE // 2] - alone).abs().max()
            self._mixes = not bool(away <= MIXING * (1.0 + together.abs().max()))
        return self._mixes


@dataclass(frozen=True)
class _OneClient:
    """A client's samples, their targets, and the outputs that lie under every model."""

    index: Index
    y: Tensor
    under: Tensor | None


def _surely(summed: float, count: int, largest: float) -> float:
    """What a sum of `count` losses is at least in any company; `largest` is the largest output.

    >>> _surely(100.0, 10, 9.0)
    98.99
    """
    return (1 - RELATIVE) * summed - ABSOLUTE * count * (1.0 + largest)


def _means(losses: npt.NDArray[np.float32]) -> Floats:
    """The mean of what is known of each model; infinite where nothing is."""
    seen = np.isfinite(losses)
    sums = np.where(seen, losses, 0.0).sum(axis=1, dtype=np.float64)
    return np.divide(sums, seen.sum(axis=1), out=np.full(len(losses), np.inf), where=seen.any(axis=1))


def _checked(losses: Tensor) -> npt.NDArray[np.float32]:
    """Losses as an array; a negative one is an exception."""
    values: npt.NDArray[np.float32] = losses.detach().cpu().numpy()
    if (values < 0).any():
        raise Negative
    return values
