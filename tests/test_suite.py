"""The suite in parts beside each other, as `make test` runs it."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.suite import PARTS, run_parts

ROOT = Path(__file__).parents[1]


def part(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_suite_selects_every_test_of_bare_pytest_once() -> None:
    """`ray and not full` and `not ray and not full` are complements within `not full`, pytest's own default."""
    selections = [command[command.index("-m", command.index("pytest")) + 1] for command in PARTS.values()]
    assert sorted(selections) == ["not ray and not full", "ray and not full"]
    assert "-m 'not full'" in (ROOT / "pyproject.toml").read_text()


def test_suite_runs_parts_at_once_and_ends_with_their_closing_lines(tmp_path: Path) -> None:
    """Each of two parts waits for the other one's file: one after the other they would never end."""
    wait = (
        "import pathlib, sys, time\n"
        "own, other = map(pathlib.Path, {!r})\n"
        "own.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "print('tests of', own.name); print('== passed in', own.name, '==')\n"
    )
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    output = io.StringIO()
    assert (
        run_parts({"first": part(wait.format((one, two))), "second": part(wait.format((two, one)))}, output)
        == 0
    )
    text = output.getvalue()
    assert text.splitlines()[-2:] == ["== passed in one ==", "== passed in two =="]
    assert text.index("Tests first") < text.index("tests of one") < text.index("Tests second")


def test_suite_fails_where_any_part_does_and_runs_the_others_to_their_end() -> None:
    fails, passes = part("print('1 failed'); raise SystemExit(3)"), part("print('2 passed')")
    for parts in ({"a": fails, "b": passes}, {"b": passes, "a": fails}):
        output = io.StringIO()
        assert run_parts(parts, output) == 3
        assert {"1 failed", "2 passed"} == set(output.getvalue().splitlines()[-2:])


def test_suite_that_is_terminated_ends_its_parts(tmp_path: Path) -> None:
    """CI's time limit leaves no test process behind; a part that is interrupted may end its fixtures."""
    ended = tmp_path / "ended"
    waits = (
        "import pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'began')!r}).touch()\n"
        "try: time.sleep(60)\n"
        f"except KeyboardInterrupt: pathlib.Path({str(ended)!r}).touch()\n"
    )
    code = (
        "import sys\nfrom tests import suite\n"
        "suite.end_when_told()\n"
        f"suite.run_parts({{'waits': {part(waits)!r}}}, sys.stdout)\n"
    )
    suite = subprocess.Popen(part(code), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "began").exists():
            assert suite.poll() is None
            time.sleep(0.05)
        suite.send_signal(signal.SIGTERM)
        assert suite.wait(30) != 0
        assert ended.exists()
    finally:
        suite.kill()
        suite.wait()
