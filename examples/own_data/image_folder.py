"""A folder of images, one folder per class, divided among clients.

python examples/own_data/image_folder.py [FOLDER]

Without FOLDER a small one is made here: my_images/train/CLASS/*.png and my_images/test/CLASS/*.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import archipelago as ar


def make_folder(folder: Path) -> Path:
    """Three classes of digits as PNG files, as torchvision's ImageFolder wants them."""
    x, y = load_digits(n_class=3, return_X_y=True)
    for at, (image, label) in enumerate(zip(x.reshape(-1, 8, 8), y, strict=True)):
        path = folder / ("test" if at % 5 == 0 else "train") / f"digit-{label}" / f"{at}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(path)
    return folder


def main(folder: Path) -> ar.Run:
    """Ten clients whose classes differ, by Dirichlet(0.3)."""
    return ar.run(
        data={"name": "image_folder", "root": folder, "image_size": 16, "grey": True},
        partition={"name": "dirichlet", "alpha": 0.3}, clients=10, method="fedavg", model="mlp", rounds=5,
        local={"lr": 0.05}, fleet={"backend": "in_process"}, name="my-images",
    )  # fmt: skip


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else make_folder(Path("my_images"))
    print(main(given.resolve()))
