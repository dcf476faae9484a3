"""Choosing K by FeSEM's recipe (section 5.2): several K on a sample of the clients for a few rounds.

The K with the lowest loss on validation samples is taken, never one that looks best on test data. The clients' own
training samples are split for it where the experiment keeps no validation part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.session import InProcessSession
from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import ExperimentSettings
from archipelago.core.vocabulary import built_in
from archipelago.data import Federation, build_federation
from archipelago.experiments.config import options
from archipelago.experiments.plan import make_plan
from archipelago.strategies import parts_of

SAMPLED_CLIENTS = 100
ROUNDS = 3
LARGEST = 10
VALIDATION = 0.2


@dataclass(frozen=True)
class Trial:
    """What one K came to."""

    clusters: int
    loss: float  # on validation samples, weighted by size
    score: float  # accuracy, or mean squared error of a regression, there
    spread: float | None  # value of the clustering objective


@dataclass(frozen=True)
class Choice:
    """The K that was chosen, and what it was chosen from."""

    clusters: int
    trials: tuple[Trial, ...]

    @property
    def sentence(self) -> str:
        """One line for people."""
        tried = ", ".join(f"{trial.clusters}: {trial.loss:.4g}" for trial in self.trials)
        return f"clusters={self.clusters} was chosen by validation loss after {ROUNDS} rounds ({tried})."


def choose_clusters(
    config: ExperimentSettings,
    candidates: Sequence[int] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> Choice:
    """Try each K in this process and take the one of least validation loss (ties: the smallest)."""
    if config.ensemble:
        raise UserError(
            "Choosing clusters takes one clustered method, got an ensemble: choose for a member, then set clusters."
        )
    base = parts_of(config.method)[0]
    if base.value.grows:  # three rounds are over before it first splits: every K would come to the same
        raise UserError(
            f"Expected a method that starts with its clusters, got {base.name}, which finds their number itself: set "
            "clusters to the most it may make."
        )
    most = min(LARGEST, config.clients // 2)
    chosen = list(candidates) if candidates is not None else list(range(2, most + 1))
    if not chosen:
        raise UserError(
            f"Choosing clusters needs at least 4 clients, got clients={config.clients}: set clusters yourself."
        )
    partition = dataclasses.replace(config.partition, validation=config.partition.validation or VALIDATION)
    federation = _sampled(build_federation(config.data, partition, config.clients, config.seed), config.seed)
    trials = []
    for clusters in chosen:
        trial = _try(config, federation, clusters)
        trials.append(trial)
        if on_trial is not None:
            on_trial(trial)
    best = min(trials, key=lambda trial: (trial.loss if np.isfinite(trial.loss) else np.inf, trial.clusters))
    return Choice(best.clusters, tuple(trials))


def _sampled(federation: Federation, seed: int) -> Federation:
    """The federation of at most SAMPLED_CLIENTS of its clients."""
    if len(federation.clients) <= SAMPLED_CLIENTS:
        return federation
    rng = generator(seed, "clients sampled to choose the number of clusters")
    kept = np.sort(rng.permutation(len(federation.clients))[:SAMPLED_CLIENTS])
    return federation.only(kept)


def _for_few_rounds(config: ExperimentSettings) -> dict[str, Any]:
    """The options of add-ons for a trial, which has few rounds."""
    sections, addons = options(config), parts_of(config.method)[1:]
    return {
        addon.section: addon.value.for_few_rounds(sections[addon.section], ROUNDS)
        for addon in addons
        if addon.section in sections
    }


def _try(config: ExperimentSettings, federation: Federation, clusters: int) -> Trial:
    fleet = dataclasses.replace(
        config.fleet, backend="in_process", actors=1, clients_per_actor=None, gpus=0.0
    )
    tried = dataclasses.replace(
        config,
        clusters=clusters,
        clients=len(federation.clients),
        rounds=ROUNDS,
        fleet=fleet,
        holdout_clients=0.0,
        **_for_few_rounds(config),
    )
    session = InProcessSession(make_plan(tried, federation))
    metrics = [session.run_round(round) for round in range(1, ROUNDS + 1)][-1].metrics
    known = [name.removeprefix("validation_") for name in metrics if name.startswith("validation_")]
    score = metrics[f"validation_{built_in().headline(known)[0].name}"]
    spread = metrics.get("clustering_objective")
    return Trial(
        clusters,
        float(metrics["validation_micro_loss"]),  # type: ignore[arg-type]
        float(score),  # type: ignore[arg-type]
        None if spread is None else float(spread),  # type: ignore[arg-type]
    )
