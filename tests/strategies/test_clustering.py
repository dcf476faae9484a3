"""K-means that repeats itself, and cluster ids that keep their meaning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.core.randomness import generator
from archipelago.strategies.clustering import kmeans, match_labels


def test_weights_decide_where_the_border_runs():
    points = np.array([[0.0], [1.0], [2.1]])
    # Unweighted {0, 1} | {2.1} costs 0.5 and {0} | {1, 2.1} costs 0.605; with weights 10, 10, 1 they cost 5 and 1.1.
    equal, weighted = (
        kmeans(points, 2, seed=0),
        kmeans(points, 2, seed=0, weights=np.array([10.0, 10.0, 1.0])),
    )
    assert equal.labels[0] == equal.labels[1] != equal.labels[2]
    assert weighted.labels[0] != weighted.labels[1] == weighted.labels[2]
    assert equal.objective == pytest.approx(0.5 / 3)
    assert weighted.objective == pytest.approx((10 * 0.1**2 + 1.0**2) / 21)  # centre (10 + 2.1) / 11 = 1.1


def test_same_seed_gives_the_same_labels_and_fewer_points_than_clusters_are_reported():
    points = generator(0, "points").standard_normal((40, 5))
    first, again = kmeans(points, 4, seed=3), kmeans(points, 4, seed=3)
    assert np.array_equal(first.labels, again.labels) and first.objective == again.objective
    few = kmeans(np.array([[1.0], [1.0], [2.0]]), 3, seed=0)
    assert few.distinct == 2 and set(few.labels) == {0, 1}
    warm = kmeans(points, 4, seed=9, centres=first.centres)
    assert np.array_equal(warm.labels, first.labels)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), clusters=st.integers(1, 6))
def test_renamed_clustering_is_matched_back(seed, clusters):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(clusters), rng.integers(0, clusters, 20)])
    shuffled = rng.permutation(clusters)[labels]
    assert np.array_equal(match_labels(labels, shuffled, clusters)[shuffled], labels)


def test_unknown_clients_do_not_count_and_nothing_known_changes_nothing():
    assert match_labels(np.full(3, -1), np.array([2, 0, 1]), 3).tolist() == [0, 1, 2]
    assert match_labels(np.array([-1, 1, 1]), np.array([0, 0, 1]), 2).tolist() == [0, 1]
