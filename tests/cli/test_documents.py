"""Every command in the documents is run: they say what the code does today."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import archipelago
import archipelago.cli.main
import benchmarks.__main__
from archipelago.data import DATASETS
from archipelago.experiments.callbacks import CallbackFailure
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import run_experiment
from archipelago.runs.sweeps import read_rows
from archipelago.sweeps.config import load_sweep
from tests.support.callbacks import StopAfter

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "DECISIONS.md", "CHANGELOG.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("results/*.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/README.md")),
)
DOOR = "python -m platform.launch"
STANDARD = "python -m platform"  # the module of that name that Python has
BENCHMARKS = "python -m benchmarks"
QUICK = ("partition",)  # benchmarks whose miniature takes a second; tests/benchmarks/ runs the others
# Small enough for a test; everything else of a documented command stays as it is written.
SMALLER = ["rounds=2", "local.steps=1", "model=mlp", "fleet.backend=in_process"]


def commands(kind: str = "sh") -> list[tuple[str, str]]:
    """(document, command) of every line of every fenced block, comments left out, and of `python -m ...` in a text."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for block in re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.M | re.S):
            lines = block.splitlines() if kind == "sh" else [block]
            found += [
                (document, re.sub(r"\s+#.*", "", line).strip() if kind == "sh" else line) for line in lines
            ]
        if kind == "sh":
            found += [
                (document, line) for line in re.findall(r"`((?:python -m |ray get-auth)[^`\n]+)`", text)
            ]
    return [(document, line) for document, line in found if line]


def of(start: str) -> list[str]:
    return sorted({line for _, line in commands() if line == start or line.startswith(f"{start} ")})


def smaller(arguments: list[str], storage: Path) -> list[str]:
    """The same command on less work, with its results under `storage`."""
    changed = [*SMALLER, f"storage={storage}"]
    if any("con+cks" in argument for argument in arguments):
        changed = [change for change in changed if change != "model=mlp"]  # it needs a backbone
    keys = {change.partition("=")[0] for change in changed}
    return [argument for argument in arguments if argument.partition("=")[0] not in keys] + changed


def test_no_kind_of_command_is_left_out():
    known = (DOOR, STANDARD, BENCHMARKS, "make", "ray job submit", "ray start --head", "ray get-auth-token",
             "export RAY_AUTH_MODE", "archipelago plugins=[my_method]", "cd examples/own_method",
             "python -m pytest")  # fmt: skip
    assert [line for _, line in commands() if not line.startswith(known)] == []
    assert ("README.md", f"{BENCHMARKS} partition") in commands()  # which stands in a sentence
    assert {line for _, line in commands() if line.startswith("make")} >= {"make run", "make test"}


@pytest.mark.parametrize("line", of("make"))
def test_make_targets_exist_and_are_explained(line):
    done = subprocess.run(["make", "--dry-run", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert line == "make" or f"{line} " in listed


@pytest.mark.parametrize("line", of(BENCHMARKS))
def test_benchmarks_exist(line, tmp_path, monkeypatch, capsys):
    words = line.split()[3:]
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", *words, "--miniature", "--json", str(tmp_path / "found.json")]
    )
    arguments = benchmarks.__main__._parser().parse_intermixed_args()
    assert (ROOT / "benchmarks" / f"{arguments.name}.py").is_file()
    if arguments.name in QUICK:
        assert benchmarks.__main__.main() == 0
        assert "limit" in capsys.readouterr().out


@pytest.mark.parametrize("line", of("ray get-auth-token"))
def test_a_token_is_made(line, tmp_path, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray keeps it
    ray = Path(sys.executable).with_name("ray")
    done = subprocess.run([ray, *line.split()[1:]], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[0-9a-f]{64}", done.stdout.strip())
    assert (tmp_path / ".ray/auth_token").read_text() == done.stdout.strip()


@pytest.mark.full
def test_make_run_ends_in_a_table_and_a_report():
    had_runs, made = (ROOT / "runs").exists(), set(ROOT.glob("runs/*"))
    done = subprocess.run(["make", "run"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    (sweep,) = set(ROOT.glob("runs/*")) - made
    try:
        assert all(method in done.stdout for method in ("FedAvg", "IFCA", "WeCFL", "IFCA+CAM", "FeSEM+CAM"))
        assert str(sweep.name) in done.stdout and {row.status for row in read_rows(sweep)} == {"finished"}
        assert (sweep / "report/report.html").is_file()
    finally:
        shutil.rmtree(sweep)
        if not had_runs:
            (ROOT / "runs").rmdir()


def test_the_standard_module_still_answers():
    assert [line for _, line in commands() if line.split()[:3] == STANDARD.split()] == [STANDARD]
    done = subprocess.run(
        [sys.executable, *STANDARD.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Linux" in done.stdout


def cases():
    """The commands; sweeps take half a minute each, so only the full matrix has them."""
    for line in of(DOOR):
        words = line.split()
        if not {"resume", "report"} & set(words):
            named = line == DOOR or any("tune_configs" in word for word in words)
            swept = named and "--dry-run" not in words
            long = swept and load_sweep(*parts(words[3:])) is not None
            yield pytest.param(line, marks=pytest.mark.full if long else ())


def parts(arguments):
    """(file, overrides, environment, whether the small variant is asked for) of a command."""
    request = archipelago.cli.main.parse(arguments)
    return request.file, request.overrides, None, request.small


@pytest.mark.parametrize("line", list(cases()))
def test_commands_of_the_command_line(line, tmp_path, capsys):
    arguments = shlex.split(line)[3:]
    if arguments[:2] == [
        "data",
        "fetch",
    ]:  # tests/data/test_fetch.py fetches, from its own web server
        from archipelago.data import DATASETS

        assert all(DATASETS.find(name).fetch for name in arguments[2:])
        return
    if arguments and arguments[0] in ("list", "doctor", "data"):
        assert archipelago.cli.main.main(arguments) == 0
        return
    if arguments and arguments[0] == "choose-clusters":
        assert archipelago.cli.main.main(smaller(arguments, tmp_path)) == 0
        assert "was chosen by validation loss" in capsys.readouterr().out
        return
    if arguments and arguments[0] == "partition":
        assert archipelago.cli.main.main([*arguments, f"storage={tmp_path}"]) == 0
        assert len(list(tmp_path.glob("*/figures/*.png"))) == 2
        return
    sweep = load_sweep(*parts(arguments))
    if sweep is not None and sweep.tunes:  # tests/sweeps/test_ray.py runs it, on Ray
        assert sweep.planned > 1
        return
    swept = [] if sweep is None else ["sweep.seeds=[0]"]
    arguments = [argument for argument in arguments if not argument.startswith("sweep.seeds")]
    code = archipelago.cli.main.main(smaller([*arguments, *swept], tmp_path))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    if "--dry-run" in arguments:
        assert "the sweep" in printed.out and not list(tmp_path.iterdir())
        return
    (made,) = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert f"Results: {made}" in printed.out
    states = [row.status for row in read_rows(made)] if swept else [archipelago.open_run(made).status.state]
    assert states and set(states) == {"finished"}


@pytest.mark.slow
def test_resume_and_open_as_the_readme_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in of(DOOR) if "name=my-run" in line]
    arguments = [a for a in smaller(shlex.split(line)[3:], Path("runs")) if not a.startswith("checkpoint")]

    with pytest.raises(CallbackFailure):
        config = load_config(None, [*arguments, "checkpoint.every=1"])
        run_experiment(config, callbacks=[StopAfter(1, "on_checkpoint")], quiet=True)
    (resume,) = [line for line in of(DOOR) if " resume " in line]
    assert archipelago.cli.main.main(shlex.split(resume)[3:]) == 0
    for report in [line for line in of(DOOR) if " report " in line]:
        words = [
            str(path)
            for word in shlex.split(report)[3:]
            for path in (sorted(Path().glob(word)) if "*" in word else [word])
        ]
        assert archipelago.cli.main.main(words) == 0
        made = Path("comparison" if "out=comparison" in words else "runs/my-run/report")
        assert (made / "report.html").stat().st_size > 1_000_000
        assert "figures=no" in words or {path.suffix for path in (made / "figures").iterdir()} == {
            ".png",
            ".svg",
        }
    capsys.readouterr()
    (code,) = [block for _, block in commands("python") if "open_run" in block]
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("line", of("archipelago"))
def test_own_method_runs_as_the_documents_show(line, tmp_path):
    """In its folder and a process of its own, as a user would; tests/test_package.py starts the installed command."""
    words = smaller(shlex.split(line)[1:], tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "archipelago", *words], cwd=ROOT / "examples" / "own_method",
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("Sticky IFCA" if "sweep." in line else "sticky") in done.stdout


def test_python_as_the_readme_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for _, block in commands("python") if "ar.sweep" in block]
    in_process = 'rounds=1, fleet={"backend": "in_process"}'
    names = {}
    exec(compile(re.sub(r"rounds=\d+", in_process, code), "README.md", "exec"), names)
    assert names["run"].status.state == "finished" and len(names["sweep"].runs) == 4


def test_arrays_of_ones_own_as_the_readme_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARCHIPELAGO_CACHE", str(tmp_path / "cache"))
    (code,) = [block for _, block in commands("python") if "use_arrays" in block]
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10
    more = 'fleet={"backend": "in_process"}, local={"steps": 1}, name="my-arrays"'
    try:
        exec(compile(code.replace('name="my-arrays"', more), "README.md", "exec"), {})
        DATASETS.remove("mine")
        assert archipelago.cli.main.main(["partition", "data=mine", "partition=natural", "clients=6"]) == 0
    finally:
        DATASETS.remove("mine")
    assert archipelago.open_run("runs/my-arrays").status.state == "finished"


@pytest.mark.parametrize("line", [*of("ray job submit"), *of("ray start")])
def test_ray_commands_are_those_of_the_tests_on_a_real_cluster(line):
    """tests/platform/test_ray_job.py runs them; here: what comes after `--` is a valid experiment."""
    tests = (ROOT / "tests/platform/test_ray_job.py").read_text() + (
        ROOT / "tests/support/clusters.py"
    ).read_text()
    words = [word for word in shlex.split(line.split(" -- ")[0]) if word != "--head"]
    assert all(f'"{word}"' in tests for word in words)
    if " -- " in line:
        arguments = shlex.split(line.split(" -- ")[1])[3:]
        assert load_config(None, [a for a in arguments if not a.startswith("storage")]).method


def test_the_readme_shows_the_methods_that_exist():
    from archipelago.strategies import ADDONS, METHODS

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in [*METHODS, *ADDONS]:
        assert f"`{name}`" in text, f"README.md does not name {name}"
