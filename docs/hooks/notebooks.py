"""The outputs that notebooks are committed with: made by a command, from a run of every cell in an empty folder.

    python -m docs.hooks.notebooks            # all of examples/, their outputs kept
    python -m docs.hooks.notebooks FOLDER     # the same into FOLDER, where their runs stay, too

Kept is what every run gives again: no times, no counters of other cells, no folder of this machine.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# What differs from run to run, and what stands for it.
TIME = re.compile(r"\b(?!0 s)\d+(\.\d+)? (ms|s)\b|\b\d+:\d\d(:\d\d)?\b")  # at its end 0 s are left
VARIES = ((TIME, "..."), (re.compile(r"\b0x[0-9a-f]+\b"), "0x..."))


def executed(path: Path, folder: Path) -> Any:
    """The notebook after every cell was run by a Jupyter kernel in `folder`, with what is to be kept."""
    import nbformat
    from nbclient import NotebookClient

    os.environ |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), "JUPYTER_PLATFORM_DIRS": "1"}
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=place).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [same_again(output, folder) for output in cell.outputs]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def same_again(output: Any, folder: Path) -> Any:
    """An output without what differs from run to run: seconds, addresses in memory, the folder it ran in."""
    output.get("metadata", {}).clear()
    output.pop("transient", None)
    if "text" in output:
        output["text"] = steady(output["text"], folder)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            output["data"][kind] = steady(value, folder)
    return output


def steady(text: str, folder: Path) -> str:
    """The same in every run.

    >>> steady("12 rounds in 3.4 s, runs in /somewhere/runs", Path("/somewhere"))
    '12 rounds in ..., runs in runs'
    """
    text = text.replace(f"{folder}/", "")
    for pattern, instead in VARIES:
        text = pattern.sub(instead, text)
    return text


def main(folder: Path | None = None) -> None:
    """Run them all, and write them."""
    import nbformat

    for path in sorted(EXAMPLES.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as temporary:
            notebook = executed(path, folder or Path(temporary))
        nbformat.write(notebook, (folder or EXAMPLES) / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None)
