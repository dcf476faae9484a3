"""Words and pictures of a federation, from the files of a partition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from archipelago.experiments.config import load_config
from archipelago.experiments.figures_data import write_partition
from archipelago.reports.drawing import save
from archipelago.reports.drawing_federation import bars, draw_federation, similarity
from archipelago.reports.federation import (
    COMPARED,
    SHOWN,
    Described,
    describe,
    distances,
    divergence,
    read_federation,
)
from tests.support.errors import refused


def written(tmp_path: Path, *overrides: str) -> Path:
    return write_partition(load_config(None, [*overrides, f"storage={tmp_path}"], env={}))


def made_up(counts: Any, groups: Any = None) -> Described:
    """A federation of given label counts (clients, classes)."""
    counts = np.asarray(counts)
    client, label = np.nonzero(counts)
    table = {
        "client": client,
        "label": label,
        "source": np.zeros(len(client), int),
        "samples": counts[client, label],
    }
    facts = {
        "data": "made", "partition": "up", "classes": counts.shape[1], "clients": len(counts), "sources": 1,
        "published_protocol": False,
    }  # fmt: skip
    clients = {} if groups is None else {"group": np.asarray(groups)}
    return Described(facts, clients, {**table, "part": np.full(len(client), "train")})


def test_divergence_by_hand() -> None:
    # Label shares (1, 0), (.5, .5) in group 0 and (0, 1), (0, 1) in group 1.
    described = made_up([[4, 0], [3, 3], [0, 2], [0, 9]], [0, 0, 1, 1])
    found = divergence(described)
    assert found["within"] == pytest.approx((0.5 + 0.0) / 2)
    assert found["between"] == pytest.approx((1 + 1 + 0.5 + 0.5) / 4)
    assert found["all"] == pytest.approx((0.5 + 0 + 3) / 6)
    assert distances(np.array([[0, 0], [1, 0]])).max() == 0.5  # a client without samples


def test_words(tmp_path: Path) -> None:
    said = dict(describe(written(tmp_path, "partition=cluster_n_class", "partition.classes=3", "seed=3")))
    assert said["clients"] == "20"
    assert said["training samples"].startswith("1,438; per client ")
    assert said["classes per client"] == "2"
    assert said["ground-truth groups"] == "4, of 5 clients each"
    between, within = (float(part.split()[0]) for part in said["label divergence"].split(", ")[:2])
    described = read_federation(tmp_path / "partition-digits-cluster_n_class-seed3")
    assert between == pytest.approx(divergence(described)["between"], abs=5e-4)
    assert between > within


def test_words_about_every_kind_of_ground_truth(tmp_path: Path) -> None:
    mixed = dict(
        describe(written(tmp_path, "partition=mixture", "data.rotations=2", "partition.validation=0.1"))
    )
    assert mixed["sources per client"] == "2"
    assert "validation samples" in mixed and "held out, per distribution" in mixed
    assert "between groups" in mixed["divergence with shifts"]
    levels = dict(describe(written(tmp_path, "partition=multilevel")))
    assert (
        levels["ground-truth groups, level 1"].startswith("2, of ")
        and "ground-truth groups, level 2" in levels
    )
    copied = dict(describe(written(tmp_path, "partition=dirichlet", "partition.compat=fedbase")))
    assert "clients are copies of others" in copied["note"]
    plain = dict(describe(written(tmp_path, "data=synthetic", "data.sources=1", "partition=quantity")))
    assert plain["ground-truth groups"] == "none" and "label divergence" not in plain


@pytest.mark.parametrize(
    "overrides",
    [
        ("partition=dirichlet",),
        ("partition=mixture", "data.rotations=4", "partition.mixture=random"),
        ("data=synthetic", "data.sources=1", "partition=quantity", "partition.alpha=1"),
        ("clients=1", "clusters=1"),
    ],
    ids=["classes", "mixture", "regression", "one client"],
)
def test_figures_are_drawn(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    described = read_federation(written(tmp_path, *overrides))
    strips, mixed = len(described.ground_truth), described.facts["sources"] > 1 and described.facts["classes"]
    assert len(bars(described).axes) == strips + (2 if mixed else 1)
    assert len(similarity(described).axes) == 2  # and its colour bar


def test_figures_become_files_that_do_not_differ_from_time_to_time(tmp_path: Path) -> None:
    path = written(tmp_path, "partition=mixture", "data.rotations=2", "clients=4", "clusters=2")
    made = draw_federation(path)
    assert [file.name for file in made] == [
        "partition-classes.png", "partition-classes.svg", "partition-similarity.png", "partition-similarity.svg",
    ]  # fmt: skip
    for file in made[::2]:
        with Image.open(file) as image:
            assert min(image.size) > 500
            assert len(image.convert("RGB").resize((200, 100), 0).getcolors(20_000)) > 10
    assert made[1].read_text().count("<path") > 3
    again = tmp_path / made[1].name
    save(bars(read_federation(path)), again)
    assert again.read_bytes() == made[1].read_bytes()


def test_bars_are_as_high_as_the_counts() -> None:
    counts = np.array([[4, 0, 2], [0, 5, 1]])
    figure = bars(made_up(counts))
    tops = [patch.get_data().values.tolist() for patch in figure.axes[0].patches]
    assert tops == [[4, 0], [4, 5], [6, 6]]


def test_similarity_is_in_the_order_of_groups() -> None:
    figure = similarity(made_up([[1, 0], [0, 1], [1, 0], [0, 1]], [1, 0, 1, 0]))
    (image,) = figure.axes[0].images
    assert np.asarray(image.get_array()).tolist() == np.kron(np.eye(2), np.ones((2, 2))).tolist()


def test_of_many_clients_some_are_shown_and_that_is_said() -> None:
    clients = 3 * SHOWN
    described = made_up(np.ones((clients, 25), int), np.arange(clients) // 100)
    figure = bars(described)
    assert figure.axes[1].get_xlim() == (0, SHOWN)
    assert f"({SHOWN} of them, evenly chosen)" in figure.get_suptitle()
    assert divergence(described)["all"] == 0.0 and clients > COMPARED


def test_folder_without_tables_is_a_sentence(tmp_path: Path) -> None:
    with refused("not-recorded", says="federation/"):
        describe(tmp_path)


def test_run_is_not_spoilt_by_a_partition(tmp_path: Path) -> None:
    for name in ("config.yaml", "status.json"):
        (tmp_path / name).write_text("{}")
    with refused("exists", says="name="):
        write_partition(load_config(None, [f"storage={tmp_path.parent}", f"name={tmp_path.name}"], env={}))
