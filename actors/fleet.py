"""The fleet: the server's only view of the clients.

One implementation of everything a strategy may ask (`archipelago/strategies/interface.py`), over two ways to reach the
blocks that host the clients: in this process, or on Ray actors. What differs is `_reach` and `_place` and nothing
else, which is why both give the same bits.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actors.collusion import Collusion
from actors.requests import (
    BestRequest,
    DeriveRequest,
    EvaluateRequest,
    MapRequest,
    ModelRequest,
    Request,
    Stateless,
    TrainRequest,
    numbers_in,
)
from actors.rounds import Count, Ledger, RoundState
from actors.trained import Trained
from actors.wire import Wire, model_key
from archipelago.core.errors import ClientFailure
from archipelago.strategies.parameters import ModelSpec, PartialSums, Vector, add_sums
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.references import Indices, Models, PerClient, Prediction, Reference, SampleWeights
from archipelago.strategies.rules import Rule

if TYPE_CHECKING:  # a server process has no use for Lightning, which a block imports
    from actors.block import ClientBlock

WILD = 1e9  # times the median magnitude: a model beyond this is diverging


class Fleet(ABC):
    """All clients of a federation, in blocks.

    `layout[b]` lists the client ids of block b. `ids` are the clients of this view: everyone, unless the view
    comes from `select`. Views share everything else with the fleet they come from.
    """

    def __init__(
        self, layout: Sequence[Sequence[int]], sizes: npt.NDArray[np.int64], not_finite: str = "drop"
    ) -> None:
        self.layout: list[Indices] = []
        self._block_of = np.empty(len(sizes), np.int64)
        self.move(layout)
        self.all_sizes = sizes
        self.not_finite = not_finite
        self.ids: Indices = np.arange(len(sizes), dtype=np.int64)
        self._population = self.ids
        self._round = RoundState()
        self._leaves = True  # what clients make in this view may leave them, see `measuring`
        self.collusion: Collusion | None = None
        self.prefix = ""  # of slots, private models and initialisations, see `named`
        self._known: dict[str, ModelSpec] = {}  # shared by all views

    def move(self, layout: Sequence[Sequence[int]]) -> None:
        """Where the clients live from now on, for all views: between rounds, by who moved their states."""
        self.layout[:] = [np.asarray(block, np.int64) for block in layout]
        for b, block in enumerate(self.layout):
            self._block_of[block] = b

    # --- reaching the blocks ----------------------------------------------------------------------------

    @abstractmethod
    def _reach(
        self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any] = ()
    ) -> dict[int, Any]:
        """Call `method` on the given blocks, all at once; {block: result}. `arrays` go to each of them."""

    @abstractmethod
    def _summed(self, method: str, calls: Iterable[dict[int, tuple[Any, ...]]]) -> Iterator[PartialSums]:
        """For each of several calls, what the blocks return, added up."""

    def _place(self, array: npt.NDArray[Any]) -> Any:
        """Put an array where every block can read it (the object store)."""
        return array

    def placed(self, array: npt.NDArray[Any]) -> Any:
        """The array where every block can read it, put there once in a round."""
        known, where = self._round.placed, (array.ctypes.data, array.shape, array.strides)
        if where not in known:
            known[where] = (array, self._place(array))  # the array is kept, so its address stays its own
        return known[where][1]

    def participants(self, skip: set[int] | None = None) -> dict[int, Indices]:
        """{block: positions in `ids` of its clients}; blocks without any, and clients to skip, are left out."""
        blocks = self._block_of[self.ids]
        order = np.argsort(blocks, kind="stable")
        if skip:
            order = order[~np.isin(self.ids[order], list(skip))]
        if not len(order):
            return {}
        starts = np.flatnonzero(np.diff(blocks[order], prepend=-1))
        return {int(blocks[at[0]]): at for at in np.split(order, starts[1:]) if len(at)}

    def names(self, at: Indices) -> list[int]:
        """The client ids at some positions of `ids`."""
        return [int(client) for client in self.ids[at]]

    def _parts(self, request: Request, clients: dict[int, Indices]) -> dict[int, tuple[Request]]:
        """What each block needs of a request."""
        return {b: (request.part(self.names(at)),) for b, at in clients.items()}

    def _table(self, found: dict[int, Any], clients: dict[int, Indices], width: int) -> Any:
        """(n, width) numbers of all blocks in the order of `ids`; NaN for clients that were skipped."""
        table = np.full((len(self.ids), width), np.nan)
        for b, at in clients.items():
            table[at] = np.asarray(found[b], np.float64).reshape(len(at), width)
        return table

    def _in_order(self, found: dict[int, list[Any]], clients: dict[int, Indices]) -> list[Any]:
        """What all blocks found, client by client, in the order of `ids`."""
        rows: list[Any] = [None] * len(self.ids)
        for b, at in clients.items():
            for position, row in zip(at, found[b], strict=True):
                rows[position] = row
        return rows

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

    def measuring(self) -> Fleet:
        """The same clients for a measurement: no attacker and no transform comes between."""
        view = self.select(self.ids)
        view._leaves = False
        return view

    @property
    def _state_prefix(self) -> str:
        return f"state/{self.prefix}"

    @property
    def everyone(self) -> Fleet:
        """The view of all clients that may train."""
        return self.select(self._population)

    def set_population(self, ids: Indices) -> None:
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
            self._known["spec"] = self._reach("spec", {0: ()})[0]
        return self._known["spec"]

    # --- transactions -----------------------------------------------------------------------------------

    def begin(self, round: int, step_share: dict[int, float] | None = None, rate: float = 1.0) -> None:
        """Start a round: pending state of an aborted attempt is forgotten everywhere."""
        self._round.start(round, step_share or {}, rate)
        self._reach("begin", dict.fromkeys(range(len(self.layout)), (round,)))

    def prepare(self, own: Callable[[], dict[str, Any]]) -> None:
        """Before the round commits: copies of what it changes go where copies are held; `own` makes the server's."""
        del own  # in one process all is lost, or nothing

    def commit(self) -> list[str]:
        """Make the round's changes permanent and release its models; returns the blocks' notes."""
        notes = self._reach("commit", dict.fromkeys(range(len(self.layout)), self._commits()))
        self._round.release()
        return sorted({note for block in notes.values() for note in block})

    def _commits(self) -> tuple[Any, ...]:
        """What blocks must know to commit."""
        return ()

    def restore(self, states: dict[int, dict[str, Any]]) -> None:
        """Give every client its state of a checkpoint."""
        arguments = {
            b: ({int(client): states[int(client)] for client in block if int(client) in states},)
            for b, block in enumerate(self.layout)
        }
        self._reach("restore", arguments)

    def snapshot(self) -> list[Any]:
        """The committed state of every client, by block."""
        found = self._reach("snapshot", dict.fromkeys(range(len(self.layout)), ()))
        return [found[b] for b in range(len(self.layout))]

    # --- what is known of the round ---------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Counts what this round moves and computes."""
        return self._round.ledger

    @property
    def events(self) -> list[str]:
        """What a user should know of this round (clients dropped, ...)."""
        return self._round.events

    def cost(self, participants: int, one_training: float) -> dict[str, float]:
        """What the strategy's part of this round moved and computed, per participant (the metrics' part aside).

        `one_training`: samples of a local training of all of them, for a method that has none.
        """
        return self.ledger.metrics(participants, one_training)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds this round spent waiting for the clients, by what they were asked; `share_...`: of the work."""
        return self._round.spent()

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
        return Models(self._reach("initial", {0: (count, self.prefix + purpose)})[0])

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
        continues: str | None = None,
        held: int = 0,
        compared: bool = True,
        restart: bool = False,
        only: Sequence[str] | None = None,
        steps: int | None = None,
        rule: Rule | None = None,
        sends: bool = False,
    ) -> Trained:
        """Local training of every client of this view."""
        wire, slot = Wire(self), self.prefix + slot
        weights = None
        if sample_weights is not None:
            weights = (self._state_prefix + sample_weights.name, sample_weights.column)
        request = TrainRequest(
            round=self._round.number,
            clients=self.ids.tolist(),
            handle=self._round.next_handle(slot),
            start=wire.encode(start),
            on_top_of=wire.encode_all(on_top_of, held=held),
            penalties=[wire.encode_penalty(penalty) for penalty in penalties],
            sample_weights=weights,
            scale=None if scale is None else wire.encode(PerClient(np.asarray(scale))),
            slot=slot,
            keep=None if keep is None else self.prefix + keep,
            fresh=fresh,
            continues=None if continues is None else self.prefix + continues,
            # Most fresh trainings belong to evaluations: there, nobody is a straggler, and nothing is sent.
            step_share=None if fresh else self._step_share(wire),
            leaves=self._leaves and (sends or not fresh),
            restart=restart,
            only=None if only is None else tuple(only),
            steps=steps,
            rule=wire.encode_rule(rule),
            prefix=self.prefix,
            rate=self._round.rate,
        )
        for name in () if rule is None else rule.keeps:
            self.ledger.own(self.prefix + name, self.ids)
        clients = self.participants(skip=self._dropped)
        found = self._reach("train", self._parts(request, clients), wire.arrays)
        objective, magnitude, gradients, forwards, received, sent, taken, seen = self._table(
            found, clients, 8
        ).T
        self._sent(request, start, magnitude, sent)
        self.ledger.train(gradients, forwards, received, seen if steps is None else None)
        self._round.objectives[slot] = (self.ids, objective)
        self._drop_not_finite(objective, magnitude, f"local training ('{slot}')", "model")
        under = [] if on_top_of is None else on_top_of if isinstance(on_top_of, list | tuple) else [on_top_of]
        trained = Trained(self, request.handle, objective, magnitude, start, taken, under)  # type: ignore[arg-type]  # references
        if not fresh:
            self._round.compare(trained, compared, self.prefix)
        return trained

    def derive(self, reference: Reference, *, slot: str, keep: str | None = None) -> Trained:
        """What a reference means for each client, as a result of its own."""
        wire = Wire(self)
        request = DeriveRequest(
            round=self._round.number,
            clients=self.ids.tolist(),
            models=wire.encode(reference),
            on_top_of=[],
            handle=self._round.next_handle(self.prefix + slot),
            leaves=self._leaves and keep is None,
            keep=None if keep is None else self.prefix + keep,
        )
        clients = self.participants(skip=self._dropped)
        found = self._reach("derive", self._parts(request, clients), wire.arrays)
        magnitude, sent = self._table(found, clients, 2).T
        self._sent(request, None, magnitude, sent)
        there = np.where(np.isnan(magnitude), np.nan, 0.0)
        self._drop_not_finite(there, magnitude, f"deriving '{slot}'", "result")
        return Trained(self, request.handle, there, magnitude)

    def _sent(
        self, request: TrainRequest | ModelRequest, start: Reference | None, magnitude: Any, sent: Any
    ) -> None:
        """Attackers that collude send what they agreed on; the ledger learns how much was sent."""
        if self.collusion is not None and request.leaves:
            self.collusion.replace(self, request.handle, start, magnitude, sent)
        self.ledger.sends(request.handle, self.ids, sent)

    def _step_share(self, wire: Wire) -> Any:
        share = self._round.step_share
        if not share:
            return None
        return wire.encode(PerClient(np.array([share.get(client, 1.0) for client in self.ids.tolist()])))

    def forget(self, name: str) -> None:
        """Drop a private model of every client of this view."""
        own = model_key(self.prefix + name)
        self._reach("forget", {b: (self.names(at), own) for b, at in self.participants().items()})

    def losses(
        self, models: Models, *, on_top_of: Reference | Sequence[Reference] | None = None
    ) -> npt.NDArray[np.float64]:
        """(n, K) mean training losses."""
        wire = Wire(self)
        request = ModelRequest(
            round=self._round.number,
            clients=self.ids.tolist(),
            models=wire.encode(models),
            on_top_of=wire.encode_all(on_top_of),
        )
        clients = self.participants()
        self.ledger.compute(0.0, self.sizes * (len(models) + len(request.on_top_of)))
        found = self._reach("losses", self._parts(request, clients), wire.arrays)
        table: npt.NDArray[np.float64] = self._table(found, clients, len(models))
        best = np.where(np.isfinite(table), table, np.inf).min(axis=1, initial=np.inf)
        self._drop_unassigned(best)
        return table

    def best(
        self,
        models: Models,
        *,
        on_top_of: Reference | Sequence[Reference] | None = None,
        first: Indices | None = None,
    ) -> tuple[Indices, npt.NDArray[np.float64]]:
        """(n,) the model of least mean training loss for each client, and that loss."""
        wire = Wire(self)
        request = BestRequest(
            round=self._round.number,
            clients=self.ids.tolist(),
            models=wire.encode(models),
            on_top_of=wire.encode_all(on_top_of),
            first=None if first is None else wire.encode(PerClient(np.asarray(first))),
            owner=self.prefix,
        )
        clients = self.participants()
        # What a deployment computes to find the best of K, however few of these passes are needed here.
        self.ledger.compute(0.0, self.sizes * (len(models) + len(request.on_top_of)))
        found = self._reach("best", self._parts(request, clients), wire.arrays)
        chosen, loss, forwards = self._table(found, clients, 3).T
        self._round.count_passes(forwards.sum(), float(self.sizes.sum()) * len(models))
        self._drop_unassigned(loss)
        return chosen.astype(np.int64), loss

    def gradients(
        self, at: Reference, *, on_top_of: Reference | Sequence[Reference] | None = None
    ) -> Trained:
        """Full-batch gradients of each client's mean training loss."""
        wire = Wire(self)
        request = ModelRequest(
            round=self._round.number,
            clients=self.ids.tolist(),
            on_top_of=wire.encode_all(on_top_of),
            models=wire.encode(at),
            handle=self._round.next_handle("gradient"),
            leaves=self._leaves,
        )
        clients = self.participants(skip=self._dropped)
        found = self._reach("gradients", self._parts(request, clients), wire.arrays)
        objective, magnitude, sent = self._table(found, clients, 3).T
        self._sent(request, None, magnitude, sent)
        self.ledger.compute(self.sizes, self.sizes * len(request.on_top_of))
        self._drop_not_finite(objective, magnitude, "the gradients", "gradient")
        return Trained(self, request.handle, objective, magnitude)

    def evaluate(
        self, prediction: Prediction, split: str = "test", *, skip: set[int] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Per-client metrics as columns aligned with `ids`; NaN where a client has no such samples.

        Clients to skip, which `prediction` may speak of, are not visited and have no row.
        """
        wire, weights = Wire(self), prediction.weights
        # Evaluation moves nothing that counts: what a client is measured with it has, or gets for its next training.
        request = EvaluateRequest(
            round=self._round.number,
            clients=self.ids.tolist(),
            models=[wire.encode(model, Count.NOT) for model in prediction.models],
            weights=None if weights is None else wire.encode(PerClient(weights)),
            combine=prediction.combine,
            split=split,
        )
        clients = self.participants(skip)
        found = self._reach("evaluate", self._parts(request, clients), wire.arrays)
        there = ~np.isin(self.ids, list(skip or ()))
        rows = [row for row in self._in_order(found, clients) if row is not None]
        used = (
            np.full(len(rows), len(request.models)) if weights is None else (weights != 0).sum(axis=1)[there]
        )
        self.ledger.compute(0.0, used * np.array([row["samples"] for row in rows]))
        names = sorted({name for row in rows for name in row})
        columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
        return {"client": self.ids[there], **columns}

    def measure(self, centres: Sequence[Sequence[Vector]], distributions: int) -> list[dict[str, float]]:
        """Metrics of every centre (models whose outputs add up) on every held-out set, set by set."""
        models = self._place(np.stack([np.stack(centre) for centre in centres]))
        blocks = len(self.layout)
        shares = {b: (list(range(b, distributions, blocks)),) for b in range(min(blocks, distributions))}
        found = self._reach("measure", shares, [models])
        return [row for s in range(distributions) for row in found[s % blocks][s // blocks]]

    def map(self, function: Callable[..., Any], *, stage: str, **inputs: Any) -> list[Any]:
        """Run a pure client function on every client; results in the order of `ids`."""
        wire = Wire(self)
        request = MapRequest(
            round=self._round.number,
            clients=self.ids.tolist(),
            stage=stage,
            function=function,
            inputs={name: wire.encode_input(value) for name, value in inputs.items()},
            prefix=self._state_prefix,
        )
        clients = self.participants()
        found = self._reach("map", self._parts(request, clients), wire.arrays)
        results = self._in_order(found, clients)
        self.ledger.compute(0.0, [forwards for _, forwards in results])
        return [result for result, _ in results]

    def describe(self, function: Callable[..., Any], *, stage: str, **inputs: Any) -> list[Any]:
        """What a function of each client's view returns; the numbers in it count as that part of a model sent."""
        results = self.map(Stateless(function), stage=stage, **inputs)
        self.ledger.send(sum(numbers_in(result) for result in results), self.spec.size)
        return results

    def distances(self, handle: str, to: Reference) -> npt.NDArray[np.float64]:
        """Euclidean distance of each client's model under `handle` to its reference."""
        wire, clients = Wire(self), self.participants()
        encoded = wire.encode(to)
        arguments = {b: (handle, self.names(at), encoded.part(self.names(at))) for b, at in clients.items()}
        found: npt.NDArray[np.float64] = self._table(
            self._reach("distances", arguments, wire.arrays), clients, 1
        )
        return found[:, 0]

    # --- clients that drop out --------------------------------------------------------------------------

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

    def _drop_unassigned(self, best: npt.NDArray[np.float64]) -> None:
        bad = self.ids[~np.isfinite(best)]
        self._drop(bad, "the assignment", "its loss was not finite under any model")

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

    def _reach(
        self, method: str, arguments: dict[int, tuple[Any, ...]], arrays: Sequence[Any] = ()
    ) -> dict[int, Any]:
        found = {}
        with self._round.timed(method):
            for b, given in arguments.items():
                found[b] = getattr(self.blocks[b], method)(*given, *arrays)
        return found

    def _summed(self, method: str, calls: Iterable[dict[int, tuple[Any, ...]]]) -> Iterator[PartialSums]:
        for arguments in calls:
            parts = (self._reach(method, {b: given})[b] for b, given in arguments.items())
            yield functools.reduce(lambda total, part: add_sums([total, part]), parts)
