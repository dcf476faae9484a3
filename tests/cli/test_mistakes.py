"""Mistakes: one sentence, exit code 2, and nothing heavy was imported or written."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipelago.experiments.checks
import archipelago.experiments.config
import archipelago.experiments.runner
from tests.support.command_line import IN_PROCESS, started

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
    ("method=oracle partition=iid", "The oracle needs data with ground-truth groups"),
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
    ("fleet.gpus=all", "Expected fleet.gpus to be a number or auto, got 'all'"),
    ("precision=16", "Unknown precision '16'"),
    ("precision=bf16", "Expected precision=32 where clients compute on CPUs, got bf16"),
    ("precision=tf32 fleet.gpus=0 fleet.address=head:6379", "got tf32, which needs a GPU"),
    ("determinism=exakt", "Unknown determinism 'exakt'"),
    ("doctor fleet.gpus=0.25", "machine without a GPU, got 0.25"),
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
    ("ifca", "write method=ifca"),
    ("fesem+cam", "write method=fesem+cam"),
    ("cam", "write method=BASE+cam"),
    ("digits", "write data=digits"),
    ("thesis-7.1", "write --config thesis-7.1"),
    ("rounds", "Expected setting=value, got 'rounds'"),
    ("rounds=3 seed", "Expected setting=value, got 'seed'"),
    ("=3", "Expected setting=value, got '=3'"),
    ("--rounds=3", "settings are written without dashes, as in rounds=VALUE"),
    ("--confg x.yaml", "Did you mean '--config'?"),
    ("{folder}/good.yaml", "write --config {folder}/good.yaml"),
    ("{folder}/a_run", "write resume {folder}/a_run"),
    ("list method", "Did you mean 'methods'?"),
    ("list data models", "got 'models' too"),
    ("list ifac", "Did you mean 'ifca'?"),
    ("list --jsn", "Unknown option '--jsn'. Did you mean '--json'?"),
    ("doctor now", "Expected setting=value, got 'now'"),
    ("doctor --now", "Unknown option '--now'"),
    ("report --now", "Unknown option 'now' of report"),
    ("partition --dry-run", "Unknown option '--dry-run'"),
    ("partition iid", "Expected setting=value, got 'iid'"),
    ("--dry-run=yes", "does not take a value"),
    ("--small method=fedavg", "Expected --config FILE beside --small"),
    ("--config thesis-7.11", "Did you mean 'thesis-7.1'?"),
    ("--show-completion tcsh", "Expected a shell after --show-completion, got 'tcsh'"),
    ("--show-completion bash zsh", "got 'zsh' too"),
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
def test_mistake_is_one_sentence_and_exit_code_2(
    typed: str,
    expected: str,
    command: Any,
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
    code, out, error = command(*words)
    assert code == 2, error
    assert out == ""
    assert expected.replace("{folder}", str(mistake_files)) in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert "omegaconf" not in error.lower()
    assert list(tmp_path.iterdir()) == []
    assert files_of(mistake_files) == before


def test_mistakes_are_many_and_different() -> None:
    assert len({typed for typed, _ in MISTAKES}) == len(MISTAKES) >= 45


@pytest.mark.parametrize("typed", ["rounds=0", "method=ifac", "clusters=9 clients=3"])
def test_mistake_ends_the_process_before_ray_is_imported(typed: str, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        f"atexit.register(lambda: open({str(loaded)!r}, 'w').write('\\n'.join(sys.modules)))\n"
    )
    (tmp_path / "storage").mkdir()
    done = started(*typed.split(), f"storage={tmp_path / 'storage'}", PYTHONPATH=str(tmp_path))
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
