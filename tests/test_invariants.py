"""The rules of the house, stated as absences: who imports whom, who reads the command line, who draws."""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from archipelago.reports import palette

ROOT = Path(__file__).parents[1]

PACKAGES = ("actors", "archipelago", "lightning_modules", "platform")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERY_FILE = sorted(
    path
    for path in ROOT.rglob("*.py")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    and path.relative_to(ROOT).parts[0] not in ("build", "runs")
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a file names in an import, also inside functions and in `import_module` calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which package is meant"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func).split(".")[-1] in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def dotted(node: ast.AST) -> str:
    """`np.random.rand` of the expression np.random.rand; empty for anything that is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return f"{value}.{node.attr}" if value else ""
    return ""


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def test_imports_point_one_way() -> None:
    """The contracts of pyproject.toml, which `make lint` checks too."""
    for package in PACKAGES:
        assert any(path.is_relative_to(ROOT / package) for path in FILES), package
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", EVERY_FILE, ids=name)
def test_nothing_imports_from_the_entry_point(path: Path) -> None:
    """`import platform` means the standard module; what our package adds is for its own tests only."""
    if path.is_relative_to(ROOT / "tests" / "platform"):
        return
    ours = {file.stem for file in (ROOT / "platform").glob("*.py")} - {"__init__"}
    used = {module.split(".")[1] for module in imports(parsed(path)) if module.startswith("platform.")}
    assert not used & ours


def reads_command_line(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if dotted(node) in ("sys.argv", "sys.orig_argv"):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "sys" and node.names[0].name.endswith("argv"):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            implicit = (
                node.func.attr in ("parse_args", "parse_known_args") and not node.args and not node.keywords
            )
            if implicit or dotted(node.func) == "OmegaConf.from_cli":
                return True
    return False


def test_only_the_entry_point_reads_the_command_line() -> None:
    assert [name(path) for path in FILES if reads_command_line(parsed(path))] == ["archipelago/cli/main.py"]
    assert len((ROOT / "platform" / "launch.py").read_text().splitlines()) <= 30


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        ("archipelago/strategies", ("ray", "lightning", "pytorch_lightning", "actors")),
        (
            "archipelago/reports",
            ("actors", "archipelago.strategies", "lightning_modules", "ray", "lightning"),
        ),
        (
            "archipelago/runs",
            ("actors", "archipelago.strategies", "archipelago.data", "torch", "ray", "lightning"),
        ),
        ("archipelago/core", ("ray", "lightning", "pandas")),
    ],
)
def test_importing_a_package_loads_none_of(package: str, banned: tuple[str, ...]) -> None:
    """What import-linter cannot see: what the libraries behind our imports load."""
    files = [path for path in FILES if path.is_relative_to(ROOT / package)]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files
    ]
    code = (
        f"import importlib, json, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        f"print(json.dumps([m for m in {banned!r} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def pickles(tree: ast.AST) -> Iterator[str]:
    """Everything in a file that reads or writes pickles, or may."""
    yield from (module for module in imports(tree) if module.split(".")[0] in PICKLERS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function, keywords = dotted(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            last = node.func.attr if isinstance(node.func, ast.Attribute) else function
            if function in ("torch.load", "torch.save") or last in ("read_pickle", "to_pickle"):
                yield function
            if function == "np.load" and keywords.get("allow_pickle") != "False":
                yield function


@pytest.mark.parametrize("package", ["experiments", "reports", "runs", "sweeps"])
def test_who_reads_and_writes_runs_knows_no_pickle(package: str) -> None:
    files = [path for path in FILES if path.is_relative_to(ROOT / "archipelago" / package)]
    assert files and {name(path): found for path in files if (found := list(pickles(parsed(path))))} == {}


@pytest.mark.parametrize(
    "line", ["import pickle", "from joblib import dump", "torch.load(p)", "pd.read_pickle(p)", "np.load(p)"]
)
def test_scan_sees_a_pickle(line: str) -> None:
    assert list(pickles(ast.parse(line)))
    assert not list(pickles(ast.parse("np.load(p, allow_pickle=False)")))


OF_RUNS = {"status.json", "sweep.yaml", "trials.csv"}  # files whose content only `archipelago/runs/` knows


def run_files(tree: ast.AST) -> Iterator[str]:
    """Names of files of runs and sweeps that a file has as text, apart from sentences."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OF_RUNS:
            yield node.value


def test_one_package_reads_and_writes_run_and_sweep_directories() -> None:
    assert list(run_files(ast.parse("(path / 'status.json').read_text()"))) == ["status.json"]
    others = [path for path in FILES if not path.is_relative_to(ROOT / "archipelago" / "runs")]
    assert {name(path): found for path in others if (found := list(run_files(parsed(path))))} == {}


# Sizes

MOST_LINES, MOST_OF_A_FUNCTION = 405, 50  # "about 400", counted with comments and blank lines


def test_modules_and_functions_stay_short() -> None:
    long = {}
    for path in FILES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            long[name(path)] = lines
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_OF_A_FUNCTION:
                    long[f"{name(path)}: {node.name}"] = length
    assert not long


def test_experiments_are_at_most_a_dozen_files() -> None:
    assert len(list((ROOT / "archipelago" / "experiments").glob("*.py"))) <= 12


# Randomness

DRAWS = {  # torch's draws, which need generator=...
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm",
}  # fmt: skip
IN_PLACE = {
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
}
SEEDED_CLASSES = {"KMeans", "MiniBatchKMeans", "SpectralClustering", "GaussianMixture", "PCA", "TSNE"}


def global_draws(tree: ast.AST) -> Iterator[str]:
    """Everything in a file that touches, or may touch, a global random state."""
    for module in imports(tree):
        if module.split(".")[0] in ("random", "secrets") or module.startswith("numpy.random."):
            yield f"import {module}"
    for node in ast.walk(tree):
        text = dotted(node)
        if text.startswith(("np.random.", "numpy.random.")) and not text.endswith("random.Generator"):
            yield text
        if text in (
            "torch.manual_seed",
            "torch.seed",
            "torch.cuda.manual_seed",
            "torch.cuda.manual_seed_all",
        ):
            yield text
        if text.startswith("torch.random.") or text.endswith("seed_everything"):
            yield text
        if not isinstance(node, ast.Call):
            continue
        function, keywords = dotted(node.func), {keyword.arg for keyword in node.keywords}
        last = node.func.attr if isinstance(node.func, ast.Attribute) else function
        if function in {f"torch.{draw}" for draw in DRAWS} and "generator" not in keywords:
            yield f"{function} without generator="
        if isinstance(node.func, ast.Attribute) and last in IN_PLACE and "generator" not in keywords:
            yield f"{last} without generator="
        if last in SEEDED_CLASSES and "random_state" not in keywords:
            yield f"{last} without random_state="
        shuffled = [k.value for k in node.keywords if k.arg == "shuffle" and ast.unparse(k.value) != "False"]
        if last == "DataLoader" and shuffled and "generator" not in keywords:
            yield "DataLoader(shuffle=...) without generator="


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_draw_from_global_random_state(path: Path) -> None:
    if path == ROOT / "archipelago" / "core" / "randomness.py":
        return  # the one place that makes generators, and forks torch's global one
    assert list(global_draws(parsed(path))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import random", "from random import shuffle", "np.random.rand(3)", "np.random.default_rng()",
        "torch.randn(3)", "x.normal_()", "torch.manual_seed(0)", "KMeans(3)", "lightning.seed_everything(1)",
        "torch.randperm(5, device='cpu')", "DataLoader(d, shuffle=True)", "from numpy.random import rand",
    ],
)  # fmt: skip
def test_scan_sees_a_global_draw(line: str) -> None:
    assert list(global_draws(ast.parse(line)))


def test_scan_lets_generators_pass() -> None:
    fine = "f: np.random.Generator; torch.randn(3, generator=g); rng.random(); KMeans(3, random_state=0)"
    assert list(global_draws(ast.parse(fine))) == []


@pytest.mark.parametrize(
    "line", ["import sys; sys.argv[1]", "from sys import argv", "p.parse_args()", "OmegaConf.from_cli()"]
)
def test_scan_sees_a_reader_of_the_command_line(line: str) -> None:
    assert reads_command_line(ast.parse(line))
    assert not reads_command_line(ast.parse("p.parse_args(arguments)"))


@pytest.mark.parametrize(
    ("method", "executor"),
    [("fedavg", "loop"), ("ifca", "loop"), ("fedavg", "stacked"), ("fedavg", "trainer")],
)
def test_experiment_neither_reads_nor_moves_a_global_generator(
    method: str, executor: str, tmp_path: Path
) -> None:
    from archipelago.experiments.config import load_config
    from archipelago.experiments.runner import run_experiment

    def run(seed: int) -> bytes:
        overrides = [
            f"method={method}", f"local.engine={executor}", "clients=4", "clusters=2", "rounds=2",
            "local.steps=2", "participation.fraction=0.5", "fleet.backend=in_process", f"storage={tmp_path}",
            f"name=run{seed}",
        ]  # fmt: skip
        path = run_experiment(load_config(overrides=overrides, env={}), quiet=True)
        return (path / "metrics.csv").read_bytes()

    def states() -> tuple[object, bytes, bytes]:
        numpy_state = np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
        return random.getstate(), numpy_state, torch.get_rng_state().numpy().tobytes()

    results = [run(0)]  # the first imports packages, and some of those draw while they are imported
    assert len(results[0].splitlines()) >= 3
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002  (the old global state is what is being watched)
            torch.manual_seed(seed)
            before = states()
            results.append(run(seed))
            assert states() == before
    assert results[0] == results[1] == results[2]


def test_pinned_versions_can_be_installed_on_every_python_that_is_promised():
    """A pin whose release does not support Python 3.10 must be marked as one for later Pythons."""
    project = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'requires-python = ">=(\d+\.\d+)"', project)
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()
            if line.strip() and not line.startswith("#")]  # fmt: skip
    refused = []
    for pin in pins:
        wanted = pin.marker is None or pin.marker.evaluate(
            {"python_version": oldest, "python_full_version": oldest}
        )
        try:
            admits = metadata(pin.name).get("Requires-Python")
        except PackageNotFoundError:
            continue  # another system's
        if wanted and admits and not SpecifierSet(admits).contains(f"{oldest}.99"):
            refused.append(f"{pin} ({admits})")
    assert not refused


# Colours

COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")


def colours_in(path: Path) -> set[str]:
    return set(COLOUR.findall(path.read_text(encoding="utf-8")))


def test_palette_is_the_one_place_of_colours() -> None:
    """What is drawn by matplotlib takes its colours there, and the page's script is handed them."""
    reports = ROOT / "archipelago" / "reports"
    assert len(colours_in(reports / "palette.py")) > 20
    drawn = [*FILES, *(ROOT / "docs" / "hooks").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert {
        name(path): found for path in drawn if path.name != "palette.py" and (found := colours_in(path))
    } == {}
    assert colours_in(reports / "page.js") <= {"#ffffff"}
    assert f"--accent: {palette.ACCENT};" in (reports / "page.css").read_text(encoding="utf-8")


def test_figures_of_a_federation_are_drawn_in_one_place() -> None:
    """The command `partition`, reports and their files: one module draws what clients hold, of one description."""
    drawing = {
        name(path)
        for path in FILES
        if "def draw_holdings" in (text := path.read_text()) or "_group_strip" in text
    }
    assert drawing == {"archipelago/reports/drawing_federation.py"}
    assert {name(path) for path in FILES if "def holdings" in path.read_text()} == {
        "archipelago/reports/figures_federation.py"
    }
