"""The data sets that need no files: scikit-learn's digits, and planted linear regressions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from archipelago.core.errors import UserError
from archipelago.core.randomness import generator
from archipelago.core.settings import DataSettings
from archipelago.data.datasets import Dataset, dataset, hold_out


@dataset(
    "digits",
    "scikit-learn's 1,797 real 8x8 grey images of handwritten digits; needs no files",
    present=lambda settings: "embedded (scikit-learn)",
    seeded=False,
)
def digits(settings: DataSettings, seed: int) -> Dataset:
    """The digits, as uint8. Their split depends on `data.test_fraction` alone, not on the seed."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    # Grey levels are 0..16; as uint8 they take a quarter of the room, and all 17 stay distinct.
    images = np.rint(x.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = y.astype(np.int64)
    train, test = hold_out(labels, settings.test_fraction, generator(0, "split of digits"))
    return Dataset(
        "digits", images[train], labels[train], images[test], labels[test], 10, mean=(0.5,), std=(0.5,)
    )


def planted_weights(settings: DataSettings, seed: int) -> NDArray[np.float64]:
    """The linear models that `synthetic` plants: (sources, dimension), entries of N(0, weight_scale^2).

    On top of that they share one draw of N(0, common_scale^2): what all have in common.
    """
    own = generator(seed, "synthetic weights").normal(
        scale=settings.weight_scale, size=(settings.sources, settings.dimension)
    )
    rng = generator(seed, "common synthetic weights")
    return own + rng.normal(scale=settings.common_scale, size=settings.dimension)


@dataset(
    "synthetic",
    "linear regression drawn from planted linear models (FedSoft's generator); needs no files",
    present=lambda settings: "embedded (generated)",
)
def synthetic(settings: DataSettings, seed: int) -> Dataset:
    """y = <theta_s, x> + noise, with theta_s ~ N(0, sigma_0^2 I) and x ~ N(0, I).

    Ruan, Joe-Wong: "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI 2022,
    experiments on synthetic data. sigma_0 is a standard deviation, as printed there; its released code
    takes it for a variance. The sources share the samples evenly.
    """
    if settings.samples < 2 * settings.sources:
        raise UserError(
            f"data.samples={settings.samples} cannot give each of data.sources={settings.sources} planted "
            f"models a training and a test sample: ask for at least {2 * settings.sources} samples."
        )
    weights = planted_weights(settings, seed)
    rng = generator(seed, "synthetic samples")
    sources = np.arange(settings.samples, dtype=np.int64) * settings.sources // settings.samples
    x = rng.normal(size=(settings.samples, settings.dimension))
    y = np.einsum("nd,nd->n", x, weights[sources]) + settings.noise * rng.normal(size=settings.samples)
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
