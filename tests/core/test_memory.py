"""What may still be taken of a container's memory."""

from pathlib import Path

import pytest

from archipelago.core import memory


def test_available_leaves_a_containers_file_cache_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("990000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 190000\nfile 800000\ninactive_file 500000\nactive_file 300000\n"
    )
    assert memory.available() == 1_000_000 - 190_000


def test_available_without_a_limit_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available() > 1_000_000
