"""Nested Python values to and from one safetensors file: exact, checksummed, and never a pickle.

A tree is any nesting of dict, list, tuple, str, int, float, bool, None, NumPy arrays and NumPy scalars.
Arrays become tensors of the file; everything else is JSON in its metadata. Reading such a file cannot run
code, and a file that is cut short or has one flipped bit is refused with a sentence.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.files import whole_file

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

_FORMAT = "archipelago-tree-1"

# What safetensors itself can hold; any other plain dtype is stored as its bytes, with its name beside it.
_DTYPES = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
    "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL", "<c8": "C64",
}  # fmt: skip


def pack(tree: Any) -> tuple[Arrays, Any]:
    """Split a tree into named arrays and a structure that JSON can hold.

    >>> arrays, structure = pack({"step": 3, "models": [np.zeros(2), (None, True)]})
    >>> list(arrays), structure["dict"][0]
    (['models/0'], ['step', 3])
    """
    arrays: Arrays = {}
    return arrays, _encode(tree, (), arrays)


def unpack(arrays: Mapping[str, Array], structure: Any) -> Any:
    """The tree that `pack` was given: equal in values, types, dtypes and shapes.

    >>> unpack(*pack({1: (2.5, "x"), "1": [np.float32(0.1)]}))
    {1: (2.5, 'x'), '1': [np.float32(0.1)]}
    """
    if isinstance(structure, list):
        return [unpack(arrays, item) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if "dict" in structure:
        return {unpack(arrays, key): unpack(arrays, value) for key, value in structure["dict"]}
    if "tuple" in structure:
        return tuple(unpack(arrays, item) for item in structure["tuple"])
    if "float" in structure:
        return struct.unpack(">d", bytes.fromhex(structure["float"]))[0]
    if "scalar" in structure:
        dtype, value = structure["scalar"]
        return _from_bytes(bytes.fromhex(value), dtype, [])[()]
    array = arrays[structure["array"]]
    if "dtype" in structure:
        return _from_bytes(array.tobytes(), structure["dtype"], structure["shape"])
    return array


def _encode(value: Any, path: tuple[str, ...], arrays: Arrays) -> Any:
    kind = type(value)  # exact types: a subclass would not come back as itself
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is list:
        return [_encode(item, (*path, str(i)), arrays) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_encode(item, (*path, str(i)), arrays) for i, item in enumerate(value)]}
    if kind is dict:
        return {"dict": [[_key(key, path), _encode(item, (*path, str(key)), arrays)]
                         for key, item in value.items()]}  # fmt: skip
    if isinstance(value, np.generic) and not _refused(value.dtype):
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    if kind is np.ndarray and not _refused(value.dtype):
        return _encode_array(value, path, arrays)
    what = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.ndarray | np.generic):
        what += f" of dtype {value.dtype}"
    raise TypeError(
        f"{_where(path)} is a {what}, which a tree cannot hold; expected dict, list, tuple, str, int, float, "
        "bool, None, a NumPy array or a NumPy scalar (convert it first)."
    )


def _encode_array(array: Array, path: tuple[str, ...], arrays: Arrays) -> dict[str, Any]:
    base = name = "/".join(path).encode("ascii", "backslashreplace").decode() or "tree"
    copies = 0
    while name in arrays or name == "__metadata__":  # {"a": {"b": x}, "a/b": y}, or the keys 1 and "1"
        copies += 1
        name = f"{base}#{copies}"
    if array.dtype.str in _DTYPES:
        arrays[name] = array
        return {"array": name}
    arrays[name] = np.frombuffer(array.tobytes(), np.uint8)
    return {"array": name, "dtype": array.dtype.str, "shape": list(array.shape)}


def _key(key: Any, path: tuple[str, ...]) -> Any:
    if isinstance(key, np.generic):  # np.int64(3) == 3: allowing both would let two keys become one
        raise TypeError(f"A key of {_where(path)} is a NumPy scalar ({key!r}); expected a plain str or int.")
    return _encode(key, (*path, "key"), {})


def _from_bytes(data: bytes, dtype: str, shape: list[int]) -> Array:
    return np.ndarray(shape, np.dtype(dtype), buffer=bytearray(data)).copy()  # a bytearray: writable


def _refused(dtype: np.dtype[Any]) -> bool:
    return dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or dtype.kind == "V"


def _where(path: tuple[str, ...]) -> str:
    return f"'{'/'.join(path)}'" if path else "The tree"


def write_arrays(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file, all or nothing, without a second copy of the arrays in memory."""
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    # Widest items first keeps every tensor aligned for readers that map the file.
    order = sorted(whole, key=lambda name: -whole[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        array = whole[name]
        if array.dtype.str not in _DTYPES:
            raise TypeError(f"'{name}' has dtype {array.dtype}, which a safetensors file cannot hold.")
        end = offset + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.str], "shape": list(array.shape),
                        "data_offsets": [offset, end]}  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in order:
            file.write(_bytes(whole[name]))


def read_arrays(path: Path) -> Arrays:
    """The arrays of a safetensors file; a damaged or foreign file is a `UserError`."""
    return read_arrays_and_metadata(path)[0]


def read_arrays_and_metadata(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a safetensors file and the texts in its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist.") from error
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged or is not a safetensors file ({_first_line(error)}).") from error


def write_tree(path: Path, tree: Any) -> None:
    """Write a tree to one `.safetensors` file: temporary name, fsync, rename."""
    arrays, structure = pack(tree)
    text = json.dumps(structure, separators=(",", ":"), allow_nan=False)
    metadata = {"format": _FORMAT, "structure": text, "checksum": _checksum(arrays, text)}
    write_arrays(path, arrays, metadata)


def read_tree(path: Path) -> Any:
    """The tree that `write_tree` wrote; a file that is cut short, damaged or foreign is a `UserError`."""
    arrays, metadata = read_arrays_and_metadata(path)
    if metadata.get("format") != _FORMAT:
        found = metadata.get("format", "no format at all")
        raise UserError(f"{path} was not written by this platform: expected '{_FORMAT}', found {found}.")
    text = metadata.get("structure", "")
    if metadata.get("checksum") != _checksum(arrays, text):
        raise UserError(f"{path} is damaged: its content does not match its checksum.")
    return unpack(arrays, json.loads(text))


def _checksum(arrays: Mapping[str, Array], structure: str) -> str:
    value = zlib.crc32(structure.encode())
    for name in sorted(arrays):
        array = arrays[name]
        value = zlib.crc32(f"{name} {array.dtype.str} {array.shape} ".encode(), value)
        value = zlib.crc32(_bytes(np.asarray(array, order="C")), value)
    return f"{value:08x}"


def _bytes(array: Array) -> memoryview:
    """The bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
