"""What the command line says and does when another process takes over what it writes at an address."""

from __future__ import annotations

from pathlib import Path

import pytest

import archipelago.cli.main
from archipelago import open_run
from archipelago.experiments.runner import run_experiment
from archipelago.runs.storage import LEASE, Mirror, join, remove_file, working_copy
from tests.support.experiments import TINY, config_of
from tests.support.leases import holder, put_lease
from tests.support.runs import assert_equal_runs
from tests.support.s3 import s3_server


@pytest.mark.slow
def test_run_in_an_object_store_that_is_taken_over_stops_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as (storage, objects):
        run, taken = f"{storage}/mine", []
        follow = Mirror.follow

        def taken_over(mirror: Mirror) -> None:
            follow(mirror)
            if not taken and "bucket/results/mine/checkpoints/round-000002/manifest.json" in objects:
                taken.append(put_lease(run, seconds=60))
                objects["bucket/results/mine/metrics.csv"] = b"theirs"

        with monkeypatch.context() as patch:
            patch.setattr(Mirror, "follow", taken_over)
            typed = [*TINY, "checkpoint.every=1", f"storage={storage}", "name=mine"]
            assert archipelago.cli.main.main(typed) == 1
        printed = capsys.readouterr().err
        assert "process 7 on other" in printed and f"resume {run}" in printed and "Traceback" not in printed
        assert objects["bucket/results/mine/metrics.csv"] == b"theirs" and holder(run) == "theirs"
        assert not working_copy(run).exists()
        assert archipelago.cli.main.main(["resume", run]) == 2  # the other one is alive
        assert objects["bucket/results/mine/metrics.csv"] == b"theirs"
        objects["bucket/results/mine/metrics.csv"] = b""  # a file that is torn is cut back
        remove_file(join(run, LEASE))
        for key in [key for key in objects if "/checkpoints/" in key]:
            del objects[key]
        assert archipelago.cli.main.main(["resume", run]) == 0
        assert_equal_runs(open_run(run).path, run_experiment(config_of(), tmp_path / "here", quiet=True))
        assert holder(run) == ""
