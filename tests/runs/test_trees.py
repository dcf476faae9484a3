"""Trees come back exactly, and a damaged file never comes back as something else."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors.numpy import load_file

from archipelago.core.errors import UserError
from archipelago.runs.trees import pack, read_arrays, read_tree, unpack, write_arrays, write_tree
from tests.support.errors import refused

_DTYPES = st.one_of(
    arrays_of.floating_dtypes(), arrays_of.integer_dtypes(), arrays_of.boolean_dtypes(),
    arrays_of.complex_number_dtypes(), arrays_of.unicode_string_dtypes(max_len=5),
)  # fmt: skip
_ARRAYS = arrays_of.arrays(_DTYPES, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.floats(width=32).map(np.float32), st.integers(-9, 9).map(np.int64), st.booleans().map(np.bool_),
)  # fmt: skip
_TREES = st.recursive(
    _SCALARS | _ARRAYS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4),
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type, dtype, shape and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@settings(max_examples=150, deadline=None)
@given(tree=_TREES)
def test_any_tree_survives_packing(tree: Any) -> None:
    assert same(unpack(*pack(tree)), tree)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=_TREES)
def test_any_tree_survives_a_file(tree: Any, tmp_path: Path) -> None:
    write_tree(tmp_path / "tree.safetensors", tree)
    assert same(read_tree(tmp_path / "tree.safetensors"), tree)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree.safetensors"]  # nothing temporary is left


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    generator = np.random.PCG64(3).state  # 128-bit integers
    tree = {
        "round": 7,
        "generator": generator,
        "clients": {0: {"model": np.arange(5, dtype=np.float32)}, 11: {"model": np.zeros(5, np.float32)}},
        "0": "a text key beside the number",
        "best": (math.inf, -math.inf, math.nan, -0.0, 0.1),
        "assignment": np.array([2, -1, 0]),
        "view": np.arange(12.0).reshape(3, 4).T[::2],
    }
    write_tree(tmp_path / "t.safetensors", tree)
    found = read_tree(tmp_path / "t.safetensors")
    assert same({**found, "view": None}, {**tree, "view": None})
    np.testing.assert_array_equal(found["view"], tree["view"])
    found["clients"][0]["model"][:] = 1  # writable


def test_file_is_plain_safetensors_with_readable_names(tmp_path: Path) -> None:
    write_tree(tmp_path / "t.safetensors", {"clients": {3: {"model": np.ones(2)}}, "a": [np.zeros(1)]})
    assert set(load_file(tmp_path / "t.safetensors")) == {"clients/3/model", "a/0"}


def test_names_that_look_alike_stay_apart(tmp_path: Path) -> None:
    tree = {"a": {"b": np.array([1])}, "a/b": np.array([2]), 1: np.array([3]), "1": np.array([4]),
            "__metadata__": np.array([5]), "a/b#1": np.array([6])}  # fmt: skip
    write_tree(tmp_path / "t.safetensors", tree)
    assert same(read_tree(tmp_path / "t.safetensors"), tree)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (np.array([object()]), "of dtype object"),
        (np.zeros(2, dtype=[("a", "f4")]), "of dtype"),
        (lambda: None, "function"),
        (b"bytes", "builtins.bytes"),
        (math, "module"),
    ],
)
def test_what_cannot_come_back_is_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named) as caught:
        pack({"state": [0, value]})
    assert "'state/1'" in str(caught.value)


def test_subclasses_and_numpy_keys_are_refused() -> None:
    class Own(dict):  # type: ignore[type-arg]
        pass

    with pytest.raises(TypeError, match="Own"):
        pack(Own())
    with pytest.raises(TypeError, match="NumPy scalar"):
        pack({np.int64(3): 1})


def test_every_truncation_and_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tree = {"x": np.arange(6, dtype=np.float32), "n": 12345, "s": np.float64(0.5)}
    write_tree(path, tree)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            read_tree(path)
    padding = whole.index(b"}}") if b"}}" in whole else 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x04
        path.write_bytes(bytes(damaged))
        try:
            found = read_tree(path)
        except UserError:
            continue
        # The only harmless place is the padding after the header.
        assert position > padding
        assert same(found, tree)


def test_foreign_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with refused("damaged", says=("t.safetensors", "exist")):
        read_tree(path)
    path.write_text("hello, this is no tensor at all")
    with refused("damaged", says=("t.safetensors", "not a safetensors file")):
        read_tree(path)
    write_arrays(path, {"w": np.ones(3, np.float32)}, {})
    with refused("damaged", says="'archipelago-tree-1'"):
        read_tree(path)
    assert same(read_arrays(path), {"w": np.ones(3, np.float32)})


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tree(path, {"a": 1})
    with pytest.raises(TypeError):
        write_tree(path, {"a": object()})
    with pytest.raises(TypeError, match="cannot hold"):
        write_arrays(path, {"a": np.array(["text"])}, {})
    assert read_tree(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]
