"""The benchmarks of GPUs, without one: counted, modelled, and measured on the shadow device."""

import dataclasses

import pytest

from benchmarks import gpu, host
from benchmarks.__main__ import main
from benchmarks.cost_model import GPUS
from benchmarks.workload import Workload
from tests.support.shadow import ShadowDevice

SMALL = Workload(ragged=True, clients=12, samples=20, batch=4, steps=2, model="mlp", shape=(1, 8, 8))


def test_gpu_benchmark_counts_and_models_without_a_gpu():
    counted = {engine: gpu.count(SMALL, engine, GPUS["A100"])["stages"] for engine in gpu.ENGINES}
    other = gpu.count(SMALL, "stacked", GPUS["T4"])["stages"]
    assert set(counted["stacked"]) == {"losses", "train", "combine", "evaluate"}
    for stage in ("losses", "train", "evaluate"):
        few, many = counted["stacked"][stage], counted["loop"][stage]
        assert (
            many["operations"] > 3 * few["operations"] and many["synchronisations"] > few["synchronisations"]
        )
        assert few["seconds"] == max(few["host"], few["device"]) > 0
        assert other[stage]["operations"] == few["operations"] and other[stage]["device"] >= few["device"]


def test_gpu_benchmark_multiplies_what_loop_does_for_a_client():
    twice = dataclasses.replace(SMALL, clients=24)
    one, two = (gpu.count(workload, "loop", GPUS["A100"])["stages"]["train"] for workload in (SMALL, twice))
    assert two["operations"] == 2 * one["operations"] and two["copies"] == 2 * one["copies"]


def test_gpu_benchmark_report_says_what_is_assumed(monkeypatch):
    monkeypatch.setattr(gpu, "count", lambda *_: {"stages": {"train": PRETENDED}, "peak_bytes": 2e9})
    result = gpu.run(None, True, engines=["stacked"], gpu="T4")
    assert [(row["clients"], row["engine"]) for row in result["rows"]] == [(12, "stacked")]
    text = gpu.report(result)
    assert "cost model's for T4" in text and "5 us to launch an operation" in text
    assert "LeNet, 12 clients, stacked: train" in text and "1,234" in text


PRETENDED = {"operations": 1234, "copies": 3, "bytes": 5_000_000, "synchronisations": 1}
PRETENDED |= {"host": 0.01, "device": 0.02, "seconds": 0.02}


def test_gpu_benchmark_measures_where_a_gpu_is_seen():
    """The way of a real GPU, on the shadow device; only torch's profiler, which counts launches, needs the real one."""
    with ShadowDevice() as device:
        found = gpu.measure(SMALL, "stacked", rounds=1)
        assert found["peak_bytes"] == device.peak > 0
    assert set(found["stages"]) == set(gpu.STAGES)
    for stage, each in found["stages"].items():
        assert each["seconds"] > 0, stage
    result = {"measured": True, "gpu": "shadow", "left_out": [], "rows": []}
    result["rows"].append({"network": "MLP", "clients": 12, "engine": "stacked", **found})
    assert "measured on shadow" in gpu.report(result)


def test_host_benchmark_has_time_and_operations_of_every_stage():
    result = host.run(1, True, engines=["stacked"])
    (row,) = result["rows"]
    assert row["stages"]["train"]["operations"] > 100 and row["stages"]["train"]["seconds"] > 0
    assert "12 clients, stacked: train" in host.report(result)


def test_benchmark_options_are_refused_where_they_mean_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", "methods", "--ragged"])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    assert "--ragged is for workload_w, not for methods" in capsys.readouterr().err
