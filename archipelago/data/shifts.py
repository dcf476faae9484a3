"""Feature and label shifts: what makes the same kind of sample look different in different groups of clients.

Shifts multiply: two rotations and two label permutations make four variants. A variant belongs to a sample, so
that a client may hold several (FedSoft's mixtures); in all other partitions it follows the sample's client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import DataSettings
from archipelago.data.apportion import Integers, ranks
from archipelago.data.datasets import Array, Dataset
from archipelago.data.partitions_dealing import blocks

# Orders of the channels of a colour image, and tones of a grey one, as x -> tone(x) of 0..255.
ORDERS = [*permutations(range(3))]
_LEVELS = np.arange(256)
TONES = np.stack([_LEVELS, 255 - _LEVELS, _LEVELS // 2, 255 - _LEVELS // 2]).astype(np.uint8)
_CHUNK = 4096  # samples that noise is added to at a time


@dataclass(frozen=True, eq=False)
class Shift:
    """What each variant does to its samples: row v of every array is variant v's; variant 0 does nothing.

    `turns`: quarter turns, counter-clockwise. `colours`: a row of ORDERS or TONES. `noise`: standard deviation,
    as part of 255 for uint8 samples. `labels` (variants, classes): what each label becomes.
    """

    turns: Integers
    colours: Integers
    noise: NDArray[np.float64]
    labels: Integers | None
    seed: int

    def __len__(self) -> int:
        return len(self.turns)

    def apply(self, x: Array, y: Array, variants: NDArray[Any]) -> None:
        """Change samples and labels in place; `variants` is the variant of each sample."""
        for variant in range(1, len(self)):
            at = np.flatnonzero(variants == variant)
            if self.turns[variant]:
                x[at] = np.rot90(x[at], int(self.turns[variant]), axes=(2, 3))
            if self.colours[variant]:
                x[at] = _coloured(x[at], int(self.colours[variant]))
            if self.noise[variant]:
                self._add_noise(x, at, variant)
            if self.labels is not None:
                y[at] = self.labels[variant][y[at]]

    def _add_noise(self, x: Array, at: Integers, variant: int) -> None:
        rng = generator(self.seed, "noise shift", client=variant)
        whole = x.dtype == np.uint8
        scale = np.float32(self.noise[variant] * (255 if whole else 1))
        for start in range(0, len(at), _CHUNK):
            some = at[start : start + _CHUNK]
            noisy = x[some] + scale * rng.standard_normal((len(some), *x.shape[1:]), dtype=np.float32)
            x[some] = np.clip(np.rint(noisy), 0, 255).astype(np.uint8) if whole else noisy

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As plain arrays, for a file."""
        found = {"shift_turns": self.turns, "shift_colours": self.colours, "shift_noise": self.noise}
        found["shift_seed"] = np.array([self.seed], dtype=np.int64)
        return found if self.labels is None else {**found, "shift_labels": self.labels}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Shift | None:
        """The inverse of `arrays`; None where there is none."""
        if "shift_turns" not in arrays:
            return None
        labels = arrays.get("shift_labels")
        return cls(
            np.asarray(arrays["shift_turns"], dtype=np.int64),
            np.asarray(arrays["shift_colours"], dtype=np.int64),
            np.asarray(arrays["shift_noise"], dtype=np.float64),
            None if labels is None else np.asarray(labels, dtype=np.int64),
            int(arrays["shift_seed"][0]),
        )


def _coloured(x: Array, colour: int) -> Array:
    if x.shape[1] == 3:
        return x[:, ORDERS[colour]]
    return TONES[colour][x]


def shift_of(dataset: Dataset, settings: DataSettings, clients: int, seed: int) -> Shift | None:
    """The variants that the settings ask for; None if they ask for nothing."""
    asked = {
        "data.rotations": settings.rotations,
        "data.label_swaps": settings.label_swaps,
        "data.colours": settings.colours,
        "data.noises": settings.noises,
    }
    if all(number == 1 for number in asked.values()):
        return None
    _refuse(dataset, asked, clients)
    combined = np.array(
        list(
            product(
                *(
                    range(asked[k])
                    for k in ("data.noises", "data.colours", "data.label_swaps", "data.rotations")
                )
            )
        )
    )
    labels = None
    if settings.label_swaps > 1:
        labels = _relabelled(int(dataset.classes or 0), settings.label_swaps, seed)[combined[:, 2]]
    noise = combined[:, 0] * (settings.noise_shift / max(settings.noises - 1, 1))
    return Shift(combined[:, 3], combined[:, 1], noise.astype(np.float64), labels, seed)


def _relabelled(classes: int, swaps: int, seed: int) -> Integers:
    """(swaps, classes) permutations of the labels; any two disagree on every label, the first changes none."""
    order = generator(seed, "label swaps").permutation(classes)
    rows = np.empty((swaps, classes), dtype=np.int64)
    for swap in range(swaps):
        rows[swap, order] = np.roll(order, -swap)
    return rows


def _refuse(dataset: Dataset, asked: Mapping[str, int], clients: int) -> None:
    shape, name = dataset.x_train.shape[1:], dataset.name
    image = len(shape) == 3
    what = f"images of {shape[1]}x{shape[2]}" if image else f"vectors of {shape[0]} features"
    rotations, swaps, colours = (asked[f"data.{key}"] for key in ("rotations", "label_swaps", "colours"))
    if rotations > 1 and not (image and shape[1] == shape[2]):
        raise UserError(
            f"data.rotations={rotations} turns square images by 90 degrees, but '{name}' holds {what}: set "
            "data.rotations=1.",
            code="unfit-data", setting="data.rotations", given=rotations,
        )  # fmt: skip
    if colours > 1 and not (image and shape[0] in (1, 3) and dataset.x_train.dtype == np.uint8):
        raise UserError(
            f"data.colours={colours} changes pixels of 0..255 in one channel or three, but '{name}' holds "
            f"{what} of {dataset.x_train.dtype}: set data.colours=1.",
            code="unfit-data", setting="data.colours", given=colours,
        )  # fmt: skip
    if colours > len(TONES) and shape[0] == 1:
        raise UserError(
            f"data.colours={colours} is more than the {len(TONES)} tones of grey images such as '{name}': ask for "
            f"at most {len(TONES)}.",
            code="too-many", setting="data.colours", given=colours, most=len(TONES),
        )  # fmt: skip
    if swaps > 1 and (dataset.classes is None or swaps > dataset.classes):
        most = "has no classes" if dataset.classes is None else f"has {dataset.classes} classes"
        raise UserError(
            f"data.label_swaps={swaps} needs as many classes, but '{name}' {most}: ask for fewer, or set "
            "data.label_swaps=1.",
            code="too-many", setting="data.label_swaps", given=swaps, most=dataset.classes,
        )  # fmt: skip
    variants = int(np.prod(list(asked.values())))
    if variants > clients:
        used = " x ".join(f"{key}={number}" for key, number in asked.items() if number > 1)
        each = "rotation" if "x" not in used and rotations > 1 else "shift"
        raise UserError(
            f"{used} is more than clients={clients}: every {each} needs a client.",
            code="too-few-clients", setting=used, clients=clients,
        )  # fmt: skip


def variants_of_clients(
    groups: Integers | None, variants: int, clients: int, crossed: bool
) -> tuple[Integers, Integers, Integers | None]:
    """(variant of each client, ground-truth groups, levels of groups) for a partition with these groups.

    Without ground-truth groups the variants are the groups. Otherwise whole groups are shifted, one after the
    other, and stay what they are; or, `crossed`, each is divided among the variants, and the groups are the pairs,
    below the partition's own as the coarser level.
    """
    if groups is None:
        variant = blocks(clients, variants)
        return variant, variant, None
    if not crossed:
        return groups % variants, groups, None
    sizes = np.bincount(groups)
    if (sizes < variants).any():
        raise UserError(
            f"data.crossed=true divides each ground-truth group among {variants} shifts, but group "
            f"{int(sizes.argmin())} has {int(sizes.min())} clients: ask for more clients, fewer groups or shifts.",
            code="too-few-clients", setting="data.crossed",
        )  # fmt: skip
    order = np.argsort(groups, kind="stable")
    rank = np.empty(clients, dtype=np.int64)
    rank[order] = ranks(groups[order])
    variant = rank * variants // sizes[groups]
    pairs = groups * variants + variant
    return variant, pairs, np.stack([groups, pairs])


def variants_of_samples(strata: Integers, variants: int, rng: np.random.Generator) -> Integers:
    """A variant for each sample: at random, and as even as possible within each stratum."""
    order = rng.permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    variant = np.empty(len(strata), dtype=np.int64)
    variant[order] = ranks(strata[order]) % variants
    return variant
