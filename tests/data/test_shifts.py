"""Rotations, label swaps, colours and noise, alone and multiplied, and how they meet ground-truth groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.core.randomness import generator
from archipelago.data import Federation, build_federation
from archipelago.data.shifts import variants_of_clients, variants_of_samples
from tests.support.errors import Mistake, mistake, refused
from tests.support.settings import data_settings, partition_settings


def build(clients: int = 8, seed: int = 0, *, data: Any = None, **partition: Any) -> Federation:
    return build_federation(data_settings(**(data or {})), partition_settings(**partition), clients, seed)


def test_labels_are_permuted_group_by_group() -> None:
    plain, swapped = build(), build(data={"label_swaps": 4})
    assert swapped.groups is not None and swapped.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    maps = []
    for group in range(4):
        members = [client for client, of in enumerate(swapped.groups) if of == group]
        held = np.concatenate(
            [swapped.clients[i].train for i in members] + [swapped.clients[i].test for i in members]
        )
        pairs = set(zip(plain.y[held].tolist(), swapped.y[held].tolist(), strict=True))
        assert len(pairs) == 10  # a permutation: each label becomes one other
        maps.append([dict(pairs)[label] for label in range(10)])
        assert sorted(maps[-1]) == list(range(10))
    assert maps[0] == list(range(10))
    for one in range(4):
        for other in range(one):
            assert all(a != b for a, b in zip(maps[one], maps[other], strict=True))
    assert (plain.x == swapped.x).all()
    assert build(seed=1, data={"label_swaps": 2}).shift.labels[1].tolist() != maps[1]  # type: ignore[union-attr]


def test_tones_of_grey_images() -> None:
    plain, toned = build(), build(data={"colours": 4})
    expected = [lambda x: x, lambda x: 255 - x, lambda x: x // 2, lambda x: 255 - x // 2]
    for client, change in zip(toned.clients[::2], expected, strict=True):
        assert (toned.x[client.train] == change(plain.x[client.train].astype(int))).all()


def test_channels_of_colour_images_change_places(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (120, 4, 4, 3), dtype=np.uint8)
    y = np.arange(120) % 2
    np.savez(tmp_path / "rgb.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    made = build(12, data={"name": "npz", "root": str(tmp_path), "colours": 6})
    images = np.concatenate([x, x]).transpose(0, 3, 1, 2)
    orders = set()
    for client in made.clients[::2]:
        (order,) = [
            order for order in np.ndindex(3, 3, 3)
            if len(set(order)) == 3 and (made.x[client.test] == images[client.test][:, order]).all()
        ]  # fmt: skip
        orders.add(order)
    assert len(orders) == 6


def test_noise_grows_from_group_to_group() -> None:
    plain, noisy = build(), build(data={"noises": 3, "noise_shift": 0.1})
    assert noisy.groups is not None and noisy.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    middle = (plain.x > 60) & (plain.x < 190)  # where nothing is cut off at 0 or 255
    spread = []
    for group in range(3):
        held = np.concatenate([noisy.clients[i].train for i in np.flatnonzero(noisy.groups == group)])
        difference = noisy.x[held].astype(float) - plain.x[held]
        spread.append(difference[middle[held]].std())
    assert spread == pytest.approx([0, 0.05 * 255, 0.1 * 255], rel=0.05)
    assert build(data={"noises": 3, "noise_shift": 0.1}).fingerprint == noisy.fingerprint
    vectors = build(data={"name": "synthetic", "noises": 2, "noise_shift": 0.5})
    untouched = build(data={"name": "synthetic"})
    assert (vectors.x - untouched.x)[vectors.clients[2].train].std() == pytest.approx(0.5, rel=0.1)


def test_shifts_multiply() -> None:
    plain, made = build(16), build(16, data={"rotations": 2, "label_swaps": 2, "colours": 2})
    assert made.groups is not None and made.groups.tolist() == np.repeat(np.arange(8), 2).tolist()
    assert made.shift is not None
    seen = set()
    for client, group in enumerate(made.groups):
        at = made.clients[client].train
        turned = np.rot90(plain.x[at], made.shift.turns[group], axes=(2, 3))
        assert (made.x[at] == (255 - turned if made.shift.colours[group] else turned)).all()
        swapped = (made.y[at] != plain.y[at]).all()
        seen.add((int(made.shift.turns[group]), int(made.shift.colours[group]), bool(swapped)))
    assert len(seen) == 8
    assert made.sources is not None
    assert {int(made.sources[client.train[0]]) for client in made.clients} == set(range(8))


class TestCrossed:
    settings = {"name": "cluster_n_class", "classes": 3, "groups": 2}  # noqa: RUF012

    def test_each_group_is_divided_among_the_shifts(self) -> None:
        made = build(data={"rotations": 2, "crossed": True}, **self.settings)
        assert made.groups is not None and made.levels is not None
        assert made.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert made.levels.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3]]
        plain = build(**self.settings)
        for client, turns in enumerate([0, 0, 1, 1, 0, 0, 1, 1]):
            at = made.clients[client].train
            assert (made.x[at] == np.rot90(plain.x[at], turns, axes=(2, 3))).all()

    def test_levels_of_the_partition_stay_above(self) -> None:
        made = build(16, data={"rotations": 2, "crossed": True}, name="multilevel")
        assert made.levels is not None and made.groups is not None
        assert len(made.levels) == 3
        assert np.array_equal(made.levels[-1], made.groups)
        assert np.array_equal(made.levels[1], made.groups // 2)

    def test_too_small_groups_are_a_sentence(self) -> None:
        with refused("too-few-clients", setting="data.crossed"):
            variants_of_clients(np.array([0, 0, 1, 1]), 4, 4, True)

    def test_groups_need_not_be_in_order(self) -> None:
        variant, pairs, levels = variants_of_clients(np.array([1, 0, 1, 0, 0]), 2, 5, True)
        assert variant.tolist() == [0, 0, 1, 0, 1]
        assert pairs.tolist() == [2, 0, 3, 0, 1]
        assert levels is not None and levels.tolist() == [[1, 0, 1, 0, 0], [2, 0, 3, 0, 1]]


def test_mixtures_of_shifts_are_per_sample() -> None:
    plain = build(10, name="iid")
    made = build(10, data={"rotations": 2}, name="mixture", mixture="10:90")
    assert made.sources is not None and made.variants is not None
    for number, client in enumerate(made.clients):
        of = made.sources[client.train]
        assert (of == 1).mean() == pytest.approx(0.9 if number < 5 else 0.1, abs=0.02)
        for turns in range(2):
            at = client.train[of == turns]
            assert (made.x[at] == np.rot90(plain.x[at], turns, axes=(2, 3))).all()
    assert len(made.holdout) == 2  # half of the test samples, by distribution
    for turns, held in enumerate(made.holdout):
        assert (made.sources[held] == -1).sum() == 0 and (made.variants[held] == turns).all()


def test_sources_of_the_data_multiply_with_shifts() -> None:
    # FedSoft's four distributions are two kinds of letters, each turned by 0 and 90 degrees.
    made = build(12, data={"name": "synthetic", "sources": 2, "noises": 2}, name="mixture", mixture="random")
    assert made.sources is not None
    assert set(made.sources[np.concatenate([client.train for client in made.clients])].tolist()) == {
        0,
        1,
        2,
        3,
    }
    assert len(made.holdout) == 4


def test_variants_of_samples_are_even_in_every_stratum() -> None:
    strata = np.array([0] * 7 + [1] * 6 + [3] * 2)
    found = variants_of_samples(strata, 3, generator(0, "test"))
    for stratum in (0, 1, 3):
        counts = np.bincount(found[strata == stratum], minlength=3)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"label_swaps": 11},
            mistake("too-many", setting="data.label_swaps", given=11, most=10, says="data.label_swaps=11"),
        ),
        ({"name": "synthetic", "label_swaps": 2}, mistake("too-many", setting="data.label_swaps", given=2)),
        (
            {"name": "synthetic", "colours": 2},
            mistake("unfit-data", given=2, says=("0..255", "10", "float32")),
        ),
        ({"colours": 5}, mistake("too-many", most=4)),
        (
            {"rotations": 3, "noises": 3},
            mistake(
                "too-few-clients", setting="data.rotations=3 x data.noises=3", clients=8, says="clients=8"
            ),
        ),
    ],
)
def test_impossible_shifts_are_sentences(data: dict[str, Any], sentence: Mistake) -> None:
    with sentence():
        build(data=data)


def test_copies_cannot_be_shifted() -> None:
    with refused("shared-samples", setting="data.rotations"):
        build(data={"rotations": 2}, name="dirichlet", compat="fedbase")
