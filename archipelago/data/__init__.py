"""Data sets, partitions, and the federation they make.

`archipelago.data.datamodule` holds the LightningDataModule; it is imported on its own, since importing
lightning takes seconds and nothing else here needs it.
"""

from archipelago.core.plugins import import_all_of
from archipelago.data.arrays import use_arrays
from archipelago.data.datasets import DATASETS, Dataset, DataSource, dataset, load_dataset, normalised
from archipelago.data.describe import client_table, count_table, facts
from archipelago.data.division import ClientData, Division
from archipelago.data.drift import DRIFTS, Drift, DriftKind, Stage, World
from archipelago.data.federation import Federation, build_federation, federation_of, partition_seed
from archipelago.data.partitions import PARTITIONS, Labels, Partition, Partitioner, hand_out, partition

# A file in this folder registers its data sets and partitions: nothing lists it.
import_all_of(__name__, __path__, but=("datamodule",))

__all__ = [
    "DATASETS",
    "DRIFTS",
    "PARTITIONS",
    "ClientData",
    "DataSource",
    "Dataset",
    "Division",
    "Drift",
    "DriftKind",
    "Federation",
    "Labels",
    "Partition",
    "Partitioner",
    "Stage",
    "World",
    "build_federation",
    "client_table",
    "count_table",
    "dataset",
    "facts",
    "federation_of",
    "hand_out",
    "load_dataset",
    "normalised",
    "partition",
    "partition_seed",
    "use_arrays",
]
