"""What was started, and how: the version, and the words that every printed command begins with."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

DISTRIBUTION = "archipelago-fl"
_started_as = ["archipelago"]  # of this process; the command line says it, in a notebook this is the answer


def version() -> str:
    """Of the installed package; a checkout that is not installed has none."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+not.installed"


def program() -> str:
    """The words before the arguments, as the user typed them: `archipelago` or `python -m platform.launch`."""
    return _started_as[0]


def set_program(words: str) -> None:
    """Say what the user typed before the arguments."""
    _started_as[0] = words


def program_of(started: str) -> str:
    """What a user typed to start the program at this path (the first of the process's arguments).

    >>> program_of("/opt/venv/bin/archipelago"), program_of("checkout/platform/launch.py")
    ('archipelago', 'python -m platform.launch')
    >>> program_of("site-packages/archipelago/__main__.py")
    'python -m archipelago'
    """
    path = Path(started)
    if path.suffix != ".py":
        return path.name or "archipelago"
    module = [path.parent.name] if path.stem == "__main__" else [path.parent.name, path.stem]
    return f"python -m {'.'.join(module)}"
