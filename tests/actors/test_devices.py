"""Claiming a device: torch's flags, the cap on a share, and what is said of it; on a machine without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.block import ClientBlock
from actors.blocks import make_block
from actors.compute import BlockDevice, compute_of
from actors.devices import CONTEXT, allocator_fraction, claim_device, mps_directory, refused_by_tier
from actors.session import InProcessSession
from archipelago.core.errors import ClientFailure, UserError
from tests.support.errors import refused
from tests.support.experiments import plan_of, run, session_of

GB = 2**30
FLAGS: dict[str, tuple[Any, str]] = {
    "matmul.allow_tf32": (torch.backends.cuda.matmul, "allow_tf32"),
    "cudnn.allow_tf32": (torch.backends.cudnn, "allow_tf32"),
    "cudnn.benchmark": (torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": (torch.backends.cudnn, "deterministic"),
    "fill_uninitialized_memory": (torch.utils.deterministic, "fill_uninitialized_memory"),
}
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def flags() -> dict[str, Any]:
    return {
        **{name: getattr(*flag) for name, flag in FLAGS.items()},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "workspace": os.environ.get(WORKSPACE),
    }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """torch.cuda on a machine without one: what was asked of it. A device of 16 GB."""
    calls: list[Any] = []
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name="A GPU", total_memory=16 * GB),
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device=None: calls.append(("memory", fraction, device)),
    )
    before = flags()
    yield calls
    assert flags() == before  # every test releases what it claims


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4])
def test_claim_caps_memory_to_the_share_without_the_context(cuda: list[Any], share: float) -> None:
    claim = claim_device(share)
    assert (claim.device, claim.name) == ("cuda:0", "A GPU")
    assert cuda == [("device", 0), ("memory", pytest.approx(share - CONTEXT / (16 * GB)), 0)]
    claim.release()
    assert cuda[-1] == ("memory", 1.0, 0)


def test_claim_of_a_whole_device_is_not_capped(cuda: list[Any]) -> None:
    claim_device(1.0).release()
    assert cuda == [("device", 0)]


def test_claim_of_a_share_that_cuda_itself_fills_is_a_sentence(cuda: list[Any]) -> None:
    before = flags()
    with refused("too-little-memory", setting="fleet.gpus", given=0.02, says=(">=", "0.039", "16.0", "0.32")):
        claim_device(0.02)
    assert flags() == before and ("memory", 1.0, 0) not in cuda
    assert allocator_fraction(0.04, 16 * GB) > 0


@pytest.mark.parametrize(
    ("precision", "determinism", "tf32", "deterministic"),
    [
        ("32", "auto", False, True),
        ("32", "exact", False, True),
        ("tf32", "seeded", True, True),
        ("tf32", "fast", True, False),
        ("bf16", "fast", False, False),
    ],
)
def test_claim_sets_flags_by_precision_and_tier_and_release_restores_them(
    cuda: list[Any], precision: str, determinism: str, tf32: bool, deterministic: bool
) -> None:
    before = flags()
    claim = claim_device(1.0, precision, determinism)
    found = flags()
    claim.release()
    assert found == {
        "matmul.allow_tf32": tf32,
        "cudnn.allow_tf32": tf32,
        "cudnn.benchmark": not deterministic,
        "cudnn.deterministic": deterministic,
        "fill_uninitialized_memory": False,
        "deterministic": deterministic,
        "workspace": ":4096:8" if deterministic else None,
    }
    assert flags() == before
    claim.release()  # a second time changes nothing
    assert flags() == before


def test_claim_leaves_a_workspace_that_the_user_chose(
    cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    claim = claim_device(1.0)
    assert os.environ[WORKSPACE] == ":16:8"
    claim.release()
    assert os.environ[WORKSPACE] == ":16:8"
    monkeypatch.delenv(WORKSPACE)


@pytest.mark.parametrize(("share", "present"), [(0.0, True), (0.0, False), (0.5, False)])
def test_claim_touches_nothing_on_a_cpu(
    cuda: list[Any], monkeypatch: pytest.MonkeyPatch, share: float, present: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    before = flags()
    for determinism in ("auto", "exact", "seeded", "fast"):
        claim = claim_device(share, "tf32", determinism)
        assert (claim.device, claim.name) == ("cpu", "CPU")
        assert flags() == before
    assert cuda == []


def test_session_in_process_takes_the_gpu_that_torch_sees_and_gives_its_flags_back(
    cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block itself stays on the CPU here: only where it would be, and under which flags, can be seen."""
    monkeypatch.setattr("actors.devices.torch_has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    seen: list[tuple[str, dict[str, Any]]] = []

    def on_cpu(setup: Any, clients: Any, x: Any, y: Any, device: str) -> ClientBlock:
        seen.append((device, flags()))
        return make_block(setup, clients, x, y)

    monkeypatch.setattr("actors.blocks.make_block", on_cpu)
    before = flags()
    session = session_of("determinism=fast")
    assert [device for device, _ in seen] == ["cuda:0"] and session.gpus == 1.0
    assert seen[0][1]["cudnn.benchmark"] is True
    assert session.compute().notes == ("1 of 2 GPUs stays idle: fleet.backend=in_process computes on one.",)
    session.close()
    assert flags() == before
    seen.clear()
    session = session_of("fleet.gpus=0")
    assert [device for device, _ in seen] == ["cpu"] and flags() == before
    assert session.compute().notes == ("2 of 2 GPUs stay idle: fleet.gpus=0 was set.",)
    session.close()


def test_session_that_cannot_be_made_gives_the_flags_back(
    cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.devices.torch_has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("actors.blocks.make_block", lambda *_: 1 / 0)
    before = flags()
    with pytest.raises(ZeroDivisionError):
        session_of()
    assert flags() == before


@pytest.mark.parametrize("determinism", ["auto", "exact", "seeded", "fast"])
def test_determinism_on_a_cpu_is_exact_whatever_is_asked_for(determinism: str) -> None:
    session = session_of(f"determinism={determinism}")
    assert session.compute().determinism == "exact"
    assert session.describe() == (
        "8 clients in this process (1 block): CPU; engine loop, precision 32, determinism exact"
    )


def test_operations_without_a_deterministic_kernel_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError(
        "adaptive_max_pool2d_backward_cuda does not have a deterministic implementation, but you set ..."
    )
    said = refused_by_tier(error, "auto")
    assert isinstance(said, UserError)
    assert "determinism=seeded, got adaptive_max_pool2d_backward_cuda" in str(said)
    assert refused_by_tier(RuntimeError("out of memory"), "auto") is None
    session = session_of("method=fedavg")

    def fails(jobs: Any) -> Iterator[Any]:
        raise error
        yield

    monkeypatch.setattr(session.fleet.blocks[0].engine, "train", fails)
    with refused("not-deterministic", operation="adaptive_max_pool2d_backward_cuda", says="determinism=fast"):
        run(session, 1)


def test_precision_below_32_bits_on_a_cpu_is_refused_by_the_block() -> None:
    """On a cluster elsewhere, only its actors see that there is no GPU."""
    import dataclasses

    plan = plan_of("method=fedavg")
    for precision in ("bf16", "tf32"):
        block = dataclasses.replace(plan.block, precision=precision)
        with refused("no-gpu", setting="precision", given=precision):
            InProcessSession(dataclasses.replace(plan, block=block))


def test_shares_of_a_gpu_ask_for_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert mps_directory() is None
    (tmp_path / "control").touch()
    assert mps_directory() == tmp_path
    shared = [BlockDevice("cuda:0", "A GPU", "node/0", "stacked", "seeded", mps) for mps in (False, False)]
    found = compute_of(shared, 0.5, "bf16")
    assert found.devices == {"A GPU": 1} and "nvidia-cuda-mps-control" in found.notes[0]
    assert found.sentence.startswith(
        "1 x A GPU, 0.5 per actor; engine stacked, precision bf16, determinism seeded"
    )
    with_mps = [BlockDevice("cuda:0", "A GPU", "node/0", "stacked", "fast", True)]
    assert compute_of(with_mps, 0.5, "32").notes == ()
    assert compute_of([*with_mps, *shared], 1.0, "32").determinism == "fast"  # the weakest of all
    assert compute_of(shared[:1], 1.0, "32").notes == ()


def test_client_failure_still_names_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of("method=fedavg")

    def fails(jobs: Any) -> Iterator[Any]:
        raise RuntimeError("CUDA error: unspecified launch failure")
        yield

    monkeypatch.setattr(session.fleet.blocks[0].engine, "train", fails)
    with pytest.raises(ClientFailure, match="unspecified launch failure"):
        run(session, 1)


# What torch refuses on a GPU under use_deterministic_algorithms(True), by the documentation of that function.
REFUSED = re.compile(
    r"aten\.(avg_pool3d_backward|_?adaptive_(avg|max)_pool\w*backward|fractional_max_pool\w*backward|max_unpool\w*"
    r"|upsample_\w*backward|reflection_pad\w*backward|nll_loss2d\w*|_ctc_loss_backward|put_?|histc|median|kthvalue"
    r"|grid_sampler\w*backward|cumsum|_embedding_bag\w*backward|scatter_reduce)\b"
)


class Operations(TorchDispatchMode):
    """The names of the operations on floating-point numbers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in args):
            self.names.add(str(function))
        return made


@pytest.mark.parametrize(
    ("method", "model"),
    [
        *(
            (each, "cnn_digits")
            for each in ("ifca+cam", "fedem", "wecfl+con+cks", "feddane", "femam", "fedsoft")
        ),
        ("fedavg", "resnet18"),
        ("fedavg", "mobilenet_v2"),
    ],
)
def test_default_tier_on_a_gpu_refuses_nothing_that_a_round_does(method: str, model: str) -> None:
    """Seen on the CPU: the same operations, with convolutions as a GPU has them."""
    engine = ("local.engine=stacked", "local.convolution=unfold", "determinism=seeded")
    small = () if model == "cnn_digits" else ("local.steps=1", "local.batch=4", "clients=2")
    with Operations() as seen:
        run(session_of(f"method={method}", f"model={model}", *engine, *small), 1)
    assert {"aten.unfold.default", "aten._log_softmax_backward_data.default"} <= seen.names
    assert not [name for name in seen.names if REFUSED.match(name)]


def test_bf16_with_the_engine_of_gpus_runs_on_a_cpu_and_says_so() -> None:
    settings = ("method=ifca", "local.engine=stacked", "determinism=seeded")
    plain, rounded = session_of(*settings), session_of(*settings, "precision=bf16")
    assert rounded.compute().sentence == "CPU; engine stacked, precision bf16, determinism seeded"
    losses = [run(session, 2)[-1].metrics["micro_loss"] for session in (plain, rounded)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)
