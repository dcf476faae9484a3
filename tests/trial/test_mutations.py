"""Whatever happens to the files of a run, `resume` and `report` give the right bits or a sentence.

Hypothesis deletes, truncates, flips, swaps and replaces by links, several at a time. Nothing is ever written outside of
the run.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.warm import Warm
from tests.trial.run_directories import FOREIGN, copied, reported, resumed, table

Mutation = tuple[str, int, int]  # (what, which file, where in it or with which other file)
KINDS = (
    "delete",
    "truncate",
    "flip",
    "append",
    "swap",
    "copy over",
    "link outside",
    "link inside",
    "folder",
    "insert",
)
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 10_000), st.integers(0, 1_000_000)),
    min_size=1,
    max_size=3,
)


def mutate(run: Path, mutation: Mutation) -> None:
    """Do one thing to one file of a run."""
    kind, which, where = mutation
    files = sorted(
        path
        for path in run.rglob("*")
        if path.is_file() and not path.is_symlink() and path.relative_to(run).as_posix() not in FOREIGN
    )
    if not files:
        return
    path, other = files[which % len(files)], files[where % len(files)]
    data = path.read_bytes()
    at = where % (len(data) + 1)
    if kind in ("flip", "insert", "append", "truncate"):
        flipped = (
            data[:at] + bytes([data[at] ^ (1 << where % 8)]) + data[at + 1 :]
            if at < len(data)
            else data + b"\0"
        )
        changed = {
            "flip": flipped,
            "insert": data[:at] + b"\n7," + data[at:],
            "append": data + b"{]\n",
            "truncate": data[:at],
        }
        path.write_bytes(changed[kind])
    elif kind == "swap":
        content = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(content)
    elif kind == "copy over":
        path.write_bytes(other.read_bytes())
    else:
        path.unlink()
        if kind == "link outside":
            outside = run.parent / "outside"
            outside.write_bytes(data)
            path.symlink_to(outside)
        elif kind == "link inside" and other != path:
            path.symlink_to(other)
        elif kind == "folder":
            path.mkdir()


def _tried(warm: Warm, runs: Path, mutations: list[Mutation], stopped: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as place:
        folder = copied(runs / ("stopped" if stopped else "finished"), Path(place) / "here")
        shutil.rmtree(folder / "run" / "report", ignore_errors=True)
        for mutation in mutations:
            mutate(folder / "run", mutation)
        if stopped:
            return resumed(warm, folder, runs / "finished")
        return reported(warm, folder, table=table(warm, runs / "finished"))


_PHASES = [Phase.generate]  # what is found is short enough: to shrink it takes minutes
_PATIENT = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=_PATIENT,
    print_blob=True,  # others every time; a failure prints what brings it back
    database=None,
    phases=_PHASES,
)
@given(MUTATIONS)
def test_resume_of_a_mutated_run(warm_process: Warm, runs: Path, mutations: list[Mutation]) -> None:
    faults = _tried(warm_process, runs, mutations, stopped=True)
    assert not faults, "\n".join(faults)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=_PATIENT,
    print_blob=True,  # others every time; a failure prints what brings it back
    database=None,
    phases=_PHASES,
)
@given(MUTATIONS)
def test_report_of_a_mutated_run(warm_process: Warm, runs: Path, mutations: list[Mutation]) -> None:
    faults = _tried(warm_process, runs, mutations, stopped=False)
    assert not faults, "\n".join(faults)
