"""Same seed, same bytes, from one version of this project to the next (under the pinned NumPy)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.data import PARTITIONS, Labels
from archipelago.data.division import Task, divide
from tests.support.partitions import built_in_partitions
from tests.support.settings import partition_settings

SETTINGS: dict[str, dict[str, Any]] = {
    "iid": {},
    "quantity": {"alpha": 1.0},
    "dirichlet": {},
    "cluster_dirichlet": {},
    "n_class": {},
    "cluster_n_class": {"classes": 3},
    "balanced_dirichlet": {"test_share": 0.25},
    "femam_cluster": {"classes": 5},
    "multilevel": {"validation": 0.1},
    "mixture": {"mixture": "random"},
    "natural": {},
    "dirichlet as fedbase": {"compat": "fedbase", "alpha": 0.5},
    "cluster_n_class as fedbase": {"compat": "fedbase", "classes": 3, "groups": 3},
    "dirichlet, validated": {"validation": 0.2, "test_share": 0.2, "min_size": 2},
}
# A change here is a change of results: say so in CHANGELOG.md and raise `partition_cache.VERSION`.
DIGESTS = {
    "iid": "3bf601c311033208",
    "quantity": "3d3cf0b3bb9c60d7",
    "dirichlet": "f0617d08c413c71c",
    "cluster_dirichlet": "e4eeeb88594a188d",
    "n_class": "15784767dd6c2527",
    "cluster_n_class": "6a3ebad1246ee271",
    "balanced_dirichlet": "a8e92c487629608e",
    "femam_cluster": "799901b4d2f2dde1",
    "multilevel": "114f83cc605ffc73",
    "mixture": "fa68ea43f9b610ab",
    "natural": "db2b62b62247f2c7",
    "dirichlet as fedbase": "090e67222537ad30",
    "cluster_n_class as fedbase": "15c5564f7878bcbe",
    "dirichlet, validated": "81cf02dba218416d",
}


def digest_of(case: str) -> str:
    """The division of a fixed little data set among a dozen clients."""
    name = case.replace(",", "").split()[0]
    parts = [
        np.random.default_rng(part).permutation(np.arange(size) % 10) for part, size in enumerate((900, 300))
    ]
    sources, owners = [np.arange(len(y)) % 2 for y in parts], [np.arange(len(y)) % 15 for y in parts]
    known = {"mixture": sources, "natural": [None, None, *owners]}.get(name, [])
    task = Task(Labels("fixed", *parts, 10, *known), partition_settings(name=name, **SETTINGS[case]), 12, 7)
    made = hashlib.sha256()
    for key, array in sorted(divide(PARTITIONS.find(name), task).arrays().items()):
        made.update(f"{key} {array.dtype} {array.shape}".encode())
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()[:16]


def test_every_partition_is_pinned() -> None:
    assert set(DIGESTS) == set(SETTINGS) >= built_in_partitions()


@pytest.mark.parametrize("case", DIGESTS)
def test_same_seed_same_bytes(case: str) -> None:
    pinned = re.search(
        r"^numpy==(\S+?);", (Path(__file__).parents[2] / "constraints.txt").read_text(), flags=re.M
    )
    if pinned is None or np.__version__ != pinned.group(1):
        pytest.skip(f"NumPy {np.__version__} is not the pinned one")
    assert digest_of(case) == DIGESTS[case]
