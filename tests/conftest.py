"""One Ray cluster for all tests of a session that need one, and one cache of partitions that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import own_cluster, short_folder


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` finds the files with tests of clusters by their marks: one that it missed would not be run."""
    files = {item.path for item in items if item.get_closest_marker("ray") is not None}
    for path in files:
        if "mark.ray" not in path.read_text(encoding="utf-8"):
            raise pytest.UsageError(
                f"expected 'pytest.mark.ray' in {path}, whose tests need a cluster: mark them there"
            )


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Path]:
    """The shared cluster: 8 CPUs and 2 GPUs, declared and not real; yields the folder its workers know."""
    from tests.support.killers import FOLDER

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    with short_folder() as folder, own_cluster(cpus=8, gpus=2, **{FOLDER: str(folder)}, **keys):
        yield folder


@pytest.fixture
def ray_cluster(ray_session: Path) -> Iterator[Path]:
    """The shared cluster, as empty as it was found: a test that leaves actors behind fails."""
    from tests.support.clusters import assert_idle

    yield ray_session
    for armed in ray_session.iterdir():
        armed.unlink()
    assert_idle()


@pytest.fixture
def own_entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entries, plug-ins and modules that a test brings are gone after it."""
    import sys

    from archipelago.core import plugins
    from archipelago.core.registry import REGISTRIES

    plugins.load_built_in()
    before = {kind: (dict(registry._entries), dict(registry.paths)) for kind, registry in REGISTRIES.items()}
    modules = set(sys.modules)
    monkeypatch.setattr(plugins, "_loaded", set(plugins._loaded))
    yield
    for kind, registry in REGISTRIES.items():
        if kind in before:
            registry._entries, registry.paths = before[kind]
    for name in set(sys.modules) - modules:
        if (
            not plugins.is_ours(name)
            and str(getattr(sys.modules[name], "__file__", "")).find("pytest-of-") >= 0
        ):
            del sys.modules[name]
