"""What the tests of all commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from archipelago.cli.main import main


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call the command line in an empty folder; gives back (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return (code, *capfd.readouterr())

    return call
