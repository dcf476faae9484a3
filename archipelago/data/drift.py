"""Data that changes during a run: what happens to whom at which round, and the ground truth of every round.

    drift=[label_swap@10:0.5, move@20:0.25, arrive@15:0.2]        NAME@ROUND:SHARE, or NAME@ROUND with data.drift_share

An event happens before its round begins, to a share of the clients that is drawn with the partition's seed. Between
two events is a *stage*: who holds which samples, every client's ground-truth group (-1 while it is away), who is there.
Clients of one group have one distribution; an event of the same kind brings its clients to the same new distribution
whenever it happens, so that drifts may be staggered (Jothimurugesan et al. 2023).

A kind of your own is a subclass of `DriftKind` under `@DRIFTS.register`, or named by its import path: it changes a
`World`, the data sets before samples are made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import Entry, NoOptions, Registry
from archipelago.core.settings import DataSettings
from archipelago.data.apportion import Integers
from archipelago.data.division import PARTS, ClientData, Division

_EVENT = re.compile(r"(?P<name>[^@\s]+)@(?P<round>\d+)(?::(?P<share>[\d.eE+-]+))?")


@dataclass
class World:
    """Data sets while the stages are made: data set d is held by one client, and changes under it.

    `group`, `turns`, `swaps`, (data sets,): its ground-truth group of the partition, quarter turns, how often its
    labels were permuted. `partial`: whether it shows the first part of its classes alone. `holder`: the data set of
    each client; `present`: who is there.
    """

    parts: tuple[ClientData, ...]
    labels: NDArray[Any]
    classes: int | None
    shape: tuple[int, ...]
    group: Integers | None
    turns: Integers
    swaps: Integers
    partial: NDArray[np.bool_]
    holder: Integers
    present: NDArray[np.bool_]
    new_share: float = 0.5  # of the classes of a partial data set, those that it does not show


class DriftKind:
    """What an event does. Subclasses give `happens`, and `before` if it shows before it happens."""

    Options: ClassVar[type] = NoOptions

    def __init__(self, options: Any) -> None:
        self.options = options

    def refuse(self, world: World) -> str:
        """Why it makes no sense with this data; empty if it does."""
        return ""

    def before(self, world: World, clients: Integers) -> None:
        """Change the world of the first round: how it is as long as the event has not happened."""

    def happens(self, world: World, clients: Integers, rng: np.random.Generator) -> None:
        """Change the world."""
        raise NotImplementedError(f"{type(self).__name__} has no happens")


class DriftRegistry(Registry[type[DriftKind]]):
    """Kinds of drift; what follows an @ in a name says when."""

    def entry(self, name: str) -> Entry[type[DriftKind]]:
        return super().entry(name.partition("@")[0])


DRIFTS: DriftRegistry = DriftRegistry("drift", section="data", base=DriftKind)


@dataclass(frozen=True)
class Event:
    """One entry of `drift=[...]`."""

    kind: str
    round: int
    share: float

    @classmethod
    def read(cls, text: str, share: float) -> Event:
        """
        >>> Event.read("move@20:0.25", 0.5), Event.read("leave@3", 0.5).share
        (Event(kind='move', round=20, share=0.25), 0.5)
        """
        found = _EVENT.fullmatch(text.strip())
        try:
            given = None if found is None or found["share"] is None else float(found["share"])
        except ValueError:
            found = given = None
        if found is None or int(found["round"]) < 2 or not 0 < (share if given is None else given) <= 1:
            raise UserError(
                "Expected events of drift as NAME@ROUND or NAME@ROUND:SHARE, from round 2 on and of a share up to 1, "
                f"got '{text}' in data.drift: write it as in label_swap@10:0.5.",
                code="wrong-form", setting="data.drift", given=text,
            )  # fmt: skip
        return cls(found["name"], int(found["round"]), share if given is None else given)


def events_of(data: DataSettings) -> list[Event]:
    """The events that the settings name, in order of their rounds; every mistake is one sentence."""
    events = [Event.read(text, data.drift_share) for text in data.drift]
    DRIFTS.listed([event.kind for event in events], "data.drift")
    return sorted(events, key=lambda event: event.round)


# Stages -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stage:
    """From round `round` to the next stage: who holds what, who is of one distribution, who is there."""

    round: int
    clients: tuple[ClientData, ...]
    groups: Integers
    present: NDArray[np.bool_]

    @property
    def sizes(self) -> Integers:
        """Training samples per client."""
        return np.array([len(client.train) for client in self.clients], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Drift:
    """All stages, and the samples that are made for them: copies of `source`, turned and with other labels."""

    stages: tuple[Stage, ...]
    source: Integers
    turns: Integers
    labels: Integers  # of the copies; empty in a regression

    def apply(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The samples, and after them the copies."""
        copies, relabelled = np.array(x[self.source]), np.array(y[self.source])
        for turns in range(1, 4):
            at = np.flatnonzero(self.turns == turns)
            if len(at):
                copies[at] = np.rot90(copies[at], turns, axes=(2, 3))
        if len(self.labels):
            relabelled = self.labels.astype(y.dtype)
        return np.concatenate([x, copies]), np.concatenate([y, relabelled])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As plain arrays, for a file; `of` is the way back."""
        found: dict[str, NDArray[Any]] = {
            "drift_rounds": np.array([stage.round for stage in self.stages], np.int64),
            "drift_groups": np.stack([stage.groups for stage in self.stages]),
            "drift_present": np.stack([stage.present for stage in self.stages]).astype(np.uint8),
            "drift_source": self.source,
            "drift_turns": self.turns,
            "drift_labels": self.labels,
        }
        for part in PARTS:
            pieces = [getattr(client, part) for stage in self.stages for client in stage.clients]
            found[f"drift_{part}"] = np.concatenate(pieces)
            found[f"drift_{part}_ends"] = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        return found

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Drift | None:
        """The inverse of `arrays`; None where there is none."""
        if "drift_rounds" not in arrays:
            return None
        rounds, groups = np.asarray(arrays["drift_rounds"]), np.asarray(arrays["drift_groups"], np.int64)
        present, count = np.asarray(arrays["drift_present"]).astype(bool), groups.shape[1]
        parts = []
        for part in PARTS:
            flat, ends = (
                np.asarray(arrays[name], np.int64) for name in (f"drift_{part}", f"drift_{part}_ends")
            )
            parts.append(np.split(flat, ends[:-1]))
        clients = [ClientData(*pieces) for pieces in zip(*parts, strict=True)]
        stages = tuple(
            Stage(int(round), tuple(clients[s * count : (s + 1) * count]), groups[s], present[s])
            for s, round in enumerate(rounds)
        )
        kept = (np.asarray(arrays[f"drift_{name}"], np.int64) for name in ("source", "turns", "labels"))
        return cls(stages, *kept)


def drifted(
    division: Division,
    data: DataSettings,
    y: NDArray[Any],
    classes: int | None,
    shape: tuple[int, ...],
    seed: int,
) -> tuple[Division, Drift | None]:
    """The division as it is in the first round, and what becomes of it; `y` are its labels, after shifts."""
    events = events_of(data)
    if not events:
        return division, None
    if division.copy_of is not None:
        raise UserError(
            "Expected clients with samples of their own for drift, got a partition that gives some samples to several "
            "clients (partition.compat): leave one of them out.",
            code="shared-samples", setting="data.drift",
        )  # fmt: skip
    count = len(division.clients)
    world = World(
        division.clients, np.asarray(y), classes, shape, division.groups,
        turns=np.zeros(count, np.int64), swaps=np.zeros(count, np.int64), partial=np.zeros(count, bool),
        holder=np.arange(count), present=np.ones(count, bool),
    )  # fmt: skip
    kinds, chosen = _prepared(events, data, world, count, seed)
    maker = _Maker(world, seed)
    stages = [maker.stage(1)]
    for number, event in enumerate(events):
        rng = generator(seed, "drift", round=number, client=1)
        kinds[number].happens(world, chosen[number], rng)
        made = maker.stage(event.round)
        stages = [*(stages[:-1] if stages[-1].round == event.round else stages), made]
    notes = tuple(
        f"Drift: {event.kind} before round {event.round}, clients {', '.join(map(str, who))}."
        for event, who in zip(events, chosen, strict=True)
    )
    first = stages[0]
    division = replace(division, clients=first.clients, groups=first.groups, notes=(*division.notes, *notes))
    return division, maker.drift(stages)


def _prepared(
    events: Sequence[Event], data: DataSettings, world: World, count: int, seed: int
) -> tuple[list[DriftKind], list[Integers]]:
    """The kinds of the events, and the clients of each; what shows before an event is in the world afterwards."""
    kinds: list[DriftKind] = []
    chosen: list[Integers] = []
    for number, event in enumerate(events):
        entry = DRIFTS.entry(event.kind)
        kind = entry.value(entry.options_from(data))
        if why := kind.refuse(world):
            raise UserError(
                f"Expected data that {event.kind} can happen to (data.drift), got {why}.",
                code="unfit-data", setting="data.drift", kind=event.kind,
            )  # fmt: skip
        some = max(1, int(np.floor(event.share * count + 0.5)))
        clients = np.sort(generator(seed, "drift", round=number).permutation(count)[:some])
        kind.before(world, clients)
        kinds.append(kind)
        chosen.append(clients)
    return kinds, chosen


class _Maker:
    """Makes stages of a world: copies of samples as they are needed, numbers for distributions as they appear."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        known = [0] if world.group is None else np.unique(world.group).tolist()
        self._groups: dict[tuple[int, int, int, bool], int] = {(g, 0, 0, False): int(g) for g in known}
        self._next = int(max(known)) + 1
        self._copies: dict[tuple[int, int, int], int] = {}  # where the copies of a data set begin
        self._source: list[Integers] = []
        self._turns: list[Integers] = []
        self._labels: list[Integers] = []
        self._samples, self._begin = len(world.labels), len(world.labels)
        self._order = generator(seed, "label drift").permutation(world.classes or 1)

    def stage(self, round: int) -> Stage:
        """The world as it is."""
        world = self.world
        clients = tuple(self._client(int(d)) for d in world.holder)
        groups = np.array([self._group(int(d)) for d in world.holder], np.int64)
        groups[~world.present] = -1
        return Stage(round, clients, groups, world.present.copy())

    def drift(self, stages: Sequence[Stage]) -> Drift:
        """All stages, with the copies that they need."""
        nothing = np.zeros(0, np.int64)
        source, turns, labels = (
            np.concatenate(each) if each else nothing for each in (self._source, self._turns, self._labels)
        )
        return Drift(tuple(stages), source, turns, labels)

    def _group(self, d: int) -> int:
        world = self.world
        base = 0 if world.group is None else int(world.group[d])
        key = (base, int(world.turns[d]), int(world.swaps[d]), bool(world.partial[d]))
        if key not in self._groups:
            self._groups[key], self._next = self._next, self._next + 1
        return self._groups[key]

    def _client(self, d: int) -> ClientData:
        world, own = self.world, self.world.parts[d]
        parts = [getattr(own, part) for part in PARTS]
        if world.partial[d]:
            keep = first_classes(world, d)
            parts = [part[np.isin(world.labels[part], keep)] for part in parts]
        turns, swaps = int(world.turns[d]), int(world.swaps[d])
        if turns or swaps:
            every = np.concatenate([getattr(own, part) for part in PARTS])
            order = np.argsort(every)
            begin = self._copied(d, turns, swaps, every)
            parts = [begin + order[np.searchsorted(every[order], part)] for part in parts]
        return ClientData(*parts)

    def _copied(self, d: int, turns: int, swaps: int, every: Integers) -> int:
        """Where the copies of a data set's samples begin, made if they are not there."""
        key = (d, turns, swaps)
        if key not in self._copies:
            self._copies[key] = self._begin
            self._begin += len(every)
            self._source.append(every)
            self._turns.append(np.full(len(every), turns, np.int64))
            if self.world.classes is not None:
                become = np.empty(self.world.classes, np.int64)
                become[self._order] = np.roll(self._order, -swaps)
                self._labels.append(become[self.world.labels[every].astype(np.int64)])
        return self._copies[key]


def first_classes(world: World, d: int) -> NDArray[Any]:
    """The classes that a data set shows before its new ones appear: the first part of those that it has."""
    own = np.unique(world.labels[world.parts[d].train])
    return own[: max(1, len(own) - max(1, int(np.floor(world.new_share * len(own) + 0.5))))]
