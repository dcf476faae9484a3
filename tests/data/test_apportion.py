from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.data.apportion import apportion, apportion_at_least, apportion_groups, apportion_rows

checked = settings(deadline=None, derandomize=True, database=None, max_examples=200)
weights = st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any)


def test_largest_remainder_by_hand() -> None:
    # 21 seats for 43, 31, 16, 10 of 100: quotas 9.03, 6.51, 3.36, 2.10; rounded down 9, 6, 3, 2; the one
    # left goes to the largest remainder, .51.
    assert apportion(21, np.array([43, 31, 16, 10])).tolist() == [9, 7, 3, 2]
    # The same as shares that do not sum to a power of two.
    assert apportion(21, np.array([0.43, 0.31, 0.16, 0.10])).tolist() == [9, 7, 3, 2]


def test_shares_that_are_whole_numbers_of_samples_survive_rounding_errors() -> None:
    # 0.1 + 0.2 is not 0.3 in floating point; the parts must still be 1, 2 and 7.
    assert apportion(10, np.array([0.1, 0.2, 0.7])).tolist() == [1, 2, 7]
    thirds = np.array([1 / 3, 1 / 3, 1 / 3, 0.0])
    assert apportion(3, thirds).tolist() == [1, 1, 1, 0]


@checked
@given(st.integers(0, 5000), weights, st.booleans())
def test_parts_are_quotas_rounded_down_or_up_and_sum_up(
    total: int, given: list[int], as_shares: bool
) -> None:
    by = np.array(given)
    parts = apportion(total, by / by.sum() if as_shares else by)
    quotas = total * by / by.sum()
    assert parts.sum() == total
    assert (np.abs(parts - quotas) < 1 + 1e-9).all()
    assert (parts[by == 0] == 0).all()


@checked
@given(st.integers(0, 300), weights, st.data())
def test_floors_are_kept_and_nothing_is_lost(total: int, given: list[int], data: st.DataObject) -> None:
    by = np.array(given)
    floor = np.array([data.draw(st.integers(0, 3)) if weight else 0 for weight in given])
    if floor.sum() > total:
        with pytest.raises(ValueError, match="floors sum to"):
            apportion_at_least(total, by, floor)
        return
    parts = apportion_at_least(total, by, floor)
    assert parts.sum() == total
    assert (parts >= floor).all()
    assert (parts[by == 0] == 0).all()
    if (apportion(total, by) >= floor).all():
        assert parts.tolist() == apportion(total, by).tolist()


def test_ties_even_out_the_columns() -> None:
    counts = apportion_rows(np.array([7, 7, 7]), np.full((3, 3), 1 / 3))
    assert counts.sum(axis=0).tolist() == [7, 7, 7]


def test_total_without_any_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot split 3"):
        apportion(3, np.zeros(2))


@checked
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
        min_size=1,
        max_size=6,
    )
)
def test_many_at_once_are_as_one_after_the_other(problems: list[tuple[int, list[int]]]) -> None:
    problems = [(total if any(weights) else 0, weights) for total, weights in problems]
    totals = np.array([total for total, _ in problems])
    groups = np.repeat(np.arange(len(problems)), [len(weights) for _, weights in problems])
    together = apportion_groups(totals, np.concatenate([weights for _, weights in problems]), groups)
    alone = [apportion(total, np.array(weights)) for total, weights in problems]
    assert together.tolist() == np.concatenate(alone).tolist()


def test_nothing_cannot_be_divided_by_nothing() -> None:
    with pytest.raises(ValueError, match="weights that are all zero"):
        apportion_groups(np.array([1]), np.array([0, 0]), np.array([0, 0]))
