"""Whether a folder is a run, and how far it has come: the one rule, for whoever asks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.files import check_regular
from archipelago.runs.format import FORMAT, upgraded_status
from archipelago.runs.lock import writer_is_gone
from archipelago.runs.storage import is_address, join, read_text


@dataclass(frozen=True)
class Status:
    """How far a run has come.

    `state` is running, finished, failed, or interrupted: it says running, and nobody writes it any more.
    """

    state: str
    rounds_done: int
    rounds: int | None = None
    sentence: str | None = None
    identity: str | None = None  # what the run is of (`identity.py`); None of runs from before

    def __str__(self) -> str:
        of = f" of {self.rounds}" if self.rounds is not None else ""
        text = f"{self.state}, {self.rounds_done}{of} rounds"
        return f"{text}: {self.sentence}" if self.sentence else text


def read_status(path: Path) -> Status:
    """The status of the run in `path`, which is taken to be one."""
    status = Status(**_content(path))
    return (
        replace(status, state="interrupted") if status.state == "running" and writer_is_gone(path) else status
    )


def _content(path: Path) -> dict[str, Any]:
    check_regular(path / "status.json")
    try:
        content = upgraded_status(json.loads((path / "status.json").read_text(encoding="utf-8")), path)
        Status(**content)  # nothing is missing, nothing is unknown
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path / 'status.json'} is damaged or missing; the run cannot be used.",
            code="damaged", file=path / "status.json",
        ) from error  # fmt: skip
    return content


def is_run_at(address: str) -> bool:
    """Whether a run lives at an address: a folder, or a place in an object store."""
    return (
        read_text(join(address, "status.json")) is not None if is_address(address) else is_run(Path(address))
    )


def state_at(address: str) -> str:
    """The state that the `status.json` there says; empty where it is damaged or missing."""
    try:
        text = read_text(join(address, "status.json"))
        return str(json.loads(text or "{}").get("state", ""))
    except (UserError, ValueError, AttributeError):
        return ""


def status_text(status: Status) -> str:
    """The content of `status.json`, with the format of the run directory."""
    return json.dumps({**asdict(status), "format": FORMAT}, indent=2, ensure_ascii=False) + "\n"


def is_run(path: Path) -> bool:
    """Whether `path` looks like a run directory."""
    return (path / "config.yaml").is_file() and (path / "status.json").is_file()


def check_is_run(path: Path) -> None:
    """A `UserError` if `path` is not a run directory, with the runs that stand beside it."""
    if is_run(path):
        return
    folder = path if path.is_dir() else path.parent
    near = sorted(entry.name for entry in folder.iterdir() if is_run(entry)) if folder.is_dir() else []
    hint = f" Runs in {folder}: {', '.join(near[-5:])}." if near else ""
    if not path.exists():
        raise UserError(
            f"There is no run {path}: expected the path of a run directory.{hint}",
            code="not-found", path=path,
        )  # fmt: skip
    raise UserError(
        f"{path} is not a run directory: it has no config.yaml and status.json.{hint}",
        code="not-a-run", path=path,
    )  # fmt: skip
