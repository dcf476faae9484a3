"""Sweeps on clusters of several nodes: separate raylets, each with temporary files, home and caches of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.sweeps.runner import run_sweep
from tests.support.clusters import ROOT, Head, another_node, can_hide, family, head_node, short_folder
from tests.support.sweeps import assert_equal_sweeps, rows_of, settings_of, sweep_of

pytestmark = [pytest.mark.ray, pytest.mark.full]

SWEEP = ("sweep.methods=[fedavg,ifca]", "sweep.seeds=[0,1]", "checkpoint.every=4")


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with head_node(cpus=1) as started:
        yield started


def launch(*settings: str) -> list[str]:
    return [sys.executable, "-m", "platform.launch", *settings_of(*SWEEP, *settings)]


def wait_for_node(process: subprocess.Popen[bytes]) -> None:
    while len(family(process.pid)) < 4:  # a raylet and its agents
        assert process.poll() is None
        time.sleep(0.2)


def job_names(head: Head) -> list[str]:
    """The names of the cluster's jobs, as its dashboard has them."""
    asked = urllib.request.Request(f"{head.dashboard}/api/jobs/")
    asked.add_header("Authorization", f"Bearer {head.environment['RAY_AUTH_TOKEN']}")
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return [str((job["metadata"] or {}).get("job_name")) for job in json.load(answer)]


def test_lost_node_s_trials_are_finished_on_another(head: Head, tmp_path: Path) -> None:
    log = tmp_path / "log"
    storage = tmp_path / "shared"
    storage.mkdir()
    rounds = "rounds=150"
    with short_folder() as root, another_node(head, cpus=2, root=root) as node:
        wait_for_node(node)
        with log.open("wb") as output:
            driver = subprocess.Popen(
                launch(rounds, f"storage={storage}", "name=lost"),
                cwd=ROOT, env={**head.environment, "RAY_ADDRESS": head.gcs}, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            runs = storage / "lost/runs"
            # One of three trials at a time runs on the head; the others have a checkpoint to resume from.
            while sum(file.read_bytes().count(b"\n") > 6 for file in runs.glob("*/metrics.csv")) < 3:
                assert driver.poll() is None, log.read_text()
                time.sleep(0.01)
            # The node divided the data itself: nothing but `storage` is shared.
            assert list((root / "ARCHIPELAGO_CACHE/partitions").glob("*.safetensors"))
            for member in family(node.pid):
                member.kill()
            assert driver.wait(240) == 0, log.read_text()
        finally:
            driver.kill()
            driver.wait()
    assert "resumes from its last checkpoint: its process or node was lost" in log.read_text()
    assert {row.status for row in rows_of(storage / "lost").values()} == {"finished"}
    whole = sweep_of(tmp_path, *SWEEP, rounds, "fleet.backend=in_process")
    assert_equal_sweeps(storage / "lost", run_sweep(whole, str(tmp_path / "whole"), quiet=True))


def test_lost_node_s_actors_find_another_place(head: Head, tmp_path: Path) -> None:
    """A trial with client actors, on the only node that holds them; another node comes when that one is gone."""
    log, storage, few = (
        tmp_path / "log",
        tmp_path / "shared",
        ("rounds=60", "fleet.actors=2", "sweep.seeds=[0]"),
    )
    storage.mkdir()
    metrics = storage / "moved/runs/ifca-seed0/metrics.csv"
    typed = settings_of("method=ifca", "checkpoint.every=4", *few, f"storage={storage}", "name=moved")
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(another_node(head, cpus=2, root=stack.enter_context(short_folder())))
        wait_for_node(node)
        with log.open("wb") as output:
            driver = subprocess.Popen(
                [sys.executable, "-m", "platform.launch", *typed],
                cwd=ROOT, env={**head.environment, "RAY_ADDRESS": head.gcs}, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 7:
                assert driver.poll() is None, log.read_text()
                time.sleep(0.01)
            assert "moved" in job_names(head)  # what the Ray dashboard calls the sweep
            for member in family(node.pid):
                member.kill()
            stack.enter_context(another_node(head, cpus=2, root=stack.enter_context(short_folder())))
            assert driver.wait(280) == 0, log.read_text()
        finally:
            driver.kill()
            driver.wait()
    alone = sweep_of(tmp_path, "method=ifca", "checkpoint.every=4", *few, "fleet.backend=in_process")
    assert_equal_sweeps(storage / "moved", run_sweep(alone, str(tmp_path / "whole"), quiet=True))


@pytest.mark.skipif(not can_hide(), reason="this machine does not let a test mount a folder")
def test_nodes_without_shared_storage_are_reported_before_anything_starts(head: Head, tmp_path: Path) -> None:
    storage = tmp_path / "not-shared"
    storage.mkdir()
    with short_folder() as root, another_node(head, cpus=1, hidden=storage, root=root) as node:
        wait_for_node(node)
        for place in (str(storage), storage.as_uri()):  # an address may name a disk of one node, too
            answered = head.call(*launch(f"storage={place}", "name=none"), RAY_ADDRESS=head.gcs)
            assert answered.returncode == 2, answered.stdout + answered.stderr
            sentence = answered.stderr.strip().splitlines()[-1]
            assert sentence.startswith("Expected storage that all 2 nodes of the cluster share, got")
            assert not list((storage / "none").rglob("*"))  # the name is free for the same command elsewhere


def test_sweep_as_a_ray_job(head: Head, tmp_path: Path) -> None:
    done = head.call(
        "ray", "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--",
        "python", "-m", "platform.launch", *settings_of(*SWEEP), f"storage={tmp_path}", "name=job",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Results: {tmp_path / 'job'}" in done.stdout
    whole = run_sweep(
        sweep_of(tmp_path, *SWEEP, "fleet.backend=in_process"), str(tmp_path / "whole"), quiet=True
    )
    assert_equal_sweeps(tmp_path / "job", whole)
