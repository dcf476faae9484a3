"""Samplers: which points of `sweep.sample` each combination of a sweep is run at.

A sampler of your own is a subclass of `Sampler` in a module of your own, chosen by `sweep.sampler=package.module.Mine`
or registered under a name in a plug-in:

    @SAMPLERS.register("halton", "a low-discrepancy sequence", label="Halton")
    class Halton(Sampler):
        Options = DrawOptions

        def points(self, combination):
            return [...]

What the platform must know about it is in its class attributes; nothing here imports Ray before a sweep begins.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import setting
from archipelago.sweeps.distributions import domain, draw

if TYPE_CHECKING:
    from ray.tune.search import Searcher


@dataclass(frozen=True)
class Goal:
    """What a sweep looks for: the metric (on validation data), `max` or `min`, and the space of `sweep.sample`."""

    metric: str
    mode: str
    space: Mapping[str, str]  # setting -> distribution


class Sampler:
    """Chooses points, {setting: value}, for each combination of a sweep.

    `draws`: it takes its points from `sweep.sample`, which must be given then and only then.
    `adaptive`: it chooses later points by what trials of earlier ones reported, through `searcher`; the points of
    all others are known beforehand, from `points`.
    """

    Options: ClassVar[type] = NoOptions
    draws: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False

    def __init__(self, options: Any, goal: Goal) -> None:
        self.options, self.goal = options, goal

    @property
    def count(self) -> int:
        """How many points each combination has, unless one is chosen twice."""
        return int(self.options.samples)

    def check(self) -> None:
        """Refuse, with a `UserError`, what it cannot do here; asked before Ray starts."""

    def points(self, combination: int) -> list[dict[str, Any]]:
        """The points of a combination, by its number."""
        raise NotImplementedError(f"{type(self).__name__} is to say its points")

    def searcher(self, combination: str, known: int) -> Searcher:
        """Ray Tune's search algorithm for a combination of which so many points were chosen by an earlier process."""
        raise NotImplementedError(f"{type(self).__name__} is to say its search algorithm")


SAMPLERS: Registry[type[Sampler]] = Registry("sampler", section="sweep", base=Sampler)


@dataclass(frozen=True)
class DrawOptions:
    """Options of samplers that draw a number of points."""

    samples: int = setting(10, "random, optuna: points to draw for each combination", at_least=1)
    sampler_seed: int = setting(0, "random, optuna: seed of the draws", at_least=0)


@SAMPLERS.register("grid", "every combination once: draws nothing", label="grid")
class Grid(Sampler):
    """No points: all there is are the combinations."""

    draws = False

    @property
    def count(self) -> int:
        """One, without values."""
        return 1

    def points(self, combination: int) -> list[dict[str, Any]]:
        """The one that changes nothing."""
        return [{}]


@SAMPLERS.register("random", "points drawn independently", label="random search")
class RandomSearch(Sampler):
    """Bergstra, Bengio, Random Search for Hyper-Parameter Optimization, JMLR 2012."""

    Options = DrawOptions

    def points(self, combination: int) -> list[dict[str, Any]]:
        """Drawn from a stream of the sampler's seed and the combination."""
        return draw(self.goal.space, self.options.samples, self.options.sampler_seed, combination)


@SAMPLERS.register("optuna", "points that Optuna suggests by what earlier ones came to", label="Optuna")
class Optuna(Sampler):
    """Akiba et al., Optuna, KDD 2019: its default, tree-structured Parzen estimators."""

    Options = DrawOptions
    adaptive = True

    def check(self) -> None:
        """Where the package was left out of an installation, a sentence says so before Ray starts."""
        if importlib.util.find_spec("optuna") is None:
            raise UserError(
                "Expected the package optuna for sweep.sampler=optuna, but it is not installed: pip install optuna, "
                "or use sweep.sampler=random.",
                code="needs-package", package="optuna",
            )  # fmt: skip

    def searcher(self, combination: str, known: int) -> Searcher:
        """Another stream after a stop: the first points of the same one are drawn already."""
        from ray.tune.search.optuna import OptunaSearch

        stream = generator(self.options.sampler_seed, "optuna", slot=combination, round=known)
        return OptunaSearch(
            space={key: domain(key, text) for key, text in self.goal.space.items()},
            metric=self.goal.metric, mode=self.goal.mode, seed=int(stream.integers(2**31)),
        )  # fmt: skip
