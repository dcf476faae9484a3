"""The picture of a report that README and the site show: a screenshot, by chromium without a screen.

python -m docs.hooks.report_picture [REPORT.html]      # default: the newest of runs/, as `make run` leaves it
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "report.png"
WIDTH = 1280
CARD = "[...document.querySelectorAll('#tables .card')].at(-1)"
PLACES = {
    "top": f"{CARD}.getBoundingClientRect().top + scrollY",
    "end": f"{CARD}.querySelector('table').getBoundingClientRect().bottom + scrollY + 8",
}


def main(report: Path) -> None:
    """The report's last table and what stands above it, as a browser draws them."""
    from PIL import Image

    from tests.support.browser import look

    ready = "document.documentElement.dataset.ready === 'yes'"
    seen = look(report, PLACES, ready=ready, width=WIDTH, picture=True)
    top, end = max(0, int(seen.answers["top"]) - 14), int(seen.answers["end"])
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(io.BytesIO(seen.picture)).crop((0, top, WIDTH, end))
    image.convert("P", palette=Image.Palette.ADAPTIVE, colors=160).save(PICTURE, optimize=True)


def newest() -> Path:
    """The report of the last run or sweep."""
    found = sorted((ROOT / "runs").glob("*/report/report.html"), key=lambda path: path.stat().st_mtime)
    if not found:
        sys.exit("Expected a report in runs/, found none: `make run` makes one.")
    return found[-1]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else newest())
