"""What leaves a client: its update, the model minus what it started from, through an ordered pipeline of transforms.

    update=[clip,gaussian]          client-level privacy          archipelago/strategies/update_privacy.py
    update=[topk,quantise]          compression                   archipelago/strategies/update_compression.py

Each transform encodes a message at the client; the server decodes in the opposite order, and what it gets is what every
sum, rule and clustering sees. What stays with a client (a private model, its own result as the start of a second
training) is untouched. A gradient that a client sends (FedSGD, FedDane) is an update too.

A transform of your own is a subclass of `Transform` under `@TRANSFORMS.register`, or named by its import path. It is a
pure function of the message and of its `Sender`, whose generators are keyed by client, round and purpose: so the bits
are the same on any number of actors. What it must remember of a client (error feedback) goes into `sender.memory`.

    @TRANSFORMS.register("halve", "half of every update")
    class Halve(Transform):
        def encode(self, message: Message, sender: Sender) -> Message:
            return message.with_values(message.values * np.float32(0.5))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import NoOptions, Registry
from archipelago.core.settings import UpdateSettings
from archipelago.strategies.parameters import ModelSpec, Vector

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Message:
    """What travels: numbers, and named arrays beside them (indices, scales). Its bytes are those of all of these."""

    values: Array
    beside: Mapping[str, Array] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of it on the wire."""
        return self.values.nbytes + sum(array.nbytes for array in self.beside.values())

    def with_values(self, values: Array, **beside: Array) -> Message:
        """The same message with other numbers, and more beside them."""
        return replace(self, values=values, beside={**self.beside, **beside})

    def without(self, *names: str) -> Message:
        """The same message without some of the arrays beside it."""
        return replace(self, beside={name: each for name, each in self.beside.items() if name not in names})


@dataclass
class Sender:
    """The client that sends: who, when, its draws, and what transforms remember of it from round to round."""

    seed: int
    client: int
    round: int
    slot: str
    memory: dict[str, Vector] = field(default_factory=dict)  # stays with the client, if the round commits

    def generator(self, purpose: str) -> np.random.Generator:
        """Draws of this client, in this round, for this purpose alone."""
        return generator(self.seed, purpose, slot=self.slot, round=self.round, client=self.client)


class Transform:
    """One step of what becomes of an update. Subclasses give `encode`, and `decode` if the server must undo it."""

    Options: ClassVar[type] = NoOptions
    final: ClassVar[bool] = False  # its values are codes: nothing that computes with numbers can follow

    def __init__(self, options: Any, participants: int) -> None:
        self.options, self.participants = options, participants  # clients that are selected in a round

    @classmethod
    def check(cls, options: Any, before: Sequence[type[Transform]]) -> None:
        """Refuse a place in the pipeline that makes no sense; `before` are the transforms in front of it."""

    @classmethod
    def check_network(cls, spec: ModelSpec) -> None:
        """Refuse a network that it cannot work with."""

    def encode(self, message: Message, sender: Sender) -> Message:
        """What the client sends instead."""
        raise NotImplementedError(f"{type(self).__name__} has no encode")

    def decode(self, message: Message, size: int) -> Message:
        """What the server makes of it: a message of `size` numbers, as many as there were before `encode`."""
        return message


TRANSFORMS: Registry[type[Transform]] = Registry("update transform", section="update", base=Transform)


@dataclass(frozen=True)
class Pipeline:
    """The transforms of an experiment, in order."""

    transforms: tuple[Transform, ...] = ()

    @classmethod
    def chosen(cls, settings: UpdateSettings, participants: int) -> Pipeline:
        """What `update=[...]` names."""
        entries = [TRANSFORMS.entry(name) for name in settings.transforms]
        return cls(tuple(entry.value(entry.options_from(settings), participants) for entry in entries))

    def __bool__(self) -> bool:
        return bool(self.transforms)

    def delivered(self, update: Vector, sender: Sender) -> tuple[Vector, int]:
        """(what the server has of an update after decoding, bytes that were sent)."""
        message, sizes = Message(update), []
        for transform in self.transforms:
            sizes.append(message.values.size)
            message = transform.encode(message, sender)
        sent = message.nbytes
        for transform, size in zip(reversed(self.transforms), reversed(sizes), strict=True):
            message = transform.decode(message, size)
        return np.asarray(message.values, np.float32), sent


def check_pipeline(settings: UpdateSettings) -> None:
    """Refuse transforms that are unknown, listed twice, or in an order that makes no sense."""
    entries = TRANSFORMS.listed(settings.transforms, "update.transforms")
    before: list[type[Transform]] = []
    for entry in entries:
        if entry.value in before:
            raise UserError(
                f"Expected '{entry.name}' once in update=[...], got it twice: leave one out.",
                code="given-twice", setting="update", given=entry.name,
            )  # fmt: skip
        if before and before[-1].final:
            last = settings.transforms[len(before) - 1]
            raise UserError(
                f"Expected '{last}' last in update=[...], got '{entry.name}' after it: what '{last}' sends are codes.",
                code="wrong-order", setting="update",
            )  # fmt: skip
        entry.value.check(entry.options_from(settings), before)
        before.append(entry.value)


def check_networks(settings: UpdateSettings, spec: ModelSpec) -> None:
    """Refuse a network that one of the transforms cannot work with."""
    for name in settings.transforms:
        TRANSFORMS.find(name).check_network(spec)
