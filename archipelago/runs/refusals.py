"""What stands in the way of a new run, or of resuming one: sentences for the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archipelago.core.dotted import dotted
from archipelago.core.errors import UserError
from archipelago.core.program import program
from archipelago.runs import identity
from archipelago.runs.files import RunFiles, read_yaml
from archipelago.runs.status import is_run, read_status


def refuse_what_is_there(path: Path, config_yaml: str) -> None:
    """A `UserError` if a new run cannot have this path."""
    if path.is_dir() and is_run(path):
        status = read_status(path)
        other = _differences(path, config_yaml, ("name", "storage", "fleet."))
        if other:
            raise UserError(
                f"Run {path} exists already ({status.state}, {status.rounds_done} rounds done) and is of another "
                f"experiment: {other}. Choose another name with name=...",
                code="exists",
                path=path,
            )
        raise UserError(
            f"Run {path} exists already ({status.state}, {status.rounds_done} rounds done); resume it with "
            f"`{program()} resume {path}`, or choose another name with name=...",
            code="exists",
            path=path,
        )
    if path.is_dir() and any(path.iterdir()):
        raise UserError(
            f"{path} is a folder that is not a run, and a run would mix with what it holds; choose another "
            "name with name=... or another folder with storage=...",
            code="exists",
            path=path,
        )
    if path.exists() and not path.is_dir():
        sentence = f"{path} is a file, and a run needs a folder; choose another name with name=..."
        raise UserError(sentence, code="exists", path=path)


def check_config(path: Path, expected: str, ignore: tuple[str, ...]) -> None:
    """A `UserError` if the run in `path` is of another config; keys that start with one of `ignore` may differ."""
    other = _differences(path, expected, ignore)
    if other:
        raise UserError(
            f"Run {path} belongs to another config: {other}. Resume it without changes, or start a new run under "
            "another name with name=...",
            code="other-config",
            path=path,
        )


def check_identity(path: Path) -> None:
    """A `UserError` if the config or the partition of the run in `path` was changed since it was made."""
    settings = settings_of(_config_text(path), path / "config.yaml")
    identity.check_identity(path, settings, read_status(path).identity)


def _config_text(path: Path) -> str:
    try:
        return (path / "config.yaml").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"The run in {path} cannot be read ({error}).", code="unreadable", path=path
        ) from error


def _differences(path: Path, expected: str, ignore: tuple[str, ...]) -> str:
    """Where a run's config says something else, in words; empty where nothing does."""
    theirs = dotted(RunFiles(path).config)
    ours = dotted(settings_of(expected))
    differences = [
        f"{key} is {theirs.get(key, 'absent')} there and {ours.get(key, 'absent')} here"
        for key in dict.fromkeys([*theirs, *ours])
        if theirs.get(key, _ABSENT) != ours.get(key, _ABSENT) and not key.startswith(ignore)
    ]
    more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
    return f"{'; '.join(differences[:3])}{more}"


_ABSENT = object()


def settings_of(text: str, path: Path = Path("config.yaml")) -> dict[str, Any]:
    """The mapping in a YAML text that stands in `path`; empty if it holds something else."""
    content = read_yaml(text, path)
    return content if isinstance(content, dict) else {}
