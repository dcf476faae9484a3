"""What must be in place before any test is collected."""

import platform
from pathlib import Path

import pytest

# Under bare `pytest` the standard `platform` module is loaded before this file; pointing it at the package
# lets tests import `platform.launch`. Nothing outside the tests may (tests/test_invariants.py).
platform.__path__ = [str(Path(__file__).parent / "platform")]  # type: ignore[attr-defined]  # it is no package

import archipelago.core.torchvision_operators  # noqa: E402, F401  (before the first lightning or torchvision import)


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """One thread, as in every actor: two test processes with all cores each are slower than one."""
    import torch

    torch.set_num_threads(1)
