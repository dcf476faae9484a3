from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.data import ClientData, Federation, build_federation, load_dataset
from tests.support.errors import Mistake, mistake, refused
from tests.support.settings import data_settings, partition_settings

PARTS = ("train", "validation", "test")


def build(clients: int = 8, seed: int = 0, *, data: Any = None, **partition: Any) -> Federation:
    return build_federation(data_settings(**(data or {})), partition_settings(**partition), clients, seed)


def same(one: Federation, other: Federation) -> bool:
    return one.fingerprint == other.fingerprint and all(
        getattr(a, part).tobytes() == getattr(b, part).tobytes()
        for a, b in zip(one.clients, other.clients, strict=True)
        for part in PARTS
    )


def test_digits_end_to_end() -> None:
    made = build()
    assert (made.name, made.classes, made.input_shape, made.groups) == ("digits", 10, (1, 8, 8), None)
    assert made.x.shape == (1797, 1, 8, 8)
    assert made.sizes.sum() == 1438
    assert made.test_sizes.sum() == 359
    data = load_dataset(data_settings(), seed=0)
    client = made.clients[3]
    assert (made.x[client.train] == data.x_train[client.train]).all()
    assert (made.y[client.test] == data.y_test[client.test - 1438]).all()
    assert client.test.min() >= 1438 > client.train.max()


def test_samples_are_read_only() -> None:
    made = build()
    with pytest.raises(ValueError, match="read-only"):
        made.x[0] = 0


class TestRotations:
    def test_client_wise_blocks_are_rotated_and_are_the_ground_truth_groups(self) -> None:
        plain, turned = build(), build(data={"rotations": 4})
        assert turned.groups is not None
        assert turned.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        for number, (before, after) in enumerate(zip(plain.clients, turned.clients, strict=True)):
            for part in PARTS:
                positions = getattr(after, part)
                assert (positions == getattr(before, part)).all()
                expected = np.rot90(plain.x[positions], turned.groups[number], axes=(2, 3))
                assert (turned.x[positions] == expected).all()

    def test_quarter_turn_is_counter_clockwise(self) -> None:
        plain, turned = build(clients=2), build(clients=2, data={"rotations": 2})
        first = turned.clients[1].train[0]
        # Counter-clockwise, the right column becomes the top row.
        assert turned.x[first, 0, 0].tolist() == plain.x[first, 0, :, 7].tolist()

    def test_cluster_wise_groups_stay_and_are_turned_group_by_group(self) -> None:
        settings = {"name": "cluster_dirichlet", "groups": 4, "alpha": 5.0}
        plain, turned = build(**settings), build(data={"rotations": 2}, **settings)
        assert turned.groups is not None
        assert turned.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        for number, client in enumerate(turned.clients):
            expected = np.rot90(plain.x[client.train], turned.groups[number] % 2, axes=(2, 3))
            assert (turned.x[client.train] == expected).all()

    def test_refused_where_there_is_nothing_square_to_turn(self, tmp_path: Path) -> None:
        with refused("unfit-data", setting="data.rotations", given=4, says=("data.rotations=4", "10")):
            build(data={"name": "synthetic", "rotations": 4})
        wide = np.zeros((20, 4, 6), dtype=np.uint8)
        labels = np.arange(20) % 2
        np.savez(tmp_path / "wide.npz", x_train=wide, y_train=labels, x_test=wide, y_test=labels)
        with refused("unfit-data", setting="data.rotations", says=("4x6", "data.rotations=1")):
            build(clients=2, data={"name": "npz", "root": str(tmp_path), "rotations": 2})

    def test_refused_with_fewer_clients_than_rotations(self) -> None:
        with refused("too-few-clients", setting="data.rotations=4", clients=3, says="clients=3"):
            build(clients=3, data={"rotations": 4})


class TestSynthetic:
    def test_each_group_has_one_linear_model(self) -> None:
        made = build(clients=8, data={"name": "synthetic", "noise": 0.1})
        assert made.groups is not None
        assert made.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        found = np.stack(
            [
                np.linalg.lstsq(made.x[client.train], made.y[client.train], rcond=None)[0]
                for client in made.clients
            ]
        )
        for group in range(4):
            first, second = found[made.groups == group]
            assert np.abs(first - second).max() < 0.1
            others = found[made.groups != group]
            assert np.abs(others - first).max(axis=1).min() > 1

    def test_class_partitions_are_refused(self) -> None:
        with refused("needs-classes", setting="partition=dirichlet", says="partition=iid"):
            build(data={"name": "synthetic"}, name="dirichlet")


class TestValidation:
    def test_share_of_training_samples_is_set_aside(self) -> None:
        plain, held = build(), build(validation=0.25)
        for before, after in zip(plain.clients, held.clients, strict=True):
            assert set(before.train) == set(after.train) | set(after.validation)
            assert len(after.validation) == round(0.25 * len(before.train))
            assert (before.test == after.test).all()
        assert held.sizes.sum() < plain.sizes.sum()

    def test_of_every_class_as_of_all(self) -> None:
        for partition in ({}, {"name": "n_class"}, {"name": "iid", "test_share": 0.3}):
            made = build(validation=0.1, **partition)
            for client in made.clients:
                held = np.append(client.train, client.validation)
                total, kept = (np.bincount(made.y[part], minlength=10) for part in (held, client.validation))
                quota = len(client.validation) * total / total.sum()
                assert (np.abs(kept - quota) < 1).all()
        # Of seven samples for ten equal classes, which ones is a matter of chance, not of their numbers.
        seen = np.bincount(
            np.concatenate([made.y[client.validation] for client in made.clients]), minlength=10
        )
        assert seen.min() > 0

    def test_every_client_draws_its_own(self) -> None:
        kept = {
            tuple(np.searchsorted(np.sort(np.append(client.train, client.validation)), client.validation))
            for client in build(validation=0.25).clients
        }
        assert len(kept) == 8

    def test_one_goes_and_one_stays_whatever_the_share(self) -> None:
        for share in (1e-6, 0.999):
            made = build(clients=100, min_size=2, validation=share)
            assert all(len(client.validation) and len(client.train) for client in made.clients)

    def test_client_with_one_sample_cannot_give_it_away(self, tmp_path: Path) -> None:
        x, y = np.zeros((2, 3)), np.zeros(2, dtype=int)
        np.savez(tmp_path / "tiny.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        data = {"name": "npz", "root": str(tmp_path)}
        with refused(
            "too-few-samples", setting="partition.validation", client=0, says="partition.validation=0.1"
        ):
            build(clients=2, data=data, min_size=1, validation=0.1)


class TestEqualResults:
    settings = {"name": "cluster_dirichlet", "alpha": 1.0, "validation": 0.2}  # noqa: RUF012

    def test_same_seed_same_federation(self) -> None:
        assert same(build(**self.settings), build(**self.settings))
        assert build(**self.settings).fingerprint != build(seed=1, **self.settings).fingerprint

    def test_fingerprint_sees_every_part(self) -> None:
        made = build(**self.settings)
        x, y = made.x.copy(), made.y.copy()
        x[5, 0, 3, 3] += 1
        y[7] = (y[7] + 1) % 10
        first = made.clients[0]
        moved = ClientData(first.train[1:], np.append(first.validation, first.train[0]), first.test)
        changes: list[dict[str, Any]] = [
            {"x": x},
            {"y": y},
            {"groups": None},
            {"copy_of": np.full(8, -1)},
            {"levels": made.groups[None]},
            {"sources": np.zeros(1797, dtype=np.int64)},
            {"mean": (0.25,)},
            {"std": (0.25,)},
            {"clients": (moved, *made.clients[1:])},
            {"clients": made.clients[::-1]},
        ]
        prints = {dataclasses.replace(made, **change).fingerprint for change in changes}
        assert len(prints | {made.fingerprint}) == len(changes) + 1
        assert dataclasses.replace(made, name="other").fingerprint == made.fingerprint

    def test_pickle_carries_everything_in_few_arrays(self) -> None:
        made = build(clients=200, min_size=1, validation=0.2)
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(made, protocol=5, buffer_callback=buffers.append)
        assert len(buffers) < 15
        assert same(made, pickle.loads(stream, buffers=buffers))
        assert same(made, pickle.loads(pickle.dumps(made)))


class TestStoredIndices:
    settings = {"name": "cluster_n_class", "classes": 3, "validation": 0.2}  # noqa: RUF012

    @pytest.mark.parametrize("rotations", [1, 4])
    def test_way_there_and_back_through_a_file(self, tmp_path: Path, rotations: int) -> None:
        data = {"rotations": rotations}
        made = build(data=data, **self.settings)
        np.savez(tmp_path / "partition.npz", **made.indices())
        with np.load(tmp_path / "partition.npz", allow_pickle=False) as stored:
            back = Federation.from_indices(load_dataset(data_settings(), seed=0), stored)
        assert same(made, back)
        assert made.groups is not None
        assert back.groups is not None
        assert back.groups.tolist() == made.groups.tolist()

    def test_way_there_and_back_through_safetensors(self) -> None:
        from safetensors.numpy import load, save

        made = build()
        assert same(
            made, Federation.from_indices(load_dataset(data_settings(), 0), load(save(made.indices())))
        )

    def test_other_data_is_refused(self) -> None:
        stored = build(**self.settings).indices()
        for other in (data_settings(test_fraction=0.3), data_settings(name="synthetic", samples=1797)):
            with refused("other-data"):
                Federation.from_indices(load_dataset(other, seed=0), stored)

    @pytest.mark.parametrize(
        "damage",
        [
            {"train": np.zeros(1438, dtype=np.int64)},
            {"train_ends": np.array([3, 2])},
            {"train_ends": np.zeros(0, dtype=np.int64)},
            {"test": np.arange(2000)},
            {"groups": np.zeros(3, dtype=np.int64)},
            {"fingerprint": np.zeros(16, dtype=np.uint8)},
            {"variants": np.ones(1797, dtype=np.int64)},
            {"holdout": np.array([0]), "holdout_ends": np.array([1])},
        ],
    )
    def test_damage_is_a_sentence(self, damage: dict[str, Any]) -> None:
        stored = {**build(**self.settings).indices(), **damage}
        with refused("other-data", name="digits"):
            Federation.from_indices(load_dataset(data_settings(), seed=0), stored)

    def test_missing_arrays_are_named(self) -> None:
        with refused("damaged"):
            Federation.from_indices(load_dataset(data_settings(), seed=0), {"train": np.zeros(3)})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda made: {"clients": ()}, "needs a client"),
        (lambda made: {"clients": (made.clients[0], made.clients[0])}, "used more than once"),
        (
            lambda made: {"clients": (dataclasses.replace(made.clients[0], train=np.arange(0)),)},
            "client 0 has no training",
        ),
        (
            lambda made: {"clients": (dataclasses.replace(made.clients[0], test=np.array([1797])),)},
            r"must lie in 0\.\.1796",
        ),
        (lambda made: {"y": made.y[1:]}, "1797 samples, but 1796 labels"),
        (lambda made: {"groups": np.zeros(3)}, "groups must hold one number for each of 8"),
    ],
)
def test_checks_refuse_what_is_no_federation(change: Any, sentence: str) -> None:
    made = build()
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(made, **change(made))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "dirichlett"}, mistake("unknown-name", nearest="dirichlet")),
        ({"data": {"name": "digit"}}, mistake("unknown-name", name="digit", nearest="digits")),
        ({"clients": 5000}, mistake("too-few-samples", samples=1438)),
        ({"clients": 359, "min_size": 5}, mistake("too-few-samples", clients=359, samples=1438, says="1795")),
        ({"name": "n_class", "classes": 11}, mistake("too-many", most=10)),
        (
            {"name": "cluster_dirichlet", "groups": 9},
            mistake("too-few-clients", clients=8, groups=9, says=("groups=9", "clients=8")),
        ),
        ({"data": {"name": "npz", "root": "no/such/folder"}}, mistake("wrong-file", path="no/such/folder")),
    ],
)
def test_mistakes_are_sentences(arguments: dict[str, Any], sentence: Mistake) -> None:
    with sentence():
        build(**arguments)


def test_what_had_to_give_way_is_carried_along() -> None:
    made = build(clients=100, name="dirichlet", alpha=0.01)
    assert "drew fewer than partition.min_size=4" in made.notes[0]


def test_room_imports_neither_lightning_nor_torch() -> None:
    code = "import archipelago.data, sys; print({'lightning', 'torch', 'ray'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
