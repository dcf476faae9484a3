"""An IFCA round (K = 10) of ragged clients on a GPU: seconds, operations, copies and memory of every stage.

    python -m benchmarks gpu                      # five minutes on a machine with a GPU; send the JSON file
    python -m benchmarks gpu --counts             # counted on the shadow device, also where there is a GPU
    python -m benchmarks gpu --counts --gpu T4    # the cost model of another GPU

With a GPU, each stage is timed between two synchronisations, after a warm-up round, and its kernel launches are those
that torch's profiler saw in one more round. Without one, a round of the same size is counted without its arithmetic
(tests/support/shadow.py) and the cost model (cost_model.py) makes seconds of it. There, `loop` is counted for 12
clients and multiplied, since it does one client after the other; all clients are in one cluster (`combine` has one
row); and instead of the assignment, which depends on values, all K losses are counted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.cost_model import GPUS, Gpu
from benchmarks.tables import table
from benchmarks.workload import Workload

NETWORKS = {"LeNet": ("cnn_cifar",), "ResNet-18": ("resnet18", "model.norm=group")}
CLIENTS = (24, 100, 200)
ENGINES = ("loop", "stacked")
STAGES = (
    "best",
    "losses",
    "train",
    "combine",
    "evaluate",
)  # best: the assignment, by as few losses as it takes
COUNTED = 12  # clients that `loop` is counted for
MINUTES = 5.0


def plan_for(workload: Workload, engine: str, *more: str) -> Any:
    """The workload's plan on a GPU: IFCA, evaluated every round, in the tier of repeatability that GPUs have."""
    plan = workload.plan(
        "method=ifca", "clusters=10", f"local.engine={engine}", "fleet.backend=in_process", "evaluation.every=1", *more
    )  # fmt: skip
    block = dataclasses.replace(plan.block, gpus=1.0, determinism="seeded")
    return dataclasses.replace(plan, block=block, fleet=dataclasses.replace(plan.fleet, gpus=1.0))


def run(
    rounds: int | None,
    miniature: bool,
    *,
    counts: bool = False,
    engines: Sequence[str] = ENGINES,
    gpu: str = "A100",
) -> dict[str, Any]:
    """Measured where there is a GPU, counted where there is none; smallest first, as far as the time goes."""
    import torch

    measured = torch.cuda.is_available() and not counts
    sizes = (12,) if miniature else CLIENTS
    networks = {"LeNet": NETWORKS["LeNet"]} if miniature else NETWORKS
    found, left_out, started = [], [], time.perf_counter()
    for network, (model, *settings) in networks.items():
        for clients in sizes:
            for engine in engines:
                name = f"{network}, {clients} clients, {engine}"
                if time.perf_counter() - started > 60 * MINUTES * 0.8:
                    left_out.append(name)
                    continue
                small = {"samples": 20, "batch": 8} if miniature else {}
                workload = Workload(ragged=True, clients=clients, model=model, **small)  # type: ignore[arg-type]
                stages = (
                    measure(workload, engine, rounds or 2, *settings)
                    if measured
                    else count(workload, engine, GPUS[gpu], *settings)
                )
                found.append({"network": network, "clients": clients, "engine": engine, **stages})
    device = torch.cuda.get_device_name(0) if measured else GPUS[gpu].name
    result: dict[str, Any] = {"measured": measured, "gpu": device, "rows": found, "left_out": left_out}
    return result if measured else {**result, "cost_model": GPUS[gpu].facts()}


# --- on a GPU ---------------------------------------------------------------------------------------------


@contextmanager
def stages_timed(into: dict[str, float]) -> Iterator[None]:
    """Seconds of every stage, from an idle device to an idle device."""
    import torch

    from actors.fleet import InProcessFleet

    reach = InProcessFleet._reach

    def timed(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        started = time.perf_counter()
        try:
            return reach(self, method, *args, **kwargs)
        finally:
            torch.cuda.synchronize()
            into[method] = into.get(method, 0.0) + time.perf_counter() - started

    with mock.patch.object(InProcessFleet, "_reach", timed):
        yield


def measure(workload: Workload, engine: str, rounds: int, *settings: str) -> dict[str, Any]:
    """Medians over some rounds after a warm-up; then one round under the profiler, of 24 clients at most for `loop`."""
    import torch

    from actors.session import InProcessSession

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    session = InProcessSession(plan_for(workload, engine, *settings))
    taken: list[dict[str, float]] = []
    for round in range(1, rounds + 2):
        seconds: dict[str, float] = {}
        with stages_timed(seconds):
            session.run_round(round)
            session.fleet.losses(session.fleet.initial(10))
        taken.append(seconds)
    peak = torch.cuda.max_memory_allocated()
    launches = profiled(session, rounds + 2) if engine != "loop" or workload.clients <= CLIENTS[0] else {}
    session.close()
    stages = {
        stage: {
            "seconds": float(np.median([each[stage] for each in taken[1:] if stage in each])),
            **launches.get(stage, {}),
        }
        for stage in STAGES
        if any(stage in each for each in taken[1:])
    }
    return {"stages": stages, "peak_bytes": peak}


CALLS = {  # of the CUDA runtime, by what we count
    "operations": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies": ("cudaMemcpyAsync",),
    "synchronisations": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


def profiled(session: Any, round: int) -> dict[str, dict[str, int]]:
    """Calls of the CUDA runtime in one round, by stage."""
    from torch.profiler import ProfilerActivity, profile

    from actors.fleet import InProcessFleet

    reach, found = InProcessFleet._reach, dict[str, dict[str, int]]()

    def watched(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watch:
            result = reach(self, method, *args, **kwargs)
        calls = {event.key: event.count for event in watch.key_averages()}
        own = found.setdefault(method, dict.fromkeys(CALLS, 0))
        for what, names in CALLS.items():
            own[what] += sum(calls.get(name, 0) for name in names)
        return result

    with mock.patch.object(InProcessFleet, "_reach", watched):
        session.run_round(round)
    return found


# --- on the shadow device -----------------------------------------------------------------------------------


def count(workload: Workload, engine: str, gpu: Gpu, *settings: str) -> dict[str, Any]:
    """Counts of the second round and the cost model's seconds, by stage."""
    from tests.support.shadow_session import shadow_session

    times = 1.0
    if engine == "loop" and workload.clients > COUNTED:
        times, workload = workload.clients / COUNTED, dataclasses.replace(workload, clients=COUNTED)
    plan = plan_for(workload, engine, *settings)
    with shadow_session(plan, memory=gpu.memory_gb * 2**30, trace=True, dry=True) as shadow:
        shadow.run_round(1)
        first = len(shadow.device.kernels)
        found = {**shadow.run_round(2), **shadow.all_losses(10)}
        del found["best"]
        assert not shadow.device.mixed, shadow.device.mixed
        kernels = shadow.device.kernels[first:]
    stages = {}
    for stage in STAGES:
        if stage not in found:
            continue
        each = found[stage]
        counted = {
            "operations": round(times * each.operations),
            "copies": round(times * each.copies),
            "bytes": round(times * each.bytes),
            "synchronisations": round(times * each.synchronisations),
        }
        own = [(kernel.bytes, kernel.flops, times) for kernel in kernels if kernel.stage == stage]
        stages[stage] = {**counted, **gpu.seconds(counted, own)}
    return {"stages": stages, "peak_bytes": shadow.device.peak}


# --- what a reader sees -----------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """One table."""
    rows = []
    for row in result["rows"]:
        for stage, found in row["stages"].items():
            rows.append(
                [
                    f"{row['network']}, {row['clients']} clients, {row['engine']}: {stage}",
                    f"{found['seconds']:.4f}",
                    *(f"{found[name]:.4f}" if name in found else "" for name in ("host", "device")),
                    *(_number(found.get(name)) for name in ("operations", "copies")),
                    f"{found['bytes'] / 1e6:,.1f}" if "bytes" in found else "",
                    _number(found.get("synchronisations")),
                    f"{row['peak_bytes'] / 1e9:.2f}",
                ]
            )
    how = "measured on" if result["measured"] else "counted without a GPU; seconds are the cost model's for"
    title = f"An IFCA round of ragged clients, K = 10, by stage, {how} {result['gpu']}"
    header = [
        "", "seconds", "host s", "device s", "operations", "copies", "MB copied", "synchronisations", "peak GB",
    ]  # fmt: skip
    lines = [table(title, header, rows)]
    if not result["measured"]:
        lines.append(f"Assumed: {Gpu(**result['cost_model']).assumptions()}")
    if result["left_out"]:
        lines.append(f"Left out to end within {MINUTES:g} minutes: {'; '.join(result['left_out'])}.")
    return "\n".join(lines)


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
