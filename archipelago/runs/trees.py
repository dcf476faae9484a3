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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.files import whole_file

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

_FORMAT = "archipelago-tree-1"
_ENTRIES_FORMAT = "archipelago-tree-2"  # a dictionary whose entries carry a checksum each

# What safetensors itself can hold; any other plain dtype is stored as its bytes, with its name beside it.
_DTYPES = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
    "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL", "<c8": "C64",
}  # fmt: skip


class DamagedFile(UserError):
    """A file that is not there, is cut short, has other bits than were written, or was written by somebody else."""

    kind = "damaged"


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
    header = _header({name: (whole[name].dtype, whole[name].shape) for name in order}, metadata)
    with whole_file(path) as file:
        file.write(header)
        for name in order:
            file.write(_bytes(whole[name]))


def _header(
    layout: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """How a safetensors file begins that holds arrays of these dtypes and shapes, one behind the other."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in layout.items():
        if dtype.str not in _DTYPES:
            raise TypeError(f"'{name}' has dtype {dtype}, which a safetensors file cannot hold.")
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype.str], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Rows:
    """A table that is too large to be held: (shape, dtype), and its rows one after the other, in any order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: Callable[[], Iterator[tuple[int, Array]]]  # (number of the row, its values)


def write_rows(path: Path, name: str, table: Rows, metadata: Mapping[str, str]) -> None:
    """What `write_arrays` writes for one array, without ever holding more than a row of it."""
    width = int(np.prod(table.shape[1:])) * table.dtype.itemsize
    header = _header({name: (table.dtype, table.shape)}, metadata)
    with whole_file(path) as file:
        file.write(header)
        file.truncate(len(header) + table.shape[0] * width)
        for row, values in table.rows():
            file.seek(len(header) + row * width)
            file.write(_bytes(np.asarray(values, table.dtype, order="C")))


def read_arrays(path: Path) -> Arrays:
    """The arrays of a safetensors file; a damaged or foreign file is a `UserError`."""
    return read_arrays_and_metadata(path)[0]


def read_arrays_and_metadata(
    path: Path, choose: Callable[[dict[str, str]], Iterable[str]] | None = None
) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a safetensors file and the texts in its header.

    `choose` names the arrays to read, given those texts; the others are not touched.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            names = file.keys() if choose is None else choose(metadata)
            return {name: file.get_tensor(name) for name in names}, metadata
    except FileNotFoundError as error:
        raise DamagedFile(f"{path} does not exist.") from error
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise DamagedFile(
            f"{path} is damaged or is not a safetensors file ({_first_line(error)})."
        ) from error


def write_tree(path: Path, tree: Any) -> str:
    """Write a tree to one `.safetensors` file: temporary name, fsync, rename. Returns what `read_checksum` finds."""
    arrays, structure = pack(tree)
    text = json.dumps(structure, separators=(",", ":"), allow_nan=False)
    metadata = {"format": _FORMAT, "structure": text, "checksum": _checksum(arrays, text)}
    write_arrays(path, arrays, metadata)
    return _header_checksum(metadata)


def read_checksum(path: Path) -> str:
    """The checksum of a file's header, without reading an array."""
    return _header_checksum(read_arrays_and_metadata(path, lambda _: ())[1])


def read_tree(path: Path) -> Any:
    """The tree that `write_tree` or `write_entries` wrote; a file that is cut short, damaged or foreign is a
    `DamagedFile`.
    """
    arrays, metadata = read_arrays_and_metadata(path)
    if metadata.get("format") == _ENTRIES_FORMAT:
        return dict(_entries(path, arrays, metadata, None))
    _check_format(path, metadata)
    text = metadata.get("structure", "")
    if metadata.get("checksum") != _checksum(arrays, text):
        raise DamagedFile(f"{path} is damaged: its content does not match its checksum.")
    return unpack(arrays, json.loads(text))


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") not in (_FORMAT, _ENTRIES_FORMAT):
        found = metadata.get("format", "no format at all")
        raise DamagedFile(f"{path} was not written by this platform: expected '{_FORMAT}', found {found}.")


def write_entries(path: Path, tree: Mapping[int, Any]) -> str:
    """Write a dictionary so that any of its entries can be read, and checked, without the others.

    Returns the checksum of all of them together: what `read_keys` finds in the file.
    """
    arrays, structure = pack(dict(tree))
    entries = [json.dumps(entry, separators=(",", ":"), allow_nan=False) for entry in structure["dict"]]
    checksums = [
        _checksum({name: arrays[name] for name in _names(entry[1])}, text)
        for entry, text in zip(structure["dict"], entries, strict=True)
    ]
    metadata = {
        "format": _ENTRIES_FORMAT,
        "structure": f'{{"dict":[{",".join(entries)}]}}',
        "checksums": " ".join(checksums),
    }
    write_arrays(path, arrays, metadata)
    return _header_checksum(metadata)


def read_entries(path: Path, keys: Iterable[int] | None = None) -> dict[int, Any]:
    """Some entries of a dictionary that `write_entries` wrote (or `write_tree`: that is read as a whole)."""
    wanted = None if keys is None else set(keys)

    def choose(metadata: dict[str, str]) -> Iterable[str]:
        _check_format(path, metadata)
        structure = _structure(path, metadata)
        alone = metadata["format"] == _ENTRIES_FORMAT  # entries can be checked for themselves
        return [
            name for key, value in structure["dict"] if wanted is None or key in wanted or not alone
            for name in _names(value)
        ]  # fmt: skip

    arrays, metadata = read_arrays_and_metadata(path, choose)
    if metadata["format"] == _ENTRIES_FORMAT:
        return dict(_entries(path, arrays, metadata, wanted))
    if metadata.get("checksum") != _checksum(arrays, metadata["structure"]):
        raise DamagedFile(f"{path} is damaged: its content does not match its checksum.")
    whole: dict[int, Any] = unpack(arrays, _structure(path, metadata))
    return {key: value for key, value in whole.items() if wanted is None or key in wanted}


def read_keys(path: Path) -> tuple[list[int], str]:
    """(the keys of a dictionary in a file, the checksum of its header), without reading an array."""
    _, metadata = read_arrays_and_metadata(path, lambda metadata: ())
    _check_format(path, metadata)
    return [key for key, _ in _structure(path, metadata)["dict"]], _header_checksum(metadata)


def _structure(path: Path, metadata: Mapping[str, str]) -> Any:
    try:
        structure = json.loads(metadata["structure"])
        structure = {"dict": [[key, value] for key, value in structure["dict"]]}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path} is damaged: it does not hold a dictionary.") from error
    return structure


def _entries(
    path: Path, arrays: Arrays, metadata: Mapping[str, str], wanted: set[int] | None
) -> Iterator[tuple[int, Any]]:
    structure, checksums = _structure(path, metadata), metadata.get("checksums", "").split()
    if len(checksums) != len(structure["dict"]):
        raise DamagedFile(f"{path} is damaged: it has not one checksum for each entry.")
    for entry, checksum in zip(structure["dict"], checksums, strict=True):
        key, value = entry
        if wanted is not None and key not in wanted:
            continue
        text = json.dumps(entry, separators=(",", ":"), allow_nan=False)
        names = list(_names(value))
        if any(name not in arrays for name in names) or checksum != _checksum(
            {name: arrays[name] for name in names}, text
        ):
            raise DamagedFile(f"{path} is damaged: its content does not match its checksum.")
        yield key, unpack(arrays, value)


def _names(structure: Any) -> Iterator[str]:
    """The arrays of a part of a structure."""
    if isinstance(structure, list):
        for item in structure:
            yield from _names(item)
    elif isinstance(structure, dict) and "array" in structure:
        yield structure["array"]
    elif isinstance(structure, dict):
        for key, value in structure.items():
            if key in ("dict", "tuple"):
                yield from _names(value)


def _header_checksum(metadata: Mapping[str, str]) -> str:
    """Of what the header says, checksums of the content among it."""
    value = 0
    for name in ("structure", "checksum", "checksums"):
        value = zlib.crc32(metadata.get(name, "").encode(), value)
    return f"{value:08x}"


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
