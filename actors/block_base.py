"""What every block of clients has: samples, private states, one live module, and the transaction of a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.best import Search
from actors.client_states import Changes, ClientStates, State
from actors.compute import BlockDevice, Committed
from actors.devices import effective_tier, mps_directory, refused_by_tier, torch_has_cuda
from actors.forward import Forward
from actors.outbox import Outbox
from actors.requests import BlockSetup, ClientSamples
from actors.wire import ClientSide, Encoded
from archipelago.core.causes import USERS, refuse_end, said, where_in_users_code
from archipelago.core.errors import ClientFailure, UserError
from archipelago.core.randomness import torch_seed
from archipelago.strategies.parameters import Vector
from lightning_modules.base import build_module
from lightning_modules.engines import check_precision, engine_entry, make_engine
from lightning_modules.flat import FlatModel
from lightning_modules.samples import Samples


class BlockBase:
    """Hosts some clients for the time of an experiment."""

    def __init__(
        self,
        setup: BlockSetup,
        clients: dict[int, ClientSamples],
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
        device: str = "cpu",
    ) -> None:
        # One thread: a sum inside a kernel must not depend on how many cores a node has.
        torch.set_num_threads(1)
        self.setup = setup
        self.clients = clients  # as they are in the round under way
        self._over_rounds = clients
        self._changes = any(samples.later for samples in clients.values())
        self.round = 0  # the one under way
        self.outbox = Outbox(setup)
        self.labels = y = self.outbox.relabelled(y, clients, setup.classes)
        used = [samples.every() for samples in clients.values()]
        used += list(setup.holdout)
        module = self._fresh_module(torch_seed(setup.seed, "template"))
        self.model = FlatModel(module, device, setup.precision)
        check_precision(setup.precision, setup.local.engine, self.model.device.type)
        self.samples = Samples(
            x,
            y,
            mean=setup.mean,
            std=setup.std,
            classes=setup.classes,
            device=device,
            normalise=setup.local.normalise,
            chunk=setup.evaluation.batch,
            used=np.concatenate(used) if used else None,
            channels_last=getattr(self.model.module, "channels_last", False),
        )
        self.forward = Forward(self.model, self.samples, setup.classes)
        self.engine = make_engine(setup.local.engine, self.model, self.samples, setup.local)
        self.states = ClientStates(clients)
        self._results: dict[str, dict[int, Vector]] = {}  # by handle and client, until the round ends
        self._searches: dict[str, Search] = {}  # by the owner of the models

    def _fresh_module(self, seed: int) -> Any:
        setup = self.setup
        return build_module(setup.model, setup.local, setup.input_shape, setup.classes, seed)

    def computes_on(self, name: str, identity: str = "") -> BlockDevice:
        """The device that this block is on, by its name and which of the cluster's it is."""
        device = str(self.model.device)
        entry = engine_entry(self.setup.local.engine, self.model.device.type)
        tier = effective_tier(self.setup.determinism, device, bool(entry.capabilities.get("exact")))
        mps = mps_directory() is not None
        return BlockDevice(device, name, identity, entry.name, tier, mps, torch_has_cuda())

    # --- transactions -----------------------------------------------------------------------------------

    def begin(self, round: int) -> None:
        """Start a round from the committed state: whatever an aborted attempt left is forgotten."""
        self.round = round
        if self._changes:
            self._hold(round)
        self.states.abort()
        self._release()

    def _hold(self, round: int) -> None:
        """Give every client the samples that it has in this round."""
        now = {client: samples.at(round) for client, samples in self._over_rounds.items()}
        if any(now[client] is not self.clients[client] for client in now):
            self.clients = now
            self._searches.clear()

    def changes(self) -> Changes:
        """What the running round changes in the states of clients, before it commits."""
        return self.states.changes()

    def commit(self) -> Committed:
        """Make the round's changes permanent, release its models."""
        self.states.commit()
        self._release()
        notes, self.engine.notes = self.engine.notes, []
        return Committed(notes, self.engine.ran())

    def snapshot(self) -> dict[int, State]:
        """The committed state of every client: values that nobody writes to."""
        return self.states.snapshot()

    def restore(self, states: dict[int, State]) -> None:
        """Take over committed states, from a checkpoint or from another block."""
        self.states.restore(states)
        self._release()

    def _release(self) -> None:
        self._results.clear()
        self.outbox.clear()
        self.samples.forget()

    def spec(self) -> Any:
        """The layout of a model value."""
        return self.model.spec

    def initial(self, count: int, purpose: str) -> npt.NDArray[np.float32]:
        """(count, P) independently initialised models, the same in every block."""
        vectors = []
        for index in range(count):
            seed = torch_seed(self.setup.seed, purpose, client=index)
            vectors.append(FlatModel(self._fresh_module(seed)).vector())
        return np.stack(vectors)

    def _side(self, arrays: tuple[npt.NDArray[Any], ...]) -> ClientSide:
        return ClientSide(arrays, self.states.of, self._results)

    @contextmanager
    def _asking(self, client: int, round: int, stage: str) -> Iterator[None]:
        """`_failing`, and what a user's module draws is drawn for this client: the same on any packing."""
        with self._failing(client, round, stage), ExitStack() as stack:
            if self.model.of_users:
                seed = torch_seed(self.setup.seed, "forward", slot=stage, round=round, client=client)
                stack.enter_context(self.model.seeded(seed))
            yield

    @contextmanager
    def _failing(self, client: int, round: int, stage: str) -> Iterator[None]:
        """Whatever goes wrong inside a client says which client, which round and which stage."""
        try:
            yield
        except (ClientFailure, UserError):
            raise
        except USERS as error:  # a module of the user's own may call sys.exit
            refuse_end(error)
            failure = ClientFailure(client, round, stage, said(error) + where_in_users_code(error))
            raise refused_by_tier(error, self.setup.determinism) or failure from error


def existing(references: list[Encoded], client: int, side: ClientSide) -> list[Vector]:
    """The models that references mean for a client, without those that point at nothing."""
    found = [reference.resolve(client, side) for reference in references]
    return [vector for vector in found if vector is not None]
