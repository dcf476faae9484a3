"""Which cluster a run joins, what it leaves alone, and what it says when there is none."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from actors.cluster import connected
from archipelago.core.errors import UserError
from archipelago.core.settings import FleetSettings


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `ray.init` was asked for; nothing is started."""
    asked: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append({"shutdown": True}))
    monkeypatch.setattr("actors.cluster._dashboard", lambda: "")
    return asked


def test_without_an_address_the_cluster_is_one_of_our_own(init: list[dict[str, Any]]) -> None:
    with connected(FleetSettings(dashboard=False)) as where:
        assert where == "a local Ray cluster"
    # Ray's default would join whatever `ray start` left running on this machine.
    assert init[0]["address"] == "local" and not init[0]["include_dashboard"]
    assert init[1:] == [{"shutdown": True}]


@pytest.mark.parametrize("given", ["setting", "environment"])
def test_a_cluster_that_was_named_is_joined(
    init: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379" if given == "environment" else "other:1")
    fleet = FleetSettings(address="head:6379") if given == "setting" else FleetSettings()
    with connected(fleet) as where:
        assert where == "the Ray cluster at head:6379"
    assert init[0]["address"] == "head:6379" and init[1:] == [{"shutdown": True}]


def test_a_connection_that_is_there_is_used_and_left_alone(
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
def test_a_cluster_that_does_not_answer_is_one_sentence(
    init: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, raised: Exception, sentence: str
) -> None:
    def refuse(**options: Any) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(UserError) as caught, connected(FleetSettings(address="head:6379")):
        raise AssertionError("there is no cluster")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert init == []  # nothing was joined, so nothing is left
