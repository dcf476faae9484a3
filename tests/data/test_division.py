"""Test shares, held-out sets, the content address and its cache, and tables of what came out."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.core.randomness import generator
from archipelago.data import (
    PARTITIONS,
    Federation,
    Labels,
    build_federation,
    client_table,
    count_table,
    facts,
    federation,
    load_dataset,
    partition_cache,
)
from archipelago.data.division import Division, Task, divide
from archipelago.data.partitions_dealing import set_aside
from tests.support.errors import refused
from tests.support.partitions import checked, labels_of
from tests.support.settings import data_settings, partition_settings


def build(clients: int = 8, seed: int = 0, *, data: Any = None, **partition: Any) -> Federation:
    return build_federation(data_settings(**(data or {})), partition_settings(**partition), clients, seed)


class TestShareForTesting:
    def test_no_class_is_left_out_for_its_number(self) -> None:
        # Ten clients with seven samples of each class, seven tested on: of which classes is a matter of chance.
        held = [np.arange(70) + 70 * client for client in range(10)]
        strata = np.arange(700) % 10
        _, test = set_aside(held, strata, 0.1, generator(0, "test"))
        assert [len(part) for part in test] == [7] * 10
        assert np.bincount(strata[np.concatenate(test)], minlength=10).min() > 0

    @checked
    @given(
        st.integers(0, 2**31),
        st.sampled_from(["iid", "quantity", "dirichlet", "cluster_dirichlet", "n_class", "cluster_n_class",
                         "balanced_dirichlet", "femam_cluster", "multilevel"]),
        st.floats(0.05, 0.7),
        st.integers(1, 8),
    )  # fmt: skip
    def test_of_all_samples_each_client_keeps_a_share(
        self, seed: int, name: str, share: float, size: int
    ) -> None:
        labels = labels_of([150] * 10, [50] * 10)
        settings = partition_settings(name=name, test_share=share, min_size=size, classes=3, alpha=1.0)
        made = divide(PARTITIONS.find(name), Task(labels, settings, 12, seed))
        used = np.concatenate([np.concatenate([client.train, client.test]) for client in made.clients])
        assert len(np.unique(used)) == len(used) and used.max() < 2000
        assert len(used) == 2000 or name in ("cluster_n_class", "multilevel", "femam_cluster")
        y = np.concatenate([labels.train, labels.test])
        for client in made.clients:
            count = len(client.train) + len(client.test)
            assert len(client.train) >= size and len(client.test) >= 1
            assert len(client.test) <= max(round(share * count), 1)
            trained, tested = (np.bincount(y[part], minlength=10) for part in (client.train, client.test))
            if count > 10:
                assert not ((tested > 0) & (trained == 0)).any()
            several = (trained + tested) >= 2
            if not several.any():  # nothing but single samples: one of them is tested on all the same
                assert len(client.test) == 1
            elif several.sum() <= len(client.test):  # label supports are equal, but for single samples
                assert ((tested > 0) == several).all()

    def test_small_shares_leave_a_test_sample_and_too_many_clients_are_a_sentence(self) -> None:
        made = build(300, test_share=0.01)
        assert (made.test_sizes >= 1).all() and (made.sizes >= 4).all()
        with refused("too-few-samples", samples=1797, says=("partition.test_share=0.5", "4000")):
            build(500, test_share=0.5)
        with refused("too-few-samples", clients=400, samples=359, says="partition.test_share=0.2"):
            build(400, min_size=1)
        with refused("incompatible", says="partition.test_share"):
            build(test_share=0.2, name="dirichlet", compat="fedbase")


class TestHoldOut:
    def test_one_set_per_ground_truth_group_that_no_client_has(self) -> None:
        plain = build(name="cluster_n_class", classes=3)
        made = build(name="cluster_n_class", classes=3, holdout=0.4)
        assert made.groups is not None
        held = np.concatenate(made.holdout)
        assert len(held) == round(0.4 * plain.test_sizes.sum())
        assert len(np.unique(held)) == len(held)
        for client, (before, after) in enumerate(zip(plain.clients, made.clients, strict=True)):
            assert np.array_equal(before.train, after.train)
            taken = np.setdiff1d(before.test, after.test)
            assert set(taken) <= set(made.holdout[made.groups[client]])
            assert set(made.y[before.test]) == set(made.y[after.test])  # label supports stay

    def test_mixtures_hold_out_half_by_default(self) -> None:
        data = {"name": "synthetic", "sources": 2}
        sizes = [
            sum(len(each) for each in build(data=data, name="mixture", **more).holdout)
            for more in ({}, {"holdout": 0.0}, {"holdout": 0.25})
        ]
        assert sizes == [400, 0, 200]

    def test_mixtures_hold_out_as_many_of_each_class(self) -> None:
        # Twelve times as many test samples of class 0 as of class 1, and enough of both.
        y = np.tile(np.repeat([0, 1], [120, 10]), 20)
        sources = np.repeat([0, 1], len(y) // 2)
        labels = Labels("uneven", y, y, 2, sources, sources)
        task = Task(labels, partition_settings(name="mixture", holdout=0.1), 4, 0)
        made = divide(PARTITIONS.find("mixture"), task)
        counts = [np.bincount(y[held - len(y)], minlength=2).tolist() for held in made.holdout]
        assert len(counts) == 2 and counts[0] == counts[1] and counts[0][0] == counts[0][1] > 10

    def test_what_cannot_be_held_out(self) -> None:
        with refused("needs-groups", setting="partition.holdout", says=("dirichlet", "mixture")):
            build(name="dirichlet", holdout=0.2)
        with refused("shared-samples", setting="partition.holdout", says="partition.compat=fedbase"):
            build(name="cluster_dirichlet", compat="fedbase", holdout=0.2)
        with refused("too-few-samples", setting="partition.holdout"):
            build(179, name="cluster_n_class", classes=3, holdout=0.01, min_size=1)
        crowded = build(
            300, data={"name": "synthetic", "samples": 1500}, name="mixture", mixture="random", min_size=1
        )
        assert crowded.holdout == ()


class TestContentAddress:
    def test_equal_questions_have_one_answer_and_are_asked_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache, settings = str(tmp_path / "kept"), {"name": "cluster_n_class", "classes": 3, "validation": 0.2}
        first = build(cache=cache, **settings)
        (kept,) = (tmp_path / "kept").iterdir()
        assert kept.stem == first.address

        def never(*_: Any, **__: Any) -> Division:
            raise AssertionError("drawn again")

        with monkeypatch.context() as patch:
            patch.setattr(partition_cache, "divide", never)
            again = build(cache=cache, **settings)
            assert again.fingerprint == first.fingerprint and again.notes == first.notes
            with pytest.raises(AssertionError, match="drawn again"):
                build(cache=cache, seed=1, **settings)
        assert build(cache="off", **settings).fingerprint == first.fingerprint
        assert build(cache="off", **settings).address == first.address

    def test_damaged_file_is_drawn_again_and_mended(self, tmp_path: Path) -> None:
        first = build(cache=str(tmp_path), name="dirichlet")
        (kept,) = tmp_path.iterdir()
        whole = kept.read_bytes()
        for damaged in (whole[:100], b"", bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]])):
            kept.write_bytes(damaged)
            assert build(cache=str(tmp_path), name="dirichlet").fingerprint == first.fingerprint
            assert len(kept.read_bytes()) == len(whole)
            assert partition_cache._read(kept, len(first.clients)) is not None

    def test_file_under_the_name_of_another_division_is_not_believed(self, tmp_path: Path) -> None:
        first = build(cache=str(tmp_path / "one"), name="dirichlet")
        build(cache=str(tmp_path / "other"), name="dirichlet", seed=1)
        (kept,), (foreign,) = ((tmp_path / name).iterdir() for name in ("one", "other"))
        kept.write_bytes(foreign.read_bytes())
        assert build(cache=str(tmp_path / "one"), name="dirichlet").fingerprint == first.fingerprint
        assert kept.read_bytes() != foreign.read_bytes()

    def test_folder_that_cannot_be_written_is_done_without(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        made = build(cache=str(tmp_path / "file" / "cache"))
        assert made.fingerprint == build(cache="off").fingerprint

    def test_address_sees_all_that_matters_and_nothing_else(self) -> None:
        labels = federation.labels_of(load_dataset(data_settings(), 0))
        base = partition_settings(name="dirichlet")
        addresses = {partition_cache.address(Task(labels, base, 8, 0))}
        for changed in (
            {"labels": dataclasses.replace(labels, train=labels.train[::-1].copy())},
            {"labels": dataclasses.replace(labels, owners_train=labels.train)},
            {"settings": partition_settings(name="dirichlet", alpha=0.2)},
            {"clients": 9},
            {"seed": 1},
            {"variants": 2},
            {"crossed": True},
        ):
            asked: dict[str, Any] = {"labels": labels, "settings": base, "clients": 8, "seed": 0, **changed}
            addresses.add(partition_cache.address(Task(**asked)))
        assert len(addresses) == 8
        elsewhere = partition_settings(name="dirichlet", cache="off")
        assert (
            partition_cache.address(Task(dataclasses.replace(labels, name="x"), elsewhere, 8, 0)) in addresses
        )

    def test_every_process_finds_the_same_address_and_content(self, tmp_path: Path) -> None:
        """Nodes share a folder: what one has divided, the others find, whatever salts their hashes."""
        code = """
from archipelago.data import build_federation
from tests.support.settings import data_settings, partition_settings
made = build_federation(data_settings(name="synthetic", samples=400),
                        partition_settings(name="mixture", mixture="random"), 5, 3)
print(made.address, made.fingerprint)
"""
        environment = {**os.environ, "ARCHIPELAGO_CACHE": str(tmp_path), "PYTHONHASHSEED": "7"}
        root = Path(__file__).parents[2]
        there = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        data = {"name": "synthetic", "samples": 400}
        here = build(5, seed=3, data=data, cache="off", name="mixture", mixture="random")
        assert there.stdout.split() == [here.address, here.fingerprint]
        assert [path.stem for path in (tmp_path / "partitions").iterdir()] == [here.address]

    def test_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ARCHIPELAGO_CACHE", "/somewhere")
        assert partition_cache.folder(partition_settings()) == Path("/somewhere/partitions")
        assert partition_cache.folder(partition_settings(cache="/else")) == Path("/else")
        assert partition_cache.folder(partition_settings(cache="off")) is None
        monkeypatch.delenv("ARCHIPELAGO_CACHE")
        assert (
            partition_cache.folder(partition_settings())
            == Path("~/.cache/archipelago/partitions").expanduser()
        )


SETTINGS: list[dict[str, Any]] = [
    {"name": "multilevel", "validation": 0.2, "holdout": 0.3},
    {"name": "dirichlet", "compat": "fedbase"},
    {"name": "mixture", "mixture": "random", "data": {"rotations": 2, "label_swaps": 2}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["name"])
def test_way_there_and_back(settings: dict[str, Any]) -> None:
    made = build(12, **settings)
    back = Federation.from_indices(load_dataset(data_settings(), 0), made.indices())
    assert back.fingerprint == made.fingerprint and back.notes == made.notes
    for name in ("groups", "levels", "sources", "variants", "copy_of"):
        one, other = getattr(made, name), getattr(back, name)
        assert (one is None) == (other is None) and (one is None or np.array_equal(one, other))
    assert [each.tolist() for each in back.holdout] == [each.tolist() for each in made.holdout]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["name"])
def test_tables_say_what_is_there(settings: dict[str, Any]) -> None:
    made = build(12, **settings)
    clients, counts, known = client_table(made), count_table(made), facts(made)
    assert clients["train"].tolist() == made.sizes.tolist()
    for client, held in enumerate(made.clients):
        for part in ("train", "validation", "test"):
            rows = (counts["client"] == client) & (counts["part"] == part)
            found = np.zeros(10, dtype=int)
            np.add.at(found, counts["label"][rows], counts["samples"][rows])
            assert found.tolist() == np.bincount(made.y[getattr(held, part)], minlength=10).tolist()
    assert counts["samples"][counts["part"] == "holdout"].sum() == sum(known["holdout"])
    assert known["published_protocol"] == (made.copy_of is not None)
    assert ("level_1" in clients) == (made.levels is not None)
    if made.sources is not None:
        assert known["sources"] == 4 and set(counts["source"]) == set(range(4))
