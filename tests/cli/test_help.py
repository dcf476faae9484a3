"""The general help, the help of every command, and what the grammar understands."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipelago
import archipelago.experiments.checks
import archipelago.experiments.config
from archipelago.cli.choose_clusters import ChooseClusters
from archipelago.cli.main import COMMANDS, main, parse
from archipelago.cli.partition import Partition
from archipelago.cli.request import Answered
from archipelago.cli.run import Run
from archipelago.sweeps.config import load_sweep
from tests.support.clusters import ROOT
from tests.support.command_line import started

NAMES = [each.name for each in COMMANDS if not each.hidden]


def test_no_arguments_are_the_demonstration() -> None:
    request = parse([])
    assert isinstance(request, Run)
    sweep = load_sweep(request.file, request.overrides, env={})
    assert sweep is not None
    compared = {(config.method, config.data.rotations) for config in sweep.combinations.values()}
    assert compared == {
        (method, turns) for method in ("fedavg", "ifca", "fesem", "fesem+cam") for turns in (4, 1)
    }
    assert (sweep.planned, sweep.base.data.name) == (24, "digits")


def test_options_and_overrides_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for arguments in (
        ["--config", str(file), "rounds=3", "name=a=b"],
        ["rounds=3", f"--config={file}", "name=a=b"],
        ["rounds=3", "name=a=b", "--config", str(file)],
        ["run", "rounds=3", "name=a=b", "--config", str(file)],
    ):
        request = parse(arguments)
        assert isinstance(request, Run)
        assert (request.file, request.overrides) == (file, ["rounds=3", "name=a=b"])


def examples() -> list[str]:
    """Of the general help and of every command's own, without the program."""
    found = []
    for arguments in ([], *([name] for name in NAMES)):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            assert main([*arguments, "--help"]) == 0
        found += re.findall(
            r"^ {4}(?:ray job submit .* -- )?archipelago ?(.*)$", text.getvalue(), flags=re.MULTILINE
        )
    return sorted(set(found))


def test_help_has_examples_of_the_main_things() -> None:
    assert len(examples()) >= 20
    text = "\n".join(examples())
    for thing in ("--config", "method=", "data=", "partition=", "fleet.gpus=", "storage=", *NAMES):
        assert thing in text or thing == "run"


@pytest.mark.parametrize("example", examples())
def test_every_example_of_the_help_is_valid(
    example: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from archipelago.data import build_federation

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(archipelago.experiments.checks, "gpu_count", lambda: 1)
    rng = np.random.Generator(np.random.PCG64(0))
    np.savez(
        tmp_path / "images.npz",
        x_train=rng.integers(0, 255, (400, 8, 8), np.uint8), y_train=np.arange(400) % 10,
        x_test=rng.integers(0, 255, (100, 8, 8), np.uint8), y_test=np.arange(100) % 10,
    )  # fmt: skip
    request = parse(shlex.split(example))
    if not isinstance(request, Run | Partition | ChooseClusters):
        assert not isinstance(request, Answered)
        return  # it names runs and data sets that a reader has; the command's own tests execute it
    if isinstance(request, Run) and load_sweep(request.file, request.overrides, env={}, small=request.small):
        return
    config = archipelago.experiments.config.load_config(request.file, request.overrides, env={})
    assert (
        len(build_federation(config.data, config.partition, config.clients, config.seed).clients)
        == config.clients
    )


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"], ["rounds=3", "--help"]])
def test_general_help_lists_every_command(arguments: list[str], command: Any) -> None:
    code, out, error = command(*arguments)
    assert (code, error) == (0, "")
    assert out.startswith("Archipelago: ") and out.endswith("(resume continues after both).\n")
    for name in NAMES:
        assert name == "run" or re.search(rf"^  archipelago {name}\b", out, re.MULTILINE), name
    assert max(len(line) for line in out.splitlines()) <= 110


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command_has_usage_options_and_examples(name: str, command: Any) -> None:
    code, out, error = command(name, "--help")
    assert (code, error) == (0, "")
    for other in ([name, "-h"], [name, "help"], ["help", name]):
        assert command(*other) == (0, out, "")
    assert out.startswith(f"Usage: archipelago {name}") and "\nOptions:\n" in out
    assert re.search(rf"^    archipelago .*{'' if name == 'run' else name}", out, re.MULTILINE)
    takes = {"list": ["--json", "KIND | NAME"], "doctor": ["--json"], "resume": ["RUN"], "data": ["fetch NAME"],
             "report": ["--json", "out=FOLDER", "figures=no|yes|all"], "run": ["--config", "--dry-run", "--small"],
             "partition": ["--config"], "choose-clusters": ["--config"]}  # fmt: skip
    assert all(word in out for word in takes[name])
    assert max(len(line) for line in out.splitlines()) <= 110


@pytest.mark.parametrize("module", ["platform.launch", "archipelago"])
def test_help_and_sentences_say_what_the_user_typed(module: str) -> None:
    typed = f"python -m {module}"
    for arguments in (["--help"], ["report", "--help"]):
        shown = started(*arguments, module=module).stdout
        assert f"{typed} report RUN" in shown
        assert "archipelago " not in shown.replace(typed, "").replace("  Archipelago", "")
        assert max(len(line) for line in shown.splitlines()) <= 110
    refused = started("resume", module=module)
    assert (refused.returncode, refused.stdout) == (2, "") and f"`{typed} resume runs/NAME`" in refused.stderr
    asked = started("--install-completion", module=module)
    assert asked.returncode == 2 and "Expected `archipelago --install-completion`" in asked.stderr


def test_config_is_found_by_name_from_any_folder(command: Any, tmp_path: Path) -> None:
    code, out, error = command("--dry-run", "--config", "thesis-7.1", "--small")
    assert (code, error) == (0, "") and "trials" in out
    (tmp_path / "demo").write_text("rounds: 0\n")  # what is in the folder comes first
    code, _, error = command("--config", "demo")
    assert code == 2 and "Expected rounds >= 1, got 0 in 'demo'" in error


def test_help_and_a_simple_mistake_import_nothing_heavy() -> None:
    code = (
        "import sys; from archipelago.cli.main import main; main(['--help']); "
        "main(['report', '--help']); code = main(['rounds=0']); "
        "heavy = {'torch', 'ray', 'lightning', 'sklearn', 'pandas', 'rich'} & set(sys.modules); "
        "sys.exit(bool(heavy) or code != 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version_is_that_of_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"archipelago-fl {metadata.version('archipelago-fl')}\n"
    assert archipelago.__version__ == metadata.version("archipelago-fl")
    monkeypatch.setattr("archipelago.core.program.DISTRIBUTION", "never-installed")
    assert main(["--version"]) == 0 and "not.installed" in capsys.readouterr().out
