"""The documentation site as it is built, in a real browser: at two widths, light and dark."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, look

ROOT = Path(__file__).parents[1]
PAGES = ("index", "first-steps", "methods/index", "methods/cam", "methods/prox", "settings", "compared", "api",
         "running/slurm", "results/cifar10-converged", "project/decisions")  # fmt: skip
QUESTIONS = {
    "width": "document.documentElement.scrollWidth",
    "broken": "[...document.images].filter((each) => each.complete && !each.naturalWidth).map((each) => each.src)",
    # Markdown that was taken for something else: a session for quotations, an entity for text.
    "spoilt": "document.querySelectorAll('blockquote blockquote').length"
    " + (document.body.innerText.match(/&#?\\w+;/g) ?? []).length",
    "heading": "document.querySelector('h1').textContent.trim().length",
    "background": "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)",
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        (CHROMIUM is None or importlib.util.find_spec("material") is None) and not os.environ.get("CI"),
        reason="needs chromium and the extra `docs`",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_the_screen_and_ask_nobody(site: Path, width: int, dark: bool) -> None:
    for page in PAGES:
        seen = look(site / f"{page}.html", QUESTIONS, width=width, dark=dark)
        assert seen.errors == [], f"{page}: {seen.errors}"
        assert (seen.answers["width"], seen.answers["broken"]) == (width, []), page
        assert seen.answers["heading"] > 2 and seen.answers["spoilt"] == 0, page
        assert (max(seen.answers["background"]) < 80) == dark, page
        assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == [], page
