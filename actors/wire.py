"""References on the wire: one class for each kind, which encodes it, takes a block's part of it and resolves it.

A strategy points at models by references (`archipelago/strategies/references.py`). `Wire.encode` makes an `Encoded` of
one, which travels in a request; arrays travel once, beside the request, and are named by their position there. The
block that hosts a client resolves it: `encoded.resolve(client, side)` is the model (or models, or value) that the
reference means for that client, None if it points at nothing.

A new kind of reference is one class here, with `encode`, `part` and `resolve`, under `@encodes(TheReference)`;
`stack` is the same for all clients of a device at once, and works by `resolve` where a class does not have it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from actors.client_states import State
from actors.rounds import Count
from actors.trained import Trained
from archipelago.strategies.parameters import Vector, merged, mixed, summed
from archipelago.strategies.penalties import Penalty, features_of
from archipelago.strategies.references import (
    Indices,
    Merged,
    Mixture,
    Models,
    PerClient,
    Private,
    Reference,
    Rows,
    Sum,
)
from archipelago.strategies.rules import Rule

if TYPE_CHECKING:
    from actors.fleet import Fleet
    from actors.stacking import DeviceSide, Stacked


@dataclass(frozen=True)
class ClientSide:
    """What encoded references point at, where the clients live."""

    arrays: Sequence[npt.NDArray[Any]]  # those that travelled beside the request
    state: Callable[[int], State]  # of a client, as of now
    results: Mapping[str, Mapping[int, Vector]]  # by handle and client


class Encoded(ABC):
    """A reference as it travels."""

    is_model: ClassVar[bool] = (
        True  # resolves to one or more models, which have buffers behind their parameters
    )

    @classmethod
    @abstractmethod
    def encode(cls, reference: Any, wire: Wire, count: Count) -> Encoded:
        """The reference as it travels from this view; the ledger counts the models in it as `count` says."""

    def part(self, clients: Sequence[int]) -> Encoded:
        """What the block that hosts `clients` needs of it."""
        return self

    @abstractmethod
    def resolve(self, client: int, side: ClientSide) -> Any:
        """What it means for one client; None if it points at nothing."""

    def stack(self, clients: Sequence[int], side: DeviceSide) -> Stacked:
        """What it means for several clients at once, on their device."""
        return side.values([self.resolve(client, side.side) for client in clients])

    def is_received(self, client: int, side: ClientSide) -> bool:
        """Whether the client has no model of its own under it yet and is sent one to begin with."""
        return False

    def received_by(self, clients: Sequence[int], side: DeviceSide) -> list[bool]:
        """`is_received` for several clients at once."""
        return [self.is_received(client, side.side) for client in clients]


_KINDS: dict[type, type[Encoded]] = {}


def encodes(*references: type) -> Callable[[type[Encoded]], type[Encoded]]:
    """Decorator: the class that carries references of these types."""

    def add(kind: type[Encoded]) -> type[Encoded]:
        _KINDS.update(dict.fromkeys(references, kind))
        return kind

    return add


def _kind_of(reference: Any) -> type[Encoded] | None:
    return next((_KINDS[kind] for kind in type(reference).__mro__ if kind in _KINDS), None)


@encodes(np.ndarray, Models)
@dataclass(frozen=True)
class EncodedArray(Encoded):
    """A model, or all of K models: the same for every client."""

    array: int

    @classmethod
    def encode(cls, reference: Any, wire: Wire, count: Count) -> Encoded:
        values = reference.values if isinstance(reference, Models) else np.asarray(reference)
        wire.down(values, None, count)
        return cls(wire.array(values))

    def resolve(self, client: int, side: ClientSide) -> Any:
        return side.arrays[self.array]

    def stack(self, clients: Sequence[int], side: DeviceSide) -> Stacked:
        return side.shared(side.arrays[self.array])


@encodes(Rows)
@dataclass(frozen=True)
class EncodedRows(Encoded):
    """One of K models for each client."""

    array: int
    rows: dict[int, int]

    @classmethod
    def encode(cls, reference: Rows, wire: Wire, count: Count) -> Encoded:
        rows = wire.by_client(reference.rows, "rows")
        wire.down(reference.models, reference.rows, count)
        return cls(wire.array(reference.models), rows)

    def part(self, clients: Sequence[int]) -> Encoded:
        return EncodedRows(self.array, {client: self.rows[client] for client in clients})

    def resolve(self, client: int, side: ClientSide) -> Any:
        row = self.rows[client]
        return None if row < 0 else side.arrays[self.array][row]

    def stack(self, clients: Sequence[int], side: DeviceSide) -> Stacked:
        return side.rows(side.arrays[self.array], [self.rows[client] for client in clients])


@encodes(PerClient)
@dataclass(frozen=True)
class EncodedValue(Encoded):
    """A number or a small array for each client."""

    values: dict[int, Any]
    is_model: ClassVar[bool] = False

    @classmethod
    def encode(cls, reference: PerClient, wire: Wire, count: Count) -> Encoded:
        return cls(wire.by_client(reference.values, "values"))

    def part(self, clients: Sequence[int]) -> Encoded:
        return EncodedValue({client: self.values[client] for client in clients})

    def resolve(self, client: int, side: ClientSide) -> Any:
        return np.asarray(self.values[client])


@encodes(Private)
@dataclass(frozen=True)
class EncodedPrivate(Encoded):
    """A client's own model by its name, and what it is until there is one."""

    name: str
    default: Encoded | None

    @classmethod
    def encode(cls, reference: Private, wire: Wire, count: Count) -> Encoded:
        # The default is sent to clients that have no model of their own yet: the ledger learns of those afterwards.
        default = None if reference.default is None else wire.encode(reference.default, Count.NOT)
        name = wire.view.prefix + reference.name
        if count is not Count.NOT:
            wire.view.ledger.own(name, wire.view.ids)
        return cls(name, default)

    def part(self, clients: Sequence[int]) -> Encoded:
        return EncodedPrivate(self.name, None if self.default is None else self.default.part(clients))

    def resolve(self, client: int, side: ClientSide) -> Any:
        own = side.state(client).get(model_key(self.name))
        return self.default.resolve(client, side) if own is None and self.default is not None else own

    def stack(self, clients: Sequence[int], side: DeviceSide) -> Stacked:
        default = None if self.default is None else self.default.stack(clients, side)
        return side.private(model_key(self.name), clients, default)

    def received_by(self, clients: Sequence[int], side: DeviceSide) -> list[bool]:
        return [not has for has in side.states.has(model_key(self.name), clients)]

    def is_received(self, client: int, side: ClientSide) -> bool:
        return side.state(client).get(model_key(self.name)) is None


@encodes(Merged)
@dataclass(frozen=True)
class EncodedMerged(Encoded):
    """A model some columns of which come from another one."""

    base: Encoded
    other: Encoded
    columns: int

    @classmethod
    def encode(cls, reference: Merged, wire: Wire, count: Count) -> Encoded:
        base, other = wire.encode(reference.base, count), wire.encode(reference.other, count)
        return cls(base, other, wire.array(np.asarray(reference.columns)))

    def part(self, clients: Sequence[int]) -> Encoded:
        return EncodedMerged(self.base.part(clients), self.other.part(clients), self.columns)

    def resolve(self, client: int, side: ClientSide) -> Any:
        base, other = self.base.resolve(client, side), self.other.resolve(client, side)
        return base if other is None else merged(base, other, side.arrays[self.columns])

    def stack(self, clients: Sequence[int], side: DeviceSide) -> Stacked:
        base, other = self.base.stack(clients, side), self.other.stack(clients, side)
        return side.merged(base, other, side.arrays[self.columns], len(clients))


@encodes(Mixture)
@dataclass(frozen=True)
class EncodedMixture(Encoded):
    """A weighted mean of K models for each client."""

    array: int
    weights: dict[int, list[float]]

    @classmethod
    def encode(cls, reference: Mixture, wire: Wire, count: Count) -> Encoded:
        weights = wire.by_client(reference.weights, "weights")
        return cls(wire.array(reference.models.values), weights)

    def part(self, clients: Sequence[int]) -> Encoded:
        return EncodedMixture(self.array, {client: self.weights[client] for client in clients})

    def resolve(self, client: int, side: ClientSide) -> Any:
        return mixed(side.arrays[self.array], self.weights[client])

    def stack(self, clients: Sequence[int], side: DeviceSide) -> Stacked:
        return side.mixed(side.arrays[self.array], np.array([self.weights[client] for client in clients]))


@encodes(Sum)
@dataclass(frozen=True)
class EncodedSum(Encoded):
    """Models added up, each times a factor."""

    parts: list[Encoded]
    factors: list[float | dict[int, float]]  # of all clients, or by client

    @classmethod
    def encode(cls, reference: Sum, wire: Wire, count: Count) -> Encoded:
        factors = [
            wire.by_client(factor, "factors") if isinstance(factor, np.ndarray) else float(factor)
            for factor, _ in reference.terms
        ]
        return cls([wire.encode(part, count) for _, part in reference.terms], factors)

    def part(self, clients: Sequence[int]) -> Encoded:
        factors = [
            {client: factor[client] for client in clients} if isinstance(factor, dict) else factor
            for factor in self.factors
        ]
        return EncodedSum([part.part(clients) for part in self.parts], factors)

    def _factors(self, client: int) -> list[float]:
        return [factor[client] if isinstance(factor, dict) else factor for factor in self.factors]

    def resolve(self, client: int, side: ClientSide) -> Any:
        models = [part.resolve(client, side) for part in self.parts]
        there = [at for at, model in enumerate(models) if model is not None]
        factors = self._factors(client)
        return summed([models[at] for at in there], [factors[at] for at in there]) if there else None

    def stack(self, clients: Sequence[int], side: DeviceSide) -> Stacked:
        factors = np.array([self._factors(client) for client in clients])
        return side.summed([part.stack(clients, side) for part in self.parts], factors)


@encodes(Trained)
@dataclass(frozen=True)
class EncodedResult(Encoded):
    """What a client made in an earlier call of this round, or what it started from if that never arrived."""

    handle: str
    default: Encoded | None

    @classmethod
    def encode(cls, reference: Trained, wire: Wire, count: Count) -> Encoded:
        start = reference.start if np.array_equal(reference.ids, wire.view.ids) else None
        return cls(reference.handle, None if start is None else wire.encode(start, count))

    def part(self, clients: Sequence[int]) -> Encoded:
        return EncodedResult(self.handle, None if self.default is None else self.default.part(clients))

    def resolve(self, client: int, side: ClientSide) -> Any:
        made = side.results.get(self.handle, {}).get(client)
        return self.default.resolve(client, side) if made is None and self.default is not None else made

    def stack(self, clients: Sequence[int], side: DeviceSide) -> Stacked:
        default = None if self.default is None else self.default.stack(clients, side)
        return side.result(self.handle, clients, default)


MODEL_KEY = "model/"


def model_key(name: str) -> str:
    """Where a client's state keeps its private model of this name."""
    return MODEL_KEY + name


class Wire:
    """Encodes the references of one request of a view; each array is placed once in a round."""

    def __init__(self, view: Fleet) -> None:
        self.view = view
        self.arrays: list[Any] = []  # what travels beside the request

    def encode(self, reference: Reference, count: Count = Count.SENT) -> Encoded:
        """A reference as it travels; whatever is no other kind is a model."""
        return (_kind_of(reference) or EncodedArray).encode(reference, self, count)

    def encode_all(
        self, references: Reference | Sequence[Reference] | None, count: Count = Count.SENT, held: int = 0
    ) -> list[Encoded]:
        """Several references, or one, or none; the first `held` of them are with the clients already."""
        listed = references if isinstance(references, list | tuple) else [references]
        return [
            self.encode(reference, Count.HELD if at < held else count)
            for at, reference in enumerate(listed)
            if reference is not None
        ]

    def encode_input(self, value: Any) -> Any:
        """A reference as it travels, and anything else as it is."""
        return value if _kind_of(value) is None else self.encode(value)

    def encode_penalty(self, penalty: Penalty) -> Penalty:
        """The same penalty, with references as they travel."""
        return with_references(penalty, self.encode)

    def encode_rule(self, rule: Rule | None) -> Rule | None:
        """The same rule, with references as they travel."""
        return None if rule is None else rule_with_references(rule, self.encode)

    def down(self, models: npt.NDArray[Any], rows: Indices | None, count: Count) -> None:
        """Tell the ledger which models the clients of the view need."""
        view = self.view
        view.ledger.down(models, view.ids, rows, len(view.all_sizes), count)

    def by_client(self, values: npt.NDArray[Any], what: str) -> dict[int, Any]:
        """Values that are aligned with the view's ids, by client."""
        if len(values) != len(self.view.ids):
            raise ValueError(
                f"expected {what} for the {len(self.view.ids)} clients of this view, got {len(values)}"
            )
        return dict(zip(self.view.ids.tolist(), values.tolist(), strict=True))

    def array(self, array: npt.NDArray[Any]) -> int:
        """The position of an array beside the request."""
        self.arrays.append(self.view.placed(array))
        return len(self.arrays) - 1


def with_references(penalty: Penalty, change: Callable[[Any], Any]) -> Penalty:
    """A penalty with other references in the fields that hold them."""
    references = {**penalty.anchors, **penalty.outputs, **features_of(penalty)}
    made: Penalty = _replaced(penalty, references, change)
    return made


def rule_with_references(rule: Rule, change: Callable[[Any], Any]) -> Rule:
    """A rule with other references in the fields that hold them."""
    made: Rule = _replaced(rule, rule.remembers, change)
    return made


def _replaced(value: Any, references: Mapping[str, Any], change: Callable[[Any], Any]) -> Any:
    changed = {name: change(reference) for name, reference in references.items()}
    return dataclasses.replace(value, **changed)


def resolved(
    references: Mapping[str, Any], client: int, side: ClientSide, parameters: int | None = None
) -> dict[str, npt.NDArray[Any]]:
    """What encoded references of a penalty mean; of models only the first `parameters` columns, if given."""
    found = {name: reference.resolve(client, side) for name, reference in references.items()}
    cut = {name for name, reference in references.items() if reference.is_model and parameters is not None}
    return {name: value[..., :parameters] if name in cut else value for name, value in found.items()}
