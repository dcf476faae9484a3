"""The notebooks in examples/ are executed as they stand, by a Jupyter kernel, in an empty folder."""

from __future__ import annotations

import json
import os
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


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs_from_first_to_last_cell(path: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path), str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    shown = json.dumps(outputs)
    assert pictures and "My sticky IFCA" in shown and "Did you mean 'ifca'" in shown
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
