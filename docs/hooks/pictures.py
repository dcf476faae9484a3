"""Pictures of data sets, partitions and shifts, made by a command and kept in `docs/data/pictures/`.

    python -m docs.hooks.pictures [data.root=FOLDER]

Of data sets it draws those whose files are in FOLDER (default: where the platform looks for them), and leaves the
pictures of the others as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from archipelago.reports.palette import GREY

FOLDER = Path(__file__).parents[1] / "data" / "pictures"
OWN = ("image_folder", "npz", "datamodule")  # data sets that are whatever a user has
SHIFTS = ("rotations", "label_swaps", "colours", "noises")


def kept(folder: str) -> list[str]:
    """Names that have a picture."""
    return sorted(path.stem for path in (FOLDER / folder).glob("*.png"))


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(figsize=(width, height), layout="constrained")


def _save(figure: Any, folder: str, name: str) -> None:
    import matplotlib.pyplot as plt
    from PIL import Image

    path = FOLDER / folder / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white", metadata={"Software": None})
    plt.close(figure)
    Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(path, optimize=True)


# Data sets --------------------------------------------------------------------------------------------------


def strip(images: Any, rows: int = 1, gap: int = 2) -> Any:
    """(n, channels, h, w) of uint8 as one picture of `rows` rows, enlarged to about 48 pixels an image."""
    n, _channels, h, w = images.shape
    across = n // rows
    canvas = np.full((rows * (h + gap) - gap, across * (w + gap) - gap, 3), 255, np.uint8)
    for at, image in enumerate(images[: rows * across]):
        top, left = (at // across) * (h + gap), (at % across) * (w + gap)
        canvas[top : top + h, left : left + w] = np.broadcast_to(image.transpose(1, 2, 0), (h, w, 3))
    times = max(1, round(48 / h))
    return canvas.repeat(times, axis=0).repeat(times, axis=1)


def _keep_strip(images: Any, folder: str, name: str, rows: int = 1) -> None:
    from PIL import Image

    path = FOLDER / folder / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(strip(images, rows)).convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(
        path, optimize=True
    )


def data_set(name: str, words: list[str]) -> None:
    """Eight images, of as many classes as there are; of regressions, samples of each ground-truth model."""
    from archipelago.data.datasets import load_dataset
    from archipelago.experiments.config import load_config

    config = load_config(None, [f"data={name}", *words])
    found = load_dataset(config.data, config.seed)
    if np.ndim(found.x_train) == 4:
        y = np.asarray(found.y_train)
        first = [int(np.flatnonzero(y == label)[0]) for label in np.unique(y)[:8]]
        more = [at for at in range(64) if at not in first][: 8 - len(first)]
        _keep_strip(np.asarray(found.x_train[np.array([*first, *more])]), "sets", name)
        return
    figure, axes = _figure(4.2, 1.6)
    axes.scatter(found.x_train[:, 0], found.y_train, s=3, c=found.sources_train, cmap="tab10", alpha=0.5)
    axes.set(xlabel="first of the features", ylabel="target")
    _save(figure, "sets", name)


def data_sets(words: list[str]) -> None:
    """Every data set whose files are here."""
    from archipelago.core.errors import UserError
    from docs.hooks.entries import entries

    for entry in entries("data set"):
        if entry.name not in OWN:
            try:
                data_set(entry.name, words)
            except (UserError, OSError) as error:
                print(f"no picture of {entry.name}: {str(error).splitlines()[0][:110]}", file=sys.stderr)


# Partitions -------------------------------------------------------------------------------------------------


def partition_settings(name: str) -> dict[str, Any]:
    """What a partition is shown on: digits, with what it needs on top."""
    from archipelago.data import PARTITIONS

    shown: dict[str, Any] = {"data": {"name": "digits"}, "clients": 20, "partition": {"name": name}}
    if "groups" in set(PARTITIONS[name].options.__dataclass_fields__):
        shown["partition"]["groups"] = 4
    if name == "mixture":
        shown["data"]["rotations"] = 2
    return shown


def partition(name: str, words: list[str]) -> None:
    """Classes by client, as areas; ground-truth groups divided by lines."""
    import archipelago as ar

    shown = partition_settings(name)
    if name == "natural":
        root = next((word.partition("=")[2] for word in words if word.startswith("data.root=")), None)
        shown = {"data": {"name": "femnist_digits", **({"root": root} if root else {})}, "clients": 12,
                 "partition": {"name": name}}  # fmt: skip
    found = ar.partition(**shown)
    if "group" in found:
        found = found.sort_values("group", kind="stable")
    columns = [column for column in found.columns if column.startswith("class ")]
    counts = np.zeros((10, len(found)))
    for column in columns:
        counts[int(column.split()[1])] = found[column]
    figure, axes = _figure(4.2, 2.1)
    areas = 200 * counts / counts.max()
    clients, classes = np.meshgrid(np.arange(len(found)), np.arange(10))
    axes.scatter(clients, classes, s=areas, c=classes, cmap="tab10", vmin=0, vmax=9, alpha=0.85, linewidths=0)
    if "group" in found:
        edges = np.flatnonzero(np.diff(found["group"].to_numpy())) + 0.5
        for edge in edges:
            axes.axvline(edge, color=GREY, lw=0.8)
    axes.set(xlabel="clients" + (", divided by group" if "group" in found else ""), ylabel="class", yticks=[0, 3, 6, 9],
             xticks=[], xlim=(-0.8, len(found) - 0.2))  # fmt: skip
    axes.invert_yaxis()
    _save(figure, "partitions", name)


def shift(name: str) -> None:
    """The same kind of digits in each of four groups, one row a group."""
    from archipelago.data import build_federation
    from archipelago.experiments.config import load_config

    config = load_config(None, ["data=digits", f"data.{name}=4", "clients=4", "partition=iid"])
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    images = []
    for client in federation.clients:
        labels = federation.y[client.train]
        images += [federation.x[client.train[np.flatnonzero(labels == label)[0]]] for label in range(8)]
    _keep_strip(np.stack(images), "shifts", name, rows=4)


def main(words: list[str]) -> None:
    """All of them."""
    from archipelago.data import PARTITIONS

    data_sets(words)
    for name in PARTITIONS:
        try:
            partition(name, words)
        except Exception as error:
            print(f"no picture of {name}: {error}", file=sys.stderr)
    for name in SHIFTS:
        shift(name)


if __name__ == "__main__":
    main(sys.argv[1:])
