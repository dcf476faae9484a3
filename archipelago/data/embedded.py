"""The data sets that need no files: scikit-learn's digits, and linear regressions with known weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.registry import NoOptions
from archipelago.core.settings import DataSettings, setting
from archipelago.data.datasets import Dataset, dataset, hold_out


@dataset(
    "digits",
    "scikit-learn's 1,797 real 8x8 grey images of handwritten digits; needs no files",
    present=lambda settings: "embedded (scikit-learn)",
    seeded=False,
    reads=("test_fraction",),
)
def digits(settings: DataSettings, options: NoOptions, seed: int) -> Dataset:
    """The digits, as uint8. Their split depends on `data.test_fraction` alone, not on the seed."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    # Grey levels are 0..16; as uint8 they take a quarter of the memory, and all 17 stay distinct.
    images = np.rint(x.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = y.astype(np.int64)
    train, test = hold_out(labels, settings.test_fraction, generator(0, "split of digits"))
    return Dataset(
        "digits", images[train], labels[train], images[test], labels[test], 10, mean=(0.5,), std=(0.5,)
    )


# FedSoft prints sigma_0 = 10 and N(0, sigma_0^2 I); its released code draws with variance 10, and so do its tables:
# Table 1 implies |theta_0 - theta_1|^2 of about 165, where variance 10 lets us expect 200 and variance 100 2,000.
FEDSOFT_SCALE = math.sqrt(10.0)


@dataclass
class SyntheticOptions:
    """`data.sources=...`: the ground-truth models and how much is drawn from them."""

    sources: int = setting(4, "synthetic: number of ground-truth linear models", at_least=1)
    samples: int = setting(4000, "synthetic: number of samples, test included", at_least=2)
    dimension: int = setting(10, "synthetic: number of features", at_least=1)
    weight_scale: float = setting(
        FEDSOFT_SCALE,
        "synthetic: standard deviation of the ground-truth weights (the root of 10: FedSoft's tables)",
        above=0,
    )
    common_scale: float = setting(
        0.0, "synthetic: standard deviation of a part common to all ground-truth weights", at_least=0
    )
    noise: float = setting(1.0, "synthetic: standard deviation of the label noise", at_least=0)


def ground_truth_weights(options: SyntheticOptions, seed: int) -> NDArray[np.float64]:
    """The linear models that `synthetic` draws from: (sources, dimension), entries of N(0, weight_scale^2).

    On top of that they share one draw of N(0, common_scale^2): what all have in common.
    """
    own = generator(seed, "synthetic weights").normal(
        scale=options.weight_scale, size=(options.sources, options.dimension)
    )
    rng = generator(seed, "common synthetic weights")
    return own + rng.normal(scale=options.common_scale, size=options.dimension)


MOST_NUMBERS = 1_000_000_000  # 8 GB while they are drawn


@dataset(
    "synthetic",
    "linear regression drawn from ground-truth linear models (FedSoft's generator); needs no files",
    present=lambda settings: "embedded (generated)",
    sources=True,
    reads=("test_fraction",),
)
def synthetic(settings: DataSettings, options: SyntheticOptions, seed: int) -> Dataset:
    """y = <theta_s, x> + noise, with theta_s ~ N(0, sigma_0^2 I) and x ~ N(0, I).

    Ruan, Joe-Wong: "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI 2022,
    experiments on synthetic data. `data.weight_scale` is sigma_0, a standard deviation. The paper prints 10; its
    released code and its tables have variance 10, which is the default here. The sources share the samples evenly.
    """
    if options.samples < 2 * options.sources:
        raise UserError(
            f"data.samples={options.samples} cannot give each of data.sources={options.sources} ground-truth "
            f"models a training and a test sample: ask for at least {2 * options.sources} samples.",
            code="too-few-samples", setting="data.samples", samples=options.samples,
        )  # fmt: skip
    if options.samples * options.dimension > MOST_NUMBERS:
        raise UserError(
            f"Expected data.samples x data.dimension <= {MOST_NUMBERS}, got {options.samples} x {options.dimension}: "
            "they are drawn in memory; ask for fewer.",
            code="too-large", setting="data.samples",
        )  # fmt: skip
    weights = ground_truth_weights(options, seed)
    rng = generator(seed, "synthetic samples")
    sources = np.arange(options.samples, dtype=np.int64) * options.sources // options.samples
    x = rng.normal(size=(options.samples, options.dimension))
    y = np.einsum("nd,nd->n", x, weights[sources]) + options.noise * rng.normal(size=options.samples)
    train, test = hold_out(sources, settings.test_fraction, generator(seed, "split of synthetic"))
    inputs, targets = x.astype(np.float32), y.astype(np.float32)
    return Dataset(
        "synthetic",
        *(inputs[train], targets[train], inputs[test], targets[test]),
        classes=None,
        mean=(0.0,),
        std=(1.0,),
        sources_train=sources[train],
        sources_test=sources[test],
    )
