"""FedSoft's mixtures and natural owners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.core.randomness import generator
from archipelago.data import Labels
from archipelago.data.partitions_mixture import mixture_weights
from tests.support.errors import refused
from tests.support.partitions import checked, divide, table


def of_sources(train: int, test: int, sources: int, classes: int | None = 4) -> Labels:
    """Samples of several sources, source by source, classes in turn."""
    parts = [np.repeat(np.arange(sources), size) for size in (train, test)]
    ys = [np.arange(len(part)) % (classes or 1) for part in parts]
    if classes is None:
        ys = [y.astype(np.float32) for y in ys]
    return Labels("made", *ys, classes, *parts)


def by_source(sources: Any, parts: tuple[Any, ...], count: int) -> Any:
    return np.stack([np.bincount(sources[part], minlength=count) for part in parts])


class TestWeights:
    def test_ratios_move_on_from_block_to_block(self) -> None:
        weights = mixture_weights("70:20:10", 6, 3, generator(0, "test"))
        assert np.allclose(weights[[0, 2, 4]], [[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]])
        assert np.array_equal(weights[0::2], weights[1::2])

    @checked
    @given(st.integers(1, 9), st.integers(2, 8), st.integers(0, 2**31))
    def test_random_weights_are_shares(self, clients: int, sources: int, seed: int) -> None:
        weights = mixture_weights("random", clients, sources, generator(seed, "test"))
        assert weights.shape == (clients, sources)
        assert (weights >= 0).all() and np.allclose(weights.sum(axis=1), 1)

    def test_two_cuts_are_uniform_points(self) -> None:
        # The first of three parts between sorted uniform points is less than x with probability 1 - (1 - x)^2.
        first = mixture_weights("random", 20_000, 3, generator(0, "test"))[:, 0]
        assert (first < 0.5).mean() == pytest.approx(0.75, abs=0.01)

    @pytest.mark.parametrize("wrong", ["10", "10:x", "1:2:3", "-1:2", "0:0", "nan:1", "even"])
    def test_what_is_no_mixture_is_a_sentence(self, wrong: str) -> None:
        with refused("wrong-form", setting="partition.mixture", says="10:90"):
            mixture_weights(wrong, 4, 2, generator(0, "test"))
        with refused("incompatible", sources=3, says="partition.mixture=random"):
            mixture_weights("linear", 4, 3, generator(0, "test"))


class TestMixture:
    @pytest.mark.parametrize(("pattern", "first"), [("10:90", [10, 90]), ("30:70", [30, 70])])
    def test_ratios_by_hand(self, pattern: str, first: list[int]) -> None:
        # 1,000 samples of each source for 20 clients whose needs cancel out: 100 each.
        labels = of_sources(1000, 100, 2)
        made = divide("mixture", labels, 20, mixture=pattern)
        held = by_source(labels.sources_train, made.train, 2)
        assert held[:10].tolist() == [first] * 10
        assert held[10:].tolist() == [first[::-1]] * 10
        assert made.groups is not None
        assert made.groups.tolist() == [1] * 10 + [0] * 10  # the source of largest share
        tested = by_source(labels.sources_test, made.test, 2)
        assert (
            tested.tolist()
            == [[part // 10 for part in first]] * 10 + [[part // 10 for part in first[::-1]]] * 10
        )

    def test_linear_by_hand(self) -> None:
        labels = of_sources(200, 40, 2)
        made = divide("mixture", labels, 4, mixture="linear")
        # Shares 1/8, 3/8, 5/8 and 7/8. Of 100 samples each, all halves would be the first source's, which has not
        # got 202; of 99 they are 12.375, 37.125, 61.875 and 86.625.
        held = by_source(labels.sources_train, made.train, 2)
        assert held.tolist() == [[12, 87], [37, 62], [62, 37], [87, 12]]

    @checked
    @given(
        st.integers(0, 2**31), st.integers(2, 6), st.integers(2, 12), st.sampled_from(["random", "ratio"]),
        st.sampled_from([None, 5]), st.sampled_from([[], [10, 30]]),
    )  # fmt: skip
    def test_what_every_mixture_keeps(
        self, seed: int, sources: int, clients: int, pattern: str, classes: int | None, sizes: list[int]
    ) -> None:
        labels = of_sources(400, 60, sources, classes)
        ratio = ":".join(map(str, range(1, sources + 1))) if pattern == "ratio" else pattern
        made = divide("mixture", labels, clients, seed, mixture=ratio, size_range=sizes, min_size=1)
        for parts in (made.train, made.test):
            together = np.concatenate(parts)
            assert len(np.unique(together)) == len(together)
        held = by_source(labels.sources_train, made.train, sources)
        size = held.sum(axis=1)
        assert (size >= 10).all() and (size <= 30).all() if sizes else len(set(size)) == 1
        weights = mixture_weights(ratio, clients, sources, generator(seed, "test"))
        assert np.abs(held - size[:, None] * weights).max() < 1  # largest remainder
        assert made.groups is not None and np.array_equal(made.groups, weights.argmax(axis=1))
        assert min(len(part) for part in made.test) >= 1
        tested = by_source(labels.sources_test, made.test, sources)
        assert not ((tested > 0) & (held == 0)).any()
        if classes is not None:
            # Label supports: never tested on what was not trained on, and on all of it where there are samples enough.
            train, test = (
                table(*part, classes) > 0 for part in ((labels.train, made.train), (labels.test, made.test))
            )
            assert not (test & ~train).any()
            plenty = np.array([len(part) for part in made.test]) >= 2 * sources * classes
            assert (test == train)[:, plenty].all()
        again = divide("mixture", labels, clients, seed, mixture=ratio, size_range=sizes, min_size=1)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(made.train, again.train, strict=True))

    def test_sources_are_drawn_class_uniformly(self) -> None:
        # 300, 60 and 40 samples of three classes; 120 are wanted of each source: 40 of each class.
        y = np.tile(np.repeat([0, 1, 2], [300, 60, 40]), 2)
        sources = np.repeat([0, 1], 400)
        labels = Labels("uneven", y, y, 3, sources, sources)
        made = divide("mixture", labels, 4, mixture="50:50", size_range=[60, 60])
        assert np.bincount(y[np.concatenate(made.train)]).tolist() == [80, 80, 80]

    def test_nobody_is_tested_on_a_class_it_never_saw(self) -> None:
        # 200 clients with six samples each of ten classes: most never see four of them.
        labels = of_sources(1200, 400, 2, classes=10)
        made = divide("mixture", labels, 200, size_range=[6, 6], mixture="30:70")
        train, test = (table(*part, 10) for part in ((labels.train, made.train), (labels.test, made.test)))
        assert (train > 0).sum(axis=0).mean() < 6 and not ((test > 0) & (train == 0)).any()
        assert test.sum() == 800 and test.sum(axis=1).tolist() == [80] * 10

    def test_mistakes_are_sentences(self) -> None:
        plain = Labels("plain", np.arange(100) % 4, np.arange(50) % 4, 4)
        with refused(
            "needs-groups", setting="partition=mixture", says=("data=synthetic", "emnist_cases", "data.rot")
        ):
            divide("mixture", plain, 4)
        labels = of_sources(100, 50, 2)
        with refused("too-few-samples", clients=4, source=0, says=("90", "180", "100")):
            divide("mixture", labels, 4, size_range=[90, 90])
        for wrong in ([5], [9, 5], [1, 2, 3]):
            with refused("wrong-form", setting="partition.size_range"):
                divide("mixture", labels, 4, size_range=wrong)


class TestNatural:
    def labels(self, share: float | None = None) -> Labels:
        """Owners 0..5 with 5, 10, 15, 20, 25 and 30 training samples and 1, 2, 3, 0, 5, 6 test samples."""
        train = np.random.default_rng(0).permutation(np.repeat(np.arange(6), [5, 10, 15, 20, 25, 30]))
        test = np.repeat(np.arange(6), [1, 2, 3, 0, 5, 6])
        if share is not None:
            owners = np.concatenate([train, test])
            y = np.arange(len(owners)) % 3
            return Labels("written", y, y, 3, None, None, owners, owners, share)
        return Labels("written", np.arange(105) % 3, np.arange(17) % 3, 3, None, None, train, test)

    @checked
    @given(st.data(), st.integers(0, 2**31))
    def test_what_every_natural_partition_keeps(self, data: st.DataObject, seed: int) -> None:
        owners = data.draw(st.integers(2, 9))
        parts = [np.array(data.draw(st.lists(st.integers(0, owners - 1), min_size=20, max_size=60)))
                 for _ in range(2)]  # fmt: skip
        labels = Labels("written", *(np.arange(len(part)) % 3 for part in parts), 3, None, None, *parts)
        sizes = [np.bincount(part, minlength=owners) for part in parts]
        fit = np.flatnonzero((sizes[0] >= 2) & (sizes[1] > 0))
        if len(fit) < 2:
            return
        clients = data.draw(st.integers(1, len(fit)))
        made, again = (divide("natural", labels, clients, seed, min_size=2) for _ in range(2))
        whose = [int(parts[0][held[0]]) for held in made.train]
        assert len(set(whose)) == clients and set(whose) <= set(fit.tolist())
        for owner, train, test, same in zip(whose, made.train, made.test, again.train, strict=True):
            assert np.array_equal(train, np.flatnonzero(parts[0] == owner))
            assert np.array_equal(test, np.flatnonzero(parts[1] == owner))
            assert train.tobytes() == same.tobytes()

    def test_client_is_an_owner_with_all_of_its_samples(self) -> None:
        labels = self.labels()
        made = divide("natural", labels, 5)  # owner 3 has nothing to be tested on
        for client, owner in enumerate([0, 1, 2, 4, 5]):
            assert np.array_equal(made.train[client], np.flatnonzero(labels.owners_train == owner))
            assert np.array_equal(made.test[client], np.flatnonzero(labels.owners_test == owner))
        assert made.notes == ("20 samples of owners that are no clients are not used",)

    def test_owners_are_drawn_at_random(self) -> None:
        labels = self.labels()
        drawn = {tuple(len(part) for part in divide("natural", labels, 2, seed).train) for seed in range(30)}
        assert len(drawn) >= 5
        for seed in range(9):
            assert min(len(part) for part in divide("natural", labels, 2, seed, min_size=6).train) >= 6

    def test_pooled_samples_of_an_owner_are_split_anew(self) -> None:
        labels = self.labels(share=0.25)
        made = divide("natural", labels, 6)
        for owner in range(6):
            held = np.flatnonzero(labels.owners_train == owner)
            assert np.array_equal(np.sort(np.concatenate([made.train[owner], made.test[owner]])), held)
            assert len(made.test[owner]) == round(0.25 * len(held))

    def test_mistakes_are_sentences(self) -> None:
        with refused("too-few-owners", clients=6, owners=6):
            divide("natural", self.labels(), 6)
        with refused("too-few-owners", clients=1, owners=6, says="partition.min_size"):
            divide("natural", self.labels(), 1, min_size=31)
        with refused("needs-owners", name="plain"):
            divide("natural", Labels("plain", np.arange(40) % 2, np.arange(20) % 2, 2), 2)
