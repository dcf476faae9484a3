"""Object stores: one process at a time writes what is at an address, and one that lost the right to it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from archipelago import open_run
from archipelago.core.errors import UserError
from archipelago.runs import lease
from archipelago.runs.lease import Lease, LeaseLost
from archipelago.runs.storage import (
    LEASE,
    Mirror,
    join,
    read_text,
    remove_file,
    working_copy,
    writable,
    write_text,
)
from archipelago.sweeps.directory import SweepDirectory
from archipelago.sweeps.runner import resume_sweep, run_sweep
from archipelago.sweeps.trial import TrialRun, payload
from tests.support.errors import refused
from tests.support.leases import holder, put_lease, taken_by_one_of_six
from tests.support.sweeps import rows_of, sweep_of


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Working copies of this test alone, and no thread left behind."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(lease, "SETTLE", 0.3)
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "lease"]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return (tmp_path / "store/run").as_uri()


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


_HOLD = """
import sys, time
from archipelago.runs import lease
from archipelago.runs.storage import writable
lease.SETTLE, lease.SECONDS, lease.RENEWAL = 0.1, float(sys.argv[2]), float(sys.argv[2]) / 4
with writable(sys.argv[1]) as (folder, mirror):
    folder.mkdir(exist_ok=True)
    (folder / "status.json").write_text("{}")
    (folder / "metrics.csv").write_text("live")
    mirror.push()
    print(folder, flush=True)
    sys.stdin.readline()
print("done", flush=True)
"""


@contextmanager
def other_process(
    address: str, tmp: Path, seconds: float = 60.0
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that writes there, with its working copies in `tmp`; and its working copy."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, address, str(seconds)], env={**os.environ, "TMPDIR": str(tmp)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        yield child, Path(child.stdout.readline().strip())
    finally:
        child.kill()
        if child.returncode is None:
            child.communicate()


@pytest.mark.parametrize("shared", [True, False])  # False: as on another node, or in another container
def test_writable_refuses_what_a_live_process_writes_and_leaves_it_alone(
    address: str, tmp_path: Path, shared: bool
) -> None:
    theirs = tmp_path / "tmp" if shared else tmp_path / "theirs"
    theirs.mkdir(exist_ok=True)
    with other_process(address, theirs) as (child, folder):
        store, copy, held = files(tmp_path / "store"), files(folder), holder(address)
        assert copy["metrics.csv"] == b"live"
        with pytest.raises(UserError) as error, writable(address):
            pass
        assert f"process {child.pid}" in str(error.value)
        assert files(folder) == copy and files(tmp_path / "store") == store and holder(address) == held
        assert Mirror(tmp_path / "read", address).fetch()  # readers need no lease
        assert set(files(tmp_path / "read")) == {"metrics.csv", "status.json"}
        child.kill()
        child.wait()
        with writable(address) as (mine, _):  # at once: it is known to be gone
            assert (mine / "metrics.csv").read_text() == "live"
    assert holder(address) == ""


def test_writable_ends_with_nothing_left_but_the_files(address: str, tmp_path: Path) -> None:
    with writable(address) as (folder, mirror):
        assert mirror is not None and holder(address) not in ("", "theirs")
        folder.mkdir()
        (folder / "metrics.csv").write_text("1")
    assert files(tmp_path / "store") == {"run/metrics.csv": b"1"} and not folder.exists()


def test_lease_of_another_machine_is_taken_when_it_has_expired(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put_lease(address, seconds=30)
    with refused("busy", holder="process 7 on other"):
        Lease(address)
    assert holder(address) == "theirs"
    put_lease(address, seconds=-1)
    Lease(address).release()
    assert holder(address) == ""
    put_lease(address, seconds=1.5)  # a lost node: Tune begins its trial elsewhere
    began = time.monotonic()
    taken = Lease(address, wait=20)
    assert 1 < time.monotonic() - began < 10 and "process 7 on other" in capsys.readouterr().err
    taken.release()


@pytest.mark.parametrize("text", ["", "[]", '{"expires": "soon"}', '{"id": "x"}'])
def test_lease_that_is_damaged_is_nobodys(address: str, text: str) -> None:
    write_text(join(address, LEASE), text)
    Lease(address).release()


def test_lease_of_a_process_whose_number_was_given_away_is_taken(address: str) -> None:
    put_lease(address, seconds=30, where=lease._where(), pid=os.getpid(), started=1.0)
    Lease(address).release()


@pytest.mark.parametrize("kind", ["file", "memory", "without conditions"])
def test_lease_is_won_by_one_of_many(address: str, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Files, and what fsspec opens, are created by one alone: nobody has to wait and see."""
    monkeypatch.setattr(lease, "SETTLE", 1.0 if kind == "without conditions" else 0.0)
    monkeypatch.setattr(
        lease, "RENEWAL", 0.5
    )  # what is waited for after a slow write, and with SETTLE=0 each is
    if kind == "without conditions":
        monkeypatch.setattr(lease, "create_text", lambda address, text: None)
    address = f"memory://{uuid.uuid4().hex}/run" if kind == "memory" else address
    won = taken_by_one_of_six(address)
    won.renew()
    won.release()


def test_lease_is_renewed_by_time(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round may take hours."""
    monkeypatch.setattr(lease, "SECONDS", 1.0)
    monkeypatch.setattr(lease, "RENEWAL", 0.2)
    held = Lease(address)
    time.sleep(2.0)
    with pytest.raises(UserError):
        Lease(address)
    held.check()
    held.release()


def test_lease_that_expired_and_nobody_took_is_renewed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SECONDS", 0.2)
    held = Lease(address)
    time.sleep(0.5)
    held.hold()
    remove_file(join(address, LEASE))  # somebody tidied up
    held.renew()
    assert holder(address) not in ("", "theirs")
    held.release()


def test_mirror_that_lost_its_lease_sends_nothing_more(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEWAL", 0.1)
    with pytest.raises(LeaseLost, match="process 7 on other"), writable(address) as (folder, mirror):
        assert mirror is not None
        (folder / "checkpoints/round-000001").mkdir(parents=True)
        (folder / "checkpoints/round-000001/manifest.json").write_text("{}")
        (folder / "metrics.csv").write_text("mine")
        mirror.push()
        put_lease(address, seconds=60)
        write_text(join(address, "metrics.csv"), "theirs")
        now = files(tmp_path / "store")
        (folder / "metrics.csv").write_text("mine again")
        (folder / "checkpoints/round-000001/manifest.json").unlink()
        with pytest.raises(LeaseLost):
            mirror.push()
        with pytest.raises(LeaseLost):
            mirror.follow()
    assert files(tmp_path / "store") == now and not folder.exists()


def test_mirror_stops_in_the_middle_of_sending(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending may take longer than a lease is good for, if the store is out of reach for a while."""
    with pytest.raises(LeaseLost), writable(address) as (folder, mirror):
        assert mirror is not None and mirror.lease is not None
        folder.mkdir()
        for name in ("metrics.csv", "timings.csv"):
            (folder / name).write_text("mine")
        hold, calls = mirror.lease.hold, []

        def out_of_reach() -> None:
            calls.append(1)
            if len(calls) == 2:
                put_lease(address, seconds=60)
                mirror.lease._until = 0.0  # type: ignore[union-attr]
            hold()

        monkeypatch.setattr(mirror.lease, "hold", out_of_reach)
        mirror.push()
    assert (
        holder(address) == "theirs" and len(files(tmp_path / "store")) == 2
    )  # one of the two, and the lease


def test_lease_in_a_store_out_of_reach_is_a_mistake_only_at_the_start(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_reach(address: str) -> None:
        raise UserError("out of reach")

    held = Lease(address)
    with monkeypatch.context() as patch:
        patch.setattr(lease, "read_text", out_of_reach)
        with refused("unwritable", says="out of reach"):
            Lease(address)
        with pytest.raises(OSError, match="out of reach"):  # exit code 1: resume continues
            held.renew()
    held.renew()
    held.release()


def test_process_that_was_stopped_for_too_long_overwrites_nothing(address: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    with other_process(address, tmp_path / "theirs", seconds=1.0) as (child, folder):
        child.send_signal(signal.SIGSTOP)
        with writable(address, wait=20) as (mine, mirror):
            assert mirror is not None
            (mine / "metrics.csv").write_text("resumed")
            mirror.push()
            (folder / "metrics.csv").write_text("late")
            child.send_signal(signal.SIGCONT)
            printed, error = child.communicate("\n", timeout=60)
            assert child.returncode == 1 and "done" not in printed and "LeaseLost" in error
            mirror.push()
    assert files(tmp_path / "store") == {"run/metrics.csv": b"resumed", "run/status.json": b"{}"}


def test_working_copies_are_private(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "tmp" / f"archipelago-{os.getuid()}"
    place.mkdir(mode=0o755)
    working_copy(address)
    assert place.stat().st_mode & 0o777 == 0o700
    place.rmdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    place.symlink_to(tmp_path / "mine")
    with refused("untrusted", says="TMPDIR"), writable(address):
        pass
    assert files(tmp_path / "mine") == {"notes.txt": b"mine"}
    place.unlink()
    place.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    place.rename(place.with_name("archipelago-12345"))
    with refused("untrusted", says="user 12345"), writable(address):
        pass


def test_readers_of_one_address_do_not_disturb_each_other(address: str) -> None:
    for name in ("config.yaml", "status.json"):
        write_text(join(address, name), '{"state": "finished", "rounds_done": 0}')
    put_lease(address, seconds=60)
    one, other = open_run(address), open_run(address)
    assert one.path != other.path and one.status == other.status
    assert one.path.name == "run" and not (one.path / LEASE).exists()


SWEEP = ("fleet.backend=in_process", "method=fedavg", "sweep.seeds=1", "rounds=2", "checkpoint.every=1")


def test_sweep_in_an_object_store_is_run_by_one_driver(tmp_path: Path) -> None:
    address = (tmp_path / "store/sweep").as_uri()
    run_sweep(sweep_of(tmp_path, *SWEEP), address, quiet=True)
    assert not list((tmp_path / "store").rglob(LEASE))
    (name,) = rows_of(address)
    write_text(
        join(address, "trials.csv"),
        str(read_text(join(address, "trials.csv"))).replace("finished", "running"),
    )
    put_lease(address, seconds=60)
    before = files(tmp_path / "store")
    with refused("busy", holder="process 7 on other"):
        resume_sweep(address, quiet=True)
    assert files(tmp_path / "store") == before
    put_lease(address, seconds=-1)
    directory = SweepDirectory.open(address)
    put_lease(address, seconds=60)
    directory._lock._until = 0.0  # type: ignore[union-attr]
    with pytest.raises(LeaseLost):
        directory.set(name, "failed", "No.")
    directory.close()
    assert rows_of(address)[name].status == "running" and holder(address) == "theirs"


def test_trial_waits_for_the_lease_of_a_lost_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trial,) = sweep_of(tmp_path, *SWEEP).trials()
    address = (tmp_path / "store/runs/trial").as_uri()
    put_lease(address, seconds=4)  # more than a trial takes to begin on a busy machine
    run = TrialRun(**{key: value for key, value in payload(trial, address).items() if key != "trial"})
    while not (result := run.step())["done"]:
        pass
    assert result["state"] == "finished" and "Waiting until process 7 on other" in capsys.readouterr().err
    assert holder(address) == ""


def test_lease_seconds_fit_the_patience_of_trials() -> None:
    from archipelago.sweeps.trial import PATIENCE

    assert 2 * lease.RENEWAL < lease.SECONDS < PATIENCE
