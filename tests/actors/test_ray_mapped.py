"""Memory-mapped samples reach Ray actors as the address of their file, and give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.session import RaySession
from archipelago.data.mapped import MappedArray
from tests.support import data_files
from tests.support.experiments import outcome, plan_of, run, session_of


@pytest.mark.ray
@pytest.mark.full
def test_actors_open_the_file_themselves(
    ray_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    data_files.tiny_imagenet(tmp_path / "tiny-imagenet-200", classes=2, train=8, val=8)
    settings = (
        "method=fedavg", "data=tiny_imagenet", f"data.root={tmp_path}", "data.rotations=1", "clients=2", "clusters=1",
        "model.hidden=[2]",
    )  # fmt: skip
    plan = plan_of(*settings, "data.mapped=yes", "fleet.backend=ray", "fleet.actors=1")
    assert isinstance(plan.x, MappedArray)
    put: list[Any] = []
    original = ray.put

    def watched(value: Any, **options: Any) -> Any:
        put.append(original(value, **options))
        return put[-1]

    monkeypatch.setattr(ray, "put", watched)
    session = RaySession(plan)
    try:
        found = outcome(session, run(session, 1))
        (arrived, *_) = ray.get(put)
        assert isinstance(arrived, MappedArray) and arrived.address == plan.x.address
    finally:
        session.close()
    there = session_of(*settings, "data.mapped=no")
    assert not isinstance(plan_of(*settings, "data.mapped=no").x, MappedArray)
    assert found == outcome(there, run(there, 1))
