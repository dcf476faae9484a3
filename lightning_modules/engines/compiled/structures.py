"""The declarations of plan.h and kernels.c, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

LANES_OF_A_GROUP = 16  # GROUP in lanes.h: samples that stand side by side in memory

# The order of the enumeration in plan.h.
CONVOLUTION, LINEAR, MAX_POOL, AVERAGE_POOL, RELU, ADD, COPY, BATCH_NORM, GROUP_NORM = range(9)

# What kernels_check answers.
PROBLEMS = (
    "", "a tensor's size", "an unknown operation", "a tensor that is not there", "shapes that do not fit",
    "memory outside the arena", "parameters outside the model", "a halo that is too narrow", "the output's shape",
)  # fmt: skip


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Tensor(Structure):
    """A tensor in the arena."""

    _fields_ = (
        _fields("value gradient", c_int64)
        + _fields("channels height width halo_y halo_x gradient_halo_y gradient_halo_x reserved", c_int32)
    )  # fmt: skip


class Operation(Structure):
    """A layer."""

    _fields_ = (
        _fields("kind in_ second out relu to_input to_second kernel_y kernel_x stride_y stride_x pad_y pad_x", c_int32)
        + _fields("count_padding norm_groups reserved", c_int32)
        + _fields("weight bias mean variance kept kept_size", c_int64)
        + _fields("epsilon momentum", c_float)
    )  # fmt: skip


class Plan(Structure):
    """Everything a kernel is given."""

    _fields_ = (
        ("tensors", POINTER(Tensor)),
        ("operations", POINTER(Operation)),
        *_fields("tensor_count operation_count groups output", c_int32),
        ("arena", c_void_p),
        *_fields("arena_size workspace workspace_size model_size", c_int64),
    )


class Adam(Structure):
    """Adam's numbers at one step."""

    _fields_ = _fields("step new1 beta2 new2 correction epsilon decay", c_float)


_PLAN = POINTER(Plan)
_GATHER = [c_void_p, c_int64, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64]
_LOSS = [_PLAN, c_int, c_void_p, c_void_p, c_void_p, c_float]
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "lanes": (c_int, []),
    "check": (c_int64, [_PLAN]),
    "kept": (c_int64, [_PLAN, c_int]),
    "workspace": (c_int64, [_PLAN, c_int]),
    "forbid": (None, [c_void_p, c_int64, c_int]),
    "gather_bytes": (None, _GATHER),
    "gather_floats": (None, _GATHER),
    "forward": (None, [_PLAN, c_void_p, c_int, c_int]),
    "backward": (None, [_PLAN, c_void_p, c_void_p, c_int]),
    "outputs": (None, [_PLAN, c_int, c_void_p]),
    "add_to_outputs": (None, [_PLAN, c_int, c_void_p]),
    "cross_entropy": (c_double, _LOSS),
    "squared_error": (c_double, _LOSS),
    "sgd": (None, [c_int64, c_void_p, c_void_p, c_void_p, *[c_float] * 4, c_int, c_int]),
    "adam": (None, [c_int64, c_void_p, c_void_p, c_void_p, c_void_p, POINTER(Adam)]),
}


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions, which lose their prefix."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"kernels_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library
