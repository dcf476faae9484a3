"""What attackers do: clients that take part like all others and send something else.

`participation.attackers=0.2` makes that share of the clients attackers for the whole run, drawn with the seed; `attack`
says what they do. An attack may do one of three things, each a method of its class:

    relabel   train on other labels                                 (label_flip)
    instead   send another update, from what the client knows       (sign_flip, gaussian_attack, free_rider)
    craft     send one update that all attackers agree on, from the updates of the clients that they know
              (`knows`: the other attackers, or all honest clients); coordinate by coordinate     (alie, ipm)

    sign_flip        -scale Delta_i; Li et al., "RSA: Byzantine-Robust Stochastic Aggregation", AAAI 2019
    label_flip       class y becomes C - 1 - y in the training data; Fang et al., "Local Model Poisoning Attacks to
                     Byzantine-Robust Federated Learning", USENIX Security 2020
    gaussian_attack  N(0, spread^2) instead of an update; Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD", 2018
    free_rider       nothing, or a little noise: a client that profits and does not work; Lin, Du, Liu, "Free-riders in
                     Federated Learning: Attacks and Defenses", 2019
    alie             mean - z std of the attackers' own updates; Baruch, Baruch, Goldberg, "A Little Is Enough",
                     NeurIPS 2019
    ipm              -epsilon times the mean of the honest updates; Xie, Koyejo, Gupta, "Fall of Empires: Breaking
                     Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2019

Readings

What an attack turns
    paper   the gradient or model that a worker sends
    here    the update, model minus start, before the pipeline of `update=[...]`, which the server can enforce
Who colludes
    paper   all attackers, who train one model
    here    those that started from the same cluster's model; clients with models of their own to start from count as
            one cluster
Free riders
    paper   do not train
    here    train, so that what a round costs is comparable, and send something else
A private model that stays with an attacker
    here    is its own, unchanged
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import AttackSettings, setting
from archipelago.strategies.parameters import Matrix, Vector
from archipelago.strategies.updates import Sender

Labels = npt.NDArray[Any]


class Attack:
    """What one attacker, or all of them together, do. Subclasses override one of the three."""

    Options: ClassVar[type] = NoOptions
    knows: ClassVar[str | None] = None  # whose updates `craft` is made of: "attackers" or "honest"
    relabels: ClassVar[bool] = False  # trains on other labels, see `relabel`

    def __init__(self, options: Any) -> None:
        self.options = options

    def relabel(self, y: Labels, classes: int) -> Labels:
        """The labels that an attacker trains on."""
        return y

    def instead(self, update: Vector, sender: Sender) -> Vector:
        """What an attacker sends instead of its update."""
        return update

    def craft(self, updates: Matrix, participants: int, attackers: int) -> npt.NDArray[np.float64]:
        """One update for all attackers of a cluster: some columns of it, from the same columns of those it knows."""
        raise NotImplementedError(f"{type(self).__name__} has no craft")


ATTACKS: Registry[type[Attack]] = Registry("attack", section="attack", base=Attack)


def chosen(settings: AttackSettings) -> Attack:
    """What `attack=...` names."""
    entry = ATTACKS.entry(settings.name)
    return entry.value(entry.options_from(settings))


@dataclass
class SignFlipOptions:
    """`attack.scale=5`"""

    scale: float = setting(1.0, "sign_flip: times the length of the attacker's own update", above=0)


@ATTACKS.register("sign_flip", "the opposite of one's update (Li et al. 2019)", label="sign flip")
class SignFlip(Attack):
    """-scale Delta."""

    Options = SignFlipOptions

    def instead(self, update: Vector, sender: Sender) -> Vector:
        return np.float32(-self.options.scale) * update


@ATTACKS.register(
    "label_flip", "training on labels in the opposite order (Fang et al. 2020)", label="label flip"
)
class LabelFlip(Attack):
    """Class y becomes C - 1 - y."""

    relabels = True

    def relabel(self, y: Labels, classes: int) -> Labels:
        return (classes - 1 - y).astype(y.dtype)


@dataclass
class GaussianAttackOptions:
    """`attack.spread=1`"""

    spread: float = setting(1.0, "gaussian_attack: standard deviation of every coordinate", above=0)


@ATTACKS.register("gaussian_attack", "noise instead of an update (Xie et al. 2018)", label="Gaussian attack")
class GaussianAttack(Attack):
    """N(0, spread^2)."""

    Options = GaussianAttackOptions

    def instead(self, update: Vector, sender: Sender) -> Vector:
        drawn = sender.generator("gaussian attack").standard_normal(update.size, np.float32)
        return np.float32(self.options.spread) * drawn


@dataclass
class FreeRiderOptions:
    """`attack.disguise=0.01`"""

    disguise: float = setting(
        0.0, "free_rider: standard deviation of noise on what it got; 0: sends just that", at_least=0
    )


@ATTACKS.register("free_rider", "sends back what it got (Lin et al. 2019)", label="free rider")
class FreeRider(Attack):
    """0, or N(0, disguise^2)."""

    Options = FreeRiderOptions

    def instead(self, update: Vector, sender: Sender) -> Vector:
        if not self.options.disguise:
            return np.zeros_like(update)
        drawn = sender.generator("free rider").standard_normal(update.size, np.float32)
        return np.float32(self.options.disguise) * drawn


@dataclass
class AlieOptions:
    """`attack.z=1.5`"""

    z: float | None = setting(
        None, "alie: standard deviations from the mean; auto: the most that a majority of clients covers",
        above=0, auto=True,
    )  # fmt: skip


@ATTACKS.register(
    "alie", "a little is enough: just inside the spread of updates (Baruch et al. 2019)", label="ALIE"
)
class Alie(Attack):
    """mean - z std, over the attackers' own updates."""

    Options = AlieOptions
    knows = "attackers"

    def craft(self, updates: Matrix, participants: int, attackers: int) -> npt.NDArray[np.float64]:
        z = self.options.z if self.options.z is not None else furthest(participants, attackers)
        mean = updates.mean(axis=0, dtype=np.float64)
        spread: npt.NDArray[np.float64] = updates.std(axis=0, dtype=np.float64)
        return mean - z * spread


def furthest(participants: int, attackers: int) -> float:
    """z_max of the paper: so many honest clients lie further out that, with the attackers, they are a majority.

    >>> round(furthest(50, 24), 3)
    1.426
    """
    supporters = participants // 2 + 1 - attackers
    honest = max(participants - attackers, 1)
    share = min(max((honest - supporters) / honest, 0.5), 1 - 1e-6)
    return NormalDist().inv_cdf(share)


@dataclass
class IpmOptions:
    """`attack.epsilon=0.5`"""

    epsilon: float = setting(
        0.5, "ipm: times the mean of the honest updates, with the opposite sign", above=0
    )


@ATTACKS.register(
    "ipm", "inner-product manipulation: against the mean of the honest (Xie et al. 2019)", label="IPM"
)
class InnerProductManipulation(Attack):
    """-epsilon mean, over the honest clients' updates."""

    Options = IpmOptions
    knows = "honest"

    def craft(self, updates: Matrix, participants: int, attackers: int) -> npt.NDArray[np.float64]:
        mean: npt.NDArray[np.float64] = updates.mean(axis=0, dtype=np.float64)
        return -self.options.epsilon * mean
