"""A method is a base strategy plus add-ons, `fesem+cam+finetune`: composition, and nothing of any paper.

The server holds a method and knows no strategy. `AnyMethod` is all it asks of one; an ensemble
(`ensemble.py`) is another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.registry import Entry
from archipelago.strategies import server_optimizers
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, Strategy
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import Vector
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.references import Indices, Prediction, Reference


class AnyMethod(Protocol):
    """What the server asks of a method, whatever it is made of."""

    @property
    def K(self) -> int:
        """Number of clusters by now."""

    @property
    def assignment(self) -> Indices | None:
        """Cluster of each client id, UNASSIGNED where not known; None without clusters."""

    @property
    def report(self) -> dict[str, Any]:
        """Metrics of the last round."""

    @property
    def records(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Tables of the last round, for the figures."""

    @property
    def events(self) -> list[str]:
        """What a user should know of the last round."""

    @property
    def when_empty(self) -> str:
        """What becomes of a cluster that no client is in."""

    @property
    def tunes(self) -> bool:
        """Whether predictions of this round come after a local training of each client's own."""

    def setup(self, fleet: FleetView) -> None:
        """Make the first models."""

    def round(self, fleet: FleetView, number: int) -> None:
        """Communication round `number` with the clients of `fleet`."""

    def prediction(self, fleet: FleetView) -> Prediction:
        """What each client of `fleet` predicts with."""

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        """The models the server holds, for the run directory."""

    def labels(self, fleet: FleetView) -> Indices | None:
        """The cluster of each client of `fleet`, also of clients never seen; None without clusters."""

    def proximity(self, ids: Indices) -> tuple[Indices, npt.NDArray[np.float64]] | None:
        """Clients of `ids` that are compared, and their distances; None without such distances."""

    def centre_models(self) -> list[list[Vector]]:
        """For each cluster, the models whose outputs add up."""

    def gradient_point(self, fleet: FleetView) -> tuple[Reference, Reference | None]:
        """Where each client's gradient is taken for the clusterability measure, and on top of what."""

    def save_state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""

    def load_state(self, tree: dict[str, Any]) -> None:
        """The inverse of `save_state`, after `setup`."""


class Method:
    """A base strategy plus add-ons."""

    def __init__(self, base: Strategy, addons: Sequence[Addon[Any]] = ()) -> None:
        self.base, self.addons = base, list(addons)
        base.additions = self
        for addon in self.addons:
            addon.beside = [other for other in self.addons if other is not addon]

    # --- what the server calls --------------------------------------------------------------------------

    def setup(self, fleet: FleetView) -> None:
        base = self.base
        base.rule.check(fleet.spec)
        base.check(base.options, base.context)
        base.setup(fleet)
        for addon in self.addons:
            addon.setup(base, fleet)

    def round(self, fleet: FleetView, number: int) -> None:
        """Round `number`, by the base or by the add-on that takes it over."""
        self.base.start_round(number)
        taker = next((addon for addon in self.addons if addon.takes_round), None)
        if taker is None:
            self.base.round(fleet)
        else:
            taker.round(self.base, fleet)
        for addon in self.addons:
            addon.after_round(self.base, fleet)

    def prediction(self, fleet: FleetView) -> Prediction:
        prediction = self._alone(fleet) or self.base.prediction(fleet)
        for addon in self.addons:
            prediction = addon.prediction(self.base, fleet, prediction)
        return prediction

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        found = dict(self.base.models())
        for addon in self.addons:
            found |= addon.models()
        return found

    def labels(self, fleet: FleetView) -> Indices | None:
        return self.base.labels(fleet)

    def proximity(self, ids: Indices) -> tuple[Indices, npt.NDArray[np.float64]] | None:
        return self.base.proximity(ids)

    def centre_models(self) -> list[list[Vector]]:
        return self.base.centre_models()

    def gradient_point(self, fleet: FleetView) -> tuple[Reference, Reference | None]:
        """The base's; where an add-on predicts alone (a warm-up), the model that it predicts with."""
        alone = self._alone(fleet)
        return self.base.gradient_point(fleet) if alone is None else (alone.models[0], None)

    def save_state(self) -> dict[str, Any]:
        return {**self.base.save_state(), "addons": [addon.save_state() for addon in self.addons]}

    def load_state(self, tree: dict[str, Any]) -> None:
        self.base.load_state(tree)
        for addon, part in zip(self.addons, tree["addons"], strict=True):
            addon.load_state(part)
        for each in (self.base, *self.addons):
            each.extend(self.base.context.clients)
        for addon in self.addons:
            addon.restored(self.base)

    @property
    def K(self) -> int:
        return self.base.K

    @property
    def assignment(self) -> Indices | None:
        return self.base.assignment

    @property
    def report(self) -> dict[str, Any]:
        return self.base.report

    @property
    def records(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        return self.base.records

    @property
    def events(self) -> list[str]:
        return self.base.events

    @property
    def when_empty(self) -> str:
        return self.base.when_empty

    @property
    def tunes(self) -> bool:
        return any(addon.tunes(self.base) for addon in self.addons)

    def _alone(self, fleet: FleetView) -> Prediction | None:
        found = (addon.predicts_alone(self.base, fleet) for addon in self.addons)
        return next((prediction for prediction in found if prediction is not None), None)

    # --- what the base asks for (`Additions`) -----------------------------------------------------------

    def terms(self, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        return [term for addon in self.addons for term in addon.penalties(self.base, fleet, c)]

    def freezes(self) -> bool:
        return any(addon.freezes(self.base) for addon in self.addons)

    def point_weights(self, fleet: FleetView) -> npt.NDArray[np.float64] | None:
        found = (addon.point_weights(self.base, fleet) for addon in self.addons)
        return next((weights for weights in found if weights is not None), None)


def parse_method(text: str, clusters: int | None = None) -> tuple[str, list[str]]:
    """`base+addon+addon` as (base, [addon, ...]), or a sentence about what is wrong with it.

    >>> from archipelago.strategies import parse_method
    >>> parse_method("ifca+cam")
    ('ifca', ['cam'])
    """
    base, *addons = text.split("+")
    method = METHODS.find(base)
    for addon in addons:
        if addon in METHODS:
            raise UserError(
                f"'{addon}' is a base method and cannot be added to '{base}': write method={addon}, or list both "
                f"as ensemble=[{base},{addon}].",
                code="add-on",
                addon=addon,
                base=base,
            )
        found = ADDONS.find(addon)
        if addons.count(addon) > 1:
            raise UserError(
                f"Expected add-on '{addon}' once, got it twice in '{text}': leave one out.",
                code="given-twice", setting="method", given=addon,
            )  # fmt: skip
        why_not = found.refuse(method, addons, 2 if clusters is None else clusters)
        if why_not:
            sentence = f"'{addon}' cannot be added to '{base}': {why_not}"
            raise UserError(sentence, code="add-on", addon=addon, base=base)
    takers = [addon for addon in addons if ADDONS.find(addon).takes_round]
    if len(takers) > 1:
        raise UserError(
            f"'{takers[0]}' and '{takers[1]}' both take over the round: leave one out of '{text}'.",
            code="add-on", addon=takers[1], base=text,
        )  # fmt: skip
    return base, addons


def parts_of(method: str, clusters: int | None = None) -> list[Entry[Any]]:
    """The entries of a method's base and of its add-ons."""
    base, addons = parse_method(method, clusters)
    return [METHODS.entry(base), *(ADDONS.entry(name) for name in addons)]


def check_options(method: str, options: Mapping[str, Any], context: Context) -> None:
    """Refuse settings that the base or an add-on cannot be run with."""
    if not server_optimizers.chosen(context.server).is_identity:
        why = "the server's step is a difference of models, whose neurons must be in one order"
        refuse_reordering(context.aggregation, f"server.optimizer={context.server.optimizer}", why)
    for entry in parts_of(method):
        entry.value.check(options.get(entry.section) or entry.options(), context)


def build(method: str, options: Mapping[str, Any], context: Context) -> Method:
    """The method named by `base+addon+addon`; `options` maps sections to options."""
    base, *addons = parts_of(method, context.clusters)
    context = dataclasses.replace(context, options=options)
    made = [entry.value(options.get(entry.section), context) for entry in addons]
    for addon, entry in zip(made, addons, strict=True):
        addon.name = entry.name
    return Method(base.value(options.get(base.section), context), made)


def label_of(method: str) -> str:
    """A method as tables print it.

    >>> label_of("fesem+cam"), label_of("fedavg*5")
    ('FeSEM+CAM', 'FedAvg*5')
    """
    name, star, count = method.partition("*")
    return "+".join(entry.label for entry in parts_of(name)) + star + count


def without_late_addons(method: str) -> str:
    """The method without the add-ons at its end that join in late.

    >>> without_late_addons("fesem+cam+finetune"), without_late_addons("fesem+cam")
    ('fesem+cam', 'fesem+cam')
    """
    base, addons = parse_method(method)
    while addons and ADDONS.find(addons[-1]).late:
        addons.pop()
    return "+".join([base, *addons])


def first_late_round(method: str, context: Context) -> int:
    """The first round in which late add-ons change anything: those of the method, or any there are if it has none.

    >>> first_late_round("ifca+finetune", Context(clients=4, rounds=100))
    98
    """
    _, addons = parse_method(method)
    own = [ADDONS.find(name) for name in addons[without_late_addons(method).count("+") :]]
    late = own or [entry.value for entry in ADDONS.values() if entry.value.late]
    return min((addon.first_round(context) for addon in late), default=1)


def with_late_addons(state: dict[str, Any], method: str) -> dict[str, Any]:
    """The state of `without_late_addons(method)` as that of `method` before its late add-ons join in."""
    missing = method.count("+") - len(state["addons"])
    return {**state, "addons": [*state["addons"], *({} for _ in range(missing))]}
