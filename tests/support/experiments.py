"""Small experiments for tests: a config, its plan, a session in this process, a digest of what came out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.reports import RoundReport
from actors.session import Checkpoint, InProcessSession, Plan
from archipelago.data import build_federation
from archipelago.experiments.config import load_config
from archipelago.experiments.plan import make_plan

TINY = (
    "clients=8",
    "clusters=2",
    "rounds=4",
    "data.rotations=2",
    "model=mlp",
    "model.hidden=[8]",
    "local.steps=3",
    "local.batch=16",
    "fleet.backend=in_process",
)


def config_of(*overrides: str) -> Any:
    """A tiny experiment on rotated digits, with some settings changed."""
    replaced = {override.partition("=")[0] for override in overrides}
    if "local.epochs" in replaced:
        replaced.add("local.steps")
    if "model.target" in replaced:
        replaced.add("model")
    if "model" in replaced and "model=mlp" not in overrides:
        replaced.add("model.hidden")  # which mlp reads, and no other
    kept = [setting for setting in TINY if setting.partition("=")[0] not in replaced]
    return load_config(None, [*kept, *overrides])


_FEDERATIONS: dict[str, Any] = {}  # read-only values, so tests may share them


def plan_of(*overrides: str) -> Plan:
    """The plan of `config_of(...)`."""
    config = config_of(*overrides)
    key = repr((config.data, config.partition, config.clients, config.seed))
    if key not in _FEDERATIONS:
        _FEDERATIONS[key] = build_federation(config.data, config.partition, config.clients, config.seed)
    return make_plan(config, _FEDERATIONS[key])


def session_from(settings: Sequence[str]) -> InProcessSession:
    """A session of these settings and the platform's defaults alone."""
    config = load_config(None, list(settings))
    federation = build_federation(config.data, config.partition, config.clients, config.seed)
    return InProcessSession(make_plan(config, federation))


def session_of(
    *overrides: str, blocks: Sequence[Sequence[int]] | None = None, checkpoint: Checkpoint | None = None
) -> InProcessSession:
    """A session in this process."""
    return InProcessSession(
        plan_of(*overrides), checkpoint, None if blocks is None else [list(b) for b in blocks]
    )


def run(session: Any, rounds: int, first: int = 1) -> list[RoundReport]:
    """Some rounds of a session."""
    return [session.run_round(round) for round in range(first, first + rounds)]


def checkpoint_of(session: Any) -> Checkpoint:
    """The session's committed state, as a checkpoint would bring it back."""
    parts = {name: fetch() for name, fetch in session.snapshot().items()}
    clients: dict[int, dict[str, Any]] = {}
    for name, part in parts.items():
        if name != "server":
            clients.update(part)
    return Checkpoint(parts["server"], clients)


def digest(value: Any) -> str:
    """A fingerprint of every bit of a nested value (arrays, reports, dictionaries)."""
    made = hashlib.sha256()
    _feed(made, value)
    return made.hexdigest()


def _feed(made: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        made.update(f"{value.dtype}{value.shape}".encode())
        made.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, RoundReport):
        _feed(made, [value.round, dict(value.metrics), dict(value.clients or {}), value.assignment])
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            made.update(str(key).encode())
            _feed(made, value[key])
    elif isinstance(value, list | tuple):
        made.update(f"[{len(value)}".encode())
        for item in value:
            _feed(made, item)
    else:
        made.update(repr(value).encode())


def outcome(session: Any, reports: list[RoundReport]) -> str:
    """The digest of all that must be equal everywhere: reports, server state, every client's state."""
    final = checkpoint_of(session)
    return digest([reports, final.server, final.clients])
