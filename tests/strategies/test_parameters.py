"""Parameter arithmetic: hand-computed cases, and sums that no order or split can change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.strategies import parameters
from archipelago.strategies.parameters import (
    ModelEntry,
    ModelSpec,
    add_sums,
    fixed_point_exponents,
    from_fixed_point,
    normalised_rows,
    one_hot,
    partial_sums,
    used_rows,
    weighted_sums,
)


def test_weighted_mean_of_two_models_is_what_a_pencil_gives():
    models = [np.float32([1.0, -2.0, 0.5]), np.float32([3.0, 2.0, 0.5])]
    mean = weighted_sums(models, normalised_rows([[1, 3]]))
    # (1 + 3*3)/4, (-2 + 3*2)/4, 0.5
    assert mean.tolist() == [[2.5, 1.0, 0.5]]


def test_one_client_alone_is_returned_bit_by_bit():
    rng = np.random.default_rng(0)
    value = (rng.standard_normal(1000) * 10.0 ** rng.integers(-6, 3, 1000)).astype(np.float32)
    assert np.array_equal(weighted_sums([value], [[1.0]])[0], value)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), clients=st.integers(1, 12), cuts=st.integers(1, 5))
def test_partial_sums_have_the_same_bits_for_every_split_and_order(seed, clients, cuts):
    rng = np.random.default_rng(seed)
    values = [
        (rng.standard_normal(17) * 10.0 ** rng.integers(-4, 5)).astype(np.float32) for _ in range(clients)
    ]
    weights = normalised_rows(rng.random((3, clients)) * (rng.random((3, clients)) < 0.7))
    exponents = fixed_point_exponents(weights, [float(np.abs(v).max()) for v in values])
    whole = partial_sums(values, weights, exponents, 17)
    order = rng.permutation(clients)
    split = np.zeros_like(whole)
    for part in np.array_split(order, cuts):
        split += partial_sums([values[j] for j in part], weights[:, part], exponents, 17)
    assert np.array_equal(whole, split)
    exact = weights @ np.stack(values).astype(np.float64)
    assert np.allclose(from_fixed_point(whole, exponents), exact, rtol=1e-6, atol=1e-12)


def test_sums_cannot_overflow_and_refuse_what_is_not_finite():
    values = [np.full(4, 3e38, np.float32)] * 50
    assert np.allclose(weighted_sums(values, np.full((1, 50), 1 / 50)), 3e38)
    with pytest.raises(OverflowError, match="finite"):
        fixed_point_exponents(np.array([[1.0]]), [np.inf])


def test_empty_row_stays_zero_and_minus_one_feeds_nobody():
    matrix = one_hot([0, -1, 0], 2, [1.0, 5.0, 3.0])
    assert matrix.tolist() == [[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]]
    assert normalised_rows(matrix)[1].tolist() == [0.0, 0.0, 0.0]


def test_spec_knows_its_parts_and_survives_json():
    spec = ModelSpec(
        (
            ModelEntry("conv.weight", (2, 2), 0, 4, "parameter", "backbone"),
            ModelEntry("fc.weight", (1, 2), 4, 6, "parameter", "head", classifier=True),
            ModelEntry("fc.bias", (1,), 6, 7, "parameter", "head"),
            ModelEntry("bn.running_mean", (2,), 7, 9, "buffer", "backbone"),
        )
    )
    assert (spec.size, spec.parameters) == (9, 7)
    assert spec.columns("backbone").tolist() == [0, 1, 2, 3]
    assert spec.columns("head").tolist() == [4, 5, 6]
    assert spec.columns("classifier").tolist() == [4, 5]
    assert spec.columns("buffers").tolist() == [7, 8]
    assert ModelSpec.from_json(spec.to_json()) == spec
    with pytest.raises(ValueError, match="expected a part"):
        spec.columns("tail")


def test_huge_values_of_one_cluster_cost_the_others_nothing():
    values = [np.float32([1.5, -2.0]), np.float32([3e25, 0.0])]
    assert weighted_sums(values, np.eye(2))[0].tolist() == [1.5, -2.0]


def in_one_piece(values, weights, exponents):
    """What `partial_sums` means, without chunks: every product rounded once, then integers."""
    totals = np.zeros((len(weights), len(values[0])), np.int64)
    for row, column in zip(*np.nonzero(weights), strict=True):
        product = values[column].astype(np.float64) * (weights[row, column] * 2.0 ** exponents[row])
        totals[row] += np.rint(product).astype(np.int64)
    return totals


@pytest.mark.parametrize("size", [1, 6, 7, 8, 50])
def test_partial_sums_in_chunks_have_the_bits_of_one_piece(size, monkeypatch):
    monkeypatch.setattr(parameters, "_CHUNK", 7)
    rng = np.random.default_rng(size)
    values = [(rng.standard_normal(size) * 10.0 ** rng.integers(-4, 5)).astype(np.float32) for _ in range(5)]
    weights = normalised_rows(rng.random((3, 5)) * (rng.random((3, 5)) < 0.6))
    exponents = fixed_point_exponents(weights, [float(np.abs(v).max()) for v in values])
    assert np.array_equal(
        partial_sums(values, weights, exponents, size), in_one_piece(values, weights, exponents)
    )


def test_partial_sums_of_used_rows_add_up_to_all_rows():
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(9).astype(np.float32) for _ in range(6)]
    weights = normalised_rows(one_hot([4, 1, 1, 0, 4, 4], 5, np.arange(1.0, 7.0)))
    exponents = fixed_point_exponents(weights, np.full(6, 10.0))
    parts = []
    for group in ([0], [1, 2], [3, 4], [5]):
        rows = used_rows(weights[:, group])
        found = partial_sums([values[j] for j in group], weights[rows][:, group], exponents[rows], 9)
        parts.append((rows, found))
    assert [rows.tolist() for rows, _ in parts] == [[4], [1], [0, 4], [4]]
    whole = partial_sums(values, weights, exponents, 9)
    before = [sums.copy() for _, sums in parts]
    for order in ([0, 1, 2, 3], [2, 3, 1, 0]):
        rows, totals = add_sums([parts[j] for j in order])
        assert rows.tolist() == [0, 1, 4] and np.array_equal(totals, whole[rows])
    pairs = add_sums([add_sums(parts[:2]), add_sums(parts[2:])])
    assert np.array_equal(pairs[1], whole[[0, 1, 4]])
    # Read from the object store, where nobody may write.
    assert all(np.array_equal(sums, old) for (_, sums), old in zip(parts, before, strict=True))


@pytest.mark.parametrize("exponent", [-960, -40, 0, 61, 180, 1000])
def test_from_fixed_point_is_exactly_ldexp(exponent):
    rng = np.random.default_rng(5)
    totals = rng.integers(-(2**62), 2**62, (2, 1000)) >> rng.integers(0, 62, (2, 1000))
    exponents = np.array([exponent, 30])
    with np.errstate(over="ignore", under="ignore"):
        expected = np.ldexp(totals.astype(np.float64), -exponents[:, None]).astype(np.float32)
        found = from_fixed_point(totals, exponents)
    assert found.tobytes() == expected.tobytes()
