"""What a session is made of, and what the driver may ask of one, whether it lives in this process or on Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from actors.client_states import State
from actors.compute import Compute
from actors.placement import Node, resolved
from actors.rebalancing import expected_costs
from actors.reports import RoundReport
from actors.requests import BlockSetup, ClientSamples
from actors.server_setup import ServerSetup
from actors.shards import ClientShard
from archipelago.core.settings import FleetSettings
from archipelago.runs.checkpoints import StoredParts


@dataclass(frozen=True)
class Plan:
    """An experiment, ready to be brought to life on any fleet.

    `fleet` is what the user asked for; `gpus` what each actor gets, where that is known already: a trial's share, or
    what the run began with.
    """

    server: ServerSetup
    block: BlockSetup
    fleet: FleetSettings
    clients: list[ClientSamples]
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    title: str = "archipelago"
    passes: float = 0.0  # of a participant's training samples through models, in a round, besides training
    gpus: float | None = None
    actors: int | None = None  # that the run began with, where the user did not say how many

    def sized(self, nodes: Sequence[Node], *, cuda: bool = True) -> FleetSettings:
        """The fleet's settings on these nodes, with a number in place of `gpus=auto`."""
        if self.gpus is not None:
            return dataclasses.replace(self.fleet, gpus=self.gpus)
        return resolved(self.fleet, len(self.clients), nodes, cuda=cuda)

    def in_object_store(self) -> tuple[Plan, tuple[Any, Any]]:
        """(the plan with the object store's samples and labels in place of its own, references to them for actors).

        This process then holds no copy of its own, and actors that are started anew find the same one.
        """
        import ray

        data = ray.put(self.x), ray.put(self.y)
        return dataclasses.replace(self, x=ray.get(data[0]), y=ray.get(data[1])), data

    def costs(self) -> npt.NDArray[np.float64]:
        """What each client is expected to cost before each barrier, a row for each."""
        return expected_costs(self)


@dataclass(frozen=True)
class Checkpoint:
    """Where to resume from: the server's state, and every client's, at hand or on disk."""

    server: dict[str, Any]
    clients: Mapping[int, State] | StoredParts
    round: int = 0


@dataclass(frozen=True)
class Place:
    """Bundles of a placement group that somebody else made: `actors` of them, from number `first` on."""

    group: Any
    first: int
    actors: int


class Snapshot(dict[str, Any]):
    """A committed state as named parts: `server`, a function that returns it, and `clients-00000` and so on."""

    def __init__(self, server: Callable[[], Any], shards: Sequence[ClientShard]) -> None:
        super().__init__({"server": server, **{f"clients-{b:05d}": shard for b, shard in enumerate(shards)}})
        self.shards = shards


@dataclass(frozen=True)
class Mended:
    """After a loss: the round that everybody is at, and its report where it was decided and never arrived."""

    round: int
    report: RoundReport | None = None


class Session(Protocol):
    """What the runner needs of a live experiment."""

    gpus: float  # of each block of clients
    say: Callable[[str], None]  # told what a user should know while a round runs

    @property
    def actors(self) -> int:
        """Blocks of clients."""

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""

    def mend(self, done: int) -> Mended | None:
        """After a loss, with `done` rounds reported: rebuild what was lost from what the others hold.

        None: not all of it is held; everybody waits for `go_back`. `ActorsLost`: this session is beyond repair.
        """

    def go_back(self, checkpoint: Checkpoint | None, round: int) -> None:
        """Everybody takes over the state of a checkpoint, or (None) begins with round 1."""

    def snapshot(self) -> Snapshot:
        """The committed state as named parts: `server`, fetched when it is called, and shards of clients."""

    def models(self) -> dict[str, Any]:
        """{"models": name -> array, "spec": layout}."""

    def spec(self) -> Any:
        """The layout of a model's values, without the models."""

    def describe(self) -> str:
        """One line about where the clients live and what they compute on."""

    def compute(self) -> Compute:
        """What the clients compute on."""

    def shortfall(self) -> str:
        """What was asked for and could not be had; empty if all of it was."""

    def close(self) -> None:
        """Release everything this session started."""
