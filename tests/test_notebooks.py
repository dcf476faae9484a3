"""The notebooks in examples/ are executed as they stand, by a Jupyter kernel, in an empty folder: they show that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

path, folder = sys.argv[1:]
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, f"{folder}/executed.ipynb")
"""


NUMBER = re.compile(r"(\d+\.\d+)")


def shown(path: Path) -> list[dict[str, str]]:
    """What is below the cells of a notebook: text by kind, and of pictures that there is one."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found = []
    for output in [output for cell in cells for output in cell.get("outputs", [])]:
        texts = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
        found.append({**texts, "image/png": "a picture"} if "image/png" in texts else texts)
        found[-1]["stream"] = "".join(output.get("text", ""))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_shows_what_it_is_committed_with(path: Path, tmp_path: Path) -> None:
    """Its cells are run by the command that made its outputs. Of another processor numbers are close, not equal."""
    command = [sys.executable, "-m", "docs.hooks.notebooks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    committed, now = shown(path), shown(tmp_path / path.name)
    assert len(committed) == len(now) > 8
    for before, after in zip(committed, now, strict=True):
        assert before.keys() == after.keys()
        for kind in before:
            old, new = NUMBER.split(before[kind]), NUMBER.split(after[kind])
            assert old[::2] == new[::2]
            assert [float(each) for each in new[1::2]] == pytest.approx(
                list(map(float, old[1::2])), rel=0.2, abs=0.02
            )
    every = json.dumps(now)
    assert "a picture" in every and "My sticky IFCA" in every and "Did you mean 'ifca'" in every
    assert str(tmp_path) not in every
    assert (tmp_path / "runs" / "first-steps-ifca" / "metrics.csv").is_file()


CELL = """
import archipelago as ar

ar.run(method="ifca", clients=4, clusters=2, rounds=3, local={"steps": 1}, model="mlp",
       fleet={"backend": "in_process"}, storage="runs", name="tiny");
"""


@pytest.mark.slow
def test_progress_in_a_notebook_is_one_output_that_is_replaced(tmp_path: Path) -> None:
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbformat.write(notebook, tmp_path / "tiny.ipynb")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}
    command = [sys.executable, "-c", EXECUTE, str(tmp_path / "tiny.ipynb"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    pages = [output["data"]["text/html"] for output in cell["outputs"] if "data" in output]
    (page,) = ["".join(page) for page in pages]  # its last version
    assert "3/3" in page and "accuracy" in page
    printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
    assert "ifca on digits" in printed and "1/3" not in printed
