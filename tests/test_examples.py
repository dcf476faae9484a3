"""The examples are run as they stand, each in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import archipelago.cli.main
from archipelago.sweeps.config import load_sweep

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "own_data/arrays.py": ["my-arrays"],
    "own_data/image_folder.py": ["my-images"],
    "own_data/my_datamodule.py": ["my-datamodule"],
    "own_module/my_module.py": ["my-plain-module", "my-module"],
    "read_runs.py": ["read-fedavg", "read-ifca"],
}
TABLE = ROOT / "examples" / "paper_table" / "table.yaml"


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_example_runs(script: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ARCHIPELAGO_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(ROOT / "examples" / script)], cwd=tmp_path, env=env, capture_output=True,
                          text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in SCRIPTS[script]:
        assert archipelago.open_run(tmp_path / "runs" / name).status.state == "finished"


def test_every_example_is_listed_and_run() -> None:
    there = {path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.py")}
    assert there - {"own_method/my_method.py", "own_method/test_my_method.py"} == set(SCRIPTS)
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert all(Path(name).name in listed for name in SCRIPTS)


def test_paper_table_is_a_sweep_of_two_tables() -> None:
    sweep = load_sweep(TABLE, [])
    assert sweep is not None and sweep.planned == 24


@pytest.mark.full
@pytest.mark.ray
def test_paper_table_becomes_latex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(TABLE), "name=my-table", "rounds=2", "local.steps=1", "sweep.seeds=[0,1]"]
    assert archipelago.cli.main.main(words) == 0
    assert archipelago.cli.main.main(["report", "runs/my-table", "figures=no"]) == 0
    text = (tmp_path / "runs/my-table/report/table.tex").read_text()
    assert text.count(r"\toprule") == 3 and "FeSEM+CAM" in text  # one per partition, and both side by side
