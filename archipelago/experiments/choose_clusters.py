"""Choosing K by FeSEM's recipe (section 5.2): several K on a sample of the clients for a few rounds.

The K with the lowest loss on validation samples is taken, never one that looks best on test data. The clients' own
training samples are split for it where the experiment keeps no validation part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.cluster import connected, nodes_of
from actors.devices import torch_has_cuda
from actors.placement import resolved
from actors.session import InProcessSession, Place, Plan, RaySession, Session
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
    *,
    place: Place | None = None,
    gpus: float | None = None,
) -> Choice:
    """Try each K and take the one of least validation loss (ties: the smallest).

    On the run's own devices where these are GPUs, else in this process. `place` and `gpus` are what was reserved for
    the run already (a trial of a sweep).
    """
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
    with _sessions(config, place, gpus) as session_of:
        for clusters in chosen:
            trial = _try(config, federation, clusters, session_of)
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


@contextmanager
def _sessions(
    config: ExperimentSettings, place: Place | None, gpus: float | None
) -> Iterator[Callable[[Plan], Session]]:
    """A function that gives a session for a plan: actors with GPUs serve every K, one after the other."""
    with ExitStack() as stack:
        on_gpus = _on_ray_gpus(config, place, gpus)
        if on_gpus:
            stack.enter_context(connected(config.fleet))
        live: list[RaySession] = []

        def session_of(plan: Plan) -> Session:
            if not on_gpus:
                session: Session = InProcessSession(_alone(plan, gpus, place))
                stack.callback(session.close)
                return session
            if live:
                live[0].begin_again(plan.server)  # K is the server's affair: blocks are the same for any K
            else:
                live.append(RaySession(dataclasses.replace(plan, gpus=gpus), place=place))
                stack.callback(live[0].close)
            return live[0]

        yield session_of


def _on_ray_gpus(config: ExperimentSettings, place: Place | None, gpus: float | None) -> bool:
    """Whether the run's clients live in Ray actors with GPUs."""
    if config.fleet.backend == "in_process" or (gpus is not None and place is None):
        return False
    if gpus is not None:
        return gpus > 0
    return bool(resolved(config.fleet, config.clients, nodes_of(config.fleet), cuda=torch_has_cuda()).gpus)


def _alone(plan: Plan, gpus: float | None, place: Place | None) -> Plan:
    """One block in this process, on the device that the run has here; none where actors elsewhere have the devices."""
    fleet = dataclasses.replace(plan.fleet, actors=1, clients_per_actor=None)
    # In this process only where the run's clients are: its own backend, or a trial without actors.
    here = gpus if place is None else 0.0
    here = 0.0 if here is None and plan.fleet.backend == "ray" else here
    block = dataclasses.replace(plan.block, precision="32") if here == 0.0 else plan.block
    return dataclasses.replace(plan, fleet=fleet, gpus=here, block=block)


def _try(
    config: ExperimentSettings, federation: Federation, clusters: int, session_of: Callable[[Plan], Session]
) -> Trial:
    tried = dataclasses.replace(
        config,
        clusters=clusters,
        clients=len(federation.clients),
        rounds=ROUNDS,
        holdout_clients=0.0,
        **_for_few_rounds(config),
    )
    session = session_of(make_plan(tried, federation))
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
