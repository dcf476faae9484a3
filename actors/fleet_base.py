"""What every fleet has: how it reaches the blocks of clients, its views, and the transaction of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from actors.compute import Committed
from actors.requests import Request
from actors.rounds import Ledger, RoundState
from archipelago.core.errors import ClientFailure
from archipelago.strategies.parameters import ModelSpec, PartialSums
from archipelago.strategies.references import Indices

if TYPE_CHECKING:
    from actors.collusion import Collusion
    from actors.trained import Trained

WILD = 1e9  # times the median magnitude: a model beyond this is diverging


class FleetBase(ABC):
    """All clients of a federation, in blocks: how they are reached, and the round under way.

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
        self.engines: set[str] = set()  # that trained, as blocks say when they commit; shared, too

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

    def select(self, ids: npt.ArrayLike) -> Self:
        """The view of some clients, ascending."""
        view = object.__new__(type(self))
        view.__dict__ = self.__dict__.copy()
        view.ids = np.unique(np.asarray(ids, np.int64))
        return view

    def named(self, prefix: str) -> Self:
        """The same clients for another method: its slots, private models and draws never meet the others'."""
        view = self.select(self.ids)
        view.prefix = f"{self.prefix}{prefix}/"
        return view

    def measuring(self) -> Self:
        """The same clients for a measurement: no attacker and no transform comes between."""
        view = self.select(self.ids)
        view._leaves = False
        return view

    @property
    def _state_prefix(self) -> str:
        return f"state/{self.prefix}"

    @property
    def everyone(self) -> Self:
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
        found = self._reach("commit", dict.fromkeys(range(len(self.layout)), self._commits()))
        self._round.release()
        self.engines |= {engine for block in found.values() for engine in block.engines}
        return notes_of([found[b] for b in sorted(found)])

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


def notes_of(blocks: Sequence[Committed]) -> list[str]:
    """What blocks say, each sentence once; with the hosts that it is true of, where it is not true of all.

    >>> notes_of([Committed(["No compiler."], (), "a"), Committed([], (), "a"), Committed([], (), "b")])
    ['No compiler. (On a.)']
    >>> notes_of([Committed(["No compiler."], (), "a"), Committed([], (), "a")])
    ['No compiler.']
    """
    hosts = {block.host for block in blocks}
    said: dict[str, set[str]] = {}
    for block in blocks:
        for note in block.notes:
            said.setdefault(note, set()).add(block.host)
    return [
        note if found == hosts else f"{note} (On {', '.join(sorted(found))}.)"
        for note, found in sorted(said.items())
    ]
