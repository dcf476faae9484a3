"""The front door: what it understands, what it refuses, and how it ends."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipelago.experiments.config
import archipelago.experiments.runner
from archipelago.cli import main as launch
from archipelago.core.errors import UserError
from archipelago.reports.summary import print_table
from archipelago.sweeps.config import load_sweep

ROOT = Path(__file__).parents[2]
IN_PROCESS = ["fleet.backend=in_process", "local.steps=1", "rounds=2", "clients=4"]


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Call the door in an empty folder; gives back (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = launch.main(arguments)
        return (code, *capfd.readouterr())

    return call


def launch_process(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    return subprocess.run(
        [sys.executable, "-m", "platform.launch", *arguments],
        cwd=cwd, env={**env, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


# Mistakes: (what was typed, what the sentence must contain). {folder} is what `mistake_files` makes.

MISTAKES = [
    # methods, data, partitions, models
    ("method=ifac", "Unknown method 'ifac'. Did you mean 'ifca'?"),
    ("method=IFCA", "Did you mean 'ifca'?"),
    ("method=ifca+nothing", "'nothing'"),
    ("ensemble=[fedavg,ifac]", "Did you mean 'ifca'?"),
    ("method=ifca ifca.share_backbone=true aggregation=matched", "with ifca.share_backbone=true, got matched"),
    ("method=ifca ifca.init=balanced ifca.balance=0.5 clusters=4", "Expected ifca.balance <= 1 / clusters"),
    ("ensemble=[fedavg,ifca] ifca.init=balanced ifca.balance=0.9 clusters=2", "set ifca.balance=0.25"),
    ("method=fedper aggregation=matched", "private heads do not follow"),
    ("method=fedsgd aggregation=matched", "gradients have no neurons"),
    ("method=oracle partition=iid", "The oracle needs data with planted groups"),
    ("method=oracle data.rotations=4 clusters=2", "set clusters=4"),
    ("method=ifca+fedavg", "cannot be added to 'ifca'"),
    ("data=digit", "Unknown data set 'digit'. Did you mean 'digits'?"),
    ("partition=dirichelt", "Unknown partition 'dirichelt'. Did you mean 'dirichlet'?"),
    ("model=mlpp", "Unknown model 'mlpp'. Did you mean 'mlp'?"),
    ("model.target=not_there.Mine", "not_there.Mine"),
    ("model=mlp model.target=not_there.Mine", "Expected model.name or model.target, got both"),
    # keys
    ("lr=0.1", "Did you mean 'local.lr'?"),
    ("local.learning_rate=0.1", "Did you mean 'local.lr'?"),
    ("local.lrr=0.1", "Did you mean 'local.lr'?"),
    ("fedprox.nu=0.1 method=fedprox", "Did you mean 'fedprox.mu'?"),
    ("local=5", "Expected settings inside 'local', got a value"),
    ("rounds.more=5", "got a section with 'rounds.more'"),
    # numbers out of range
    ("rounds=0", "Expected rounds >= 1, got 0"),
    ("rounds=-3", "Expected rounds >= 1, got -3"),
    ("clients=0", "Expected clients >= 1, got 0"),
    ("clusters=0", "Expected clusters >= 1, got 0"),
    ("clusters=-1", "Expected clusters >= 1, got -1"),
    ("clusters=21 clients=20", "Expected clusters <= clients, got clusters=21 and clients=20"),
    ("seed=-1", "Expected seed >= 0, got -1"),
    ("local.steps=0", "Expected local.steps >= 1, got 0"),
    ("local.steps=-1", "Expected local.steps >= 1, got -1"),
    ("local.epochs=0", "Expected local.epochs >= 1, got 0"),
    ("local.batch=0", "Expected local.batch >= 1, got 0"),
    ("local.batch=-32", "Expected local.batch >= 1, got -32"),
    ("local.lr=0", "Expected local.lr > 0, got 0"),
    ("local.lr=-1", "Expected local.lr > 0, got -1 (learning rate; default 0.05)"),
    ("local.lr=nan", "Expected local.lr to be a finite number, got"),
    ("local.lr=.inf", "Expected local.lr to be a finite number, got inf"),
    ("local.momentum=1", "Expected 0 <= local.momentum < 1, got 1"),
    ("partition.alpha=0", "Expected partition.alpha > 0, got 0"),
    ("partition.alpha=-0.5", "Expected partition.alpha > 0, got -0.5"),
    ("participation.fraction=0", "Expected 0 < participation.fraction <= 1, got 0"),
    ("participation.fraction=1.01", "Expected 0 < participation.fraction <= 1, got 1.01"),
    ("participation.fraction=-0.1", "got -0.1"),
    ("data.rotations=5", "Expected 1 <= data.rotations <= 4, got 5"),
    ("fedprox.mu=-1 method=fedprox", "Expected fedprox.mu >= 0, got -1"),
    # types
    ("rounds=many", "Expected rounds to be a whole number, got 'many'"),
    ("rounds=2.5", "Expected rounds to be a whole number, got 2.5"),
    ("rounds=", "Expected a value after 'rounds=', got nothing"),
    ("rounds=[1", "Expected rounds to be a whole number, got '[1'"),
    ("rounds=null", "Expected rounds to be a whole number, got null"),
    ("local.lr=fast", "Expected local.lr to be a number, got 'fast'"),
    ("local.keep_optimizer=3", "Expected local.keep_optimizer to be true or false, got 3"),
    ("model.hidden=64", "Expected model.hidden to be a list of whole numbers in brackets, such as [64], got 64"),
    ("model.hidden=[8,0]", "Expected every number of model.hidden >= 1, got [8,0]"),
    ("local.optimizer=sdg", "Did you mean 'sgd'?"),
    ("fleet.backend=rya", "Did you mean 'ray'?"),
    ("rounds=${nope}", "rounds='${nope}'"),
    # the fleet
    ("fleet.clients_per_actor=0", "Expected fleet.clients_per_actor >= 1, got 0"),
    ("fleet.actors=0", "Expected fleet.actors >= 1, got 0"),
    ("fleet.actors=21 clients=20", "got fleet.actors=21 and clients=20"),
    ("fleet.actors=2 fleet.clients_per_actor=3", "fleet.actors or fleet.clients_per_actor, got both"),
    ("fleet.gpus=0.25", "machine without a GPU, got 0.25"),
    ("fleet.gpus=-1", "Expected fleet.gpus >= 0, got -1"),
    ("fleet.gpus=1.5 fleet.address=head:6379", "got 1.5"),
    ("fleet.gpus=0.00001 fleet.address=head:6379", "Ray counts no smaller shares"),
    ("fleet.cpus=0", "Expected fleet.cpus > 0, got 0"),
    ("fleet.address=nowhere", "Expected fleet.address as host:port"),
    # one thing said twice, or options of another method
    ("local.steps=5 local.epochs=1", "Expected local.steps or local.epochs, got both (5 and 1)"),
    ("method=ifca ensemble=[fedavg,ifca]", "Expected method or ensemble, got both"),
    ("rounds=3 rounds=4", "Expected rounds once, got both 3 and 4"),
    ("data=digits data.name=synthetic", "Expected data.name once"),
    ("method=ifca fedprox.mu=1", "Expected options of the method 'ifca' only, got fedprox.mu=1"),
    ("local.trainer.precision=64", "Expected local.engine=trainer"),
    # where results go
    ("name=a/b", "got 'a/b'"),
    ("name=../up", "got '../up'"),
    ("name='a b'", "got 'a b'"),
    ("name=.hidden", "got '.hidden'"),
    ("storage=nowhere://bucket/runs", "an address that pyarrow or fsspec can open, got 'nowhere://bucket/runs'"),
    ("storage={folder}/a_file", "is a file"),
    ("storage={folder}/runtime_resources/pkg/runs", "which Ray deletes"),
    (f"{' '.join(IN_PROCESS)} storage={{folder}} name=a_run", "exists already (finished, 2 rounds done); resume it"),
    (f"{' '.join(IN_PROCESS)} storage={{folder}} name=a_run seed=7", "another experiment: seed is 0 there and 7 here"),
    ("storage={folder} name=not_a_run", "is a folder that is not a run"),
    ("storage={folder} name=a_file", "is a file"),
    # data
    ("data=npz data.root={folder}/missing", "does not exist"),
    ("data=npz data.root={folder}/empty", "is an empty folder"),
    ("data=npz data.root={folder}/corrupt.npz", "cannot be read as an .npz archive"),
    ("clients=5000 method=fedavg", "5000"),
    ("data=synthetic data.samples=7 data.sources=4", "data.samples=7"),
    ("data=synthetic partition=dirichlet", "dirichlet"),
    # files
    ("--config {folder}/missing.yaml", "which does not exist"),
    ("--config {folder}/god.yaml", "did you mean '{folder}/good.yaml'?"),
    ("--config {folder}", "got the folder"),
    ("--config {folder}/empty.yaml", "got an empty file"),
    ("--config {folder}/list.yaml", "got a sequence"),
    ("--config {folder}/broken.yaml", "in line 2"),
    ("--config {folder}/twice.yaml", "duplicate key"),
    ("--config {folder}/binary.yaml", "which is not text"),
    ("--config {folder}/unknown.yaml", "'local.stesp' in '{folder}/unknown.yaml'. Did you mean 'local.steps'"),
    ("--config {folder}/number.yaml", "Expected local.lr > 0, got -1 in '{folder}/number.yaml'"),
    ("--config {folder}/truth.yaml", "Expected name to be text or null, got true in '{folder}/truth.yaml'"),
    ("--config {folder}/code.yaml", "Expected valid YAML"),
    ("--config", "Expected a file after --config"),
    ("--config {folder}/good.yaml --config {folder}/good.yaml", "Expected --config once"),
    # commands
    ("lits", "Unknown command 'lits'. Did you mean 'list'?"),
    ("rounds", "Expected setting=value, got 'rounds'"),
    ("rounds=3 seed", "Expected setting=value, got 'seed'"),
    ("=3", "Expected setting=value, got '=3'"),
    ("--rounds=3", "settings are written without dashes, as in rounds=VALUE"),
    ("--confg x.yaml", "Did you mean '--config'?"),
    ("{folder}/good.yaml", "write --config {folder}/good.yaml"),
    ("{folder}/a_run", "write resume {folder}/a_run"),
    ("list method", "Did you mean 'methods'?"),
    ("list data models", "got 'models' too"),
    ("doctor now", "got 'now' too"),
    ("resume", "Expected a run directory after resume, got nothing"),
    ("resume {folder}/missing", "There is no run {folder}/missing"),
    ("resume {folder}/not_a_run", "is not a run directory"),
    ("resume {folder}/a_run", "finished"),
]  # fmt: skip


@pytest.fixture(scope="module")
def mistake_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that the mistakes name, among them one real, finished run."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "a_file").write_text("a file")
    (folder / "not_a_run").mkdir()
    (folder / "not_a_run" / "thesis.txt").write_text("do not touch")
    (folder / "runtime_resources" / "pkg").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "corrupt.npz").write_bytes(b"PK\x03\x04 and then nothing")
    for name, text in {
        "good": "rounds: 3",
        "empty": "# nothing\n", "list": "- rounds\n- 3\n", "broken": "rounds: 3\n  lr: [\n",
        "twice": "rounds: 3\nrounds: 4\n", "unknown": "local:\n  stesp: 3\n", "number": "local: {lr: -1}\n",
        "truth": "name: yes\n", "code": "name: !!python/object/apply:os.getcwd []\n",
    }.items():  # fmt: skip
        (folder / f"{name}.yaml").write_text(text)
    (folder / "binary.yaml").write_bytes(np.arange(256, dtype=np.uint8).tobytes())
    config = archipelago.experiments.config.load_config(
        overrides=[*IN_PROCESS, f"storage={folder}", "name=a_run"], env={}
    )
    archipelago.experiments.runner.run_experiment(config, quiet=True)
    return folder


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.name != ".lock"}


@pytest.mark.parametrize(("typed", "expected"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_exit_code_2(
    typed: str,
    expected: str,
    door: Any,
    mistake_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_ray(*arguments: object, **options: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", no_ray)
    monkeypatch.setattr(archipelago.experiments.checks, "gpu_count", lambda: 0)
    before = files_of(mistake_files)
    words = [word.replace("{folder}", str(mistake_files)) for word in shlex.split(typed)]
    code, out, error = door(*words)
    assert code == 2, error
    assert out == ""
    assert expected.replace("{folder}", str(mistake_files)) in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert "omegaconf" not in error.lower()
    assert list(tmp_path.iterdir()) == []
    assert files_of(mistake_files) == before


def test_there_are_enough_mistakes() -> None:
    assert len({typed for typed, _ in MISTAKES}) == len(MISTAKES) >= 45


@pytest.mark.parametrize("typed", ["rounds=0", "method=ifac", "clusters=9 clients=3"])
def test_a_mistake_ends_the_process_before_ray_is_imported(typed: str, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        f"atexit.register(lambda: open({str(loaded)!r}, 'w').write('\\n'.join(sys.modules)))\n"
    )
    (tmp_path / "storage").mkdir()
    done = launch_process(*typed.split(), f"storage={tmp_path / 'storage'}", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    modules = loaded.read_text().split("\n")
    assert "archipelago.experiments.config" in modules
    assert "ray" not in modules
    assert "lightning" not in modules
    if typed == "rounds=0":
        assert "torch" not in modules  # what needs no method's code is answered at once
    assert list((tmp_path / "storage").iterdir()) == []


# What is understood


def test_no_arguments_are_the_demonstration() -> None:
    request = launch.parse([])
    assert request.command == "run"
    sweep = load_sweep(request.file, request.overrides, env={})
    assert sweep is not None
    assert [config.method for config in sweep.combinations.values()] == [
        "fedavg", "ifca", "wecfl", "ifca+cam", "fesem+cam",
    ]  # fmt: skip
    assert (sweep.planned, sweep.base.data.name, sweep.base.data.rotations) == (15, "digits", 4)


def test_options_and_overrides_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for arguments in (
        ["--config", str(file), "rounds=3", "name=a=b"],
        ["rounds=3", f"--config={file}", "name=a=b"],
        ["rounds=3", "name=a=b", "--config", str(file)],
    ):
        request = launch.parse(arguments)
        assert (request.command, request.file, request.overrides) == ("run", file, ["rounds=3", "name=a=b"])


def examples() -> list[str]:
    return re.findall(r"^ {4}(.*python -m platform\.launch.*)$", launch.HELP, flags=re.MULTILINE)


def test_the_help_has_examples_of_the_main_things() -> None:
    assert len(examples()) >= 6
    text = "\n".join(examples())
    for thing in ("--config", "method=", "data=", "partition=", "fleet.gpus=", "storage=", "ray job submit"):
        assert thing in text


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
    arguments = shlex.split(example.partition("python -m platform.launch")[2])
    request = launch.parse(arguments)
    assert request.command == ("partition" if arguments[0] == "partition" else "run")
    config = archipelago.experiments.config.load_config(request.file, request.overrides, env={})
    assert (
        len(build_federation(config.data, config.partition, config.clients, config.seed).clients)
        == config.clients
    )


def test_a_partition_is_described_and_drawn(door: Any, tmp_path: Path) -> None:
    code, out, error = door("partition", "clients=6", "clusters=2", "partition=n_class", "name=mine")
    assert (code, error) == (0, "")
    assert "classes per client  2" in out and "label divergence" in out
    folder = tmp_path / "runs" / "mine"
    assert {file.name for file in (folder / "figures").iterdir()} == {
        f"partition-{name}.{kind}" for name in ("classes", "similarity") for kind in ("png", "svg")
    }
    assert all(
        str(Path("runs") / "mine" / "figures" / file.name) in out for file in (folder / "figures").iterdir()
    )
    for wrong in (
        ("partition", "n_class"),
        ("partition", "partition=n_clas"),
        ("partition", "clients=100000"),
    ):
        code, out, error = door(*wrong)
        assert (code, out) == (2, "") and len(error.splitlines()) == 1


def test_a_partition_goes_to_an_object_store_and_says_who_never_trains(door: Any, tmp_path: Path) -> None:
    storage = f"file://{tmp_path}/bucket"
    code, out, error = door(
        "partition", "clients=6", "holdout_clients=0.4", "name=mine", f"storage={storage}"
    )
    assert (code, error) == (0, "")
    assert re.search(r"held-out clients\s+2 that never train and are adopted afterwards: \d, \d\s", out)
    assert (
        f"Tables and indices: {storage}/mine" in out
        and f"{storage}/mine/figures/partition-classes.png" in out
    )
    assert {path.name for path in tmp_path.iterdir()} == {"bucket"}  # no folder called file:
    there = {path.name for path in (tmp_path / "bucket" / "mine").rglob("*") if path.is_file()}
    assert {"partition.safetensors", "facts.json", "partition-similarity.svg"} <= there


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"], ["rounds=3", "--help"]])
def test_help(arguments: list[str], door: Any) -> None:
    code, out, error = door(*arguments)
    assert (code, out, error) == (0, launch.HELP, "")
    assert max(len(line) for line in out.splitlines()) <= 110


def test_help_and_a_simple_mistake_import_nothing_heavy() -> None:
    code = (
        "import sys; from archipelago.cli import main as launch; launch.main(['--help']); "
        "code = launch.main(['rounds=0']); "
        "heavy = {'torch', 'ray', 'lightning', 'sklearn', 'pandas', 'rich'} & set(sys.modules); "
        "sys.exit(bool(heavy) or code != 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# list and doctor


def test_list_has_one_line_for_everything(door: Any) -> None:
    from archipelago.data import DATASETS, PARTITIONS
    from archipelago.strategies import ADDONS, METHODS
    from lightning_modules.networks import NETWORKS

    code, out, error = door("list")
    assert (code, error) == (0, "")
    for registry in (METHODS, ADDONS, DATASETS, PARTITIONS, NETWORKS):
        for name, entry in registry.items():
            lines = [line for line in out.splitlines() if line.split()[:1] == [name]]
            assert [line for line in lines if entry.about in line], name


def test_list_says_where_every_method_is_from() -> None:
    from archipelago.strategies import ADDONS, METHODS

    ours = {"local", "oracle", "random"}  # references of our own, or of nobody in particular
    for name, entry in [*METHODS.items(), *ADDONS.items()]:
        if name not in ours:
            assert re.search(r"\(.*(19|20)\d\d\)|thesis|FeSEM's", entry.about), (name, entry.about)


def test_a_round_fits_on_a_screen() -> None:
    import inspect

    from archipelago.strategies import ADDONS, METHODS

    for name, entry in [*METHODS.items(), *ADDONS.items()]:
        assert len(inspect.getsource(entry.value.round).splitlines()) <= 40, name


@pytest.mark.parametrize("kind", launch.KINDS)
def test_list_of_one_kind(kind: str, door: Any) -> None:
    code, out, _ = door("list", kind)
    assert code == 0
    known = {
        "methods": "fedprox",
        "data": "synthetic",
        "partitions": "iid",
        "models": "mlp",
        "settings": "local.lr",
    }
    assert [other for other, name in known.items() if re.search(rf"^ +{name} ", out, re.MULTILINE)] == [kind]


def test_list_settings_shows_every_setting_with_its_range(door: Any) -> None:
    _, out, _ = door("list", "settings")
    for leaf in archipelago.experiments.config.leaves(archipelago.experiments.config.full_schema()).values():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [leaf.key]]
        assert leaf.about in line
    assert "0 < participation.fraction <= 1" in out


def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    assert launch.main(["list", "settings"]) == 0
    out = capsys.readouterr().out
    assert "participation.fraction" in out
    assert "[0 <" in out  # brackets are text, not markup


def test_list_into_a_closed_pipe_is_no_failure() -> None:
    command = f"{shlex.quote(sys.executable)} -m platform.launch list settings | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_without_ray(door: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    code, out, error = door("doctor")
    assert (code, error) == (0, "")
    for text in (
        "CPUs",
        "memory",
        "GPU",
        "torch",
        "digits",
        "embedded",
        "client actor",
        "loop (CPU)",
        "none (RAY_ADDRESS is not set)",
        "none (a cluster may ask for one",
        f"{tmp_path / 'runs'} ",
    ):
        assert text in out  # fmt: skip
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-secret-token")
    code, out, _ = door("doctor")
    assert "set (RAY_AUTH_TOKEN)" in out
    assert "a-secret-token" not in out


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_doctor_with_a_cluster_that_does_not_answer(
    door: Any, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch._RayProbe, "_SECONDS", 0.5)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent_port}")
    code, out, _ = door("doctor")
    assert code == 0
    assert "no: no answer in 0.5 s" in out
    assert "the Ray cluster does not answer" in out


def test_doctor_with_nothing_at_the_address(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    start = time.monotonic()
    code, out, _ = door("doctor")
    assert code == 0
    assert re.search(rf"address +{address}\n", out)
    assert re.search(r"reachable +no: ", out)
    assert time.monotonic() - start < 20


@pytest.mark.ray
def test_doctor_with_a_real_cluster(ray_cluster: Path, door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    code, out, error = door("doctor")
    assert code == 0, error
    assert "yes: 1 node, 8 CPUs, 2 GPUs" in out
    assert "8 client actors of 1 CPU each, for 20 clients" in out


# Running, stopping, failing, going on


def test_a_run_stopped_when_it_is_finished_is_not_to_be_resumed(
    door: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the report is made."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_show_results", stop)
    code, _, error = door(*IN_PROCESS, "name=mine")
    assert code == 130
    assert error.endswith(
        "The run is finished, in runs/mine; its report: python -m platform.launch report runs/mine\n"
    )


def test_a_run_ends_in_a_table_and_its_path(door: Any, tmp_path: Path) -> None:
    code, out, error = door(*IN_PROCESS, "name=first")
    assert code == 0, error
    assert out.splitlines()[-1].startswith("Results: runs/first ")
    table = io.StringIO()
    print_table(tmp_path / "runs" / "first", table)
    assert table.getvalue() in out
    assert "accuracy" in table.getvalue()
    assert (tmp_path / "runs" / "first" / "summary.md").is_file()
    code, _, error = door(*IN_PROCESS, "name=first")
    assert code == 2
    assert "exists already" in error


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (KeyboardInterrupt(), 130, "Stopped."),
        (SystemExit(15), 143, "Ended from outside."),
        (RuntimeError("out of luck"), 1, "Failed: RuntimeError."),
    ],
)
def test_whatever_stops_a_run_the_way_on_is_said_and_works(
    raised: BaseException,
    code: int,
    expected: str,
    door: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = archipelago.experiments.runner.run_experiment

    def stopped(config: Any, path: Path, **more: Any) -> Path:
        def stop(report: Any) -> None:
            if report.round == 2:
                raise raised

        return whole(config, path, stop, **{**more, "quiet": True})

    monkeypatch.setattr(archipelago.experiments.runner, "run_experiment", stopped)
    arguments = [*IN_PROCESS, "rounds=4", "checkpoint.every=1", "name=stopped"]
    arguments.remove("rounds=2")
    given, _, error = door(*arguments)
    assert given == code
    last = error.splitlines()[-1]
    assert last.startswith(expected)
    assert ("Traceback" in error) == (code == 1)
    command = last.partition("python -m platform.launch ")[2]
    assert command == "resume runs/stopped"
    given, out, error = door(*shlex.split(command))
    assert given == 0, error
    assert "Results: runs/stopped" in out
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert door(*arguments[:-1], "name=whole")[0] == 0
    stopped_metrics, whole_metrics = (
        tmp_path / "runs" / name / "metrics.csv" for name in ("stopped", "whole")
    )
    assert stopped_metrics.read_bytes() == whole_metrics.read_bytes()


def test_a_failure_before_the_run_directory_says_so(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(archipelago.experiments.runner, "run_experiment", fail)
    code, _, error = door("name=never")
    assert code == 1
    assert "no such luck" in error
    assert error.splitlines()[-1] == "Failed: RuntimeError. Nothing was written."


def test_a_mistake_that_only_an_actor_sees_is_still_a_sentence(
    door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RayTaskError(Exception):
        cause = UserError("Expected this, got that.")

    def fail(*arguments: object, **more: object) -> None:
        raise RayTaskError("a long remote traceback")

    monkeypatch.setattr(archipelago.experiments.runner, "run_experiment", fail)
    assert door("name=never") == (2, "", "Expected this, got that.\n")


@pytest.mark.slow
def test_ctrl_c_in_the_terminal(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "platform.launch", *IN_PROCESS[:2], "rounds=100000", "checkpoint.every=1",
         f"storage={tmp_path}", "name=long"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # As in a terminal: tests that were started in the background inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "long" / "metrics.csv").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert error.splitlines()[-1].endswith(
        f"go on with: python -m platform.launch resume {tmp_path / 'long'}"
    )
    assert "Traceback" not in error


def test_choosing_the_number_of_clusters(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import archipelago.experiments.choose_clusters

    monkeypatch.setattr(archipelago.experiments.choose_clusters, "LARGEST", 3)
    code, out, error = door("choose-clusters", "method=fesem", *IN_PROCESS, "clients=8", "data.rotations=2")
    assert code == 2 and "Expected clients once" in error
    given = [word for word in IN_PROCESS if not word.startswith("clients=")]
    code, out, error = door("choose-clusters", "method=fesem", *given, "clients=8", "data.rotations=2")
    assert code == 0, error
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["clusters=2", "clusters=3"]
    losses = [float(line.split()[3]) for line in lines[:2]]
    best = 2 if losses[0] <= losses[1] else 3
    assert lines[2].startswith(f"clusters={best} was chosen")
    assert lines[3].endswith(f"clusters={best}") and "method=fesem" in lines[3]
    code, _, error = door("choose-clusters", "method=fedavg")
    assert code == 2 and "clustered method" in error
