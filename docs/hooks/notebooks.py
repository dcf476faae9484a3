"""The outputs that notebooks are committed with: made by a command, from a run of every cell in an empty folder.

    python -m docs.hooks.notebooks            # all of examples/, their outputs kept
    python -m docs.hooks.notebooks FOLDER     # the same into FOLDER, where their runs stay, too

Kept is what every run gives again: no times, no counters of other cells, no folder of this machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def executed(path: Path, folder: Path) -> Any:
    """The notebook after every cell was run by a Jupyter kernel in `folder`, with what is to be kept."""
    import nbformat
    from nbclient import NotebookClient

    os.environ |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), "JUPYTER_PLATFORM_DIRS": "1"}
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := same_again(output, folder))]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def same_again(output: Any, folder: Path) -> Any:
    """An output without what differs from run to run; None if nothing else is in it."""
    return output


def main(folder: Path | None = None) -> None:
    """Run them all, and write them."""
    import nbformat

    for path in sorted(EXAMPLES.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as temporary:
            notebook = executed(path, folder or Path(temporary))
        nbformat.write(notebook, (folder or EXAMPLES) / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None)
