"""Compression of updates: fewer numbers, or fewer bits for each.

    topk        the coordinates of largest magnitude, with their positions; Aji and Heafield, "Sparse Communication for
                Distributed Gradient Descent", EMNLP 2017. `update.feedback` adds what was not sent to the client's next
                update (Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018).
    quantise    integers of `update.bits` bits between the least and the largest value of each bucket, rounded up or
                down at random so that the mean is right; Alistarh et al., "QSGD", NeurIPS 2017; Suresh et al.,
                "Distributed Mean Estimation with Limited Communication", ICML 2017 (its stochastic k-level scheme).

Both together: `update=[topk,quantise]` quantises the numbers that are left.

Readings

Equal magnitudes
    here    the first coordinates are kept
What is sent beside the numbers
    paper   QSGD: an entropy code (Elias) of the integers
    here    positions in the smallest integers that hold them, a bucket's least value and its step as float32, no
            entropy coding; the cost table counts the bytes of all of it
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.parameters import Vector
from archipelago.strategies.updates import TRANSFORMS, Message, Sender, Transform


@dataclass
class TopKOptions:
    """`update.keep=0.01 update.feedback=true`"""

    keep: float = setting(0.1, "topk: share of the coordinates that is sent", above=0, at_most=1)
    feedback: bool = setting(False, "topk: add what was not sent to the client's next update")


@TRANSFORMS.register("topk", "the coordinates of largest magnitude alone", label="top-k")
class TopK(Transform):
    """k values and their positions."""

    Options = TopKOptions

    def encode(self, message: Message, sender: Sender) -> Message:
        values = message.values
        if self.options.feedback and "topk" in sender.memory:
            values = values + sender.memory["topk"]
        at = largest(values, max(1, round(self.options.keep * values.size)))
        if self.options.feedback:
            left = values.copy()
            left[at] = 0
            sender.memory["topk"] = left
        positions = at.astype(np.min_scalar_type(max(values.size - 1, 0)))
        return message.with_values(values[at], positions=positions)

    def decode(self, message: Message, size: int) -> Message:
        values = np.zeros(size, np.float32)
        values[message.beside["positions"]] = message.values
        return message.without("positions").with_values(values)


def largest(values: Vector, count: int) -> npt.NDArray[np.int64]:
    """Positions of the `count` values of largest magnitude, ascending; of equal ones the first.

    >>> largest(np.float32([1, -3, 2, 2]), 2).tolist()
    [1, 2]
    """
    magnitudes = np.abs(values)
    least = np.partition(magnitudes, values.size - count)[values.size - count]
    above = np.flatnonzero(magnitudes > least)
    # By value and not by argpartition, whose choice among equals is the processor's.
    return np.sort(np.concatenate([above, np.flatnonzero(magnitudes == least)[: count - len(above)]]))


@dataclass
class QuantiseOptions:
    """`update.bits=8 update.bucket=1024`"""

    bits: int = setting(8, "quantise: bits of a number", at_least=1, at_most=8)
    bucket: int = setting(1024, "quantise: numbers that share a range", at_least=1)


@TRANSFORMS.register("quantise", "numbers of a few bits, rounded at random without bias")
class Quantise(Transform):
    """round(v) up with probability v - floor(v), v = (value - least) / step."""

    Options = QuantiseOptions
    final = True

    def encode(self, message: Message, sender: Sender) -> Message:
        buckets = _buckets(message.values, self.options.bucket)
        low, high = buckets.min(axis=1), buckets.max(axis=1)
        levels = np.float32(2**self.options.bits - 1)
        step = ((high - low) / levels).astype(np.float32)
        scaled = np.divide(
            buckets - low[:, None], step[:, None], out=np.zeros_like(buckets), where=step[:, None] > 0
        )
        floor = np.floor(scaled)
        up = sender.generator("quantise").random(buckets.shape, np.float32) < scaled - floor
        codes = np.clip(floor + up, 0, levels).astype(np.uint8).reshape(-1)[: message.values.size]
        return message.with_values(packed(codes, self.options.bits), low=low, step=step)

    def decode(self, message: Message, size: int) -> Message:
        codes = unpacked(message.values, self.options.bits, size)
        buckets = _buckets(codes.astype(np.float32), self.options.bucket)
        values = message.beside["low"][:, None] + buckets * message.beside["step"][:, None]
        return message.without("low", "step").with_values(values.reshape(-1)[:size].astype(np.float32))


def _buckets(values: Vector, width: int) -> Vector:
    """(buckets, width): the last one filled up with its last value."""
    count = -(-values.size // width)
    return np.pad(values, (0, count * width - values.size), mode="edge").reshape(count, width)


def packed(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Codes of some bits each without gaps.

    >>> packed(np.array([1, 2, 3], np.uint8), 4).tolist()
    [18, 48]
    """
    if bits == 8:
        return codes
    return np.packbits(np.unpackbits(codes[:, None], axis=1)[:, 8 - bits :])


def unpacked(sent: npt.NDArray[np.uint8], bits: int, size: int) -> npt.NDArray[np.uint8]:
    """The inverse of `packed` for `size` codes.

    >>> unpacked(np.array([18, 48], np.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    if bits == 8:
        return sent
    rows = np.unpackbits(sent)[: size * bits].reshape(size, bits)
    return np.packbits(np.pad(rows, ((0, 0), (8 - bits, 0))), axis=1)[:, 0]
