"""A partition on its own, before any experiment: its files in a folder, for figures and for a look."""

from __future__ import annotations

from pathlib import Path

from experiments.config import config_to_yaml
from experiments.run_directory import is_run, write_federation
from federated_data import build_federation
from foundation.errors import UserError
from foundation.files import write_whole
from foundation.settings import ExperimentSettings


def write_partition(config: ExperimentSettings) -> Path:
    """Divide the data as the experiment would and leave what it came to in `storage/name`."""
    name = config.name or f"partition-{config.data.name}-{config.partition.name}-seed{config.seed}"
    path = Path(config.storage).expanduser() / name
    if is_run(path):
        raise UserError(
            f"{path} is a run directory, which a partition would spoil: choose another name=NAME."
        )
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / "config.yaml", config_to_yaml(config))
        write_federation(path, federation)
    except OSError as error:
        raise UserError(
            f"Cannot write {path} ({error.strerror}); choose a folder that can be written with storage=..."
        ) from error
    return path
