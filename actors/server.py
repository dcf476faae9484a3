"""The server: holds the global and the cluster models (inside its method) and runs rounds.

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
from archipelago.strategies import AnyMethod, Context, assemble
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
    levels: npt.NDArray[np.int64] | None = None  # (levels, clients) nested ground-truth groups
    distributions: int = 0  # ground-truth distributions with held-out samples
    compared_rounds: tuple[int, ...] = ()  # after which client models are written down
    compared_clients: int = 200
    plugins: tuple[str, ...] = ()  # modules that register what is looked up here

    def context(self) -> Context:
        """What the method may know."""
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
        self.method: AnyMethod = assemble(
            setup.method, setup.ensemble, setup.combine, setup.options, setup.context()
        )
        held = held_out(setup.clients, setup.holdout_clients, setup.seed)
        self.population = np.setdiff1d(np.arange(setup.clients), held)  # who may ever train
        self.held_out = held
        fleet.set_population(self.population)
        fleet.begin(0)
        self.method.setup(fleet)
        if state is not None:
            self.method.load_state(state)
        fleet.begin(0)

    def run_round(self, round: int) -> RoundReport:
        """One communication round, committed before this returns."""
        started = time.perf_counter()
        setup, method, fleet = self.setup, self.method, self.fleet
        chosen = participants(setup.participation, self.population, setup.seed, round)
        fleet.begin(round, chosen.step_share)
        before = method.assignment
        method.round(fleet.select(chosen.ids), round)
        metrics: dict[str, Any] = {
            "participants": len(chosen.ids),
            "missing": len(chosen.missing),
            "dropped": len(fleet.dropped),
            "federated_objective": self._federated_objective(),
            **fleet.cost(len(chosen.ids), self._one_training(chosen)),
            **method.report,
        }
        if method.assignment is not None:
            metrics |= clustering_metrics(method.assignment, before, setup.groups, method.K, setup.plugins)
            if setup.levels is not None:
                metrics["ari_by_level"] = [
                    clustering_metrics(method.assignment, None, level, method.K)["ari"]
                    for level in setup.levels
                ]
        table, records = None, dict(method.records)
        if round % setup.evaluation.every == 0 or round == setup.rounds:
            table = self._evaluate(metrics)
            records |= self._centres(metrics)
        if round in setup.compared_rounds:
            records |= client_models(fleet, setup.compared_clients)
        events = [*fleet.events, *method.events, *self._cluster_events(before if round > 1 else None)]
        events += self._data_events() if round == 1 else []
        seconds = dict(fleet.seconds)
        events += fleet.commit()
        seconds["round"] = time.perf_counter() - started
        assignment = None if method.assignment is None else method.assignment.copy()
        return RoundReport(round, metrics, table, assignment, seconds, events=events, records=records)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of the server."""
        return self.method.save_state()

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """The models the server holds."""
        return self.method.models()

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
        prediction = self.method.prediction(fleet)
        columns = fleet.evaluate(prediction, "test")
        table = {"client": columns.pop("client"), "train_samples": setup.sizes}
        if setup.groups is not None:
            table["group"] = setup.groups
        if self.method.assignment is not None:
            table["cluster"] = self.method.assignment
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
        centres = self.method.centre_models() if self.setup.distributions else []
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
        """Metrics over the clients that train, and over those held out (`holdout_...`)."""
        weights = self.setup.sizes if self.setup.evaluation.weights == "train" else columns["samples"]

        def over(ids: npt.NDArray[np.int64]) -> dict[str, Any]:
            return summarise({name: column[ids] for name, column in columns.items()}, weights[ids])

        metrics = over(self.population)
        if len(self.held_out):
            metrics |= {f"holdout_{name}": value for name, value in over(self.held_out).items()}
        return metrics

    def _clusterability(self, fleet: Fleet) -> dict[str, Any]:
        """The thesis's B (3.18): the largest ||mean gradient of the cluster - own|| / ||mean gradient||."""
        labels, clusters = self.method.labels(fleet), self.method.K
        if labels is None:
            labels, clusters = np.zeros(len(fleet.ids), np.int64), 1
        at, under = self.method.gradient_point(fleet)
        gradients = fleet.gradients(at, on_top_of=under)
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
        """Empty clusters, clusters of one and collapses, reported when they happen and not every round after."""
        if self.method.assignment is None or (self.method.assignment == UNASSIGNED).all():
            return []
        clusters = self.method.K
        now = _sizes(self.method.assignment, clusters)
        then = None if before is None or (before == UNASSIGNED).all() else _sizes(before, clusters)
        events = []
        for k in np.flatnonzero(now == 0):
            if then is None or then[k] > 0:
                events.append(f"Cluster {k} is empty: {self.method.when_empty}.")
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
