"""Everything that a server needs to know besides its fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.participation import held_out
from archipelago.core.settings import (
    AggregationSettings,
    AttackSettings,
    EvaluationSettings,
    LocalSettings,
    ParticipationSettings,
    ServerSettings,
    UpdateSettings,
)
from archipelago.strategies import Context
from archipelago.strategies.local_steps import optimizer_of
from archipelago.strategies.schedules import Rates

LabelCounts = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # clients, and their (n, classes) samples


@dataclass(frozen=True)
class ServerStage:
    """What holds from a round on, where data changes during a run."""

    round: int
    sizes: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]  # ground truth, -1 of clients that are away
    present: npt.NDArray[np.bool_]
    label_counts: LabelCounts | None = None  # as `ServerSetup.label_counts`, from this round on


@dataclass(frozen=True)
class ServerSetup:
    """Everything a server needs to know besides its fleet."""

    method: str
    ensemble: list[str]
    combine: str
    options: dict[str, Any]
    clients: int
    holdout_clients: float
    clusters: int
    rounds: int
    seed: int
    weights: str
    participation: ParticipationSettings
    evaluation: EvaluationSettings
    sizes: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64] | None
    has_validation: bool
    not_finite: str
    local: LocalSettings
    aggregation: AggregationSettings
    server: ServerSettings = field(default_factory=ServerSettings)
    update: UpdateSettings = field(default_factory=UpdateSettings)
    attack: AttackSettings = field(default_factory=AttackSettings)
    attackers: tuple[int, ...] = ()
    one_class: npt.NDArray[np.bool_] | None = None  # clients that train on one class; None without classes
    label_counts: LabelCounts | None = None  # of some clients, see `_judged`
    levels: npt.NDArray[np.int64] | None = None  # (levels, clients) nested ground-truth groups
    distributions: int = 0  # ground-truth distributions with held-out samples
    compared_rounds: tuple[int, ...] = ()  # after which client models are written down
    compared_clients: int = 200
    plugins: tuple[str, ...] = ()  # modules that register what is looked up here
    partition_seed: int | None = None  # says who is held out; None: `seed`
    adoption: str = "labels"  # how clients that never train find a cluster
    stages: tuple[ServerStage, ...] = ()  # the first is that of round 1; empty where nothing changes

    def stage(self, round: int) -> ServerStage | None:
        """What holds in a round; None where nothing ever changes."""
        return next((each for each in reversed(self.stages) if each.round <= max(round, 1)), None)

    def truth(self, round: int) -> npt.NDArray[np.int64] | None:
        """The ground-truth groups in a round."""
        stage = self.stage(round)
        return self.groups if stage is None else stage.groups

    @property
    def held_out(self) -> npt.NDArray[np.int64]:
        """Clients that never train."""
        drawn_by = self.seed if self.partition_seed is None else self.partition_seed
        return held_out(self.clients, self.holdout_clients, drawn_by)

    def since(self, round: int) -> int:
        """The first round that had the data of this one."""
        stage = self.stage(round)
        return 1 if stage is None else stage.round

    def _known_groups(self) -> npt.NDArray[np.int64] | None:
        """Every ground-truth group that there ever is."""
        tables = [stage.groups for stage in self.stages] or ([] if self.groups is None else [self.groups])
        if not tables:
            return None
        known = np.unique(np.concatenate(tables))
        return known[known >= 0]

    def context(self) -> Context:
        """What the method may know."""
        optimizer, momentum = optimizer_of(self.local)
        return Context(
            clients=self.clients,
            clusters=self.clusters,
            rounds=self.rounds,
            seed=self.seed,
            weights=self.weights,
            lr=self.local.lr,
            optimizer=optimizer,
            momentum=momentum,
            rates=Rates(self.local, self.rounds),
            groups=self.groups,
            truth=self.truth,
            since=self.since,
            new_clients=self.held_out,
            adoption=self.adoption,
            known_groups=self._known_groups(),
            has_validation=self.has_validation,
            evaluate_every=self.evaluation.every,
            evaluate_last=self.evaluation.last,
            aggregation=self.aggregation,
            server=self.server,
        )
