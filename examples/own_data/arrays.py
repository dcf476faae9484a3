"""Your own arrays as a federation: images (or vectors), their classes, and whose they are.

python examples/own_data/arrays.py
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

import archipelago as ar


def main() -> ar.Run:
    """Digits as bytes, five of them upside down for every second owner; each owner is a client."""
    x, y = load_digits(return_X_y=True)
    images = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
    owners = np.arange(len(y)) % 12  # a writer, a hospital, a phone
    images[owners % 2 == 1] = images[owners % 2 == 1, ::-1]

    # Kept under this name: sweeps, `resume` and the command line find it, too.
    ar.use_arrays("my_digits", (images, y), owners=owners)
    print(ar.partition(data="my_digits", partition="natural", clients=12))
    return ar.run(
        data="my_digits", partition="natural", clients=12, method="ifca", clusters=2, rounds=5,
        local={"lr": 0.05}, fleet={"backend": "in_process"}, name="my-arrays",
    )  # fmt: skip


if __name__ == "__main__":
    print(main())
