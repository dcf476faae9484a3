"""What must be in place before any test is collected."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's cache; processes they start inherit theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("ARCHIPELAGO_STATE", str(tmp_path_factory.mktemp("state")))  # which runs were made here
        yield


@pytest.fixture(autouse=True, scope="session")
def words_of_examples(doctest_namespace: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """What examples in docstrings may use: a `folder` for results, and settings with which a run is `quick`."""
    from archipelago import Callback

    doctest_namespace["folder"] = str(tmp_path_factory.mktemp("examples"))
    doctest_namespace["quick"] = {
        "clients": 2, "local": {"steps": 1}, "fleet": {"backend": "in_process"}, "quiet": True,
    }  # fmt: skip
    doctest_namespace["Callback"] = Callback
