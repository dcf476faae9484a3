"""What may happen to clients during a run: the kinds of drift that come with the platform."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from archipelago.core.settings import setting
from archipelago.data.apportion import Integers
from archipelago.data.drift import DRIFTS, DriftKind, World, first_classes


@DRIFTS.register("label_swap", "labels are permuted: what was called y is called something else")
class LabelSwap(DriftKind):
    """The labels of a client are permuted once more; all clients share the order of permutations."""

    def refuse(self, world: World) -> str:
        return "" if world.classes is not None and world.classes > 1 else "data without classes"

    def happens(self, world: World, clients: Integers, rng: np.random.Generator) -> None:
        held = world.holder[clients]
        world.swaps[held] = (world.swaps[held] + 1) % int(world.classes or 1)


@DRIFTS.register("rotation", "images are turned by 90 degrees")
class Rotation(DriftKind):
    """The images of a client are turned once more."""

    def refuse(self, world: World) -> str:
        square = len(world.shape) == 3 and world.shape[1] == world.shape[2]
        return "" if square else f"samples of shape {world.shape}, which are no square images"

    def happens(self, world: World, clients: Integers, rng: np.random.Generator) -> None:
        held = world.holder[clients]
        world.turns[held] = (world.turns[held] + 1) % 4


@dataclass
class NewClassesOptions:
    """`data.drift_classes=0.5`"""

    drift_classes: float = setting(0.5, "drift new_classes: share of a client's classes that appear later",
                                   above=0, below=1)  # fmt: skip


@DRIFTS.register("new_classes", "clients see samples of classes that they did not have before")
class NewClasses(DriftKind):
    """Before the event, a client shows the first part of its classes alone."""

    Options = NewClassesOptions

    def refuse(self, world: World) -> str:
        return "" if world.classes is not None else "data without classes"

    def before(self, world: World, clients: Integers) -> None:
        world.new_share = self.options.drift_classes  # the same for all events
        for d in clients:
            shown, own = first_classes(world, int(d)), world.parts[d]
            # A client that would have nothing to train or to be tested on keeps all its classes.
            world.partial[d] = (
                len(shown) < len(np.unique(world.labels[own.train]))
                and np.isin(world.labels[own.train], shown).any()
                and np.isin(world.labels[own.test], shown).any()
            )

    def happens(self, world: World, clients: Integers, rng: np.random.Generator) -> None:
        world.partial[clients] = False


@DRIFTS.register("move", "clients move to another ground-truth group: they exchange all they hold")
class Move(DriftKind):
    """Each of the clients, as far as possible, exchanges its data set with one of another group among them."""

    def refuse(self, world: World) -> str:
        several = world.group is not None and len(np.unique(world.group)) > 1
        return "" if several else "one ground-truth group (set data.rotations=2, for example)"

    def happens(self, world: World, clients: Integers, rng: np.random.Generator) -> None:
        assert world.group is not None, "seen by `refuse`"
        waiting = rng.permutation(clients).tolist()
        while waiting:
            one = waiting.pop()
            group = world.group[world.holder[one]]
            other = next((i for i in waiting if world.group[world.holder[i]] != group), None)
            if other is not None:
                waiting.remove(other)
                world.holder[[one, other]] = world.holder[[other, one]]


@DRIFTS.register("arrive", "clients that were not there before")
class Arrive(DriftKind):
    """Absent until the event."""

    def before(self, world: World, clients: Integers) -> None:
        world.present[clients] = False

    def happens(self, world: World, clients: Integers, rng: np.random.Generator) -> None:
        world.present[clients] = True


@DRIFTS.register("leave", "clients that are gone from now on")
class Leave(DriftKind):
    """Absent after the event; somebody always stays."""

    def happens(self, world: World, clients: Integers, rng: np.random.Generator) -> None:
        stays = np.flatnonzero(world.present & ~np.isin(np.arange(len(world.present)), clients))
        world.present[clients if len(stays) else clients[1:]] = False
