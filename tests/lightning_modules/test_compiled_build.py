"""Compiling the kernels: the same bits from every build, one file per machine, and what happens without a compiler."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_modules.engines import TrainJob, make_engine
from lightning_modules.engines.compiled import build, recipe
from tests.support.compiled import DIGEST_JOBS, Bench, digest, network
from tests.support.compiled_machines import NARROW, WIDE
from tests.support.errors import refused

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests/support/compiled_digests.json"


def able():
    """Instruction sets of this processor, and a reason why there is nothing to test."""
    try:
        build._compiler()
        build.chosen_instructions()
    except build.CannotBuild as reason:
        return [], str(reason)
    has = build.processor_flags()
    return [name for name in build.INSTRUCTIONS if build.NEEDED[name] <= has], ""


ABLE, REASON = able()
needs_kernels = pytest.mark.skipif(not ABLE and not os.environ.get("CI"), reason=REASON or "kernels")


@pytest.fixture
def fresh(monkeypatch):
    """Whoever asks for the library gets the one of the environment as it is now."""
    monkeypatch.delenv("ARCHIPELAGO_KERNELS", raising=False)
    build.library.cache_clear()
    yield monkeypatch
    build.library.cache_clear()


@needs_kernels
@pytest.mark.parametrize("instructions", ABLE or ["none"])
@pytest.mark.parametrize("name", DIGEST_JOBS)
def test_bits_are_those_of_the_stored_digest_with_every_instruction_set(fresh, name, instructions):
    """`python -m tests.support.compiled_digests` writes them; a change of theirs belongs under *Results changed*."""
    assert instructions in ABLE, REASON
    fresh.setenv("ARCHIPELAGO_KERNELS", instructions)
    assert digest(name) == json.loads(STORED.read_text())[name]
    assert build.library().lanes() == {"avx512": 16, "avx2": 8}[instructions]


@needs_kernels
@pytest.mark.full
@pytest.mark.skipif(len(ABLE) < 2, reason="this processor has one of the two instruction sets")
def test_run_of_a_machine_with_avx2_is_continued_by_one_with_avx512_to_the_models_of_a_whole_run(tmp_path):
    """Kernels, torch and NumPy pass for those of the other machine: models, assignments, jobs under every penalty."""
    found = []
    for part, machine in (("begin", NARROW), ("end", WIDE)):
        command = [sys.executable, "-m", "tests.support.compiled_machines", str(tmp_path), part]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **machine}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [each.pop("torch") for each in found] == ["AVX2", "AVX512"]
    assert found[0] == found[1]


@needs_kernels
def test_second_compiler_gives_the_same_bits(fresh, tmp_path):
    import shutil

    first = Path(build._compiler()[0]).resolve().name
    other = next(
        (c for c in ("clang", "gcc") if shutil.which(c) and not first.endswith(c) and c not in first), None
    )
    if other is None:
        pytest.skip("one compiler only")
    fresh.setenv("CC", other)
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digest("cnn_cifar") == json.loads(STORED.read_text())["cnn_cifar"]


@pytest.fixture
def counted(fresh, tmp_path):
    """A compiler that takes half a second, makes a file, and leaves a line in the file that this returns."""
    fake, log = tmp_path / "cc", tmp_path / "compiled"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\n'
        f"echo . >> {log}; sleep 0.5\n"
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo kernels > "$2"; shift; done\n'
    )
    fake.chmod(0o755)
    fresh.setenv("CC", str(fake))
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fresh.setattr(build, "processor_flags", lambda: {"avx512f", "avx2", "fma"})
    fresh.setattr(build, "_prebuilt", lambda instructions: None)
    return log


def test_cold_processes_compile_once(counted):
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if build.library_path().read_text() == "kernels\n" else 1
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert counted.read_text() == ".\n"


def test_threads_that_compile_at_the_same_time_leave_one_whole_file_for_each_instruction_set(counted, fresh):
    found = []
    threads = [threading.Thread(target=lambda: found.append(build._built())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and found[0].parent == build.cache_folder()
    assert [each.name for each in found[0].parent.iterdir()] == [found[0].name]  # nothing half-built is left
    before = found[0].stat().st_mtime_ns
    assert build.library_path() == found[0] and found[0].stat().st_mtime_ns == before
    fresh.setenv("ARCHIPELAGO_KERNELS", "avx2")
    assert build.library_path() != found[0]


def test_builder_that_is_gone_or_stuck_stops_nobody(counted, fresh):
    import fcntl

    build.cache_folder().mkdir(parents=True)
    stuck = os.open(build.cache_folder(), os.O_RDONLY)
    fcntl.flock(stuck, fcntl.LOCK_EX)
    fresh.setattr(build, "_WAIT", 0.3)
    assert build.library_path().is_file()
    os.close(stuck)  # as its end would
    build.library_path().unlink()
    fresh.setattr(build, "_WAIT", 60.0)
    started = time.monotonic()
    assert build.library_path().is_file() and time.monotonic() - started < 30
    assert counted.read_text() == ".\n.\n"


def test_kernels_that_nobody_asked_for_are_removed_when_new_ones_come(counted):
    folder = build.cache_folder()
    folder.mkdir(parents=True)
    days = {
        "avx2-old.so": 31,
        "avx2-used.so": 29,
        ".building-dead.so": 2,
        ".building-live.so": 0,
        "other": 99,
    }
    for name, age in days.items():
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age * 86400 - 60,) * 2)
    kept = build.library_path()
    assert {each.name for each in folder.iterdir()} == {
        kept.name,
        "avx2-used.so",
        ".building-live.so",
        "other",
    }
    os.utime(kept, (time.time() - 40 * 86400,) * 2)
    assert build.library_path() == kept and time.time() - kept.stat().st_mtime < 60


def test_kernels_are_compiled_while_the_process_does_other_things(counted):
    started = time.monotonic()
    for _ in range(3):
        build.build_in_background()
    assert time.monotonic() - started < 0.4 and not list(build.cache_folder().glob("avx*.so"))
    assert build.library_path().is_file()  # waits for it
    assert counted.read_text() == ".\n"


@needs_kernels
def test_damaged_file_is_removed_and_said(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))

    def damaged(command, kept):
        kept.write_bytes(b"not a library")
        return kept

    fresh.setattr(build, "_compiled", damaged)
    with pytest.raises(build.CannotBuild, match="could not be loaded"):
        build.library()
    assert not list((tmp_path / "archipelago/kernels").iterdir())


def trained_by_loop(fresh):
    """A small training that must be the loop's, and what the engine said."""
    bench = Bench(network("cnn_digits", (1, 8, 8), 5), (1, 8, 8))
    job = bench.job([8, 8])
    found, again = bench.engine.train_one(job), bench.engine.train_one(job)
    expected = make_engine("loop", bench.model, bench.samples).train_one(job)
    assert np.array_equal(found.model, expected.model) and np.array_equal(again.model, expected.model)
    return bench.engine.notes


def test_without_a_compiler_the_loop_trains_and_it_is_said_once(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fresh.setenv("PATH", str(tmp_path))
    fresh.delenv("CC", raising=False)
    fresh.setattr(build, "processor_flags", lambda: {"avx2", "fma"})
    (note,) = trained_by_loop(fresh)
    assert "falls back to loop" in note and "no C compiler" in note


def test_without_fma_the_loop_trains_and_it_is_said_once(fresh):
    fresh.setattr(build, "processor_flags", lambda: {"sse2", "avx"})
    (note,) = trained_by_loop(fresh)
    assert "falls back to loop" in note and "FMA" in note


def test_compiler_that_fails_is_said(fresh, tmp_path):
    fake = tmp_path / "cc"
    fake.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo fake 1.0 && exit 0\necho 'x: error: no' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    fresh.setenv("CC", str(fake))
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fresh.setattr(build, "processor_flags", lambda: {"avx2", "fma"})
    (note,) = trained_by_loop(fresh)
    assert "could not compile the kernels (x: error: no)" in note


def test_unknown_instruction_set_is_a_sentence(fresh):
    fresh.setenv("ARCHIPELAGO_KERNELS", "neon")
    with refused("unknown-choice", setting="ARCHIPELAGO_KERNELS", given="neon"):
        build.chosen_instructions()


def test_every_source_is_in_the_key_and_in_the_package():
    folder = Path(build.__file__).parent
    assert {each.name for each in folder.iterdir() if each.suffix in (".c", ".h")} == set(recipe.SOURCES)


def _library_of_the_compiler(name):
    command = [build._compiler()[0], f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("instructions", "which"),
    [
        (ABLE[0] if ABLE else "none", "some"),
        *(pytest.param(each, "everything", marks=pytest.mark.full) for each in ABLE),
    ],
)
def test_numerical_tests_under_the_sanitizers(tmp_path, instructions, which):
    """AddressSanitizer (gaps between tensors are forbidden memory) and UBSan."""
    assert instructions in ABLE, REASON
    # libstdc++ beside it, so that exceptions of libraries that bring their own are found.
    preloaded = [_library_of_the_compiler(name) for name in ("libasan.so", "libstdc++.so")]
    if not all(Path(each).is_file() for each in preloaded):
        assert not os.environ.get("CI"), "the compiler has no AddressSanitizer to preload: install libasan"
        pytest.skip("the compiler has no AddressSanitizer to preload")
    environment = {
        **os.environ,
        "ARCHIPELAGO_KERNELS": f"{instructions}+sanitize",
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "tests.support.compiled_sanitized", which]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["caught", "fine"]


@needs_kernels
def test_silently_slow_build_is_noticed():
    """A ratio of processor time to torch in one process, least of many: 0.24 with AVX-512, 0.40 with AVX2 on EPYC.

    Torch has the best instructions of the processor in both cases: on one that has AVX2 alone the ratio is smaller.
    """
    instructions = build.chosen_instructions()[0]
    limit = {"avx512": 0.40, "avx2": 0.60}[instructions]
    torch.set_num_threads(1)
    shape = (3, 32, 32)
    bench = Bench(network("cnn_cifar", shape, 10), shape, samples=64, channels_last=True)
    rng = np.random.default_rng(0)
    job = TrainJob(0, bench.model.vector(), [rng.permutation(64)[:32] for _ in range(2)], seed=0)
    loop = make_engine("loop", bench.model, bench.samples)
    least = dict.fromkeys(("compiled", "loop"), float("inf"))
    for count in range(60):  # ten at least, then until it is shown
        for name, engine in (("compiled", bench.engine), ("loop", loop)):
            started = time.process_time()
            engine.train_one(job)
            least[name] = min(least[name], time.process_time() - started)
        if count >= 9 and least["compiled"] / least["loop"] < limit:
            break
    assert least["compiled"] / least["loop"] < limit, (instructions, least)
