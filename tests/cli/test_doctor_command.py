"""`doctor`: what it says of the machine and of a Ray cluster, and that it never hangs."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archipelago.cli.ray_probe import RayProbe


def test_doctor_without_ray(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    code, out, error = command("doctor")
    assert (code, error) == (0, "")
    for text in (
        "CPUs",
        "memory",
        "GPU",
        "torch",
        "digits",
        "embedded",
        "client actor",
        "loop (CPU)",
        "none (RAY_ADDRESS is not set)",
        "none (a cluster may ask for one",
        f"{tmp_path / 'runs'} ",
    ):
        assert text in out  # fmt: skip
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-secret-token")
    code, out, _ = command("doctor")
    assert "set (RAY_AUTH_TOKEN)" in out
    assert "a-secret-token" not in out


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_doctor_with_a_cluster_that_does_not_answer(
    command: Any, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayProbe, "SECONDS", 0.5)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent_port}")
    code, out, _ = command("doctor")
    assert code == 0
    assert "no: no answer in 0.5 s" in out
    assert "the Ray cluster does not answer" in out


def test_doctor_with_nothing_at_the_address(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    start = time.monotonic()
    code, out, _ = command("doctor")
    assert code == 0
    assert re.search(rf"address +{address}\n", out)
    assert re.search(r"reachable +no: ", out)
    assert time.monotonic() - start < 20


@pytest.mark.ray
def test_doctor_with_a_real_cluster(ray_cluster: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    code, out, error = command("doctor")
    assert code == 0, error
    assert "yes: 1 node, 8 CPUs, 2 GPUs" in out
    assert "8 client actors of 1 CPU each, for 20 clients" in out


def test_doctor_as_json_says_the_same_facts(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-secret-token")
    code, out, error = command("doctor", "--json")
    assert (code, error) == (0, "") and "a-secret-token" not in out
    found = json.loads(out)
    assert {"machine", "packages", "data_sets", "ray", "run"} <= set(found)
    assert "usable of" in found["machine"]["CPUs"] and found["packages"]["torch"][0].isdigit()
    assert found["ray"]["token"] == "set (RAY_AUTH_TOKEN)" and "client actor" in found["run"]["actors"]
    shown = command("doctor")[1]
    for section in found.values():
        for name, value in section.items():
            assert name == "memory" or re.search(
                rf"^  {re.escape(name)} +{re.escape(value)}$", shown, re.M
            ), name


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of 8 CPUs and 4 GPUs, and a torch that could use them."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("actors.devices.machine_gpus", lambda: 4)
    monkeypatch.setattr("actors.devices.torch_has_cuda", lambda: True)
    monkeypatch.setattr("archipelago.experiments.checks.gpu_count", lambda: 4)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def rows(command: Any, *settings: str) -> dict[str, str]:
    code, out, error = command("doctor", "--json", *settings)
    assert (code, error) == (0, "")
    found: dict[str, str] = json.loads(out)["run"]
    return found


def test_doctor_says_devices_precision_and_determinism_of_the_default_run(command: Any, gpus: None) -> None:
    found = rows(command)
    assert found["actors"] == "4 client actors of 1 CPU and 1 GPU each, for 20 clients"
    assert found["devices"] == "4 GPUs, one per actor"
    assert found["engine"].endswith("(GPU)")
    assert (found["precision"], found["determinism"]) == ("32", "seeded")
    assert "idle" not in found and "is not needed" in found["MPS"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["fleet.gpus=0"], "4 of 4 GPUs stay idle: fleet.gpus=0 was set."),
        (["clients=3", "clusters=2"], "1 of 4 GPUs stays idle: there are fewer clients (3) than GPUs."),
        (["fleet.actors=1"], "3 of 4 GPUs stay idle: fleet.actors=1 was set."),
        (
            ["fleet.cpus=4"],
            "2 of 4 GPUs stay idle: the CPUs of their nodes hold no more actors of 4 CPU (fleet.cpus).",
        ),
    ],
)
def test_doctor_says_why_gpus_stay_idle(command: Any, gpus: None, settings: list[str], why: str) -> None:
    assert rows(command, *settings)["idle"] == why


def test_doctor_says_that_torch_is_a_cpu_build(
    command: Any, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.devices.torch_has_cuda", lambda: False)
    code, out, _ = command("doctor")
    assert code == 0
    assert "4, which torch cannot use: it is a CPU build" in out
    assert "4 of 4 GPUs stay idle: torch is a CPU build here" in out
    assert "loop (CPU)" in out


def test_doctor_asks_for_mps_where_actors_share_a_gpu(command: Any, gpus: None, tmp_path: Path) -> None:
    found = rows(command, "fleet.gpus=0.5", "precision=bf16", "determinism=fast")
    assert found["devices"] == "4 GPUs, 0.5 per actor"
    assert (found["precision"], found["determinism"]) == ("bf16", "fast")
    assert "nvidia-cuda-mps-control -d" in found["MPS"]
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert rows(command, "fleet.gpus=0.5")["MPS"] == f"runs on this machine ({tmp_path / 'mps'})"
