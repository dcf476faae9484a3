"""Seconds of a stage on a named GPU, from what was counted on the shadow device. A model, not a measurement.

The host launches operations one after the other without waiting; the device works them off in order. A stage takes as
long as the slower of the two:

    host   = operations x launch + copies x copy call + synchronisations x wait
    device = sum over operations of max(shortest kernel, bytes / bandwidth, flops / arithmetic) + copied bytes / PCIe

Bytes of an operation are its inputs and outputs, once each; peak figures are the makers', the efficiencies ours.
`python -m benchmarks gpu` on a GPU measures the same stages: compare before you believe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU and its host."""

    name: str
    memory_gb: int
    bandwidth: float  # bytes per second, peak
    arithmetic: float  # float32 operations per second, peak, without TF32
    pcie: float  # bytes per second, reached
    launch: float = 5e-6  # seconds the host needs for an operation
    copy_call: float = 10e-6  # ... to start a copy
    wait: float = 20e-6  # ... for a synchronisation, beyond the work waited for
    shortest_kernel: float = 2e-6
    share_of_bandwidth: float = 0.7  # of the peak, that element-wise kernels reach
    share_of_arithmetic: float = 0.5  # ... that matrix products and convolutions reach

    def assumptions(self) -> str:
        """All of it in one sentence."""
        return (
            f"{self.name} {self.memory_gb} GB: {self.launch * 1e6:g} us to launch an operation (a host's Python often "
            f"needs more: `python -m benchmarks host`), {self.copy_call * 1e6:g} us to start a copy, "
            f"{self.wait * 1e6:g} us for a synchronisation, {self.shortest_kernel * 1e6:g} us for the shortest kernel, "
            f"{self.pcie / 1e9:g} GB/s over PCIe, {self.share_of_bandwidth:.0%} of {self.bandwidth / 1e9:,.0f} GB/s, "
            f"{self.share_of_arithmetic:.0%} of {self.arithmetic / 1e12:g} float32 TFLOP/s."
        )

    def seconds(self, counted: dict[str, int], kernels: Iterable[tuple[int, int, float]]) -> dict[str, float]:
        """`host`, `device` and `seconds` of a stage; `kernels` are (bytes, flops, how often).

        >>> gpu = Gpu("ideal", 1, bandwidth=1e9, arithmetic=1e9, pcie=1e9, share_of_bandwidth=1, share_of_arithmetic=1)
        >>> work = {"operations": 1000, "copies": 0, "bytes": 0, "synchronisations": 0}
        >>> gpu.seconds(work, [(10**6, 10, 1000)])
        {'host': 0.005, 'device': 1.0, 'seconds': 1.0}
        """
        host = (
            counted["operations"] * self.launch
            + counted["copies"] * self.copy_call
            + counted["synchronisations"] * self.wait
        )
        bandwidth, arithmetic = (
            self.bandwidth * self.share_of_bandwidth,
            self.arithmetic * self.share_of_arithmetic,
        )
        device = counted["bytes"] / self.pcie
        for size, flops, times in kernels:
            device += times * max(self.shortest_kernel, size / bandwidth, flops / arithmetic)
        return {"host": round(host, 9), "device": round(device, 9), "seconds": round(max(host, device), 9)}

    def facts(self) -> dict[str, Any]:
        """For the JSON result."""
        return asdict(self)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80, bandwidth=2039e9, arithmetic=19.5e12, pcie=20e9),
        Gpu("H100", 80, bandwidth=3350e9, arithmetic=66.9e12, pcie=40e9),
        Gpu("V100", 32, bandwidth=900e9, arithmetic=15.7e12, pcie=10e9),
        Gpu("T4", 16, bandwidth=320e9, arithmetic=8.1e12, pcie=10e9),
        Gpu("RTX4090", 24, bandwidth=1008e9, arithmetic=82.6e12, pcie=20e9),
    )
}
