"""What the benchmarks measure with: process trees, statistics, verdicts, results that are plain JSON."""

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import frames, machine, memory, partition, report, scale, start
from benchmarks.__main__ import NAMES, NO_LIMIT, _result_of, main
from benchmarks.tables import shown, spread, table, verdict
from tests.support.partitions import built_in_partitions

ROOT = Path(__file__).parents[2]


def test_machine_facts_are_plain_data():
    facts = json.loads(json.dumps(machine.facts()))
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 1e8
    assert set(facts["versions"]) >= {"torch", "ray", "lightning"}
    assert len(facts["commit"]) in (0, 40)  # none outside a repository


def test_tree_has_this_process_and_its_children():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert {os.getpid(), child.pid} <= set(machine.tree())
    finally:
        child.communicate(b"\n")
    assert child.pid not in machine.tree()


def test_command_is_watched_with_all_its_processes():
    inner = "import time; block = bytearray(b'x') * 80_000_000; time.sleep(1)"
    outer = "import subprocess, sys; block = bytearray(b'x') * 80_000_000; "
    outer += f"subprocess.run([sys.executable, '-c', {inner!r}])"
    seconds, found = machine.watched([sys.executable, "-c", outer])
    assert len(found) == 2 and min(found.values()) > 80e6 and sum(found.values()) > 160e6
    assert seconds > 1
    with pytest.raises(RuntimeError, match="exit code 3"):
        machine.watched([sys.executable, "-c", "raise SystemExit(3)"])


def test_report_is_watched_with_all_its_processes(monkeypatch):
    monkeypatch.setattr(
        report, "watched", lambda command: (1.0, {"main (1)": 3 * 10**8, "drawing (2)": 10**8})
    )
    assert report._measure(Path("sweep")) == (1.0, 4 * 10**8)


@pytest.mark.parametrize(
    ("name", "words", "found", "code"),
    [
        ("stub", [], {"kept": True}, 0),
        ("stub", [], {"kept": False}, 1),
        ("stub", ["--miniature"], {"kept": False}, 0),
        ("stub", [], {"accuracy": 0.5}, 0),  # no limit
        ("all", [], {"kept": False}, 1),
        ("all", [], {"kept": True}, 0),
    ],
)
def test_limit_that_is_missed_is_in_the_exit_code(name, words, found, code, tmp_path, monkeypatch, capsys):
    stub = SimpleNamespace(run=lambda rounds, miniature: found, report=str)
    monkeypatch.setitem(sys.modules, "benchmarks.stub", stub)
    monkeypatch.setattr("benchmarks.__main__.NAMES", ("stub",))
    whole = {"benchmark": "stub", "machine": {}, "result": found}
    monkeypatch.setattr(
        "benchmarks.__main__._elsewhere", lambda name, arguments: whole
    )  # another process has no stub
    monkeypatch.setattr(sys, "argv", ["benchmarks", name, *words, "--json", str(tmp_path / "found.json")])
    assert main() == code
    assert ("Limits missed: stub." in capsys.readouterr().err) == bool(code)
    written = json.loads((tmp_path / "found.json").read_text())
    assert (written if name == "stub" else written["stub"])["result"] == found


def test_settings_of_an_experiment_stand_behind_options_and_are_for_aliasing_alone(
    tmp_path, monkeypatch, capsys
):
    given = []
    stub = SimpleNamespace(
        run=lambda rounds, miniature, settings: given.append((rounds, settings)) or {}, report=str
    )
    monkeypatch.setitem(sys.modules, "benchmarks.aliasing", stub)
    words = ["--rounds", "3", "--json", str(tmp_path / "found.json"), "data=digits", "clients=4"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "aliasing", *words])
    assert main() == 0 and given == [(3, ["data=digits", "clients=4"])]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "scale", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and "scale takes no settings" in capsys.readouterr().err


def test_benchmark_that_missed_its_limit_elsewhere_has_a_result_and_one_that_broke_has_none(tmp_path):
    path = tmp_path / "found.json"
    write = f"import pathlib; pathlib.Path({str(path)!r}).write_text('[1]'); raise SystemExit(1)"
    assert _result_of([sys.executable, "-c", write], path) == [1]
    with pytest.raises(subprocess.CalledProcessError):
        _result_of([sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "none.json")


def test_processor_time_counts_work_and_not_sleep():
    before = machine.cpu_seconds([os.getpid()])
    busy_until = time.process_time() + 0.2
    while time.process_time() < busy_until:
        pass
    assert machine.cpu_seconds([os.getpid()]) - before >= 0.15
    sleeper = subprocess.Popen(["sleep", "0.3"])
    sleeper_used = machine.cpu_seconds([sleeper.pid])
    sleeper.wait()
    assert sleeper_used <= 0.05
    assert machine.cpu_seconds([sleeper.pid]) == 0.0  # it has ended


def test_shared_memory_counts_once(tmp_path):
    """Two processes that map the same 64 MB cost 64 MB together, not 128."""
    size, path = 64_000_000, tmp_path / "shared"
    path.write_bytes(bytes(size))
    program = (
        "import mmap, sys; print('ready', flush=True); input();"
        "file = open(sys.argv[1], 'rb'); view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ);"
        "print(sum(view[i] for i in range(0, len(view), 4096)), flush=True); input()"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    pids = [child.pid for child in children]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 2
        before = sum(machine.memory_by_process(pids).values())
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        assert [child.stdout.readline() for child in children] == ["0\n"] * 2
        after = sum(machine.memory_by_process(pids).values())
    finally:
        for child in children:
            child.communicate("\n")
    assert 0.9 * size < after - before < 1.2 * size


def test_peak_keeps_the_largest_look():
    peak = machine.Peak()
    first = sum(peak.look().values())
    held = mmap.mmap(-1, 40_000_000)  # fresh pages: an array could live in what an earlier test gave back
    held.write(bytes(40_000_000))
    peak.look()
    held.close()
    peak.look()
    assert sum(peak.largest.values()) > first + 30_000_000


def test_statistics_and_tables():
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found == {"median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0}
    assert shown(found, 1) == "3.0 (2.0 to 4.0)"
    assert verdict(1.1, 1.1) == "kept"
    assert verdict(1.2, 1.1) == "MISSED"
    assert table("T", ["a", "b"], [["x", "10"], ["yy", "5"]]).splitlines() == [
        "T", "", "a    b", "--  --", "x   10", "yy   5",
    ]  # fmt: skip


def test_scale_by_hand():
    """From 100 to 500 clients: cost up by a quarter, 2 MB more for 400 clients."""
    found = {
        100: {"seconds": [2.0, 2.0], "processor_seconds": [1.0, 1.0], "data_bytes": 100, "memory_bytes": 3e6},
        500: {"seconds": [2.5, 2.5], "processor_seconds": [1.0, 1.1], "data_bytes": 500, "memory_bytes": 5e6},
    }
    result = json.loads(json.dumps(scale._result(found)))
    assert result["largest_over_smallest_cost"] == 1.25
    assert result["kept"] is False
    assert result["memory_bytes_per_client"] == 5000.0
    assert result["sizes"]["500"]["ratios"]["seconds"]["median"] == 1.25
    assert "1.250, limit 1.15: MISSED" in scale.report(result)
    assert "5.0 KB a client" in scale.report(result)


def test_reports_name_what_was_found():
    starts = [{"first_round_seconds": 12.0, "processor_seconds_until_then": 20.0, "whole_seconds": 15.0}]
    whole = {"whole_limit": 120.0, "whole_seconds": 15.0}
    text = start.report({"limit": 30.0, "slowest_seconds": 12.0, "starts": starts, **whole})
    assert "at most 12.0 s, limit 30 s: kept" in text
    found = {
        "limit": 2.0e9,
        "peak_bytes": 3_000_000_000,
        "data_bytes": 154_000_000,
        "above_data_bytes": 2_846_000_000,
        "peak_by_process": {"driver (1)": 2_000_000_000, "raylet (2)": 1_000_000_000},
        "after_round_bytes": [2_900_000_000],
    }
    text = memory.report(found)
    assert "above it 2.85 GB, limit 2.0 GB: MISSED" in text
    assert text.index("driver (1)") < text.index("raylet (2)")


def test_server_needs_no_lightning():
    """Every actor pays for its imports: seconds, and a hundred megabytes."""
    program = (
        "import sys, actors.server, actors.ray_actors;"
        "print([m for m in ('lightning', 'torchmetrics', 'torchvision', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_benchmark_runs_in_miniature(tmp_path):
    path = tmp_path / "all.json"
    command = [sys.executable, "-m", "benchmarks", "--miniature", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(path.read_text())
    assert set(found) == set(NAMES)
    for each in found.values():
        assert {"benchmark", "machine", "result"} == set(each)
        if each["benchmark"] not in NO_LIMIT:
            assert isinstance(each["result"]["kept"], bool)
    assert found["workload_w"]["result"]["variants"]["momentum kept"]["largest_difference"] < 1e-5
    assert done.stdout.count("limit") >= 4


def test_every_partition_is_timed_against_the_limit():
    result = json.loads(json.dumps(partition.run(1, miniature=True)))
    assert {row["partition"].partition(",")[0] for row in result["rows"]} == built_in_partitions()
    assert all(row["outcome"].endswith("samples") for row in result["rows"]), result["rows"]
    assert result["kept"] is True
    assert "20 clients: at most" in partition.report(result)


def test_frames_lead_from_main_to_the_loss_of_a_batch():
    found = frames.run(None, miniature=True)
    assert found["way"][0] == "archipelago/cli/main.py: main"
    assert found["way"][-1] == "lightning_modules/base.py: loss"
    assert found["frames"] == len(found["way"]) - 1 <= found["limit"] and found["kept"]
    assert 10 < found["files"] < found["command_files"] <= found["loaded_files"]
    assert "frames" in frames.report(found)
