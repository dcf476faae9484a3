"""What changes while a cell of a notebook runs: one output that is replaced, where a terminal has a live line."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVERY = 0.2  # seconds between two versions of an output: each is a message to the browser
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


def in_notebook(stream: TextIO) -> bool:
    """Whether what is printed to `stream` appears under a cell: standard output of a Jupyter kernel."""
    if stream is not sys.stdout or "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class CellOutput:
    """One output of the running cell, which `show` replaces."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, -_EVERY
        self._handle: Any = None

    def show(self, renderable: RenderableType, *, last: bool = False) -> None:
        """Show it in place of what was there; left out if that was a moment ago, unless it is the `last`."""
        from IPython.display import HTML, display

        if not last and self._clock() - self._last < _EVERY:
            return
        self._last = self._clock()
        page = HTML(rendered(renderable))  # type: ignore[no-untyped-call]
        if self._handle is None:
            self._handle = display(page, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(page)


def rendered(renderable: RenderableType, width: int = 110) -> str:
    """As HTML, with colours and the width of a wide terminal."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        record=True,
        force_jupyter=False,
        force_terminal=True,
        color_system="truecolor",
        width=width,
    )
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=_PAGE)
