"""A session in this process: the reference that every other layout must equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from actors.compute import Compute, compute_of, without_gpu
from actors.placement import gpus_of, idle_gpus, layout
from actors.plan import Checkpoint, Mended, Plan, Snapshot
from actors.ray_errors import ActorsLost
from actors.reports import RoundReport
from actors.server import Server
from actors.shards import LocalShard, states_of
from actors.watchdog import say_in_log


class InProcessSession:
    """Everything in this process; `actors` blocks, so that any packing can be simulated."""

    say: Callable[[str], None] = staticmethod(say_in_log)

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint | None = None, blocks: list[list[int]] | None = None
    ) -> None:
        from actors.blocks import make_block
        from actors.devices import claim_device, machine_gpus, torch_has_cuda
        from actors.fleet import InProcessFleet

        if blocks is None:
            count = plan.fleet.actors or 1
            if plan.fleet.clients_per_actor is not None:
                count = -(-len(plan.clients) // plan.fleet.clients_per_actor)
            blocks = layout(plan.costs(), min(count, len(plan.clients)), plan.fleet.clients_per_actor)
        # One process computes on one device, whatever number of blocks it simulates.
        alone = dataclasses.replace(
            plan, fleet=dataclasses.replace(plan.fleet, actors=1, clients_per_actor=None)
        )
        here, cuda = {"CPU": plan.fleet.cpus, "GPU": float(machine_gpus())}, torch_has_cuda()
        sized = alone.sized([here], cuda=cuda)
        self.gpus = gpus_of(sized)
        setup = dataclasses.replace(plan.block, gpus=self.gpus)
        self._claim = claim_device(self.gpus, setup.precision, setup.determinism)
        try:
            made = [
                make_block(setup, {c: plan.clients[c] for c in block}, plan.x, plan.y, self._claim.device)
                for block in blocks
            ]
            self._blocks = [
                block.computes_on(self._claim.name, "here" if self.gpus else "") for block in made
            ]
            idle = ""
            if plan.gpus is None:  # or the rest of this machine is not this run's to use
                idle = idle_gpus(plan.fleet, sized, len(plan.clients), 1, [here], cuda=cuda, alone=True)
            self._idle, self._precision = idle, setup.precision
            self.fleet = InProcessFleet(made, plan.server.sizes, plan.server.not_finite)
            self.server = Server(plan.server, self.fleet, checkpoint.server if checkpoint else None)
            if checkpoint:
                self.fleet.restore(states_of(checkpoint.clients, range(len(plan.clients))))
        except BaseException:
            self.close()
            raise

    def run_round(self, round: int) -> RoundReport:
        """One committed round."""
        return self.server.run_round(round)

    @property
    def actors(self) -> int:
        """Blocks of clients."""
        return len(self.fleet.layout)

    def mend(self, done: int) -> Mended | None:
        """What is lost here is lost with this process."""
        raise ActorsLost("a process has nobody that could rebuild it")

    def go_back(self, checkpoint: Checkpoint | None, round: int) -> None:
        """Never called: `mend` does not return."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """State values are never written to, so handing them out is enough."""
        server, blocks = self.server.state(), self.fleet.snapshot()
        return Snapshot(lambda: server, [LocalShard(block) for block in blocks])

    def models(self) -> dict[str, Any]:
        """The server's models."""
        return {"models": self.server.models(), "spec": self.spec()}

    def spec(self) -> Any:
        """The layout of a model's values."""
        return self.fleet.spec.to_json()

    def describe(self) -> str:
        """One line."""
        count = len(self.fleet.layout)
        blocks = f"{count} block{'' if count == 1 else 's'}"
        return f"{len(self.fleet.all_sizes)} clients in this process ({blocks}): {self.compute().sentence}"

    def compute(self) -> Compute:
        """What the clients compute on."""
        return compute_of(self._blocks, self.gpus, self._precision, self._idle, self.fleet.engines)

    def shortfall(self) -> str:
        """A GPU that torch cannot use."""
        return without_gpu(self._blocks, self.gpus)

    def close(self) -> None:
        """Give the device back: torch's flags are those of the process again."""
        self._claim.release()
