"""The fleet: the server's only view of the clients.

One implementation of everything a strategy may ask (`archipelago/strategies/interface.py`), over two ways to reach the
blocks that host the clients: in this process, or on Ray actors. What differs is `_reach` and `_place` and nothing
else, which is why both give the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actors.fleet_base import FleetBase
from actors.requests import (
    BestRequest,
    DeriveRequest,
    EvaluateRequest,
    MapRequest,
    ModelRequest,
    Stateless,
    TrainRequest,
    numbers_in,
)
from actors.rounds import Count
from actors.trained import Trained
from actors.wire import Wire, model_key
from archipelago.strategies.parameters import PartialSums, Vector, add_sums
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.references import Indices, Models, PerClient, Prediction, Reference, SampleWeights
from archipelago.strategies.rules import Rule

if TYPE_CHECKING:  # a server process has no use for Lightning, which a block imports
    from actors.block import ClientBlock


class Fleet(FleetBase):
    """All clients of a federation, and what a strategy may ask of them."""

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
        request = TrainRequest(
            round=self._round.number,
            clients=self.ids.tolist(),
            handle=self._round.next_handle(slot),
            start=wire.encode(start),
            on_top_of=wire.encode_all(on_top_of, held=held),
            penalties=[wire.encode_penalty(penalty) for penalty in penalties],
            sample_weights=self._weights_of(sample_weights),
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
        under = [] if on_top_of is None else on_top_of if isinstance(on_top_of, list | tuple) else [on_top_of]
        trained = self._trained(request, wire, start, under)  # type: ignore[arg-type]  # references
        if not fresh:
            self._round.compare(trained, compared, self.prefix)
        return trained

    def _weights_of(self, weights: SampleWeights | None) -> tuple[str, int] | None:
        """Which column of which private table weighs the samples."""
        return None if weights is None else (self._state_prefix + weights.name, weights.column)

    def _trained(
        self, request: TrainRequest, wire: Wire, start: Reference, under: Sequence[Reference]
    ) -> Trained:
        """Send a training to the clients, and note what it cost and whose result is not finite."""
        for name in () if request.rule is None else request.rule.keeps:
            self.ledger.own(self.prefix + name, self.ids)
        clients = self.participants(skip=self._dropped)
        found = self._reach("train", self._parts(request, clients), wire.arrays)
        objective, magnitude, gradients, forwards, received, sent, taken, seen = self._table(
            found, clients, 8
        ).T
        self._sent(request, start, magnitude, sent)
        self.ledger.train(gradients, forwards, received, seen if request.steps is None else None)
        self._round.objectives[request.slot] = (self.ids, objective)
        self._drop_not_finite(objective, magnitude, f"local training ('{request.slot}')", "model")
        return Trained(self, request.handle, objective, magnitude, start, taken, under)

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
