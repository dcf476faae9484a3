"""A torch network as a list of operations that the kernels have, derived from its traced structure."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from archipelago.strategies.parameters import ModelSpec
from lightning_modules.engines.compiled import structures as c
from lightning_modules.engines.compiled.operations import Layer, NetworkPlan, NotCovered, Shape


def plan_of(network: nn.Module, prefix: str, spec: ModelSpec, input_shape: tuple[int, ...]) -> NetworkPlan:
    """The plan of a network whose parameters are called `prefix`... in the model; raises NotCovered."""
    graph = _traced(network)
    reader = _Reader(network, prefix, spec, input_shape)
    for node in graph.nodes:
        reader.read(node)
    plan = NetworkPlan(reader.shapes, reader.layers, reader.output, spec.size, spec.parameters)
    if not reader.shapes[reader.output].flat:
        raise NotCovered("its output is not one row of numbers for a sample")
    unused = [e.name for e in spec.entries if e.kind == "parameter" and e.name not in reader.used]
    if unused:
        raise NotCovered(f"'{unused[0]}' belongs to no layer that it can see")
    return plan


def _traced(network: nn.Module) -> fx.Graph:
    """The graph of the network without identities; the same in training and in evaluation."""
    graphs = []
    was = network.training
    try:
        with torch.enable_grad():
            for mode in (False, True):
                network.train(mode)
                graphs.append(fx.Tracer().trace(network))
    except Exception as error:  # whatever a forward pass does to a proxy
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise NotCovered(f"{type(network).__name__}.forward cannot be traced ({reason})") from error
    finally:
        network.train(was)
    first, graph = graphs
    if str(first) != str(graph):
        raise NotCovered(f"{type(network).__name__}.forward does other things in training than in evaluation")
    for node in list(graph.nodes):
        if node.op == "call_module" and _is_identity(network.get_submodule(str(node.target))):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph


def _is_identity(module: nn.Module) -> bool:
    nothing = type(module) is nn.Identity
    return nothing or (isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0)


def _pair(value: Any) -> tuple[int, int]:
    y, x = (value, value) if isinstance(value, int) else value
    return int(y), int(x)


def _positive(size: int, what: str) -> int:
    if size < 1:
        raise NotCovered(f"{what} leaves nothing of the image")
    return size


class _Reader:
    """Goes through the nodes of a graph; `tensors` has what each of them made."""

    def __init__(
        self, network: nn.Module, prefix: str, spec: ModelSpec, input_shape: tuple[int, ...]
    ) -> None:
        self.network, self.prefix = network, prefix
        self.entries = {entry.name: entry for entry in spec.entries}
        self.input_shape = input_shape
        self.shapes: list[Shape] = []
        self.layers: list[Layer] = []
        self.tensors: dict[fx.Node, int] = {}
        self.used: set[str] = set()
        self.output = -1

    def read(self, node: fx.Node) -> None:
        """One node more."""
        if node.op == "placeholder":
            self._input(node)
        elif node.op == "output":
            self.output = self._tensor(node.args[0])
        elif node.op == "call_module":
            name = str(node.target)
            module = self.network.get_submodule(name)
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
                raise NotCovered(f"'{name}' has hooks")
            self._module(node, name, module)
        elif node.op in ("call_function", "call_method"):
            self._function(node)
        else:
            raise NotCovered(f"'{node.target}' is used outside a layer")

    def _input(self, node: fx.Node) -> None:
        if self.shapes:
            raise NotCovered("its forward takes more than one input")
        shape = self.input_shape
        if len(shape) == 3:
            self.shapes.append(Shape(*shape, flat=False))
        else:
            self.shapes.append(Shape(math.prod(shape), flat=len(shape) == 1))
        self.tensors[node] = 0

    def _tensor(self, argument: Any) -> int:
        found = self.tensors.get(argument) if isinstance(argument, fx.Node) else None
        if found is None:
            raise NotCovered(f"'{argument}' is not the output of a layer that it has")
        return found

    def _new(self, node: fx.Node, shape: Shape) -> int:
        self.shapes.append(shape)
        self.tensors[node] = len(self.shapes) - 1
        return len(self.shapes) - 1

    def _module(self, node: fx.Node, name: str, module: nn.Module) -> None:
        if len(node.args) != 1 or node.kwargs:
            raise NotCovered(f"'{name}' takes more than one input")
        handler = _MODULES.get(type(module))
        if handler is None:
            raise NotCovered(f"'{name}' ({type(module).__name__}) has no kernel")
        handler(self, node, name, module)

    def _function(self, node: fx.Node) -> None:
        target: Any = node.target
        label = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if target in (operator.add, operator.iadd, torch.add) and len(node.args) == 2 and not node.kwargs:
            self.add(node)
        elif target in (F.relu, torch.relu, "relu"):
            self._as_module(node, label, nn.ReLU, nn.ReLU(), node.kwargs.get("inplace", False) is True)
        elif target in (torch.flatten, "flatten"):
            arguments = [*node.args[1:], *node.kwargs.values()]
            if arguments not in ([1], [1, -1]):
                raise NotCovered(f"'{node.name}' flattens more than each sample")
            self.flatten(node, node.name, None)
        elif target in ("view", "reshape", torch.reshape):
            self._view(node)
        elif target in ("size",):
            pass  # of the batch; whoever reads it says so
        elif target is F.max_pool2d:
            self._as_module(node, label, nn.MaxPool2d, _made(nn.MaxPool2d, node))
        elif target is F.avg_pool2d:
            self._as_module(node, label, nn.AvgPool2d, _made(nn.AvgPool2d, node))
        elif target is F.adaptive_avg_pool2d:
            self._as_module(node, label, nn.AdaptiveAvgPool2d, _made(nn.AdaptiveAvgPool2d, node))
        else:
            raise NotCovered(f"'{label}' has no kernel")

    def _as_module(
        self, node: fx.Node, name: str, kind: type, module: nn.Module, inplace: bool = False
    ) -> None:
        if inplace:
            module.inplace = True  # type: ignore[assignment]
        _MODULES[kind](self, node, name, module)

    def _view(self, node: fx.Node) -> None:
        sizes = list(node.args[1:])
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            sizes = list(sizes[0])
        size = self.shapes[self._tensor(node.args[0])].size
        whole = len(sizes) == 2 and (sizes[1] == size or (sizes[1] == -1 and isinstance(sizes[0], fx.Node)))
        first = isinstance(sizes[0], fx.Node) and sizes[0].target == "size" and sizes[0].args[1:] == (0,)
        if not whole or not (first or sizes[0] == -1):
            raise NotCovered(f"'{node.name}' changes the shape of a sample")
        self.flatten(node, node.name, None)

    def _parameter(self, path: str, name: str, shape: tuple[int, ...]) -> int:
        """Where a layer's parameter or buffer begins in the model."""
        full = f"{self.prefix}{path}.{name}"
        entry = self.entries.get(full)
        if entry is None or tuple(entry.shape) != shape:
            raise NotCovered(f"'{path}' has no {name} of its own")
        if full in self.used:
            raise NotCovered(f"'{path}' is used twice")
        self.used.add(full)
        return entry.start

    # -- layers ---------------------------------------------------------------------------------------------------

    def convolution(self, node: fx.Node, name: str, module: Any) -> None:
        at = self._tensor(node.args[0])
        shape = self.shapes[at]
        plain = module.groups == 1 and _pair(module.dilation) == (1, 1) and module.padding_mode == "zeros"
        if not plain or isinstance(module.padding, str):
            raise NotCovered(
                f"'{name}' has groups, dilation, or padding of another kind than a number of zeros"
            )
        if shape.flat or shape.channels != module.in_channels:
            raise NotCovered(f"'{name}' expects images of {module.in_channels} channels")
        kernel, stride, pad = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
        height, width = (
            _positive((side + 2 * p - k) // s + 1 if side + 2 * p >= k else 0, f"'{name}'")
            for side, p, k, s in zip((shape.height, shape.width), pad, kernel, stride, strict=True)
        )
        outs = module.out_channels
        weight = self._parameter(name, "weight", (outs, shape.channels, *kernel))
        bias = -1 if module.bias is None else self._parameter(name, "bias", (outs,))
        out = self._new(node, Shape(outs, height, width, flat=False))
        self.layers.append(
            Layer(c.CONVOLUTION, at, out, kernel=kernel, stride=stride, pad=pad, weight=weight, bias=bias)
        )

    def linear(self, node: fx.Node, name: str, module: Any) -> None:
        at = self._tensor(node.args[0])
        shape = self.shapes[at]
        if not shape.flat or shape.channels != module.in_features:
            raise NotCovered(f"'{name}' expects rows of {module.in_features} numbers")
        weight = self._parameter(name, "weight", (module.out_features, module.in_features))
        bias = -1 if module.bias is None else self._parameter(name, "bias", (module.out_features,))
        out = self._new(node, Shape(module.out_features))
        self.layers.append(Layer(c.LINEAR, at, out, weight=weight, bias=bias))

    def pool(self, node: fx.Node, name: str, module: Any) -> None:
        at = self._tensor(node.args[0])
        shape = self.shapes[at]
        largest = isinstance(module, nn.MaxPool2d)
        kernel, pad = _pair(module.kernel_size), _pair(module.padding)
        stride = kernel if module.stride is None else _pair(module.stride)
        odd = (
            (_pair(module.dilation) != (1, 1) or module.return_indices)
            if largest
            else module.divisor_override is not None
        )
        if shape.flat or odd or any(2 * p > k for p, k in zip(pad, kernel, strict=True)):
            raise NotCovered(f"'{name}' is a pool of another kind than it has")
        sides = []
        for side, k, s, p in zip((shape.height, shape.width), kernel, stride, pad, strict=True):
            spare = side + 2 * p - k
            count = (-(-spare // s) if module.ceil_mode else spare // s) + 1
            if (
                module.ceil_mode and (count - 1) * s >= side + p
            ):  # a window must begin inside, as torch has it
                count -= 1
            sides.append(_positive(count if spare >= 0 or module.ceil_mode else 0, f"'{name}'"))
        out = self._new(node, Shape(shape.channels, sides[0], sides[1], flat=False))
        kind = c.MAX_POOL if largest else c.AVERAGE_POOL
        counts = 0 if largest else int(module.count_include_pad)
        self.layers.append(Layer(kind, at, out, kernel=kernel, stride=stride, pad=pad, count_padding=counts))

    def adaptive_pool(self, node: fx.Node, name: str, module: Any) -> None:
        shape = self.shapes[self._tensor(node.args[0])]
        sides = [
            side if wanted is None else wanted
            for side, wanted in zip(
                (shape.height, shape.width),
                (module.output_size, module.output_size)
                if isinstance(module.output_size, int)
                else module.output_size,
                strict=True,
            )
        ]
        if shape.flat or shape.height % sides[0] or shape.width % sides[1]:
            raise NotCovered(f"'{name}' has windows of several sizes")
        same = (shape.height // sides[0], shape.width // sides[1])
        self.pool(node, name, nn.AvgPool2d(same))

    def relu(self, node: fx.Node, name: str, module: Any) -> None:
        source: Any = node.args[0]
        at = self._tensor(source)
        if len(source.users) > 1 and getattr(module, "inplace", False):
            raise NotCovered(f"'{name}' changes in place what another layer reads")
        # In the pass of the layer before, where nobody else reads what that layer gives.
        root = at
        while (alias := self.shapes[root].alias) is not None:
            root = alias
        maker = next((layer for layer in self.layers if layer.out == root), None)
        if (
            len(source.users) == 1
            and maker is not None
            and maker.kind not in (c.RELU, c.COPY)
            and not maker.relu
        ):
            maker.relu = 1
            self.tensors[node] = at
            return
        out = self._new(node, dataclasses.replace(self.shapes[at], alias=None))
        self.layers.append(Layer(c.RELU, at, out))

    def add(self, node: fx.Node) -> None:
        first, second = self._tensor(node.args[0]), self._tensor(node.args[1])
        a, b = (dataclasses.replace(self.shapes[t], alias=None) for t in (first, second))
        if a != b:
            raise NotCovered(f"'{node.name}' adds tensors of several shapes")
        self.layers.append(Layer(c.ADD, first, self._new(node, a), second=second))

    def flatten(self, node: fx.Node, name: str, module: Any) -> None:
        source: Any = node.args[0]
        at = self._tensor(source)
        if module is not None and (module.start_dim != 1 or module.end_dim != -1):
            raise NotCovered(f"'{name}' flattens more than each sample")
        shape = self.shapes[at]
        maker = next((layer for layer in self.layers if layer.out == at), None)
        haloed = maker is not None and maker.kind == c.CONVOLUTION  # its gradient may need a halo
        if len(source.users) == 1 and not haloed:
            self._new(node, Shape(shape.size, alias=at))
        else:
            out = self._new(node, Shape(shape.size))
            self.layers.append(Layer(c.COPY, at, out))

    def batch_norm(self, node: fx.Node, name: str, module: Any) -> None:
        at = self._tensor(node.args[0])
        shape = self.shapes[at]
        if shape.channels != module.num_features or shape.flat != isinstance(module, nn.BatchNorm1d):
            raise NotCovered(f"'{name}' expects {module.num_features} channels")
        if module.momentum is None or not module.track_running_stats:
            raise NotCovered(f"'{name}' averages its statistics in another way than by momentum")
        layer = self._norm(node, name, module, c.BATCH_NORM, (module.num_features,))
        layer.momentum = module.momentum
        layer.mean = self._parameter(name, "running_mean", (module.num_features,))
        layer.variance = self._parameter(name, "running_var", (module.num_features,))

    def group_norm(self, node: fx.Node, name: str, module: Any) -> None:
        if self.shapes[self._tensor(node.args[0])].channels != module.num_channels:
            raise NotCovered(f"'{name}' expects {module.num_channels} channels")
        layer = self._norm(node, name, module, c.GROUP_NORM, (module.num_channels,))
        layer.norm_groups = module.num_groups

    def _norm(self, node: fx.Node, name: str, module: Any, kind: int, shape: tuple[int, ...]) -> Layer:
        at = self._tensor(node.args[0])
        out = self._new(node, dataclasses.replace(self.shapes[at], alias=None))
        layer = Layer(kind, at, out, epsilon=module.eps)
        if module.weight is not None:
            layer.weight = self._parameter(name, "weight", shape)
        if module.bias is not None:
            layer.bias = self._parameter(name, "bias", shape)
        self.layers.append(layer)
        return layer


def _made(kind: Callable[..., nn.Module], node: fx.Node) -> nn.Module:
    """The module with the arguments of a functional call: they have the same names and order."""
    return kind(*node.args[1:], **node.kwargs)


_MODULES: dict[type, Callable[[_Reader, fx.Node, str, Any], None]] = {
    nn.Conv2d: _Reader.convolution,
    nn.Linear: _Reader.linear,
    nn.MaxPool2d: _Reader.pool,
    nn.AvgPool2d: _Reader.pool,
    nn.AdaptiveAvgPool2d: _Reader.adaptive_pool,
    nn.ReLU: _Reader.relu,
    nn.Flatten: _Reader.flatten,
    nn.BatchNorm1d: _Reader.batch_norm,
    nn.BatchNorm2d: _Reader.batch_norm,
    nn.GroupNorm: _Reader.group_norm,
}
