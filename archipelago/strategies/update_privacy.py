"""Client-level differential privacy: updates of bounded length, and noise that hides each of them in their sum.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018 (DP-FedAvg);
Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism", ICML 2021 (noise added by the clients).

    S   update.clip      z   update.noise      m   clients that are selected in a round      Delta_i   an update

    clip        Delta_i min(1, S / ||Delta_i||)
    gaussian    + N(0, (z S)^2 / m) in every coordinate: m clients together add N(0, (z S)^2) to their sum

`update=[clip,gaussian]` gives, on the sum of all participants, the noise of DP-FedAvg with noise multiplier z, without
a server that must be trusted to add it (secure aggregation hides what is summed). What it comes to as epsilon is
counted after every round from the sums that the server really took: `archipelago/strategies/privacy.py`.

Readings

The length of an update
    paper   DP-FedAvg: of the whole update, or layer by layer
    here    of the whole vector, running statistics included
Attackers
    here    their updates pass through the same pipeline: the server can enforce a bound
Networks with BatchNorm
    here    are refused with noise, which would make variances negative
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from archipelago.core.errors import UserError
from archipelago.core.settings import setting
from archipelago.strategies.parameters import ModelSpec, length_of
from archipelago.strategies.updates import TRANSFORMS, Message, Sender, Transform


@dataclass
class ClipOptions:
    """`update.clip=1.0`"""

    clip: float = setting(1.0, "clip: longest Euclidean length of an update", above=0)


@TRANSFORMS.register("clip", "updates of a bounded Euclidean length (McMahan et al. 2018)")
class Clip(Transform):
    """Delta min(1, S / ||Delta||)."""

    Options = ClipOptions

    def encode(self, message: Message, sender: Sender) -> Message:
        length = length_of(message.values)
        if length <= self.options.clip:
            return message
        return message.with_values((message.values * (self.options.clip / length)).astype(np.float32))


@dataclass
class GaussianOptions(ClipOptions):
    """`update.noise=1.0 update.delta=1e-5`"""

    noise: float = setting(
        1.0, "gaussian: noise multiplier z, the noise in the sum of a round's updates in clips", above=0
    )
    delta: float = setting(1e-5, "gaussian: delta of the epsilon that is reported", above=0, below=1)


@TRANSFORMS.register(
    "gaussian", "Gaussian noise of each client's own, for client-level privacy", private=True
)
class Gaussian(Transform):
    """Delta + N(0, (z S)^2 / m)."""

    Options = GaussianOptions

    @classmethod
    def check(cls, options: Any, before: Sequence[type[Transform]]) -> None:
        if not before or before[-1] is not Clip:
            raise UserError(
                "Expected clip before gaussian, as in update=[clip,gaussian], got gaussian without it: noise hides "
                "only an update of bounded length; put clip right before it.",
                code="wrong-order", setting="update",
            )  # fmt: skip

    @classmethod
    def check_network(cls, spec: ModelSpec) -> None:
        if len(spec.columns("buffers")):
            raise UserError(
                "Expected a network without running statistics (BatchNorm) with update=[...,gaussian], got one that "
                "has them: noise would make variances negative; choose another model.",
                code="unfit-model", setting="update",
            )  # fmt: skip

    def encode(self, message: Message, sender: Sender) -> Message:
        scale = np.float32(self.options.noise * self.options.clip / np.sqrt(self.participants))
        noise = sender.generator("update noise").standard_normal(message.values.size, np.float32)
        return message.with_values(message.values + scale * noise)
