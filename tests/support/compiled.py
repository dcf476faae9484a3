"""The compiled engine's yardstick: the same steps in float64, by torch, and where they are decided by a hair."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import archipelago.core.torchvision_operators  # isort: skip  # noqa: F401  (must come before lightning)
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from archipelago.core.randomness import generator, seeded_torch
from archipelago.core.settings import LocalSettings
from lightning_modules.base import FederatedModule
from lightning_modules.engines import TrainJob, TrainResult, make_engine
from lightning_modules.engines.objective import prepare
from lightning_modules.flat import FlatModel
from lightning_modules.networks import build_network
from lightning_modules.samples import Samples


class Module(FederatedModule):
    """The platform's module around any network, with an optimizer of the test's own."""

    make_optimizer: Any = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def module_around(network: nn.Module, classes: int | None, optimizer: Any = None) -> Module:
    module = Module(network, classes=classes, local=LocalSettings())
    module.make_optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.05))
    return module


class Bench:
    """A network in both precisions, with samples of random bytes (or numbers)."""

    def __init__(self, make: Any, shape: tuple[int, ...], *, classes: int | None = 5, optimizer: Any = None,
                 samples: int = 60, raw: str = "bytes", **options: Any) -> None:  # fmt: skip
        rng = generator(0, "samples of a test")
        size = (samples, *shape)
        x = rng.integers(0, 256, size).astype(np.uint8) if raw == "bytes" else rng.standard_normal(size)
        y = rng.integers(0, classes, samples) if classes else rng.standard_normal(samples)
        with seeded_torch(3):
            network = make()
        self.model = FlatModel(module_around(network, classes, optimizer))
        with seeded_torch(3):
            self.exact = module_around(make(), classes, optimizer).double()
        channels = shape[0] if len(shape) == 3 else 1
        mean, std = [0.4] * channels, [0.3] * channels
        self.samples = Samples(
            x if raw != "floats" else x.astype(np.float32), y, mean=mean, std=std, classes=classes, **options
        )
        self.engine = make_engine("compiled", self.model, self.samples)
        self.logits = 0.0  # the largest output of the last step in double precision
        self.exact.register_forward_hook(self._note_logits)
        self.largest = 0.0  # gradient of the last step in double precision, before it was limited

    def job(self, batches: list[int], **extra: Any) -> TrainJob:
        """Batches of these sizes; parameters are moved a little, so that biases and scales are not 0 and 1."""
        rng = generator(1, "batches of a test")
        start = self.model.vector().copy()
        start += (0.05 * rng.standard_normal(len(start))).astype(np.float32)
        buffers = self.model.spec.columns("buffers")
        start[buffers] = np.abs(start[buffers]) + 0.5
        count = len(self.samples.raw().x)
        return TrainJob(
            0, start, [rng.choice(count, size, replace=False) for size in batches], seed=0, **extra
        )

    def _note_logits(self, module: nn.Module, given: Any, outputs: torch.Tensor) -> None:
        self.logits = float(outputs.detach().abs().max())

    def _limit(self, parameters: list[nn.Parameter]) -> None:
        recipe = self.model.recipe
        if recipe.clip is not None and recipe.clip_by == "value":
            nn.utils.clip_grad_value_(parameters, recipe.clip)
        elif recipe.clip is not None:
            nn.utils.clip_grad_norm_(parameters, recipe.clip)

    def sensitivity(self) -> tuple[float, float]:
        """How much rounding of the last step's largest gradient grows in (the model, the optimizer's state).

        Gradients that are clipped one by one shrink and their rounding does not; Adam divides a small gradient by
        hardly more than its epsilon, and with it the rounding that the large ones left there.
        """
        recipe, (group,) = self.model.recipe, self.model.optimizer.param_groups
        reached, state = self.largest, 1.0
        if recipe.clip is not None and recipe.clip_by == "value":
            state = max(1.0, self.largest / recipe.clip)
            reached = min(self.largest, recipe.clip)
        return state * (max(1.0, reached / group["eps"]) if "eps" in group else 1.0), state

    def moved_by_adam(self, start: np.ndarray, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Where Adam with this state takes parameters, in double precision."""
        (group,) = self.model.optimizer.param_groups
        moved = start.astype(np.float64)
        for number, entry in enumerate(e for e in self.model.spec.entries if e.kind == "parameter"):
            mean, square = (
                np.ravel(state[f"{number}.{name}"]).astype(np.float64) for name in ("exp_avg", "exp_avg_sq")
            )
            first, second = (1 - beta ** float(state[f"{number}.step"]) for beta in group["betas"])
            size = np.sqrt(square / second) + group["eps"]
            moved[entry.start : entry.stop] -= group["lr"] / first * mean / size
        return moved[: self.model.spec.parameters]

    def in_float64(self, job: TrainJob) -> TrainResult:
        """The job by torch in double precision."""
        module, spec = self.exact, self.model.spec
        single = prepare(job, self.model, self.samples)
        terms = [dataclasses.replace(term, anchors=doubled(term.anchors)) for term in single.terms]
        objective = dataclasses.replace(single, terms=terms, tables=doubled(single.tables))
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        with torch.no_grad():
            for entry in spec.entries:
                part = torch.from_numpy(job.start[entry.start : entry.stop].astype(np.float64))
                tensors[entry.name].copy_(part.reshape(entry.shape))
        optimizer = module.configure_optimizers()
        parameters = list(module.parameters())
        for key, value in (job.optimizer_state or {}).items():
            index, _, name = key.partition(".")
            as_double = torch.from_numpy(value.astype(np.float64))
            optimizer.state[parameters[int(index)]][name] = as_double if name != "step" else as_double.float()
        module.train()
        total = 0.0
        for step, index in enumerate(job.batches):
            x, y = self.samples.batch(index)
            y = y.double() if module.classes is None else y
            optimizer.zero_grad()
            value = objective(module, (x.double(), y), step)
            value.backward()
            self.largest = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
            self._limit(parameters)
            optimizer.step()
            total += float(value.detach())
        model = np.concatenate([tensors[e.name].detach().numpy().ravel() for e in spec.entries])
        state = {
            f"{i}.{name}": np.asarray(torch.as_tensor(v).detach().numpy())
            for i, p in enumerate(parameters)
            for name, v in optimizer.state[p].items()
            if v is not None
        }
        return TrainResult(0, model, state, total / len(job.batches))


def doubled(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in double precision, apart from integers."""
    return {name: each.double() if each.is_floating_point() else each for name, each in tensors.items()}


def errors(
    found: TrainResult, exact: TrainResult, start: np.ndarray, logits: float = 0.0
) -> tuple[float, float, float]:
    """(of what moved, of the optimizer's state, of the objective), each relative to its largest number.

    A loss is a difference of logits: where they are large and it is small, it is as exact as they are.
    """
    moved = np.abs(exact.model - start).max()
    worst = 0.0
    assert found.optimizer_state.keys() == exact.optimizer_state.keys()
    names = {key.partition(".")[2] for key in exact.optimizer_state}
    for name in names:
        keys = [key for key in exact.optimizer_state if key.partition(".")[2] == name]
        largest = max(np.abs(exact.optimizer_state[key]).max() for key in keys)
        for key in keys:
            away = np.abs(found.optimizer_state[key] - exact.optimizer_state[key]).max()
            worst = max(worst, away / largest)
    objective = abs(found.objective - exact.objective) / max(abs(exact.objective), 0.1 * logits, 1e-3)
    return float(np.abs(found.model - exact.model).max() / moved), float(worst), objective


@dataclasses.dataclass(frozen=True)
class Tie:
    """A window of a max-pool, or an argument of a ReLU, that is decided by less than float32 can tell."""

    call: int  # which pool or ReLU of a forward pass
    place: int  # of the number that decides, in the flat input
    bump: float  # what added to it decides otherwise


@contextmanager
def ties_noted(turned: Collection[Tie] = (), within: float = 2e-6) -> Iterator[list[Tie]]:
    """The ties of a forward pass; those of `turned` are decided the other way."""
    found: list[Tie] = []
    pool, relu, calls = F.max_pool2d, F.relu, itertools.count()

    def note(call: int, x: torch.Tensor, places: torch.Tensor, bumps: torch.Tensor) -> torch.Tensor:
        found.extend(
            Tie(call, place, bump) for place, bump in zip(places.tolist(), bumps.tolist(), strict=True)
        )
        mine = [tie for tie in turned if tie.call == call]
        if not mine:
            return x
        moved = torch.zeros(x.numel(), dtype=x.dtype)
        for tie in mine:
            moved[tie.place] = tie.bump
        return x + moved.view_as(x)

    def noting_pool(x: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
                    *rest: Any, **named: Any) -> torch.Tensor:  # fmt: skip
        kernel, step, pad = pair(kernel_size), pair(stride or kernel_size), pair(padding)
        if kernel[0] * kernel[1] > 1:
            seen, (height, width) = x.detach(), x.shape[2:]
            rows, columns = pool(seen, kernel_size, stride, padding, *rest, **named).shape[2:]
            around = F.pad(seen, (pad[1], pad[1] + kernel[1], pad[0], pad[0] + kernel[0]), value=-math.inf)
            windows = around.unfold(2, kernel[0], step[0]).unfold(3, kernel[1], step[1])
            two = windows[:, :, :rows, :columns].flatten(4).topk(2, dim=-1)
            gap = two.values[..., 0] - two.values[..., 1]
            near = (gap > 0) & (gap < within * seen.abs().max())
            sample, channel, row, column = near.nonzero(as_tuple=True)
            winner = two.indices[..., 0][near]
            y = row * step[0] - pad[0] + winner // kernel[1]
            at = column * step[1] - pad[1] + winner % kernel[1]
            places = ((sample * x.shape[1] + channel) * height + y) * width + at
            x = note(next(calls), x, places, -2 * gap[near])
        return pool(x, kernel_size, stride, padding, *rest, **named)

    def noting_relu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        seen = x.detach().reshape(-1)
        places = ((seen.abs() < within * seen.abs().max()) & (seen != 0)).nonzero()[:, 0]
        return relu(note(next(calls), x, places, -2 * seen[places]))

    F.max_pool2d, F.relu = noting_pool, noting_relu
    try:
        yield found
    finally:
        F.max_pool2d, F.relu = pool, relu


def pair(size: Any) -> tuple[int, int]:
    """What torch takes as one number or two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def network(name: str, shape: tuple[int, ...], classes: int | None, **options: Any) -> Any:
    """A maker of a registered network."""
    from archipelago.core.schema import composed
    from archipelago.core.settings import ModelSettings

    return lambda: build_network(composed(ModelSettings)(name=name, **options), shape, classes)


# name: (network, shape, optimizer, options of the model, of what limits gradients)
DIGEST_JOBS: dict[str, tuple[str, tuple[int, ...], str, dict[str, Any], dict[str, Any]]] = {
    "mlp": ("mlp", (1, 8, 8), "sgd", {}, {}),
    "cnn_cifar": ("cnn_cifar", (3, 32, 32), "sgd", {}, {}),
    "cnn_fashion": ("cnn_fashion", (1, 28, 28), "adam", {}, {}),
    "resnet_slim": ("resnet_slim", (3, 25, 25), "sgd", {}, {}),
    "resnet18": ("resnet18", (3, 8, 8), "sgd", {"norm": "group"}, {}),
    "cnn_celeba": ("cnn_celeba", (3, 21, 18), "adam", {}, {}),
    "nesterov": ("cnn_digits", (1, 8, 8), "nesterov", {}, {}),
    "squared_error": ("linear_regression", (12,), "sgd", {}, {}),
    "clipped_by_norm": ("mlp", (1, 8, 8), "sgd", {}, {"clip": 0.1, "clip_by": "norm"}),
    "clipped_by_value": ("mlp", (1, 8, 8), "sgd", {}, {"clip": 0.003, "clip_by": "value"}),
}


def digest(name: str) -> str:
    """Of the bits of a training with ragged batches, frozen models and weights, and of a forward pass.

    Nothing that torch computed goes in: start, samples and weights are drawn by numpy.
    """
    which, shape, kind, options, limits = DIGEST_JOBS[name]
    optimizers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.003),
    }
    classes = None if name == "squared_error" else 5
    raw = "bytes" if classes else "floats"
    bench = Bench(
        network(which, shape, classes, **options), shape, classes=classes, raw=raw, optimizer=optimizers[kind]
    )
    if limits:
        bench.model.recipe = dataclasses.replace(bench.model.recipe, **limits)
    rng = generator(7, "digest")
    size = bench.model.spec.size
    start, under = (
        np.abs(rng.uniform(-0.1, 0.1, size)).astype(np.float32) + np.float32(0.001) for _ in range(2)
    )
    signs = np.where(rng.random(size) < 0.5, -1, 1).astype(np.float32)
    parameters = bench.model.spec.columns("parameters")
    start[parameters] *= signs[parameters]
    under[parameters] *= signs[parameters]
    weights = (np.arange(60), rng.uniform(0.5, 2.0, 60).astype(np.float32))
    job = bench.job([32, 17, 20], on_top_of=[under], sample_weights=weights, scale=0.7)
    job = TrainJob(0, start, job.batches, 0, on_top_of=[under], sample_weights=weights, scale=0.7)
    result = bench.engine.train_one(job)
    assert not bench.engine.notes and np.isfinite(result.model).all()
    content = hashlib.sha256(result.model.tobytes())
    for key in sorted(result.optimizer_state):
        content.update(result.optimizer_state[key].tobytes())
    content.update(np.float64(result.objective).tobytes())
    content.update(bench.engine.outputs(result.model, np.arange(60)).numpy().tobytes())
    return content.hexdigest()[:32]
