"""A partition on its own, before any experiment: its files in a folder, for figures and for a look."""

from __future__ import annotations

from pathlib import Path

from actors.participation import held_out
from archipelago.core.errors import UserError
from archipelago.core.files import write_whole
from archipelago.core.own_files import refuse_links
from archipelago.core.settings import ExperimentSettings
from archipelago.data import build_federation, partition_seed
from archipelago.experiments.config import config_to_yaml
from archipelago.runs.status import is_run
from archipelago.runs.storage import join
from archipelago.runs.written import write_federation


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
