"""What figures need besides the tables of rounds: example images, t-SNE at the end of a run, a partition on its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.participation import held_out
from archipelago.core.errors import UserError
from archipelago.core.files import write_whole
from archipelago.core.own_files import numbered_files, refuse_links
from archipelago.core.randomness import generator
from archipelago.core.settings import ExperimentSettings
from archipelago.data import Federation, build_federation, partition_seed
from archipelago.experiments.config import config_to_yaml
from archipelago.runs.directory import RunDirectory
from archipelago.runs.status import is_run
from archipelago.runs.storage import join
from archipelago.runs.trees import write_arrays
from archipelago.runs.written import write_federation

EXAMPLES = Path("records") / "examples.safetensors"
_MOST_BYTES = 600_000  # of all example images of a run: a sweep of hundreds stays small


def write_examples(run: RunDirectory, federation: Federation, config: ExperimentSettings) -> None:
    """A few training images of each client, as they are trained on, if the samples are images."""
    shape = federation.input_shape
    if not config.records.images or len(shape) != 3 or shape[0] not in (1, 3):
        return
    most = _MOST_BYTES // (int(np.prod(shape)) * config.records.images)
    count = len(federation.clients)
    shown = np.unique(np.linspace(0, count - 1, min(count, max(most, 1))).astype(np.int64))
    images, owners = [], []
    for client in shown:
        held = federation.clients[client].train
        rng = generator(config.seed, "example images", client=int(client))
        chosen = rng.permutation(held)[: config.records.images]
        images.append(_as_bytes(federation.x[chosen]))
        owners += [int(client)] * len(chosen)
    arrays: dict[str, npt.NDArray[Any]] = {
        "images": np.concatenate(images),
        "client": np.asarray(owners, np.int64),
    }
    write_arrays(run.path / EXAMPLES, arrays, {})


def _as_bytes(x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Images as 0..255; floats are stretched from their smallest to their largest value."""
    if x.dtype == np.uint8:
        return np.asarray(x, np.uint8)
    low, high = float(x.min()), float(x.max())
    return np.rint((x - low) / max(high - low, 1e-12) * 255).astype(np.uint8)


def write_tsne(run: RunDirectory, config: ExperimentSettings) -> None:
    """t-SNE of the client models of each recorded round (`records/tsne-ROUND.parquet`), where it was asked for."""
    if not config.records.tsne:
        return
    import pyarrow.parquet as pq

    for round, path in numbered_files(run.path / "records", "models"):
        table = pq.read_table(path)
        names = [name for name in table.column_names if name.startswith("pc_")]
        points = np.stack([table[name].to_numpy() for name in names], axis=1).astype(np.float64)
        if len(points) >= 4:
            at = tsne(points, config.seed, round)
            columns = {"client": table["client"].to_numpy(), "x": at[:, 0], "y": at[:, 1]}
            run.record("tsne", round, columns)


def tsne(points: npt.NDArray[np.float64], seed: int, round: int = 0) -> npt.NDArray[np.float32]:
    """(n, 2) coordinates by t-SNE, begun from the first two columns."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    start = np.zeros((len(points), 2))
    start[:, : min(2, points.shape[1])] = points[:, :2]
    start = start / max(float(start[:, 0].std()), 1e-12) * 1e-4  # as scikit-learn scales its own
    state = int(generator(seed, "t-SNE", round=round).integers(2**31))
    perplexity = min(30.0, (len(points) - 1) / 3)
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # scikit-learn's own, of settings not made here
        made = TSNE(2, perplexity=perplexity, init=start.astype(np.float32), random_state=state)
        return np.asarray(made.fit_transform(points), np.float32)


# A partition on its own, before any experiment ---------------------------------------------------------------


def partition_address(config: ExperimentSettings) -> str:
    """Where a partition goes: `storage/name`, a folder or an address in an object store."""
    seed = partition_seed(config.partition, config.seed)
    name = config.name or f"partition-{config.data.name}-{config.partition.name}-seed{seed}"
    return join(config.storage, name)


def write_partition(config: ExperimentSettings, folder: Path | None = None) -> Path:
    """Divide the data as the experiment would and leave what it came to in `folder` (default: `storage/name`)."""
    path = Path(partition_address(config)) if folder is None else folder
    if is_run(path):
        raise UserError(
            f"{partition_address(config)} is a run directory, which a partition would spoil: choose another name=NAME.",
            code="exists", path=partition_address(config),
        )  # fmt: skip
    if path.is_dir() and any(path.iterdir()) and not (path / "partition.safetensors").is_file():
        raise UserError(
            f"Expected a new folder or one with a partition, got {partition_address(config)} with other files, which a "
            "partition might overwrite: choose another name=NAME.",
            code="exists", path=partition_address(config),
        )  # fmt: skip
    refuse_links(path)
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_federation(path, federation)  # first the indices, by which a partition is known
        write_whole(path / "config.yaml", config_to_yaml(config))
    except OSError as error:
        raise UserError(
            f"Cannot write {path} ({error.strerror}); choose a folder that can be written with storage=...",
            code="unwritable", path=path,
        ) from error  # fmt: skip
    return path


def held_out_clients(config: ExperimentSettings) -> list[tuple[str, str]]:
    """Who would never train (`holdout_clients`), as a row for the description of a partition."""
    found = held_out(config.clients, config.holdout_clients, partition_seed(config.partition, config.seed))
    if not len(found):
        return []
    shown = ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")
    return [("held-out clients", f"{len(found)} that never train and are adopted afterwards: {shown}")]
