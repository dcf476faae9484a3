"""Choosing K by FeSEM's recipe (section 5.2): several K on a sample of the clients for a few rounds.

Every K, 1 among them, is tried with several draws of first models and batches, the same for all K. The least K is taken
whose mean loss on validation samples is within one standard error of the lowest (Breiman et al., "Classification
and Regression Trees", 1984), never one that looks best on test data. How sure that is: how often the choice is the
same when one of the draws is left out. The clients' own training samples are split for it where the experiment keeps
no validation part.

With one draw and three rounds IFCA was given 8, 5 and 8 models for four true groups (digits, 20 clients): its models
need about eight rounds to take their groups, and before that more models are always better. With three draws and eight
rounds it is given 4, 6 and 6: of four models one often stays without clients, of six that are four or five in use, so
that more models than groups do have the lowest loss. FeSEM, whose clusters are all in use, is given 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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
ROUNDS = 8
DRAWS = 3
LARGEST = 10
VALIDATION = 0.2


@dataclass(frozen=True)
class Trial:
    """What one K came to, as means over draws."""

    clusters: int
    loss: float  # on validation samples, weighted by size
    score: float  # accuracy, or mean squared error of a regression, there
    spread: float | None  # value of the clustering objective
    losses: tuple[float, ...] = ()  # of each draw
    in_use: tuple[int, ...] = ()  # clusters that have clients, of each draw

    @property
    def error(self) -> float:
        """The standard error of the loss; 0 where there is one draw."""
        return standard_error(self.losses)


@dataclass(frozen=True)
class Choice:
    """The K that was chosen, and what it was chosen from."""

    clusters: int
    trials: tuple[Trial, ...]

    @property
    def agreement(self) -> tuple[int, int]:
        """(the same K, choices) when each of the draws is left out; (1, 1) where there is one draw."""
        draws = max((len(trial.losses) for trial in self.trials), default=0)
        if draws < 2:
            return 1, 1
        table = {trial.clusters: trial.losses for trial in self.trials}
        left = [{k: each[:d] + each[d + 1 :] for k, each in table.items()} for d in range(draws)]
        return sum(within_one_error(each) == self.clusters for each in left), draws

    @property
    def sentence(self) -> str:
        """One line for people."""
        tried = ", ".join(f"{trial.clusters}: {trial.loss:.4g} ± {trial.error:.2g}" for trial in self.trials)
        same, choices = self.agreement
        used = next((trial.in_use for trial in self.trials if trial.clusters == self.clusters), ())
        span = f"{min(used)} to {max(used)}" if len(set(used)) > 1 else f"{max(used, default=self.clusters)}"
        in_use = "" if set(used) <= {self.clusters} else f" ({span} of them in use)"
        return (
            f"clusters={self.clusters}{in_use} was chosen: the least number whose validation loss after {ROUNDS} "
            f"rounds is within one standard error of the lowest ({tried}); the same in {same} of {choices} choices "
            "without one of the draws."
        )


def standard_error(losses: Sequence[float]) -> float:
    """Of their mean; 0 for a single one."""
    return float(np.std(losses, ddof=1) / np.sqrt(len(losses))) if len(losses) > 1 else 0.0


def within_one_error(losses: Mapping[int, Sequence[float]]) -> int:
    """The least K whose mean loss is at most the lowest and its standard error; a loss that is not finite never is.

    >>> within_one_error({1: (2.0, 2.0), 2: (1.05, 1.05), 4: (0.9, 1.1), 8: (1.2, 1.2)})
    2
    >>> within_one_error({2: (float("nan"),), 3: (5.0,)})
    3
    """
    means = {k: float(np.mean(each)) for k, each in losses.items()}
    means = {k: mean if np.isfinite(mean) else np.inf for k, mean in means.items()}
    best = min(means, key=lambda k: (means[k], k))
    limit = means[best] + (standard_error(losses[best]) if np.isfinite(means[best]) else 0.0)
    return min(k for k, mean in means.items() if mean <= limit)


def choose_clusters(
    config: ExperimentSettings,
    candidates: Sequence[int] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    *,
    place: Place | None = None,
    gpus: float | None = None,
) -> Choice:
    """Try each K with each draw and take the least one within one standard error of the lowest validation loss.

    On the run's own devices where these are GPUs, else in this process. `place` and `gpus` are what was reserved for
    the run already (a trial of a sweep).
    """
    if config.ensemble:
        raise UserError(
            "Choosing clusters takes one clustered method, got an ensemble: choose for a member, then set clusters.",
            code="not-an-ensemble",
        )
    base = parts_of(config.method)[0]
    if base.value.grows:  # a few rounds are over before it first splits: every K would come to the same
        raise UserError(
            f"Expected a method that starts with its clusters, got {base.name}, which finds their number itself: set "
            "clusters to the most it may make.",
            code="finds-clusters", base=base.name,
        )  # fmt: skip
    most = min(LARGEST, config.clients // 2)
    if candidates is None and most >= 2:
        candidates = [clusters for clusters in range(1, most + 1) if _is_possible(config.method, clusters)]
    if not candidates:
        raise UserError(
            f"Choosing clusters needs at least 4 clients, got clients={config.clients}: set clusters yourself.",
            code="too-few-clients", clients=config.clients,
        )  # fmt: skip
    partition = dataclasses.replace(config.partition, validation=config.partition.validation or VALIDATION)
    federation = _sampled(build_federation(config.data, partition, config.clients, config.seed), config.seed)
    found: dict[int, list[Trial]] = {clusters: [] for clusters in candidates}
    trials = []
    with _sessions(config, place, gpus) as session_of:
        for draw in range(DRAWS):
            tried = dataclasses.replace(config, seed=_seed(config.seed, draw))
            for clusters in candidates:
                found[clusters].append(_try(tried, federation, clusters, session_of))
                if draw + 1 == DRAWS:
                    trials.append(_mean(found[clusters]))
                    if on_trial is not None:
                        on_trial(trials[-1])
    best = within_one_error({trial.clusters: trial.losses for trial in trials})
    return Choice(best, tuple(trials))


def _is_possible(method: str, clusters: int) -> bool:
    """Whether the parts of a method take this number (a contrast needs two clusters)."""
    try:
        parts_of(method, clusters)
    except UserError:
        return False
    return True


def _seed(seed: int, draw: int) -> int:
    """The seed of a draw: the experiment's own first."""
    return (
        seed
        if draw == 0
        else int(generator(seed, "draw to choose the number of clusters", round=draw).integers(2**31))
    )


def _mean(trials: Sequence[Trial]) -> Trial:
    """One K over its draws."""
    losses = tuple(trial.loss for trial in trials)
    spreads = [trial.spread for trial in trials if trial.spread is not None]
    return Trial(
        trials[0].clusters,
        float(np.mean(losses)),
        float(np.mean([trial.score for trial in trials])),
        float(np.mean(spreads)) if spreads else None,
        losses,
        tuple(used for trial in trials for used in trial.in_use),
    )


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
        seeds: list[int] = []  # of the live one's blocks

        def session_of(plan: Plan) -> Session:
            if not on_gpus:
                session: Session = InProcessSession(_alone(plan, gpus, place))
                stack.callback(session.close)
                return session
            if live and seeds == [plan.block.seed]:
                live[0].begin_again(plan.server)  # K is the server's affair: blocks are the same for any K
            else:
                if live:  # another draw: blocks make the first models
                    live.pop().close()
                seeds[:] = [plan.block.seed]
                live.append(RaySession(dataclasses.replace(plan, gpus=gpus), place=place))
            return live[0]

        @stack.callback
        def close() -> None:
            for session in live:
                session.close()

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
    sizes = metrics.get("cluster_sizes")
    return Trial(
        clusters,
        float(metrics["validation_micro_loss"]),  # type: ignore[arg-type]
        float(score),  # type: ignore[arg-type]
        None if spread is None else float(spread),  # type: ignore[arg-type]
        in_use=() if sizes is None else (int(np.count_nonzero(sizes)),),
    )
