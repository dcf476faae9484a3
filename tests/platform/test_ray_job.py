"""Ray jobs on a real cluster that asks for a token, started as its administrator would start it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago import open_run
from archipelago.experiments.runner import run_experiment
from tests.support.clusters import ROOT, Head, head_node
from tests.support.experiments import TINY, config_of
from tests.support.runs import assert_equal_runs

pytestmark = pytest.mark.ray

EXPERIMENT = [*(setting for setting in TINY if not setting.startswith("fleet.")), "fleet.actors=1"]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with head_node(cpus=2) as started:
        yield started


# A LightningModule of the user's own, which actors can import from the working directory alone.
OWN_MODULE = "model.target=tests.support.modules.DropoutModule"


def check_results(run: Path, folder: Path, *changes: str) -> None:
    """The job left the run that the same experiment in this process leaves."""
    assert open_run(run).status.state == "finished"
    assert_equal_runs(run, run_experiment(config_of(*changes), folder / "here", quiet=True))


def test_job_that_brings_the_project_and_a_module_of_its_own_along(head: Head, tmp_path: Path) -> None:
    done = head.call(
        "ray", "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--",
        "python", "-m", "platform.launch", *(each for each in EXPERIMENT if not each.startswith("model")), OWN_MODULE,
        f"storage={tmp_path}", "name=job",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Results: {tmp_path / 'job'}" in done.stdout  # the table reached the one who submitted
    check_results(tmp_path / "job", tmp_path, OWN_MODULE)
    # What was sent is the project, and neither its environment nor its history.
    packages = [
        path for path in head.folder.glob("session_2*/runtime_resources/working_dir_files/*") if path.is_dir()
    ]
    assert len(packages) == 1
    # An empty folder is a name without anything behind it: Ray sends it whatever is to be left out.
    sent = {path.name for path in packages[0].iterdir() if path.is_file() or any(path.iterdir())}
    assert {"platform", "actors", "tune_configs", "pyproject.toml"} <= sent
    assert not sent & {".git", ".venv", "runs", ".mypy_cache", ".pytest_cache"}
    assert sum(path.stat().st_size for path in packages[0].rglob("*")) < 20e6


def test_job_on_nodes_that_carry_the_project(head: Head, tmp_path: Path) -> None:
    done = head.call(
        "ray", "job", "submit", "--", "python", "-m", "platform.launch", *EXPERIMENT, f"storage={tmp_path}",
        "name=job", RAY_ADDRESS=head.dashboard,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(tmp_path / "job", tmp_path)


def test_job_by_the_installed_command_needs_no_checkout(head: Head, tmp_path: Path) -> None:
    """`ray job submit -- archipelago ...`, with a plug-in in the job's working directory and nothing else there."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_sets.py").write_text(
        "from archipelago.strategies.base import METHODS\n"
        "from archipelago.strategies.fedavg import FedAvg\n\n\n"
        "@METHODS.register('job_average', 'FedAvg under another name', label='Job average')\n"
        "class JobAverage(FedAvg):\n    pass\n"
    )
    tiny = [each for each in EXPERIMENT if not each.startswith("method=")]
    done = head.call(
        "ray", "job", "submit", "--address", head.dashboard, "--working-dir", str(folder), "--",
        "archipelago", *tiny, "plugins=[my_sets]", "method=job_average", f"storage={tmp_path}", "name=job",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found, same = (
        open_run(tmp_path / "job"),
        run_experiment(config_of("method=fedavg"), tmp_path / "here", quiet=True),
    )
    assert found.status.state == "finished"
    assert (found.path / "metrics.csv").read_bytes() == (same / "metrics.csv").read_bytes()


@pytest.mark.full
def test_run_ended_from_outside_says_how_to_resume(head: Head, tmp_path: Path) -> None:
    long = [setting for setting in EXPERIMENT if not setting.startswith("rounds=")]
    driver = subprocess.Popen(
        [sys.executable, "-m", "platform.launch", *long, "rounds=100000", f"fleet.address={head.gcs}",
         f"storage={tmp_path}", "name=long"],
        cwd=ROOT, env=head.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not (tmp_path / "long" / "metrics.csv").exists():
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.1)
        driver.terminate()  # what `ray job stop` does first
        _, error = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert driver.returncode == 143, error
    assert error.splitlines()[-1].endswith(f"python -m platform.launch resume {tmp_path / 'long'}")
    assert open_run(tmp_path / "long").status.state != "finished"


def test_wrong_token_is_refused(head: Head, tmp_path: Path) -> None:
    stranger = {"RAY_AUTH_TOKEN": "0" * 64, "RAY_gcs_server_port_wait_time_s": "1"}
    refused = head.call("ray", "job", "submit", "--address", head.dashboard, "--", "true", **stranger)
    assert refused.returncode != 0
    assert "Invalid authentication token" in refused.stderr
    driver = [sys.executable, "-m", "platform.launch", *EXPERIMENT, f"fleet.address={head.gcs}"]
    refused = head.call(*driver, f"storage={tmp_path}", "name=refused", **stranger)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "Expected the token of the Ray cluster" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "refused").exists()
