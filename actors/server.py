"""The server: holds the global and the cluster models (inside its method) and runs rounds.

A plain class: the in-process session uses it as it is, and a ServerActor wraps it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from actors import parts
from actors.collusion import Collusion
from actors.drift_recovery import Recovery, watched
from actors.exposure import Exposure
from actors.fleet import Fleet
from actors.metrics import clustering_metrics, summarise
from actors.participation import Participants, participants, selected, trained_samples, visited
from actors.records import client_models
from actors.reports import RoundReport
from actors.server_setup import ServerSetup
from archipelago.core.causes import exits_are_failures
from archipelago.core.metrics import specs
from archipelago.core.plugins import load_plugins
from archipelago.strategies import AnyMethod, assemble, attacks
from archipelago.strategies.base import UNASSIGNED
from archipelago.strategies.privacy import PrivacyBudget
from archipelago.strategies.references import Prediction
from archipelago.strategies.schedules import Rates
from archipelago.strategies.updates import check_networks

JUDGED = 500  # clients whose distances and labels judge a clustering: all pairs of them are compared


class Server:
    """One method, its models, and the fleet it works with."""

    def __init__(self, setup: ServerSetup, fleet: Fleet, state: dict[str, Any] | None = None) -> None:
        self.setup, self.fleet = setup, fleet
        load_plugins(setup.plugins)
        self.method: AnyMethod = assemble(
            setup.method, setup.ensemble, setup.combine, setup.options, setup.context()
        )
        held = setup.held_out
        self.population = np.setdiff1d(np.arange(setup.clients), held)  # who may ever train
        self.held_out = held
        self.attackers = np.asarray(setup.attackers, np.int64)
        if len(self.attackers) and (attack := attacks.chosen(setup.attack)).knows is not None:
            fleet.collusion = Collusion(attack, self.attackers)
        count, total = selected(setup.participation, len(self.population)), len(self.population)
        self.sizes, self.recovery = setup.sizes, None
        if setup.stages:
            measured = specs(setup.plugins, also=setup.evaluation.metrics)
            self.recovery = Recovery(setup.evaluation.recovery, watched(measured))
        self.privacy = PrivacyBudget.of(setup.update, count, count / total)
        self._enter(1)
        self.rates = Rates(setup.local, setup.rounds)
        fleet.begin(0, rate=self.rates(1))
        if setup.update.transforms:
            check_networks(setup.update, fleet.spec)
        self.method.setup(fleet)
        if state is not None:
            self.method.load_state(state)
            if self.privacy is not None:
                self.privacy.load_state(state["privacy"])
            if self.recovery is not None:
                self.recovery.load_state(state["recovery"])
        fleet.begin(0, rate=self.rates(1))
        self.round = 0  # the last that was decided
        self.report: RoundReport | None = None  # of that round
        self._before: dict[str, Any] | None = None  # the state that the running round began with

    def run_round(self, round: int) -> RoundReport:
        """One communication round, committed before this returns."""
        started = time.perf_counter()
        self._before = self.committed_state()
        setup, method, fleet = self.setup, self.method, self.fleet
        drift = self._enter(round)
        chosen = participants(setup.participation, self.population, setup.seed, round)
        fleet.begin(round, chosen.step_share, self.rates(round))
        fleet.ledger.exposure = None if self.privacy is None else Exposure()
        before = method.assignment
        with exits_are_failures(f"method '{setup.method}'"):
            method.round(fleet.select(chosen.ids), round)
        metrics: dict[str, Any] = {
            "participants": len(chosen.ids),
            "missing": len(chosen.missing),
            "dropped": len(fleet.dropped),
            "federated_objective": self._federated_objective(),
            **fleet.cost(len(chosen.ids), self._one_training(chosen)),
            **method.report,
        }
        if self.privacy is not None:
            assert fleet.ledger.exposure is not None
            self.privacy.spend(fleet.ledger.exposure.behind())
            metrics["epsilon"] = self.privacy.epsilon()
        metrics |= self._clustering(before, round)
        table, records = None, dict(method.records)
        if self._evaluates(round):
            table = self._evaluate(metrics, round)
            records |= self._centres(metrics)
        if self.recovery is not None:
            metrics |= self.recovery.sees(round, metrics)
        if round in setup.compared_rounds:
            records |= client_models(fleet, setup.compared_clients)
        events = [*drift, *fleet.events, *method.events, *self._cluster_events(before if round > 1 else None)]
        events += [*self._data_events(), *self._attack_events()] if round == 1 else []
        assignment = None if method.assignment is None else method.assignment.copy()
        report = RoundReport(round, metrics, table, assignment, events=events, records=records)
        fleet.prepare(lambda: {"state": self.state(), "report": report})
        # Here the round is decided: whatever is lost from now on, it is not run again.
        self.round, self.report, self._before = round, report, None
        seconds = dict(fleet.seconds)
        events += fleet.commit()
        seconds["round"] = time.perf_counter() - started
        self.report = replace(report, timings=seconds, events=events, engines=frozenset(fleet.engines))
        return self.report

    def _clustering(self, before: npt.NDArray[np.int64] | None, round: int) -> dict[str, Any]:
        """Metrics of the round's assignment; none of a method that has no clusters."""
        setup, method = self.setup, self.method
        if method.assignment is None:
            return {}
        metrics: dict[str, Any] = clustering_metrics(
            method.assignment, before, setup.truth(round), method.K, setup.plugins, self._judged(round)
        )
        if setup.levels is not None:
            each = [
                clustering_metrics(method.assignment, None, level, method.K, setup.plugins)
                for level in setup.levels
            ]
            for spec in specs(setup.plugins, over="clusters"):
                if "levels" in spec.shown:
                    metrics[f"{spec.name}_by_level"] = [found[spec.name] for found in each]
        return metrics

    def committed_state(self) -> dict[str, Any]:
        """The state after the last round that was decided, whatever an attempt at the next one has changed."""
        return self.state() if self._before is None else self._before

    def _evaluates(self, round: int) -> bool:
        return round % self.setup.evaluation.every == 0 or round == self.setup.rounds

    def _judged(self, round: int) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """What a clustering is judged by without ground truth, of a sample of clients: distances and labels."""
        if not self._evaluates(round):
            return {}
        spread = np.unique(np.linspace(0, len(self.population) - 1, JUDGED).astype(np.int64))
        compared = self.method.proximity(self.population[spread])
        found = {} if compared is None or not len(compared[0]) else {"distances": compared}
        stage = self.setup.stage(round)
        counts = self.setup.label_counts if stage is None else stage.label_counts
        return found if counts is None else {**found, "labels": counts}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of the server."""
        state = self.method.save_state()
        if self.privacy is not None:
            state = {**state, "privacy": self.privacy.save_state()}
        return state if self.recovery is None else {**state, "recovery": self.recovery.save_state()}

    def _enter(self, round: int) -> list[str]:
        """Take over what holds in a round: sizes, and who is there; returns what a user should know of a drift."""
        stage = self.setup.stage(round)
        if stage is None:
            self.fleet.set_population(self.population)
            return []
        there = np.flatnonzero(stage.present)
        self.population = np.setdiff1d(there, self.setup.held_out)
        self.held_out = np.intersect1d(there, self.setup.held_out)
        self.sizes = self.fleet.all_sizes = stage.sizes
        self.fleet.set_population(self.population)
        if stage.round != round or round == 1:
            return []
        assert self.recovery is not None
        self.recovery.starts(round)
        earlier = self.setup.stage(round - 1)
        assert earlier is not None
        changed = int((earlier.groups != stage.groups).sum())
        groups = len(np.unique(stage.groups[stage.groups >= 0]))
        return [
            f"Drift before round {round}: {changed} clients changed; there are {groups} ground-truth groups and "
            f"{len(there)} clients."
        ]

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """The models the server holds."""
        return self.method.models()

    def _one_training(self, chosen: Participants) -> float:
        """Samples that FedAvg would train on with these participants."""
        share = np.array([chosen.step_share.get(int(i), 1.0) for i in chosen.ids])
        return float(trained_samples(self.setup.local, self.sizes[chosen.ids], share).sum())

    def _federated_objective(self) -> float | None:
        """sum_i (n_i / n) of the local objectives that were minimised, over the clients' own batches."""
        for ids, objective in self.fleet.objectives.values():
            arrived = np.isfinite(objective)
            if arrived.any():
                return float(np.average(objective[arrived], weights=self.sizes[ids][arrived]))
        return None

    @cached_property
    def _fresh_norm(self) -> float:
        """The norm of a model that was not trained."""
        return parts.norm_of(self.fleet.initial(1, "fresh model")[0])

    def _evaluate(self, metrics: dict[str, Any], round: int) -> dict[str, npt.NDArray[Any]]:
        """Fill `metrics` and return the table of the clients that were visited."""
        setup, ids = self.setup, self._visited(round)
        fleet = self.fleet.measuring().select(ids)
        if setup.evaluation.personal:
            metrics |= self._personal(ids)
        prediction = self.method.prediction(fleet)
        columns = fleet.evaluate(prediction, "test")
        table = {"client": columns.pop("client"), "train_samples": self.sizes[ids]}
        truth = setup.truth(round)
        if truth is not None:
            table["group"] = truth[ids]
        if self.method.assignment is not None:
            table["cluster"] = self.method.assignment[ids]
        if len(self.held_out):
            table["held_out"] = np.isin(table["client"], self.held_out)
        if len(self.attackers):
            table["attacker"] = np.isin(table["client"], self.attackers)
        table |= columns
        metrics |= self._summary(ids, columns)
        splits = ["validation"] if setup.has_validation else []
        for split in splits + (["train"] if setup.evaluation.train else []):
            columns = fleet.evaluate(prediction, split)
            columns.pop("client")
            metrics |= {f"{split}_{name}": value for name, value in self._summary(ids, columns).items()}
            table |= {f"{split}_{name}": column for name, column in columns.items()}
        if prediction.names and parts.due(round, setup.rounds, setup.evaluation.every):
            known = specs(setup.plugins, over="clients", also=setup.evaluation.metrics)
            measured = [spec.name for spec in known if "parts" in spec.shown]
            metrics |= parts.part_metrics(
                fleet, prediction, self.population, self.sizes[ids], self._fresh_norm, measured
            )
        if setup.evaluation.clusterability:
            metrics |= self._clusterability(fleet.select(np.intersect1d(ids, self.population)))
        return table

    def _visited(self, round: int) -> npt.NDArray[np.int64]:
        """Who is evaluated after a round: of the clients that train and of those held out, each by itself."""
        setup, last = self.setup, round >= self.setup.rounds
        parts = [
            visited(setup.evaluation, each, setup.seed, round, last)
            for each in (self.population, self.held_out)
        ]
        return np.sort(np.concatenate(parts)).astype(np.int64)

    def _personal(self, ids: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Metrics of the models that this round's participants trained, each its own, before averaging."""
        trained = self.fleet.first_trained
        if trained is None:
            return {}
        view = self.fleet.measuring().select(trained.ids)
        skip = {int(i) for i in trained.ids[~trained.arrived | ~np.isin(trained.ids, ids)]}
        columns = view.evaluate(Prediction([trained, *trained.under]), "test", skip=skip)
        who = columns.pop("client")
        return {f"personal_{name}": value for name, value in self._summary(who, columns).items()}

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
        for spec in specs(self.setup.plugins, also=self.setup.evaluation.metrics):
            if spec.name in columns and "distributions" in spec.shown:
                metrics[f"centre_{spec.name}"] = columns[spec.name].reshape(shape).tolist()
        distribution, centre = np.indices(shape).reshape(2, -1)
        return {"centres": {"distribution": distribution, "centre": centre, **columns}}

    def _summary(self, ids: npt.NDArray[np.int64], columns: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
        """Metrics over those of `ids` that train, and over those held out (`holdout_...`)."""
        weights = self.sizes[ids] if self.setup.evaluation.weights == "train" else columns["samples"]

        def over(whom: npt.NDArray[np.int64]) -> dict[str, Any]:
            at = np.isin(ids, whom)
            return summarise({name: column[at] for name, column in columns.items()}, weights[at])

        metrics = over(self.population)
        if len(self.held_out):
            metrics |= {f"holdout_{name}": value for name, value in over(self.held_out).items()}
        if len(self.attackers):
            honest = np.setdiff1d(self.population, self.attackers)
            metrics |= {f"honest_{name}": value for name, value in over(honest).items()}
        return metrics

    def _clusterability(self, fleet: Fleet) -> dict[str, Any]:
        """The thesis's B (3.18): the largest ||mean gradient of the cluster - own|| / ||mean gradient||."""
        labels, clusters = self.method.labels(fleet), self.method.K
        if labels is None:
            labels, clusters = np.zeros(len(fleet.ids), np.int64), 1
        at, under = self.method.gradient_point(fleet)
        gradients = fleet.gradients(at, on_top_of=under)
        weights = self.sizes[fleet.ids] * gradients.arrived
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

    def _attack_events(self) -> list[str]:
        """Who attacks, and how."""
        if not len(self.attackers):
            return []
        who = ", ".join(map(str, self.attackers))
        return [
            f"{len(self.attackers)} of {len(self.population)} clients attack ({self.setup.attack.name}): {who}."
        ]

    def _cluster_events(self, before: npt.NDArray[np.int64] | None) -> list[str]:
        """Empty clusters, clusters of one and collapses, reported when they happen and not every round after."""
        if self.method.assignment is None or (self.method.assignment == UNASSIGNED).all():
            return []
        clusters = self.method.K
        now = _sizes(self.method.assignment, clusters)
        then = None if before is None or (before == UNASSIGNED).all() else _sizes(before, clusters)[:clusters]
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
    # A method that merges clusters has had more of them before.
    return np.bincount(assignment[assignment >= 0], minlength=clusters)[:clusters]
