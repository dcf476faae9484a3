"""The compiled engine beside PyTorch on one thread: steps, forward passes, IFCA's losses, and workload W.

The torch side is the honest one: images normalised beforehand and in the memory format channels_last, which is its
faster one, for images of one channel as well (`pixel_by_pixel`); torch takes the best instructions of the processor.
The compiled side pays for everything: bytes are gathered and normalised in every step. Small measurements are processor
time, the least of many, so that other work on the machine does not count; workload W is seconds of rounds in turn, as
in `workload_w`. With AVX-512, both builds are measured: the results have the same bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.bare import Trainer, normalised
from benchmarks.tables import spread, table, verdict
from benchmarks.workload import MEAN, MINIATURE, STD, Workload
from lightning_modules.samples import pixel_by_pixel

# Ratios that are promised; what is not here is shown. IFCA's losses have no allowance for AVX2 (DECISIONS.md, B4): they
# are promised where the processor has AVX-512, and shown for AVX2.
LIMITS = {
    "avx512": {"cnn_cifar step": 0.35, "IFCA losses, K = 10": 0.35, "workload W": 0.40},
    "avx2": {"cnn_cifar step": 0.60, "workload W": 0.65},
}
MODELS = 10  # of IFCA's loss pass
NETWORKS = {"cnn_cifar": (3, 32, 32), "cnn_fashion": (1, 28, 28), "mlp": (1, 28, 28)}


@contextmanager
def built_for(instructions: str) -> Iterator[None]:
    """The kernels of an instruction set, in this process and in those that it starts."""
    from lightning_modules.engines.compiled import build

    before = os.environ.get("ARCHIPELAGO_KERNELS")
    os.environ["ARCHIPELAGO_KERNELS"] = instructions
    build.library.cache_clear()
    try:
        yield
    finally:
        build.library.cache_clear()
        os.environ.pop("ARCHIPELAGO_KERNELS")
        if before is not None:
            os.environ["ARCHIPELAGO_KERNELS"] = before


def least(repeats: int, **sides: Callable[[], Any]) -> dict[str, float]:
    """Processor seconds of each side, the least of `repeats` in turn."""
    found = dict.fromkeys(sides, float("inf"))
    for _ in range(repeats):
        for name, work in sides.items():
            started = time.process_time()
            work()
            found[name] = min(found[name], time.process_time() - started)
    return found


class Sides:
    """One client of workload W, trained and evaluated by the compiled engine and by bare PyTorch."""

    def __init__(self, network: str, workload: Workload) -> None:
        from archipelago.core.schema import composed
        from archipelago.core.settings import LocalSettings, ModelSettings
        from lightning_modules.base import build_module
        from lightning_modules.engines import TrainJob, make_engine
        from lightning_modules.flat import FlatModel
        from lightning_modules.samples import Samples

        torch.set_num_threads(1)
        settings = composed(ModelSettings)(name=network, hidden=[200])
        local = LocalSettings(lr=workload.lr, momentum=workload.momentum)
        shape = workload.shape
        module = build_module(settings, local, shape, 10, seed=0)
        self.model = FlatModel(module)
        x, y = workload.images()
        self.samples = Samples(
            x, y, mean=MEAN[: shape[0]], std=STD[: shape[0]], classes=10, channels_last=True
        )
        self.engine = make_engine("compiled", self.model, self.samples)
        if self.engine.notes or self.engine.passes() is None:  # type: ignore[attr-defined]
            raise RuntimeError(" ".join(self.engine.notes))
        self.index = workload.train_indices(0)
        rng = np.random.default_rng(0)
        steps = [rng.choice(self.index, workload.batch, replace=False) for _ in range(3)]
        self.job = TrainJob(0, self.model.vector(), steps, seed=0)
        self.bare = Trainer(workload, [0], *_normalised(workload))
        if network != "cnn_cifar":  # bare.py has that one alone
            self.bare.network = build_module(settings, local, shape, 10, seed=0).network
            self.bare.parameters = list(self.bare.network.parameters())
            self.bare.optimizer = torch.optim.SGD(
                self.bare.parameters, lr=workload.lr, momentum=workload.momentum
            )
        self.bare.network.train()

    def compiled_steps(self) -> None:
        """Three steps."""
        self.engine.train_one(self.job)

    def torch_steps(self) -> None:
        """The same three steps, written down by hand."""
        self.load(torch.from_numpy(self.job.start.copy()))
        self.bare.optimizer.state.clear()
        for rows in self.job.batches:
            index = torch.from_numpy(rows)
            self.bare.optimizer.zero_grad()
            loss = F.cross_entropy(self.bare.network(self.bare.x[index]), self.bare.y[index])
            loss.backward()
            self.bare.optimizer.step()

    def load(self, vector: torch.Tensor) -> None:
        """Put a model, running statistics included, into the bare network."""
        buffers = [each for each in self.bare.network.buffers() if each.is_floating_point()]
        nn.utils.vector_to_parameters(vector, [*self.bare.parameters, *buffers])

    def compiled_losses(self, models: list[Any]) -> list[float]:
        """Mean loss of each model on a client's images, as the platform computes it."""
        from lightning_modules.engines.objective import outputs_of

        self.samples.forget()
        y = self.samples.targets(self.index)
        found = (outputs_of(self.model, self.samples, model, self.index) for model in models)
        return [float(F.cross_entropy(outputs, y, reduction="none").double().mean()) for outputs in found]

    def torch_losses(self, models: list[Any]) -> list[float]:
        """The same by hand."""
        found, y = [], self.bare.y[: len(self.index)]
        self.bare.network.eval()
        for model in models:
            self.load(torch.from_numpy(model.copy()))
            with torch.no_grad():
                outputs = self.bare.network(self.bare.x[: len(self.index)])
            found.append(float(F.cross_entropy(outputs, y, reduction="none").double().mean()))
        self.bare.network.train()
        return found


def _normalised(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    if workload.shape[0] == len(MEAN):
        return normalised(workload)
    x, y = workload.images()
    images = torch.from_numpy(x).float().div_(255).sub_(MEAN[0]).div_(STD[0])
    return pixel_by_pixel(images), torch.from_numpy(y)


def of_network(name: str, repeats: int, samples: int) -> dict[str, dict[str, float]]:
    """Name -> processor seconds of both sides: a step, a forward pass, and (for the CIFAR network) IFCA's losses."""
    sides = Sides(name, Workload(clients=1, samples=samples, model=name, shape=NETWORKS[name]))
    start, rng = sides.job.start, np.random.default_rng(1)
    models = [(start + 0.01 * rng.standard_normal(len(start))).astype(np.float32) for _ in range(MODELS)]
    ours, theirs = sides.compiled_losses(models[:2]), sides.torch_losses(models[:2])
    assert np.allclose(ours, theirs, rtol=1e-4), (ours, theirs)

    def losses(repeats: int, count: int) -> dict[str, float]:
        return least(
            repeats,
            compiled=lambda: sides.compiled_losses(models[:count]),
            torch=lambda: sides.torch_losses(models[:count]),
        )

    steps = least(repeats, compiled=sides.compiled_steps, torch=sides.torch_steps)
    found = {f"{name} step": {side: value / 3 for side, value in steps.items()}}
    found[f"{name} forward, {samples}"] = losses(repeats, 1)
    if name == "cnn_cifar":
        found[f"IFCA losses, K = {MODELS}"] = losses(max(repeats // 3, 2), MODELS)
    return found


def measured(repeats: int, samples: int) -> dict[str, dict[str, float]]:
    """Name -> milliseconds of both sides and their ratio, with the kernels that are chosen now."""
    seconds: dict[str, dict[str, float]] = {}
    for name in NETWORKS:
        seconds |= of_network(name, repeats, samples)
    return {
        name: {
            **{f"{side}_ms": 1e3 * value for side, value in each.items()},
            "ratio": each["compiled"] / each["torch"],
        }
        for name, each in seconds.items()
    }


def workload_w(rounds: int, miniature: bool) -> dict[str, Any]:
    """The platform on Ray with the compiled engine beside the bare loop of two processes."""
    from actors.cluster import connected
    from archipelago.core.settings import FleetSettings
    from benchmarks.workload_w import compare

    with connected(FleetSettings()):
        found = compare(MINIATURE if miniature else Workload(), rounds, "local.engine=compiled")
    took = found["seconds"]
    ratio = spread(np.divide(took["platform"], took["bare"]))["median"]
    return {
        "compiled_ms": 1e3 * float(np.median(took["platform"])),
        "torch_ms": 1e3 * float(np.median(took["bare"])),
        "ratio": ratio,
        "largest_difference": found["largest_difference"],
    }


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """Each instruction set of this processor in turn."""
    from lightning_modules.engines.compiled import build

    has = build.processor_flags()
    able = [name for name in build.INSTRUCTIONS if build.NEEDED[name] <= has]
    results: dict[str, Any] = {}
    for instructions in able:
        with built_for(instructions):
            found = measured(2 if miniature else 40, 40 if miniature else 250)
            found["workload W"] = workload_w(rounds or (1 if miniature else 5), miniature)
        results[instructions] = found
    missed = [
        f"{instructions}: {name}"
        for instructions, found in results.items()
        for name, limit in LIMITS[instructions].items()
        if found[name]["ratio"] > limit
    ]
    return {"instructions": results, "limits": LIMITS, "missed": missed, "kept": not missed}


def report(result: dict[str, Any]) -> str:
    """Milliseconds of both sides, and their ratio beside its limit."""
    parts = []
    for instructions, found in result["instructions"].items():
        rows = []
        for name, each in found.items():
            limit = result["limits"][instructions].get(name)
            said = "" if limit is None else f"at most {limit:.2f}: {verdict(each['ratio'], limit)}"
            rows.append(
                [name, f"{each['compiled_ms']:.2f}", f"{each['torch_ms']:.2f}", f"{each['ratio']:.3f}", said]
            )
        title = f"Engine compiled, {instructions}, beside torch (images in channels_last), one thread, batches of 32"
        parts.append(table(title, ["", "compiled ms", "torch ms", "ratio", "limit"], rows))
    return "\n".join(parts)
