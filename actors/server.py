"""The server: holds the global and the cluster models (inside its strategy) and runs rounds.

A plain class: the in-process session uses it as it is, and a ServerActor wraps it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.fleet import Fleet
from actors.metrics import clustering_metrics, summarise
from actors.participation import Participants, held_out, participants
from actors.placement import trained_samples
from actors.records import client_models
from actors.reports import RoundReport
from archipelago.core.metrics import specs
from archipelago.core.plugins import load_plugins
from archipelago.core.settings import (
    AggregationSettings,
    EvaluationSettings,
    LocalSettings,
    ParticipationSettings,
)
from archipelago.strategies import Context, Strategy, build, build_ensemble
from archipelago.strategies.base import UNASSIGNED


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
    one_class: npt.NDArray[np.bool_] | None = None  # clients that train on one class; None without classes
    levels: npt.NDArray[np.int64] | None = None  # (levels, clients) nested planted groups
    distributions: int = 0  # planted distributions with held-out samples
    compared_rounds: tuple[int, ...] = ()  # after which client models are written down
    compared_clients: int = 200
    plugins: tuple[str, ...] = ()  # modules that register what is looked up here

    def context(self) -> Context:
        """What the strategy may know."""
        return Context(
            clients=self.clients,
            clusters=self.clusters,
            rounds=self.rounds,
            seed=self.seed,
            weights=self.weights,
            lr=self.local.lr,
            groups=self.groups,
            has_validation=self.has_validation,
            evaluate_every=self.evaluation.every,
            evaluate_last=self.evaluation.last,
            aggregation=self.aggregation,
        )


class Server:
    """One method, its models, and the fleet it works with."""

    def __init__(self, setup: ServerSetup, fleet: Fleet, state: dict[str, Any] | None = None) -> None:
        self.setup, self.fleet = setup, fleet
        load_plugins(setup.plugins)
        self.strategy: Strategy
        if setup.ensemble:
            self.strategy = build_ensemble(setup.ensemble, setup.combine, setup.options, setup.context())
        else:
            self.strategy = build(setup.method, setup.options, setup.context())
        held = held_out(setup.clients, setup.holdout_clients, setup.seed)
        self.population = np.setdiff1d(np.arange(setup.clients), held)  # who may ever train
        self.held_out = held
        fleet.set_population(self.population)
        fleet.begin(0)
        self.strategy.begin(fleet)
        if state is not None:
            self.strategy.load_state(state)
        fleet.begin(0)

    def run_round(self, round: int) -> RoundReport:
        """One communication round, committed before this returns."""
        started = time.perf_counter()
        setup, strategy, fleet = self.setup, self.strategy, self.fleet
        chosen = participants(setup.participation, self.population, setup.seed, round)
        fleet.begin(round, chosen.step_share)
        before = strategy.assignment
        strategy.run_round(fleet.select(chosen.ids), round)
        metrics: dict[str, Any] = {
            "participants": len(chosen.ids),
            "missing": len(chosen.missing),
            "dropped": len(fleet.dropped),
            "federated_objective": self._federated_objective(),
            **fleet.cost(len(chosen.ids), self._one_training(chosen)),
            **strategy.report,
        }
        if strategy.assignment is not None:
            metrics |= clustering_metrics(
                strategy.assignment, before, setup.groups, strategy.K, setup.plugins
            )
            if setup.levels is not None:
                metrics["ari_by_level"] = [
                    clustering_metrics(strategy.assignment, None, level, strategy.K)["ari"]
                    for level in setup.levels
                ]
        table, records = None, dict(strategy.records)
        if round % setup.evaluation.every == 0 or round == setup.rounds:
            table = self._evaluate(metrics)
            records |= self._centres(metrics)
        if round in setup.compared_rounds:
            records |= client_models(fleet, setup.compared_clients)
        events = [*fleet.events, *strategy.events, *self._cluster_events(before if round > 1 else None)]
        events += self._data_events() if round == 1 else []
        seconds = dict(fleet.seconds)
        events += fleet.commit()
        seconds["round"] = time.perf_counter() - started
        assignment = None if strategy.assignment is None else strategy.assignment.copy()
        return RoundReport(round, metrics, table, assignment, seconds, events=events, records=records)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of the server."""
        return self.strategy.save_state()

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """The models the server holds."""
        return self.strategy.all_models()

    def _one_training(self, chosen: Participants) -> float:
        """Samples that FedAvg would train on with these participants."""
        share = np.array([chosen.step_share.get(int(i), 1.0) for i in chosen.ids])
        return float(trained_samples(self.setup.local, self.setup.sizes[chosen.ids], share).sum())

    def _federated_objective(self) -> float | None:
        """sum_i (n_i / n) of the local objectives that were minimised, over the clients' own batches."""
        for ids, objective in self.fleet.objectives.values():
            arrived = np.isfinite(objective)
            if arrived.any():
                return float(np.average(objective[arrived], weights=self.setup.sizes[ids][arrived]))
        return None

    def _evaluate(self, metrics: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Fill `metrics` and return the table of clients."""
        setup, fleet = self.setup, self.fleet.select(np.arange(self.setup.clients))
        prediction = self.strategy.predict(fleet)
        columns = fleet.evaluate(prediction, "test")
        table = {"client": columns.pop("client"), "train_samples": setup.sizes}
        if setup.groups is not None:
            table["group"] = setup.groups
        if self.strategy.assignment is not None:
            table["cluster"] = self.strategy.assignment
        if len(self.held_out):
            table["held_out"] = np.isin(table["client"], self.held_out)
        table |= columns
        metrics |= self._summary(columns)
        splits = ["validation"] if setup.has_validation else []
        for split in splits + (["train"] if setup.evaluation.train else []):
            columns = fleet.evaluate(prediction, split)
            columns.pop("client")
            metrics |= {f"{split}_{name}": value for name, value in self._summary(columns).items()}
            table |= {f"{split}_{name}": column for name, column in columns.items()}
        if setup.evaluation.clusterability:
            metrics |= self._clusterability(fleet.select(self.population))
        return table

    def _centres(self, metrics: dict[str, Any]) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Every cluster model on held-out samples of every ground-truth distribution (FedSoft's Tables 1, 3, 4).

        `centre_accuracy` or `centre_mse`: a row per distribution, a column per model; all metrics go to a record.
        """
        centres = self.strategy.centre_models() if self.setup.distributions else []
        if not centres:
            return {}
        rows = self.fleet.measure(centres, self.setup.distributions)
        shape = (self.setup.distributions, len(centres))
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        for spec in specs(self.setup.plugins):
            if spec.name in columns and "distributions" in spec.shown:
                metrics[f"centre_{spec.name}"] = columns[spec.name].reshape(shape).tolist()
        distribution, centre = np.indices(shape).reshape(2, -1)
        return {"centres": {"distribution": distribution, "centre": centre, **columns}}

    def _summary(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
        """Figures over the clients that train, and over those held out (`holdout_...`)."""
        weights = self.setup.sizes if self.setup.evaluation.weights == "train" else columns["samples"]

        def over(ids: npt.NDArray[np.int64]) -> dict[str, Any]:
            return summarise({name: column[ids] for name, column in columns.items()}, weights[ids])

        figures = over(self.population)
        if len(self.held_out):
            figures |= {f"holdout_{name}": value for name, value in over(self.held_out).items()}
        return figures

    def _clusterability(self, fleet: Fleet) -> dict[str, Any]:
        """The thesis's B (3.18): the largest ||mean gradient of the cluster - own|| / ||mean gradient||."""
        strategy = self.strategy
        labels = np.zeros(len(fleet.ids), np.int64)
        clusters = 1
        if strategy.clustered:
            labels, clusters = strategy.labels(fleet), strategy.K  # type: ignore[attr-defined]
        gradients = fleet.gradients(
            strategy.gradient_point(fleet), on_top_of=getattr(strategy, "underlay", None)
        )
        weights = self.setup.sizes[fleet.ids] * gradients.arrived
        present = [k for k in range(clusters) if weights[labels == k].sum() > 0]
        rows = np.full(clusters, -1)
        rows[present] = np.arange(len(present))
        means = gradients.average(by=rows[labels], weights=weights, clusters=len(present))
        away = gradients.distances(means[rows[labels]])
        norms = np.sqrt(np.add.reduce(means.values.astype(np.float64) ** 2, axis=1))
        by_cluster: list[float | None] = [None] * clusters
        for row, k in enumerate(present):
            by_cluster[k] = (
                float(np.nanmax(away[labels == k])) / float(norms[row]) if norms[row] > 0 else None
            )
        known = [value for value in by_cluster if value is not None]
        return {"clusterability": max(known) if known else None, "clusterability_by_cluster": by_cluster}

    def _data_events(self) -> list[str]:
        """Clients whose data leave little to learn, or make every step a full-batch one."""
        setup, events = self.setup, []
        total = len(self.population)
        if setup.one_class is not None and (count := int(setup.one_class[self.population].sum())):
            events.append(
                f"{count} of {total} clients {'trains' if count == 1 else 'train'} on samples of one class."
            )
        if count := int((setup.sizes[self.population] <= setup.local.batch).sum()):
            events.append(
                f"{count} of {total} clients {'has' if count == 1 else 'have'} no more training samples than one batch "
                f"(local.batch={setup.local.batch})."
            )
        return events

    def _cluster_events(self, before: npt.NDArray[np.int64] | None) -> list[str]:
        """Empty clusters, clusters of one and collapses, told when they happen and not every round after."""
        if self.strategy.assignment is None or (self.strategy.assignment == UNASSIGNED).all():
            return []
        clusters = self.strategy.K
        now = _sizes(self.strategy.assignment, clusters)
        then = None if before is None or (before == UNASSIGNED).all() else _sizes(before, clusters)
        events = []
        for k in np.flatnonzero(now == 0):
            if then is None or then[k] > 0:
                events.append(f"Cluster {k} is empty: {self.strategy.when_empty}.")
        if len(single := np.flatnonzero((now == 1) & (True if then is None else then != 1))):
            events.append(_one_client(single.tolist()))
        if (now > 0).sum() == 1 < clusters and (then is None or (then > 0).sum() > 1):
            events.append(f"All clients are in cluster {int(now.argmax())}.")
        return events


def _one_client(clusters: list[int]) -> str:
    """
    >>> _one_client([2]), _one_client([0, 2, 5])
    ('Cluster 2 has one client.', 'Clusters 0, 2 and 5 have one client each.')
    """
    if len(clusters) == 1:
        return f"Cluster {clusters[0]} has one client."
    return f"Clusters {', '.join(map(str, clusters[:-1]))} and {clusters[-1]} have one client each."


def _sizes(assignment: npt.NDArray[np.int64], clusters: int) -> npt.NDArray[np.int64]:
    return np.bincount(assignment[assignment >= 0], minlength=clusters)
