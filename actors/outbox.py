"""What leaves the clients of a block: their updates as attackers and the pipeline of `update=[...]` make them.

A result has two versions while a round lasts: what the client made, which it keeps and continues from, and what the
server gets, which sums, clusterings and distances are about. Without a pipeline and without attackers they are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.client_states import ClientStates
from actors.requests import BlockSetup, ClientSamples
from archipelago.strategies import attacks
from archipelago.strategies.parameters import Vector
from archipelago.strategies.updates import Pipeline, Sender


class Outbox:
    """Delivered models of a block's clients, by handle and client, until the round ends."""

    def __init__(self, setup: BlockSetup) -> None:
        self._seed = setup.seed
        self._pipeline = Pipeline.chosen(setup.update, setup.participants)
        self._attackers = frozenset(setup.attackers)
        self.attack = attacks.chosen(setup.attack) if self._attackers else None
        self.alters = bool(self._pipeline) or self.attack is not None
        self.sent: dict[str, dict[int, Vector]] = {}
        self._starts: dict[str, dict[int, Vector | None]] = {}  # what colluders must know

    def clear(self) -> None:
        """The round is over."""
        self.sent.clear()
        self._starts.clear()

    def delivered(self, handle: str, results: Mapping[str, Mapping[int, Vector]]) -> Mapping[int, Vector]:
        """What the server has of a call: what was sent, or the results as they are."""
        return self.sent.get(handle, results.get(handle, {}))

    def relabelled(
        self, y: npt.NDArray[Any], clients: Mapping[int, ClientSamples], classes: int | None
    ) -> npt.NDArray[Any]:
        """The labels, with those that this block's attackers train on; nobody else holds these samples."""
        mine = sorted(self._attackers & set(clients))
        if self.attack is None or not self.attack.relabels or not mine or classes is None:
            return y
        changed = np.array(y)
        for client in mine:
            index = np.unique(clients[client].every("train"))
            changed[index] = self.attack.relabel(changed[index], classes)
        changed.flags.writeable = False
        return changed

    def put(
        self,
        handle: str,
        client: int,
        round: int,
        start: Vector | None,
        result: Vector,
        states: ClientStates,
        *,
        crafted: Vector | None = None,
    ) -> tuple[float, int]:
        """A result on its way: (its largest absolute value, bytes) as it arrives. `start` is None for a gradient.

        What colluding attackers send is known only when everybody is done: theirs waits for `crafted`.
        """
        if self.attack is not None and self.attack.knows is not None and crafted is None:
            self._starts.setdefault(handle, {})[client] = start
            if client in self._attackers:
                return _largest(result), 0
        slot = handle.partition(":")[2]
        key = f"update/{slot}"
        known = states.host(client).get(key, {}) if self._pipeline else {}
        sender = Sender(self._seed, client, round, slot, dict(known))
        update = result if start is None else result - start
        if crafted is not None:
            update = crafted
        elif self.attack is not None and client in self._attackers:
            update = np.asarray(self.attack.instead(update, sender), np.float32)
        update, nbytes = (
            self._pipeline.delivered(update, sender) if self._pipeline else (update, update.nbytes)
        )
        if any(sender.memory.get(name) is not known.get(name) for name in {*sender.memory, *known}):
            for array in sender.memory.values():
                array.flags.writeable = False
            states.put_host(client, {**states.host(client), key: sender.memory})
        model = update if start is None else start + update
        model.flags.writeable = False
        self.sent.setdefault(handle, {})[client] = model
        return _largest(model), nbytes

    def update_of(self, handle: str, client: int, result: Vector) -> Vector:
        """What a client would have sent, before any attack and transform."""
        start = self._starts[handle][client]
        return result if start is None else result - start

    def put_crafted(
        self, handle: str, client: int, round: int, result: Vector, states: ClientStates, crafted: Vector
    ) -> tuple[float, int]:
        """What a colluding attacker sends instead of its result."""
        start = self._starts[handle][client]
        return self.put(handle, client, round, start, result, states, crafted=crafted)


def _largest(values: Vector) -> float:
    return float(np.max(np.abs(values), initial=0.0))
