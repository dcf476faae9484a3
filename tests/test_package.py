"""The package as an outsider has it: a wheel in an environment of its own, used in a folder that is no checkout."""

from __future__ import annotations

import json
import os
import re
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
    tracked = {f"archipelago/tune_configs/{path.name}" for path in (ROOT / "tune_configs").glob("*.yaml")}
    assert tracked <= set(names)
    for package in (path.parent for path in (ROOT / "archipelago").rglob("__init__.py")):
        assert (
            f"{package.relative_to(ROOT)}/__init__.py" in names
        )  # a new package must be listed in pyproject.toml


def test_installed_command_lists_and_answers_mistakes_outside_the_checkout(
    installed: Path, research: Path
) -> None:
    assert "ifca" in command(installed, research, "list")
    assert "my_average" not in command(installed, research, "list", "methods")
    assert "Did you mean 'fedavg'" in command(installed, research, "method=fedavgg", code=2)


@pytest.mark.slow
def test_installed_command_runs_an_own_method_in_process_and_reports_it(
    installed: Path, research: Path
) -> None:
    words = ["plugins=[my_method]", "method=my_average", "fleet.backend=in_process", "name=mine"]
    command(installed, research, *SMALL, *words)
    assert json.loads((research / "out/mine/status.json").read_text())["state"] == "finished"
    assert "My average" in command(installed, research, "report", "out/mine", "figures=no")
    where = "import archipelago; print(archipelago.__file__)"
    python = [installed / "python", "-c", where]
    found = subprocess.run(
        python, cwd=research, env=outside(), capture_output=True, text=True, check=True
    ).stdout
    assert str(installed.parent) in found  # and not the checkout's


@pytest.mark.ray
def test_installed_command_runs_sweeps_and_resumes_on_ray(installed: Path, research: Path) -> None:
    sweep = ["plugins=[my_method]", "sweep.methods=[fedavg,my_average]", "sweep.seeds=1", "name=both"]
    assert "My average" in command(installed, research, *SMALL, *sweep)
    run = [
        "method=my_method.MyAverage",
        "fleet.actors=2",
        "name=one",
        "checkpoint.every=1",
        "fleet.dashboard=false",
    ]
    command(installed, research, *SMALL, *run)
    once = (research / "out/one/metrics.csv").read_bytes()
    # A run that was stopped after its first round, as its files would be.
    status = research / "out/one/status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "state": "running"}))
    (research / "out/one/metrics.csv").write_text("\n".join(once.decode().splitlines()[:2]) + "\n")
    for last in (research / "out/one/checkpoints").glob("*2"):
        for file in last.iterdir():
            file.unlink()
        last.rmdir()
    command(installed, research, "resume", "out/one")
    assert (research / "out/one/metrics.csv").read_bytes() == once


@pytest.mark.full
def test_installed_command_alone_is_the_demonstration(installed: Path, research: Path) -> None:
    shown = command(installed, research)
    assert "IFCA" in shown and "What to try next" in shown
