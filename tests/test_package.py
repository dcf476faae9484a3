"""The package as an outsider has it: a wheel in an environment of its own, used in a folder that is no checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {"actors", "archipelago", "lightning_modules"}
SMALL = ["clients=4", "rounds=2", "local.steps=1", "model=mlp", "storage=out"]

METHOD = '''"""A method in a file of its own."""

from archipelago.strategies.base import METHODS
from archipelago.strategies.fedavg import FedAvg


@METHODS.register("my_average", "FedAvg under another name", label="My average")
class MyAverage(FedAvg):
    """Nothing new."""
'''


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git tracks: a build leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if not name.startswith(("results/", "tests/", "benchmarks/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--no-build-isolation", "--no-index", "--wheel-dir", out, source],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that has the wheel, and the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python*/site-packages"))
    # The libraries alone: a path file inside that folder, an editable install of the checkout say, is not read.
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--no-index", "--ignore-installed", wheel],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return folder / "bin"


@pytest.fixture
def research(tmp_path: Path) -> Iterator[Path]:
    """A research repository with folders that are called like parts of the platform."""
    for name in ("experiments", "reports", "strategies", "runs", "data", "tune_configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('{name} of another project')\n")
    (tmp_path / "my_method.py").write_text(METHOD)
    yield tmp_path


def outside() -> dict[str, str]:
    """The environment of somebody who knows nothing of the checkout."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**env, "RAY_DISABLE_IMPORT_WARNING": "1"}


def command(installed: Path, folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [installed / "archipelago", *words],
        cwd=folder,
        env=outside(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


# Several commands in one process: starting one costs seconds. The command itself is started by other tests.
SEVERAL = """
import sys
import archipelago
from archipelago.cli.main import main

words = [[]]
for word in sys.argv[1:]:
    words.append([]) if word == "then" else words[-1].append(word)
print(archipelago.__file__)
sys.exit(max(main(each) for each in words))
"""


def commands(installed: Path, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [installed / "python", "-c", SEVERAL, *words],
        cwd=folder, env=outside(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(installed.parent)), "the checkout's package was used"
    return done.stdout


def stopped_after_one_round(run: Path) -> bytes:
    """Make the files of a run what they are if it is stopped after its first round; what its metrics were."""
    once = (run / "metrics.csv").read_bytes()
    status = run / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "state": "running"}))
    (run / "metrics.csv").write_text("\n".join(once.decode().splitlines()[:2]) + "\n")
    for last in (run / "checkpoints").glob("*2"):
        shutil.rmtree(last)
    return once


def test_wheel_holds_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == TOP_LEVEL
    for wanted in (
        "archipelago/py.typed",
        "archipelago/tune_configs/comparison.yaml",
        "archipelago/reports/published_results.csv",
        "archipelago/reports/page.js",
        "actors/grafana_dashboard.json",
        "lightning_modules/engines/compiled/kernels.c",
        "lightning_modules/engines/compiled/lanes.h",
    ):
        assert wanted in names, wanted
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"Version: {version}" in text and "License-Expression: Apache-2.0" in text
    tracked = {f"archipelago/{path.relative_to(ROOT)}" for path in (ROOT / "tune_configs").rglob("*.yaml")}
    assert any("/bases/" in name for name in tracked) and tracked <= set(names)
    for package in (path.parent for path in (ROOT / "archipelago").rglob("__init__.py")):
        assert (
            f"{package.relative_to(ROOT)}/__init__.py" in names
        )  # a new package must be listed in pyproject.toml


def test_installed_command_lists_and_answers_mistakes_outside_the_checkout(
    installed: Path, research: Path
) -> None:
    listed = command(installed, research, "list")
    assert "ifca" in listed and "my_average" not in listed
    assert "Did you mean 'fedavg'" in command(installed, research, "method=fedavgg", code=2)


@pytest.mark.slow
def test_installed_package_runs_an_own_method_resumes_it_reports_it_and_finds_configs(
    installed: Path, research: Path
) -> None:
    own = ["plugins=[my_method]", "method=my_average", "name=mine", "checkpoint.every=1"]
    commands(installed, research, *SMALL, *own, "fleet.backend=in_process")
    once = stopped_after_one_round(research / "out/mine")
    table = ["--config", "thesis-7.1-small", "sweep.methods=[fedavg]", "sweep.seeds=[0]", "rounds=1"]
    shown = commands(
        installed, research, "resume", "out/mine", "then", "report", "out/mine", "figures=no",
        "then", *table, "storage=out", "fleet.backend=in_process",
    )  # fmt: skip
    assert json.loads((research / "out/mine/status.json").read_text())["state"] == "finished"
    assert (research / "out/mine/metrics.csv").read_bytes() == once
    assert "My average" in shown and "digits, cluster_dirichlet" in shown
    assert len(list((research / "out/thesis-7.1-small/runs").iterdir())) == 2


@pytest.mark.ray
def test_installed_package_sweeps_and_reports_on_ray(installed: Path, research: Path) -> None:
    sweep = ["plugins=[my_method]", "sweep.methods=[fedavg,my_average]", "sweep.seeds=1", "name=both"]
    shown = commands(
        installed,
        research,
        *SMALL,
        *sweep,
        "fleet.dashboard=false",
        "then",
        "report",
        "out/both",
        "figures=no",
    )
    assert shown.count("My average") >= 2  # said by the sweep, and by the report of it
    assert (research / "out/both/report/report.html").is_file()


@pytest.mark.full
@pytest.mark.ray
def test_installed_command_resumes_on_ray(installed: Path, research: Path) -> None:
    chosen = [
        "method=my_method.MyAverage",
        "fleet.actors=2",
        "name=one",
        "checkpoint.every=1",
        "fleet.dashboard=false",
    ]
    command(installed, research, *SMALL, *chosen)
    once = stopped_after_one_round(research / "out/one")
    command(installed, research, "resume", "out/one")
    assert (research / "out/one/metrics.csv").read_bytes() == once


@pytest.mark.full
def test_installed_command_alone_is_the_demonstration(installed: Path, research: Path) -> None:
    shown = command(installed, research)
    assert "IFCA" in shown and "What to try next" in shown
