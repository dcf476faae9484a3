"""An experiment on the shadow device, in this process, counted by round and stage.

    with shadow_session(plan) as shadow:
        counts = shadow.run_round(1)         # {"train": Counts, "losses": Counts, "combine": ..., "": the server's own}
    assert not shadow.device.mixed

A stage is what the fleet asks of a block: `train`, `best`, `losses`, `evaluate`, `gradients`, `map`, `combine`,
`columns`, `distances`, `measure`, `begin`, `commit`, `initial`. Whatever happens outside of these is under ''.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from actors.fleet import InProcessFleet
from actors.reports import RoundReport
from actors.session import Checkpoint, InProcessSession, Plan
from tests.support.shadow import Counts, ShadowDevice


class ShadowSession:
    """A session whose blocks are on the shadow device."""

    def __init__(self, plan: Plan, device: ShadowDevice, session: InProcessSession) -> None:
        self.plan, self.device, self.session = plan, device, session
        self.reports: list[RoundReport] = []

    @property
    def parameters(self) -> int:
        """P, the length of a model."""
        return int(self.session.fleet.spec.size)

    def run_round(self, round: int) -> dict[str, Counts]:
        """One committed round, and what it cost by stage."""
        before = self.device.stages
        self.reports.append(self.session.run_round(round))
        after = self.device.stages
        found = {stage: counts - before.get(stage, Counts()) for stage, counts in after.items()}
        return {stage: counts for stage, counts in found.items() if counts}

    def all_losses(self, count: int) -> dict[str, Counts]:
        """What the losses of all clients under `count` new models cost, outside of any round."""
        fleet, before = self.session.fleet, self.device.stages.get("losses", Counts())
        fleet.losses(fleet.initial(count))
        return {"losses": self.device.stages["losses"] - before}

    def model_bytes(self, stage: str, first: int = 0) -> int:
        """Bytes of the copies of a stage whose rows are whole models; `first`: how many copies to pass over."""
        return sum(
            copy.bytes
            for copy in self.device.copies[first:]
            if copy.stage == stage and copy.shape[-1:] == (self.parameters,)
        )


@contextmanager
def shadow_session(
    plan: Plan,
    *,
    blocks: Sequence[Sequence[int]] | None = None,
    checkpoint: Checkpoint | None = None,
    memory: int = 80 * 2**30,
    trace: bool = False,
    dry: bool = False,
) -> Iterator[ShadowSession]:
    """The plan's session on a shadow device of `memory` bytes, which it gets as it would get a GPU."""
    fleet = dataclasses.replace(plan.fleet, gpus=1.0)
    plan = dataclasses.replace(plan, fleet=fleet, block=dataclasses.replace(plan.block, gpus=1.0))
    reach = InProcessFleet._reach
    with ShadowDevice(memory, trace=trace, dry=dry) as device:

        def counted(self: InProcessFleet, method: str, *args: Any, **kwargs: Any) -> Any:
            with device.stage(method):
                return reach(self, method, *args, **kwargs)

        with mock.patch.object(InProcessFleet, "_reach", counted):
            session = InProcessSession(
                plan, checkpoint, None if blocks is None else [list(b) for b in blocks]
            )
            assert not session.shortfall(), session.shortfall()
            try:
                yield ShadowSession(plan, device, session)
            finally:
                session.close()
