"""Ensembles: several methods side by side on the same federation, predicting together.

- Thesis Table 7.5: the sum of two methods, `ensemble=[fedavg,ifca]`, Eq. (7.36): logits are added.
- FedAvg+ and FedProx+ (thesis, CAM paper): K independent runs, soft-voted: `ensemble=[fedavg*5]
  combine=logit_mean` (the mean of logits, as the released code does; `probability_mean` and `vote` exist too,
  which decides between classes of equally many votes by the members' probabilities).

Members share the clients and the rounds, and nothing else: every slot, private model, optimizer state and random
draw of a member carries its number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.strategies.base import Context, Strategy
from archipelago.strategies.interface import FleetView
from archipelago.strategies.method import AnyMethod, Method, build, parts_of
from archipelago.strategies.parameters import Vector
from archipelago.strategies.references import Indices, Merged, Prediction, Private, Reference

MOST_MEMBERS = 1000


def expand(members: list[str]) -> list[str]:
    """`fedavg*3` as three times `fedavg`.

    >>> expand(["fedavg*2", "ifca"])
    ['fedavg', 'fedavg', 'ifca']
    """
    names: list[str] = []
    for member in members:
        method, star, count = member.partition("*")
        if star and not (count.isdigit() and int(count) >= 1):
            raise UserError(
                f"Expected a member such as {method}*5, got '{member}': write a whole number after '*'.",
                code="wrong-form", setting="ensemble", given=member,
            )  # fmt: skip
        if star and int(count) > MOST_MEMBERS:
            raise UserError(
                f"Expected at most {MOST_MEMBERS} members of an ensemble, got '{member}': each is a method of its own.",
                code="too-many", setting="ensemble", given=member, most=MOST_MEMBERS,
            )  # fmt: skip
        names += [method] * (int(count) if star else 1)
    return names


def check_members(members: list[str], combine: str, clusters: int) -> None:
    """Refuse members that cannot predict together."""
    for member in expand(members):
        parts = parts_of(member, clusters)
        if parts[0].value.mixes:
            raise UserError(
                f"'{member}' predicts with a mixture of probabilities, which cannot be added to other members: "
                "leave it out of the ensemble.",
                code="cannot-be-added", member=member,
            )  # fmt: skip
        if combine in ("probability_mean", "vote") and any(entry.value.additive for entry in parts):
            raise UserError(
                f"combine={combine} needs members that predict with one model each, got '{member}', which adds "
                "several: use combine=logit_sum or logit_mean.",
                code="cannot-be-added", member=member, combine=combine,
            )  # fmt: skip


class Ensemble:
    """Members that run side by side and predict together: a method (`AnyMethod`) made of methods."""

    tunes = False
    when_empty = Strategy.when_empty

    def __init__(self, members: list[Method], combine: str, context: Context) -> None:
        self.members, self.combine = members, combine
        self.K = context.clusters
        self.assignment: Indices | None = None  # of the first member that has clusters
        self.report: dict[str, Any] = {}
        self.records: dict[str, dict[str, npt.NDArray[Any]]] = {}
        self.events: list[str] = []

    def _each(self, fleet: FleetView) -> list[tuple[Method, FleetView]]:
        return [(member, fleet.named(f"member {j}")) for j, member in enumerate(self.members)]

    def setup(self, fleet: FleetView) -> None:
        for member, view in self._each(fleet):
            member.setup(view)

    def round(self, fleet: FleetView, number: int) -> None:
        self.report, self.records, self.events = {}, {}, []
        for j, (member, view) in enumerate(self._each(fleet)):
            member.round(view, number)
            self.report |= {f"member{j}_{name}": value for name, value in member.report.items()}
            self.records |= {f"member{j}_{name}": table for name, table in member.records.items()}
            self.events += [f"Member {j}: {event}" for event in member.events]
        clustered = [member for member in self.members if member.assignment is not None]
        if clustered:
            self.assignment, self.K = clustered[0].assignment, clustered[0].K

    def prediction(self, fleet: FleetView) -> Prediction:
        models: list[Reference] = []
        shares = []
        for j, (member, view) in enumerate(self._each(fleet)):
            prediction = member.prediction(view)
            models += [prefixed(model, f"member {j}/") for model in prediction.models]
            shares.append(as_sum(prediction, len(fleet.ids)))
        weights = np.concatenate(shares, axis=1)
        if self.combine == "logit_mean":
            return Prediction(models, weights=weights / len(self.members))
        return Prediction(models, None if (weights == 1.0).all() else weights, self.combine)

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {
            f"member{j}-{name}": values
            for j, member in enumerate(self.members)
            for name, values in member.models().items()
        }

    def labels(self, fleet: FleetView) -> Indices | None:
        """None: members need not agree on clusters."""
        return None

    def proximity(self, ids: Indices) -> tuple[Indices, npt.NDArray[np.float64]] | None:
        """None: members need not compare clients alike."""
        return None

    def centre_models(self) -> list[list[Vector]]:
        return []

    def gradient_point(self, fleet: FleetView) -> tuple[Reference, Reference | None]:
        return self.prediction(fleet).models[0], None

    def save_state(self) -> dict[str, Any]:
        return {"members": [member.save_state() for member in self.members], "assignment": self.assignment}

    def load_state(self, tree: dict[str, Any]) -> None:
        self.assignment = tree["assignment"]
        for member, part in zip(self.members, tree["members"], strict=True):
            member.load_state(part)


def as_sum(prediction: Prediction, clients: int) -> npt.NDArray[np.float64]:
    """(clients, models): how much each model's outputs count in the sum that a member predicts with."""
    weights = prediction.weights
    if weights is None:
        weights = np.ones((clients, len(prediction.models)))
    if prediction.combine == "logit_mean":
        weights = weights / weights.sum(axis=1, keepdims=True)
    return weights


def prefixed(reference: Reference, prefix: str) -> Reference:
    """The same reference, seen from outside the member: its private models carry the member's name."""
    if isinstance(reference, Private):
        default = None if reference.default is None else prefixed(reference.default, prefix)
        return Private(prefix + reference.name, default)
    if isinstance(reference, Merged):
        base, other = prefixed(reference.base, prefix), prefixed(reference.other, prefix)
        return dataclasses.replace(reference, base=base, other=other)
    return reference


def build_ensemble(members: list[str], combine: str, options: dict[str, Any], context: Context) -> Ensemble:
    """The ensemble of `members`, each a method of its own."""
    check_members(members, combine, context.clusters)
    return Ensemble(
        [
            build(name, options, dataclasses.replace(context, seed=member_seed(context.seed, j)))
            for j, name in enumerate(expand(members))
        ],
        combine,
        context,
    )


def assemble(
    method: str, ensemble: list[str], combine: str, options: dict[str, Any], context: Context
) -> AnyMethod:
    """What an experiment runs: the ensemble if it has members, else the method."""
    if ensemble:
        return build_ensemble(ensemble, combine, options, context)
    return build(method, options, context)


def member_seed(seed: int, member: int) -> int:
    """The seed of a member's own draws (K-means starts, random clusters, ...)."""
    return int(generator(seed, "ensemble member", client=member).integers(2**31))
