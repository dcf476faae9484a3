"""What is written down about the machine a run ran on."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

from archipelago.runs.environment import describe_environment, environment_differences, git_commit


def test_environment_is_json_with_versions_processor_and_command() -> None:
    found = json.loads(json.dumps(describe_environment("python -m platform.launch rounds=3")))
    assert found["command"] == "python -m platform.launch rounds=3"
    assert found["packages"]["torch"] == metadata.version("torch")
    assert {"ray", "lightning", "numpy", "scikit-learn"} <= set(found["packages"])
    assert found["cpu"]["cores"] >= 1
    assert found["cpu"]["model"]
    assert found["cpu"]["instructions"]
    assert found["started"].endswith("+00:00")


def test_environment_does_not_differ_from_itself() -> None:
    before = describe_environment("one command")
    after = describe_environment("another command")
    assert environment_differences(before, after) == []


def test_every_change_that_may_move_a_bit_is_reported() -> None:
    before = {"python": "3.10.1", "packages": {"torch": "2.6.0", "ray": "2.50.0"}}
    now = {"python": "3.11.7", "packages": {"torch": "2.7.0", "numpy": "2.1"}}
    before["cpu"], now["cpu"] = {"instructions": "AVX2"}, {"instructions": "AVX512"}
    said = " ".join(environment_differences(before, now))
    for part in ("Python was 3.10.1", "torch was 2.6.0", "ray was 2.50.0 when the run began and is absent",
                 "numpy was absent", "instruction set was AVX2"):  # fmt: skip
        assert part in said


def test_run_of_a_checkout_records_its_commit() -> None:
    root = Path(__file__).parents[2]
    commit = describe_environment()["commit"]
    assert commit == git_commit(root)
    assert (commit is not None) == (root / ".git").exists()


def _git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def test_commit_of_the_code_and_whether_it_was_changed(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    _git(tmp_path, "init")
    assert git_commit(tmp_path) is None  # nothing committed yet
    (tmp_path / "code.py").write_text("x = 1\n")
    _git(tmp_path, "add", "code.py")
    _git(tmp_path, "commit", "-m", "first")
    commit = git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "code.py").write_text("x = 2\n")
    assert git_commit(tmp_path) == commit + "+changes"
    # A repository that only surrounds the code says nothing about it.
    (tmp_path / "inner").mkdir()
    assert git_commit(tmp_path / "inner") is None
