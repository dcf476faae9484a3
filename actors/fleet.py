"""The fleet: the server's only view of the clients.

One implementation of everything a strategy may ask (`archipelago/strategies/interface.py`), over two ways to reach the
blocks that host the clients: in this process, or on Ray actors. What differs is `_call` and nothing else,
which is why both give the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actors.requests import Encoded, EncodedPenalty, EvaluateRequest, MapRequest, ModelRequest, TrainRequest
from archipelago.core.errors import ClientFailure
from archipelago.strategies.parameters import (
    Matrix,
    ModelSpec,
    Vector,
    fixed_point_exponents,
    from_fixed_point,
    normalised_rows,
    one_hot,
)
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.references import (
    Indices,
    Merged,
    Mixture,
    Models,
    PerClient,
    Prediction,
    Private,
    Reference,
    Rows,
    SampleWeights,
)

if TYPE_CHECKING:  # a server process has no use for Lightning, which a block imports
    from actors.block import ClientBlock


WILD = 1e9


class Fleet(ABC):
    """All clients of a federation, in blocks.

    `layout[b]` lists the client ids of block b. `ids` are the clients of this view: everyone, unless the view
    comes from `select`. Views share everything else with the fleet they come from.
    """

    def __init__(
        self, layout: Sequence[Sequence[int]], sizes: npt.NDArray[np.int64], not_finite: str = "drop"
    ) -> None:
        self.layout = [np.asarray(block, np.int64) for block in layout]
        self._block_of = np.empty(len(sizes), np.int64)
        for b, block in enumerate(self.layout):
            self._block_of[block] = b
        self.all_sizes = sizes
        self.not_finite = not_finite
        self.ids: Indices = np.arange(len(sizes), dtype=np.int64)
        self._population = self.ids
        self._round = _Round()
        self.prefix = ""  # of slots, private models and initialisations, see `named`
        self._known: dict[str, ModelSpec] = {}  # shared by all views

    # --- reaching the blocks ----------------------------------------------------------------------------

    @abstractmethod
    def _reach(self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any]) -> Any:
        """Call `method` on the given blocks, all at once; {block: result}. `arrays` go to each of them."""

    def _call(self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any] = ()) -> Any:
        started = time.perf_counter()
        found = self._reach(method, arguments, arrays)
        seconds = self._round.seconds
        seconds[method] = seconds.get(method, 0.0) + time.perf_counter() - started
        return found

    def _place(self, array: npt.NDArray[Any]) -> Any:
        """Put an array where every block can read it (the object store), once per round."""
        return array

    # --- views ------------------------------------------------------------------------------------------

    def select(self, ids: npt.ArrayLike) -> Fleet:
        """The view of some clients, ascending."""
        view = object.__new__(type(self))
        view.__dict__ = self.__dict__.copy()
        view.ids = np.unique(np.asarray(ids, np.int64))
        return view

    def named(self, prefix: str) -> Fleet:
        """The same clients for another method: its slots, private models and draws never meet the others'."""
        view = self.select(self.ids)
        view.prefix = f"{self.prefix}{prefix}/"
        return view

    @property
    def _state_prefix(self) -> str:
        return f"state/{self.prefix}"

    @property
    def everyone(self) -> Fleet:
        """The view of all clients that may train."""
        return self.select(self._population)

    def set_population(self, ids: npt.NDArray[np.int64]) -> None:
        """Which clients may train; the others are held out, and no strategy sees them before evaluation."""
        self._population = np.asarray(ids, np.int64)
        self.ids = self._population

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """n_i of the clients of this view."""
        return self.all_sizes[self.ids]

    @property
    def spec(self) -> ModelSpec:
        """The layout of a model value."""
        if "spec" not in self._known:
            self._known["spec"] = self._call("spec", {0: ()})[0]
        return self._known["spec"]

    # --- transactions -----------------------------------------------------------------------------------

    def begin(self, round: int, step_share: dict[int, float] | None = None) -> None:
        """Start a round: pending state of an aborted attempt is forgotten everywhere."""
        self._round.start(round, step_share or {})
        self._call("begin", dict.fromkeys(range(len(self.layout)), (round,)))

    def commit(self) -> list[str]:
        """Make the round's changes permanent and release its models; returns the blocks' notes."""
        notes = self._call("commit", dict.fromkeys(range(len(self.layout)), ()))
        self._round.release()
        return sorted({note for block in notes.values() for note in block})

    def restore(self, states: dict[int, dict[str, Any]]) -> None:
        """Give every client its state of a checkpoint."""
        self._call(
            "restore",
            {
                b: ({int(client): states[int(client)] for client in block if int(client) in states},)
                for b, block in enumerate(self.layout)
            },
        )

    def snapshot(self) -> list[Any]:
        """The committed state of every client, by block."""
        found = self._call("snapshot", dict.fromkeys(range(len(self.layout)), ()))
        return [found[b] for b in range(len(self.layout))]

    @property
    def events(self) -> list[str]:
        """What a user should know of this round (clients dropped, ...)."""
        return self._round.events

    def cost(self, participants: int, one_training: float) -> dict[str, float]:
        """What the strategy's part of this round moved and computed, per participant (the metrics' part aside).

        `one_training`: samples of a local training of all of them, for a method that has none.
        """
        return self._round.ledger.figures(participants, one_training)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds this round spent waiting for the clients, by what they were asked."""
        return self._round.seconds

    @property
    def dropped(self) -> set[int]:
        """Clients whose training was not finite in this round."""
        return set().union(*self._round.dropped.values())

    @property
    def _dropped(self) -> set[int]:
        return self._round.dropped.setdefault(self.prefix, set())

    @property
    def objectives(self) -> dict[str, tuple[Indices, npt.NDArray[np.float64]]]:
        """Per slot trained in this round: (clients, their mean local objective)."""
        return self._round.objectives

    @property
    def first_trained(self) -> Trained | None:
        """What the first local training of this round made, a shared part only if there was no other one.

        None before it, and after the commit.
        """
        return self._round.first_trained

    # --- what a strategy asks for -----------------------------------------------------------------------

    def initial(self, count: int, purpose: str = "initial model") -> Models:
        """`count` independently initialised models."""
        return Models(_frozen(self._call("initial", {0: (count, self.prefix + purpose)})[0]))

    def train(
        self,
        start: Reference,
        *,
        on_top_of: Reference | Sequence[Reference] | None = None,
        penalties: Sequence[Penalty] = (),
        sample_weights: SampleWeights | None = None,
        scale: npt.NDArray[np.float64] | None = None,
        slot: str = "main",
        keep: str | None = None,
        fresh: bool = False,
        held: int = 0,
        compared: bool = True,
    ) -> Trained:
        """Local training of every client of this view."""
        wire = _Wire(self)
        slot = self.prefix + slot
        encoded = wire.encode(start)
        under = [
            wire.encode(reference, count=SENT if at >= held else HELD)
            for at, reference in enumerate(_as_list(on_top_of))
        ]
        terms = [wire.encode_penalty(penalty) for penalty in penalties]
        weights = None
        if sample_weights is not None:
            weights = (self._state_prefix + sample_weights.name, sample_weights.column)
        scales = None if scale is None else wire.encode(PerClient(np.asarray(scale)))
        handle, clients = self._round.next_handle(slot), self._participants(skip=self._dropped)
        arguments = {
            b: (
                TrainRequest(
                    round=self._round.number,
                    handle=handle,
                    clients=[int(i) for i in self.ids[at]],
                    start=wire.part(encoded, at),
                    on_top_of=[wire.part(e, at) for e in under],
                    penalties=[wire.penalty_part(term, at) for term in terms],
                    sample_weights=weights,
                    scale=None if scales is None else wire.part(scales, at),
                    slot=slot,
                    keep=None if keep is None else self.prefix + keep,
                    fresh=fresh,
                    # Fresh trainings belong to evaluations: there, nobody is a straggler.
                    step_share={} if fresh else {int(i): self._round.step_share[int(i)]
                                                 for i in self.ids[at] if int(i) in self._round.step_share},
                ),
            )
            for b, at in clients.items()
        }  # fmt: skip
        outcome = self._call("train", arguments, wire.arrays)
        objective, magnitude, gradients, forwards, received = self._scatter(outcome, clients, 5).T
        self._round.ledger.train(gradients, forwards, received)
        self._round.objectives[slot] = (self.ids, objective)
        self._drop_not_finite(objective, magnitude, f"local training ('{slot}')", "model")
        trained = Trained(self, handle, self.ids, objective, magnitude, start)
        if not fresh:
            self._round.compare(trained, compared, self.prefix)
        return trained

    def forget(self, name: str) -> None:
        """Drop a private model of every client of this view."""
        own = f"model/{self.prefix}{name}"
        arguments = {b: ([int(i) for i in self.ids[at]], own) for b, at in self._participants().items()}
        self._call("forget", arguments, [])

    def losses(
        self, models: Models, *, on_top_of: Reference | Sequence[Reference] | None = None
    ) -> npt.NDArray[np.float64]:
        """(n, K) mean training losses."""
        wire = _Wire(self)
        encoded, under = wire.encode(models), [wire.encode(r) for r in _as_list(on_top_of)]
        clients = self._participants()
        arguments = {
            b: (
                ModelRequest(
                    round=self._round.number,
                    clients=[int(i) for i in self.ids[at]],
                    models=wire.part(encoded, at),
                    on_top_of=[wire.part(e, at) for e in under],
                ),
            )
            for b, at in clients.items()
        }
        self._round.ledger.compute(0.0, self.sizes * (len(models) + len(under)))
        found = self._scatter(self._call("losses", arguments, wire.arrays), clients, len(models))
        best = np.where(np.isfinite(found), found, np.inf).min(axis=1, initial=np.inf)
        self._drop(self.ids[~np.isfinite(best)], "the assignment", "its loss was not finite under any model")
        return found

    def gradients(
        self, at: Reference, *, on_top_of: Reference | Sequence[Reference] | None = None
    ) -> Trained:
        """Full-batch gradients of each client's mean training loss."""
        wire = _Wire(self)
        under = [wire.encode(reference) for reference in _as_list(on_top_of)]
        encoded, handle, clients = (
            wire.encode(at),
            self._round.next_handle("gradient"),
            self._participants(skip=self._dropped),
        )
        arguments = {
            b: (
                ModelRequest(
                    round=self._round.number,
                    clients=[int(i) for i in self.ids[positions]],
                    models=wire.part(encoded, positions),
                    on_top_of=[wire.part(e, positions) for e in under],
                    handle=handle,
                ),
            )
            for b, positions in clients.items()
        }
        found = self._call("gradients", arguments, wire.arrays)
        objective, magnitude = self._scatter(found, clients, 2).T
        self._round.ledger.compute(self.sizes, self.sizes * len(under))
        self._drop_not_finite(objective, magnitude, "the gradients", "gradient")
        return Trained(self, handle, self.ids, objective, magnitude)

    def evaluate(self, prediction: Prediction, split: str = "test") -> dict[str, npt.NDArray[Any]]:
        """Per-client metrics as columns aligned with `ids`; NaN where a client has no such samples."""
        wire = _Wire(self)
        # Evaluation moves nothing that counts: what a client is measured with it has, or gets for its next training.
        encoded = [wire.encode(model, count=NOT) for model in prediction.models]
        clients, weights = self._participants(), prediction.weights
        arguments = {
            b: (
                EvaluateRequest(
                    round=self._round.number,
                    clients=[int(i) for i in self.ids[at]],
                    models=[wire.part(e, at) for e in encoded],
                    weights=None if weights is None else {int(self.ids[j]): weights[j] for j in at},
                    combine=prediction.combine,
                    split=split,
                ),
            )
            for b, at in clients.items()
        }
        rows = self._in_order(self._call("evaluate", arguments, wire.arrays), clients)
        used = np.full(len(rows), len(encoded)) if weights is None else (weights != 0).sum(axis=1)
        self._round.ledger.compute(0.0, used * np.array([row["samples"] for row in rows]))
        names = sorted({name for row in rows for name in row})
        return {
            "client": self.ids,
            **{name: np.array([row.get(name, math.nan) for row in rows]) for name in names},
        }

    def measure(self, centres: Sequence[Sequence[Vector]], distributions: int) -> list[dict[str, float]]:
        """Figures of every centre (models whose outputs add up) on every held-out set, set by set."""
        models = self._place(np.stack([np.stack(centre) for centre in centres]))
        blocks = len(self.layout)
        shares = {b: (list(range(b, distributions, blocks)),) for b in range(min(blocks, distributions))}
        found = self._call("measure", shares, [models])
        return [row for s in range(distributions) for row in found[s % blocks][s // blocks]]

    def map(self, function: Callable[..., Any], *, stage: str, **inputs: Any) -> list[Any]:
        """Run a pure client function on every client; results in the order of `ids`."""
        wire = _Wire(self)
        encoded = {n: wire.encode(v) if _is_reference(v) else v for n, v in inputs.items()}
        clients = self._participants()
        arguments = {
            b: (
                MapRequest(
                    round=self._round.number,
                    clients=[int(i) for i in self.ids[at]],
                    stage=stage,
                    function=function,
                    inputs={n: wire.part(v, at) if isinstance(v, Encoded) else v for n, v in encoded.items()},
                    prefix=self._state_prefix,
                ),
            )
            for b, at in clients.items()
        }
        results = self._in_order(self._call("map", arguments, wire.arrays), clients)
        self._round.ledger.compute(0.0, [forwards for _, forwards in results])
        return [result for result, _ in results]

    # --- small print ------------------------------------------------------------------------------------

    def _participants(self, skip: set[int] | None = None) -> dict[int, npt.NDArray[np.int64]]:
        """{block: positions in `ids` of its clients}; blocks without any, and clients to skip, are left out."""
        blocks = self._block_of[self.ids]
        order = np.argsort(blocks, kind="stable")
        if skip:
            order = order[~np.isin(self.ids[order], list(skip))]
        if not len(order):
            return {}
        starts = np.flatnonzero(np.diff(blocks[order], prepend=-1))
        return {int(blocks[at[0]]): at for at in np.split(order, starts[1:]) if len(at)}

    def _scatter(
        self, outcome: dict[int, Any], clients: dict[int, npt.NDArray[np.int64]], width: int
    ) -> npt.NDArray[np.float64]:
        table = np.full((len(self.ids), width), np.nan)
        for b, at in clients.items():
            table[at] = np.asarray(outcome[b], np.float64).reshape(len(at), width)
        return table

    def _in_order(
        self, outcome: dict[int, list[Any]], clients: dict[int, npt.NDArray[np.int64]]
    ) -> list[Any]:
        rows: list[Any] = [None] * len(self.ids)
        for b, at in clients.items():
            for position, row in zip(at, outcome[b], strict=True):
                rows[position] = row
        return rows

    def _drop_not_finite(
        self, objective: npt.NDArray[np.float64], magnitude: npt.NDArray[np.float64], stage: str, result: str
    ) -> None:
        finite = np.isfinite(objective) & np.isfinite(magnitude)
        if finite.any():
            # A model beyond all others by this much is diverging: averaged, it would wipe the others out.
            limit = WILD * max(float(np.median(magnitude[finite])), 1.0)
            magnitude[finite & (magnitude > limit)] = np.inf
        bad = self.ids[~(np.isfinite(objective) & np.isfinite(magnitude))]
        self._drop(bad, stage, f"its loss or its {result} was not finite")

    def _drop(self, bad: Indices, stage: str, what: str) -> None:
        bad = bad[~np.isin(bad, list(self._dropped))]
        if not len(bad):
            return
        if self.not_finite == "stop":
            advice = "lower local.lr, or continue without such clients with not_finite=drop"
            raise ClientFailure(int(bad[0]), self._round.number, stage, f"{what} ({advice})")
        self._dropped.update(int(client) for client in bad)
        self._round.events.append(
            f"Round {self._round.number}: dropped client{'s' if len(bad) > 1 else ''} "
            f"{', '.join(str(client) for client in bad)} from {stage}: {what}."
        )


class Trained:
    """Models that clients made and that stayed where they were made, one for each of `ids`."""

    def __init__(
        self,
        fleet: Fleet,
        handle: str,
        ids: Indices,
        objective: npt.NDArray[np.float64],
        magnitude: npt.NDArray[np.float64],
        start: Reference | None = None,
    ) -> None:
        self._fleet, self.handle, self.ids = fleet, handle, ids
        self.start = start  # what a reference to this handle means for a client that did not arrive
        self.objective = objective
        self.arrived = np.isfinite(objective) & np.isfinite(magnitude)
        self._magnitude = np.where(self.arrived, magnitude, 0.0)

    def combine(self, weights: npt.ArrayLike, otherwise: Models | None = None) -> Models:
        """The (K, n) weighted means of the models: rows are normalised over the clients that arrived."""
        matrix = np.asarray(weights, np.float64)
        if matrix.ndim != 2 or matrix.shape[1] != len(self.ids):
            raise ValueError(f"expected a (K, {len(self.ids)}) weight matrix, got shape {matrix.shape}")
        matrix = normalised_rows(matrix * self.arrived)
        self._fleet._round.ledger.up(self.handle, self.ids[matrix.any(axis=0)])
        exponents = fixed_point_exponents(matrix, self._magnitude)
        fleet, clients = self._fleet, self._clients()
        totals = fleet._call(
            "combine",
            {b: (self.handle, self._names(at), matrix[:, at], exponents) for b, at in clients.items()},
        )
        summed = sum(totals.values(), np.zeros((len(matrix), fleet.spec.size), np.int64))
        values = from_fixed_point(summed, exponents)
        for k in np.flatnonzero(~matrix.any(axis=1)):
            # An empty cluster has nothing to average: it keeps the model it had.
            if otherwise is None:
                raise ValueError(f"row {k} weighs nothing and there is no model to keep")
            values[k] = otherwise.values[k]
        return Models(_frozen(values))

    def average(
        self,
        by: Indices | None = None,
        weights: npt.ArrayLike = 1.0,
        clusters: int | None = None,
        otherwise: Models | Vector | None = None,
    ) -> Any:
        """The weighted mean of all models (a vector), or of each cluster `by` (a `Models`)."""
        w = np.broadcast_to(np.asarray(weights, np.float64), self.ids.shape)
        if by is None:
            keep = None if otherwise is None else Models(np.asarray(otherwise)[None])
            return self.combine(w[None], keep)[0]
        if clusters is None:
            raise ValueError("averaging by cluster needs the number of clusters")
        return self.combine(one_hot(by, clusters, w), otherwise)  # type: ignore[arg-type]

    def features(self, part: str) -> Matrix:
        """(n, d): the columns of a part of each model, in id order."""
        return self.gather(self._fleet.spec.columns(part))

    def some(self, at: npt.NDArray[np.int64]) -> Trained:
        """The same handle for some positions of `ids`, ascending."""
        view = self._fleet.select(self.ids[at])
        return Trained(view, self.handle, self.ids[at], self.objective[at], self._magnitude[at], self.start)

    def gather(self, columns: npt.ArrayLike | None = None) -> Matrix:
        """(n, d): chosen columns of every model, in id order; zeros for a client that did not arrive."""
        chosen = None if columns is None else np.asarray(columns, np.int64)
        self._fleet._round.ledger.up(self.handle, self.ids[self.arrived])
        clients = self._clients()
        parts = self._fleet._call(
            "columns", {b: (self.handle, self._names(at), chosen) for b, at in clients.items()}
        )
        width = self._fleet.spec.size if chosen is None else len(chosen)
        table = np.zeros((len(self.ids), width), np.float32)
        for b, at in clients.items():
            table[at] = parts[b]
        return table

    def chunks(self, memory: float = 256e6) -> Any:
        """(columns, (n, columns) array) pieces of all models, none larger than `memory` bytes."""
        step = max(1, int(memory // (4 * max(len(self.ids), 1))))
        for at in range(0, self._fleet.spec.size, step):
            columns = np.arange(at, min(at + step, self._fleet.spec.size))
            yield columns, self.gather(columns)

    def distances(self, to: Reference) -> npt.NDArray[np.float64]:
        """Euclidean distance of each client's model to its reference."""
        view = self._fleet.select(self.ids)
        wire, clients = _Wire(view), self._clients()
        encoded = wire.encode(to)
        found = view._call(
            "distances",
            {b: (self.handle, self._names(at), wire.part(encoded, at)) for b, at in clients.items()},
            wire.arrays,
        )
        return view._scatter(found, clients, 1)[:, 0]

    def _clients(self) -> dict[int, npt.NDArray[np.int64]]:
        return self._fleet.select(self.ids)._participants()

    def _names(self, at: npt.NDArray[np.int64]) -> list[int]:
        return [int(i) for i in self.ids[at]]


class _Round:
    """What belongs to the round under way, shared by all views of a fleet."""

    def __init__(self) -> None:
        self.start(0, {})

    def start(self, number: int, step_share: dict[int, float]) -> None:
        self.number = number
        self.step_share = step_share
        self.events: list[str] = []
        self.seconds: dict[str, float] = {}
        self.dropped: dict[str, set[int]] = {}  # by prefix: members of an ensemble drop for themselves
        self.ledger = Ledger()
        self.objectives: dict[str, tuple[Indices, npt.NDArray[np.float64]]] = {}
        self.release()

    def release(self) -> None:
        self.placed: dict[Any, tuple[npt.NDArray[Any], Any]] = {}
        self.first_trained: Trained | None = None
        self._gives_way: str | None = None  # the prefix whose next training takes the first one's place
        self._handles = 0

    def compare(self, trained: Trained, compared: bool, prefix: str) -> None:
        """Keep the round's first training; one that is not to be compared gives way to the same method's next."""
        if self.first_trained is None or (compared and prefix == self._gives_way):
            self.first_trained, self._gives_way = trained, None if compared else prefix

    def next_handle(self, slot: str) -> str:
        self._handles += 1
        return f"{self._handles}:{slot}"


SENT, HELD, NOT = (
    "sent",
    "held",
    "not",
)  # what the ledger makes of a model: on its way, with the client, neither
BACKWARD = 2.0  # a backward pass in forward passes


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
        self.gradients = self.forwards = 0.0
        self.first = 0  # clients that got a model to begin their own with
        self.unit = 0.0  # samples of the first training: what FedAvg would train on

    def down(
        self,
        models: npt.NDArray[Any],
        ids: Indices,
        rows: npt.NDArray[np.int64] | None,
        clients: int,
        sent: bool = True,
    ) -> None:
        """Clients `ids` need a model, the whole array of models, or one row each (-1: none)."""
        self._held.append(models)
        for k, model in enumerate(np.atleast_2d(models)):
            chosen = ids if rows is None else ids[rows == k]
            for table in (self._stored, self._down) if sent else (self._stored,):
                table.setdefault(model.ctypes.data, np.zeros(clients, bool))[chosen] = True

    def own(self, name: str, ids: Indices) -> None:
        """Clients `ids` use a private model."""
        self._own.setdefault(name, set()).update(ids.tolist())

    def up(self, handle: str, ids: Indices) -> None:
        """Clients `ids` deliver their result of a call."""
        self._up.setdefault(handle, set()).update(ids.tolist())

    def compute(self, gradients: Any, forwards: Any) -> None:
        """Samples that went backward, and samples that only went forward."""
        self.gradients += float(np.nansum(gradients))
        self.forwards += float(np.nansum(forwards))

    def train(self, gradients: Any, forwards: Any, received: Any) -> None:
        """A local training; `received` has a 1 for each client that was sent the model to begin its own with."""
        self.unit = self.unit or float(np.nansum(gradients))
        self.first += int(np.nansum(received))
        self.compute(gradients, forwards)

    def figures(self, participants: int, one_training: float) -> dict[str, float]:
        """Per participant; computation as a multiple of one local training, which is what FedAvg does."""
        count = max(participants, 1)
        stored = sum(int(has.sum()) for has in self._stored.values()) + sum(map(len, self._own.values()))
        work = (1.0 + BACKWARD) * self.gradients + self.forwards
        unit = self.unit or one_training
        figures = {
            "cost_models_stored": stored / count,
            "cost_models_down": (int(sum(sent.sum() for sent in self._down.values())) + self.first) / count,
            "cost_models_up": sum(len(ids) for ids in self._up.values()) / count,
            "cost_gradients": self.gradients / count,
            "cost_forwards": self.forwards / count,
        }
        if unit:
            figures["cost_computation"] = work / ((1.0 + BACKWARD) * unit)
        return figures


class _Wire:
    """Encodes references of a view; arrays travel beside the request, each placed once per round."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._ids = fleet, fleet.ids
        self.arrays: list[Any] = []

    def encode(self, reference: Reference, count: str = SENT) -> Encoded:
        """A reference as it travels; `count` says what the ledger makes of the models in it."""
        if isinstance(reference, Rows):
            self._check(reference.rows, "rows")
            self._down(reference.models, reference.rows, count)
            return Encoded("rows", self._array(reference.models), self._by_client(reference.rows))
        if isinstance(reference, PerClient):
            self._check(reference.values, "values")
            return Encoded("value", per_client=self._by_client(reference.values))
        if isinstance(reference, Private):
            # The default is sent to clients that have no model of their own yet: `train` counts those.
            default = None if reference.default is None else self.encode(reference.default, NOT)
            name = self._fleet.prefix + reference.name
            if count != NOT:
                self._fleet._round.ledger.own(name, self._ids)
            return Encoded("private", name=name, default=default)
        if isinstance(reference, Merged):
            base, other = self.encode(reference.base, count), self.encode(reference.other, count)
            columns = self._array(np.asarray(reference.columns))
            return Encoded("merged", columns, default=base, other=other)
        if isinstance(reference, Mixture):
            self._check(reference.weights, "weights")
            return Encoded(
                "mixture", self._array(reference.models.values), self._by_client(reference.weights)
            )
        if isinstance(reference, Models):
            self._down(reference.values, None, count)
            return Encoded("models", self._array(reference.values))
        if isinstance(reference, Trained):
            same = reference.start is not None and np.array_equal(reference.ids, self._ids)
            return Encoded(
                "result", name=reference.handle, default=self.encode(reference.start, count) if same else None
            )
        vector = np.asarray(reference)
        self._down(vector, None, count)
        return Encoded("vector", self._array(vector))

    def _down(self, models: npt.NDArray[Any], rows: npt.NDArray[np.int64] | None, count: str) -> None:
        if count != NOT:
            ledger, clients = self._fleet._round.ledger, len(self._fleet.all_sizes)
            ledger.down(models, self._ids, rows, clients, sent=count == SENT)

    def part(self, encoded: Encoded, at: npt.NDArray[np.int64]) -> Encoded:
        """The piece of a reference that one block needs."""
        chosen = (
            {int(self._ids[j]): encoded.per_client[int(self._ids[j])] for j in at}
            if encoded.per_client
            else {}
        )
        default = None if encoded.default is None else self.part(encoded.default, at)
        other = None if encoded.other is None else self.part(encoded.other, at)
        return Encoded(encoded.kind, encoded.array, chosen, encoded.name, default, other)

    def encode_penalty(self, penalty: Penalty) -> EncodedPenalty:
        """A penalty travels without its references, which travel as all references do."""
        anchors = {name: self.encode(reference) for name, reference in penalty.anchors.items()}
        outputs = {name: self.encode(reference) for name, reference in penalty.outputs.items()}
        bare = dataclasses.replace(penalty, **dict.fromkeys([*anchors, *outputs]))  # type: ignore[type-var]
        return EncodedPenalty(bare, anchors, outputs)

    def penalty_part(self, term: EncodedPenalty, at: npt.NDArray[np.int64]) -> EncodedPenalty:
        """The piece of a penalty that one block needs."""
        anchors = {name: self.part(encoded, at) for name, encoded in term.anchors.items()}
        outputs = {name: self.part(encoded, at) for name, encoded in term.outputs.items()}
        return EncodedPenalty(term.penalty, anchors, outputs)

    def _by_client(self, values: npt.NDArray[Any]) -> dict[int, Any]:
        return {int(client): value for client, value in zip(self._ids, values.tolist(), strict=True)}

    def _check(self, values: npt.NDArray[Any], what: str) -> None:
        if len(values) != len(self._ids):
            raise ValueError(
                f"expected {what} for the {len(self._ids)} clients of this view, got {len(values)}"
            )

    def _array(self, array: npt.NDArray[Any]) -> int:
        placed = self._fleet._round.placed
        where = (array.ctypes.data, array.shape, array.strides)
        if where not in placed:
            placed[where] = (
                array,
                self._fleet._place(array),
            )  # held, so its id stays its own
        self.arrays.append(placed[where][1])
        return len(self.arrays) - 1


class InProcessFleet(Fleet):
    """All blocks in this process, one after the other: the reference every other layout must equal."""

    def __init__(
        self,
        blocks: Sequence[ClientBlock],
        sizes: npt.NDArray[np.int64],
        not_finite: str = "drop",
    ) -> None:
        super().__init__([sorted(block.clients) for block in blocks], sizes, not_finite)
        self.blocks = list(blocks)

    def _reach(self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any]) -> Any:
        return {b: getattr(self.blocks[b], method)(*args, *arrays) for b, args in arguments.items()}


def _as_list(reference: Reference | Sequence[Reference] | None) -> list[Reference]:
    if reference is None:
        return []
    return list(reference) if isinstance(reference, list | tuple) else [reference]  # type: ignore[list-item]


def _is_reference(value: Any) -> bool:
    return isinstance(value, Rows | Merged | Mixture | PerClient | Private | Models | Trained | np.ndarray)


def _frozen(array: Matrix) -> Matrix:
    """The same array, read-only: models are values."""
    array = np.asarray(array)
    if array.flags.writeable:
        array.flags.writeable = False
    return array
