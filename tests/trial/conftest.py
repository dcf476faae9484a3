"""One warm process and one set of undamaged runs for all tests of the trial."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.warm import Warm, warm
from tests.trial.run_directories import make_runs


@pytest.fixture(scope="session")
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Everything imported, ready to fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        with warm(tmp_path_factory.mktemp("warm")) as process:
            yield process


@pytest.fixture(scope="session")
def runs(warm_process: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undamaged runs."""
    folder = tmp_path_factory.mktemp("runs")
    make_runs(warm_process, folder)
    return folder
