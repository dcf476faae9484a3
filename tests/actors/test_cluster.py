"""Which cluster a run joins, what it leaves alone, and what it says when there is none."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.cluster import connected
from archipelago.core.settings import FleetSettings
from tests.support.errors import refused


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What `ray.init` was asked for; nothing is started."""
    asked: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append({"shutdown": True}))
    monkeypatch.setattr("actors.cluster._dashboard", lambda: "")
    monkeypatch.setattr(
        "actors.cluster._refuse_silence", lambda address: None
    )  # nobody is there, whoever asks
    monkeypatch.setenv("HOME", str(tmp_path))
    return asked


def test_without_an_address_the_cluster_is_one_of_our_own(init: list[dict[str, Any]]) -> None:
    with connected(FleetSettings(dashboard=False)) as where:
        assert where == "a local Ray cluster"
    # Ray's default would join whatever `ray start` left running on this machine.
    assert init[0]["address"] == "local" and not init[0]["include_dashboard"]
    assert init[1:] == [{"shutdown": True}]


@pytest.mark.parametrize("given", ["setting", "environment"])
def test_cluster_that_was_named_is_joined(
    init: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379" if given == "environment" else "other:1")
    fleet = FleetSettings(address="head:6379") if given == "setting" else FleetSettings()
    with connected(fleet) as where:
        assert where == "the Ray cluster at head:6379"
    assert init[0]["address"] == "head:6379" and init[1:] == [{"shutdown": True}]


def test_connection_that_is_there_is_used_and_left_alone(
    init: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with connected(FleetSettings(address="head:6379")):
        pass
    assert init == []


def wrapped_by_ray(reason: str) -> Exception:
    """A failure to connect as `ray.init` raises it: the reason is in the text of what it came from."""
    error = ConnectionError("Failed to connect to Ray cluster at head:6379")
    error.__cause__ = RuntimeError(f"Failed to connect to GCS. Last connection error: {reason}")
    return error


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (wrapped_by_ray("timed out"), "Expected a Ray cluster at 'head:6379', got none that answers"),
        (ValueError("Invalid address format: head:6379"), "got none that answers (Invalid address format"),
        (wrapped_by_ray("InvalidAuthToken: missing"), "Expected the token of the Ray cluster at 'head:6379'"),
        (ray.exceptions.AuthenticationError("no token"), "Expected the token of the Ray cluster"),
    ],
)
def test_cluster_that_does_not_answer_is_one_sentence(
    init: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, raised: Exception, sentence: str
) -> None:
    def refuse(**options: Any) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", refuse)
    with refused("unreachable") as caught, connected(FleetSettings(address="head:6379")):
        raise AssertionError("there is no cluster")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert init == []  # nothing was joined, so nothing is left


def test_address_where_nobody_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray would have tried for minutes"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            refused("unreachable"),
            connected(FleetSettings(address=address)),
        ):
            raise AssertionError("there is no cluster")


def test_token_of_ray_is_for_its_user_alone(
    init: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    token = tmp_path / ".ray/auth_token"
    with connected(FleetSettings()):
        first = token.read_text()
    assert len(first) == 64 and stat.S_IMODE(token.stat().st_mode) == 0o600
    token.chmod(0o644)  # as Ray makes it
    with connected(FleetSettings()):
        assert token.read_text() == first and stat.S_IMODE(token.stat().st_mode) == 0o600


LISTENING = """
import os, sys
import psutil, ray
from actors.cluster import connected
from archipelago.core.settings import FleetSettings

with connected(FleetSettings(dashboard=True)):
    @ray.remote
    class Actor:
        def here(self):
            return os.getpid()
    actor = Actor.remote()
    ray.get(actor.here.remote())
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for each in process.net_connections(kind="inet"):
            if each.status == psutil.CONN_LISTEN:
                print(process.name(), each.laddr.ip)
assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ
"""


@pytest.mark.ray
@pytest.mark.full
def test_cluster_of_our_own_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    """Its server, raylet, agents, dashboard, metrics and workers: everything that listens, of every process."""
    done = started_python(LISTENING, tmp_path)
    found = [line.rsplit(" ", 1) for line in done.splitlines() if line]
    names = " ".join(name for name, _ in found)
    assert "gcs_server" in names and "raylet" in names and "Actor" in names, done
    assert {address for _, address in found} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, done
    assert stat.S_IMODE((tmp_path / ".ray/auth_token").stat().st_mode) == 0o600


def started_python(text: str, home: Path) -> str:
    """What a script prints, in a process of its own with another home."""
    import subprocess

    from tests.support.clusters import ROOT

    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env={**kept, "HOME": str(home)}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
