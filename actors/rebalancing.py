"""What stages cost before anything was run, what they cost in the first rounds, and the one move that follows.

No layout changes a bit of a result, so a decision may rest on seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from actors.balance import Costs, Layout, balanced, barriers, fitted, makespan
from actors.participation import participants, trained_samples
from actors.rounds import BACKWARD

if TYPE_CHECKING:
    from actors.session import Plan

WARM_UP = 1  # rounds of a session that are not measured: imports, first touches, caches
MEASURED = 2  # rounds that are
GAIN = 0.9  # clients move if a round is expected to take less than this share of the time
AHEAD = 200  # rounds whose participants a layout is made for
STAGES = (
    "losses",
    "map",
    "gradients",
    "train",
    "evaluate",
)  # what clients compute; all but the last: participants

Stages = dict[str, npt.NDArray[np.float64]]


def stage_work(plan: Plan) -> Stages:
    """Samples that each client passes through one model, in one call of each stage."""
    sizes = plan.server.sizes
    evaluated = np.array([len(client.test) + len(client.validation) for client in plan.clients], float)
    if plan.block.evaluation.train:
        evaluated += sizes
    train = trained_samples(plan.block.local, sizes, np.ones(len(sizes))).astype(float)
    return {stage: sizes.astype(float) for stage in STAGES} | {"train": train, "evaluate": evaluated}


def expected_costs(plan: Plan) -> Costs:
    """Barriers before anything was measured: forward passes, a training step being three of them."""
    work = stage_work(plan)
    stages = {
        "losses": plan.passes * work["losses"],
        "train": (1.0 + BACKWARD) * work["train"],
        "evaluate": work["evaluate"] / plan.block.evaluation.every,
    }
    return barriers(stages, upcoming(plan, 1))


def upcoming(plan: Plan, first: int) -> list[npt.NDArray[np.int64]]:
    """Who takes part in the rounds from `first` on, as far as a layout looks ahead; one entry if it is always all."""
    setup = plan.server
    population = np.setdiff1d(np.arange(setup.clients), setup.held_out)
    if setup.participation.fraction >= 1.0 and setup.participation.dropouts == 0.0:
        return [population]
    last = min(setup.rounds, first + AHEAD - 1)
    return [
        participants(setup.participation, population, setup.seed, round).ids
        for round in range(first, max(last, first) + 1)
    ]


class Rebalancing:
    """Collects what the first rounds of a session took, and says once where clients should live instead."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen: list[tuple[int, Layout, Sequence[Mapping[str, float]]]] = []
        self.over = False

    def measured(
        self, round: int, layout: Layout, seconds: Sequence[Mapping[str, float]]
    ) -> tuple[Layout, float] | None:
        """(layout, share of the time it takes) if clients should move, given what each actor took, by stage."""
        self._seen.append((round, layout, seconds))
        if len(self._seen) < WARM_UP + MEASURED:
            return None
        self.over = True
        costs = barriers(self.costs(), upcoming(self._plan, round + 1))
        now, better = makespan(costs, layout), balanced(costs, len(layout))
        share = makespan(costs, better) / now if now > 0 else 1.0
        return (better, share) if share < GAIN else None

    def costs(self) -> Stages:
        """Seconds of each client in each stage of a round, from what blocks took."""
        plan, work, seen = self._plan, stage_work(self._plan), self._seen[WARM_UP:]
        took_part = []
        for round, _, _ in seen:
            mask = np.zeros(len(plan.clients))
            mask[upcoming(plan, round)[0]] = 1.0
            took_part.append(mask)
        everyone = [np.ones(len(plan.clients))] * len(seen)
        costs: Stages = {}
        for stage in STAGES:
            seconds = np.array([[block.get(stage, 0.0) for block in blocks] for _, _, blocks in seen])
            ran = seconds.sum(axis=1) > 0
            if not ran.any():
                continue
            who = np.stack(everyone if stage == "evaluate" else took_part)
            layouts = [layout for (_, layout, _), was in zip(seen, ran, strict=True) if was]
            costs[stage] = fitted((who * work[stage])[ran], layouts, seconds[ran])
        evaluations = 1.0 / plan.block.evaluation.every
        if "evaluate" in costs:
            costs["evaluate"] *= evaluations
        elif "train" in costs:  # none came among the measured rounds
            rate = costs["train"].sum() / ((1.0 + BACKWARD) * max(work["train"].sum(), 1.0))
            costs["evaluate"] = rate * work["evaluate"] * evaluations
        return costs or {"train": work["train"]}
