"""Memory of a device that runs out: real rounds on a shadow device of so many bytes, and what they come to."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from actors import stacked_block
from actors.device_states import DeviceStates
from archipelago.core.errors import ClientFailure
from lightning_modules.engines.stacked.device_memory import ClientRows, DeviceMemory, is_out_of_memory
from tests.support.experiments import outcome, plan_of, session_of
from tests.support.shadow_session import shadow_session

ENDLESS = 80 * 2**30
CLIENTS, PARAMETERS = 12, 150_010
ROWS = 4 * CLIENTS * PARAMETERS  # bytes of one row of P numbers for every client: 7.2 MB


def settings(method: str) -> tuple[str, ...]:
    return (
        f"method={method}", f"clients={CLIENTS}", "model=mlp", "model.hidden=[2000]", "local.engine=stacked",
        "local.steps=2", "local.batch=16", "partition=dirichlet", "partition.alpha=0.3", "evaluation.batch=64",
    )  # fmt: skip


@lru_cache(maxsize=16)
def two_rounds(method: str, memory: int, determinism: str = "exact", *more: str) -> tuple[str, str, Any]:
    """(digest of everything, notes about memory, the shadow device) of two rounds on so many bytes."""
    plan = plan_of(*settings(method), f"determinism={determinism}", *more)
    with shadow_session(plan, memory=memory) as shadow:
        assert shadow.session.fleet.blocks[0].batched
        for round in (1, 2):
            shadow.run_round(round)
        assert shadow.parameters == PARAMETERS and not shadow.device.mixed
        said = [event for report in shadow.reports for event in report.events if "device memory" in event]
        return outcome(shadow.session, shadow.reports), " ".join(said), shadow.device


@pytest.mark.parametrize("memory", [1.75 * ROWS, 3.5 * ROWS])
def test_rounds_that_run_out_of_device_memory_equal_those_that_do_not(memory: float) -> None:
    """Ditto keeps seven tables of this size: models, momenta and private models, committed and pending."""
    expected, quiet, plenty = two_rounds("ditto", ENDLESS, "exact", "local.chunk=2")
    found, said, device = two_rounds("ditto", int(memory), "exact", "local.chunk=2")
    assert plenty.peak > 7 * ROWS and not quiet
    assert device.peak <= memory and "host memory" in said
    assert found == expected


@pytest.mark.full
@pytest.mark.parametrize("method", ["fesem+cam", "fedem", "fedper", "scaffold", "apfl", "wecfl+con"])
def test_methods_that_run_out_of_device_memory_lose_no_bit(method: str) -> None:
    runs_out(method, 2.2)


@pytest.mark.full
def test_gradients_alone_that_run_out_of_device_memory_lose_no_bit() -> None:
    """FedSGD keeps no states, and sums take less by themselves where memory is short."""
    runs_out("fedsgd", 3.0)


def runs_out(method: str, times: float) -> None:
    """Two rounds on so many times less memory than they take where there is plenty."""
    expected, _, plenty = two_rounds(method, ENDLESS, "exact", "local.chunk=2")
    memory = int(max(plenty.peak / times, 1.75 * ROWS))
    found, said, device = two_rounds(method, memory, "exact", "local.chunk=2")
    assert device.peak <= memory and "host memory" in said
    assert found == expected


def test_chunks_are_halved_when_there_is_nothing_left_to_move() -> None:
    _, said, device = two_rounds("fedavg", int(1.75 * ROWS), "seeded")
    assert "clients at a time" in said and "host memory" in said
    assert device.peak <= 1.75 * ROWS


STAGES = ["combine", "columns", "distances", "changes", "commit"]


@pytest.mark.parametrize("stage", STAGES)
def test_device_errors_name_client_round_and_stage(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **more: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    session = session_of("method=local", "local.engine=stacked")
    session.run_round(1)
    block, fleet = session.fleet.blocks[0], session.fleet
    fleet.begin(2)
    trained = fleet.train(fleet.initial(1)[0])
    monkeypatch.setattr(stacked_block, "fixed_point_sums", broken)
    for name in ("read", "columns"):
        monkeypatch.setattr(ClientRows, name, broken)
    for name in ("changes", "commit"):
        monkeypatch.setattr(DeviceStates, name, broken)
    asks = {
        "combine": trained.average,
        "columns": trained.gather,
        "distances": lambda: trained.distances(fleet.initial(1)[0]),
        "changes": block.changes,
        "commit": fleet.commit,
    }
    with pytest.raises(ClientFailure, match=r"Client 0 .*round 2 .*with 7 others.*illegal memory access"):
        asks[stage]()


def test_device_errors_name_the_clients_of_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of("method=fedavg", "local.engine=stacked", "local.chunk=3")
    original = ClientRows.write

    def broken(self: Any, start: int, rows: Any) -> None:
        if start == 3:
            raise RuntimeError("CUDA error: device-side assert triggered")
        original(self, start, rows)

    monkeypatch.setattr(ClientRows, "write", broken)
    with pytest.raises(ClientFailure, match=r"Client 3 .*round 1.*with clients 4, 5 as one batched model"):
        session.run_round(1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_failed_allocations_of_libraries_count_as_out_of_memory(words: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(words)) == expected
    assert is_out_of_memory(torch.OutOfMemoryError("no room")) and not is_out_of_memory(ValueError(words))


def test_tables_on_the_host_are_read_and_written_as_those_on_the_device() -> None:
    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    memory = DeviceMemory(torch.device("cpu"))
    table, other = memory.placed(values), memory.zeros(3, 4)
    other.replace(np.array([2, 0]), table, np.array([4, 1]))
    assert other.on_host().tolist() == [values[1].tolist(), [0.0] * 4, values[4].tolist()]
    assert table.read(np.array([3])).tolist() == [values[3].tolist()]
    assert not memory.can_spill  # there is no other memory


# --- what copies of states cost ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_device_budget_of_copied_states_is_a_copy_a_state_and_one_wait(method: str) -> None:
    """`fleet.copies`: what a round changed goes to the host once, from pinned memory, beside the device's work."""
    plan = plan_of(*settings(method), "determinism=seeded", "fleet.backend=in_process")
    with shadow_session(plan) as shadow:
        fleet, block = shadow.session.fleet, shadow.session.fleet.blocks[0]
        commit, found = fleet.commit, []

        def with_copies() -> Any:
            with shadow.device.stage("copies"):
                found.append(block.changes())
            return commit()

        fleet.commit = with_copies
        counts = [shadow.run_round(round) for round in (1, 2)]
        tables = {"fedavg": 1, "ditto": 3}[method]  # momentum; of both slots, and the private models
        assert counts[0]["copies"].d2h_bytes == tables * ROWS and counts[0]["copies"].d2h_copies == tables
        assert [each["copies"].synchronisations for each in counts] == [1, 1]
        # From the second round on they set out while the round is under way: here, only the wait is left.
        assert counts[1]["copies"].d2h_bytes == 0 and counts[1]["train"].d2h_bytes >= tables * ROWS
        states = block.snapshot()
        for client, state in found[1].put.items():
            for name, value in state.items():
                kept = states[client][name]
                pairs = (
                    [(value, kept)] if not isinstance(value, dict) else [(value[n], kept[n]) for n in value]
                )
                assert all(np.array_equal(a, b) for a, b in pairs)
