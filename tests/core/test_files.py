"""Atomic writes: a file is there complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago.core.files import whole_file, write_whole


def test_old_content_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_whole(path, "old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("durable", [True, False])
def test_error_on_the_way_changes_nothing(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "status.json"
    write_whole(path, "old", durable=durable)
    with pytest.raises(RuntimeError), whole_file(path, durable=durable) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
