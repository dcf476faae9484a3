"""Data sets and partitions of somebody else, in files outside the project: as good as the platform's own."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from archipelago.data import DATASETS, PARTITIONS, build_federation, datasets, load_dataset, partitions
from archipelago.experiments.config import load_config
from archipelago.reports.build import ReportRequest, build_report
from tests.support.clusters import ROOT
from tests.support.errors import Mistake, mistake, refused
from tests.support.settings import data_settings, partition_settings


def example(text: str | None) -> str:
    """The file that a module's docstring shows."""
    lines = (text or "").split("\n    from dataclasses", 1)[1].split("\n`", 1)[0]
    return textwrap.dedent(f"    from dataclasses{lines}")


# The same two, as functions that nobody registered; the types of their options say all that is needed.
PLAIN = '''
"""A data set and a partition without a decorator."""
import my_data
import my_partition


def plain_blobs(settings, options: my_data.BlobOptions, seed):
    """Three clouds of points."""
    return my_data.blobs(settings, options, seed)


def plain_stripes(labels, settings, options: my_partition.StripeOptions, clients, rng):
    """Classes in turn."""
    return my_partition.stripes(labels, settings, options, clients, rng)
'''

# What a user types, in a folder that has nothing but the files of their own.
DRIVER = """
import os
import signal
import sys
from pathlib import Path

from archipelago.experiments.callbacks import Callback
from archipelago.experiments.config import load_config
from archipelago.experiments.runner import resume, run_experiment
from archipelago.sweeps.config import load_sweep
from archipelago.sweeps.runner import run_sweep


class Killer(Callback):
    def on_round(self, run, report):
        if report.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def do(what, name, *words):
    if what == "run":
        run_experiment(load_config(overrides=words), Path(name), quiet=True)
    if what == "killed":
        run_experiment(load_config(overrides=[*words, "checkpoint.every=1"]), Path(name), callbacks=[Killer()])
    if what == "resume":
        resume(Path(name), quiet=True)
    if what == "on_ray":
        run_experiment(load_config(overrides=[*words, "fleet.backend=in_process"]), Path("here"), quiet=True)
        run_experiment(load_config(overrides=[*words, "fleet.actors=2"]), Path(name), quiet=True)
        run_sweep(load_sweep(None, [*words, "sweep.seeds=[0]"]), str(Path(f"{name}-sweep").resolve()), quiet=True)


if __name__ == "__main__":
    lines = [[]]
    for word in sys.argv[1:]:
        lines.append([]) if word == "then" else lines[-1].append(word)
    for line in lines:
        do(*line)
"""

SMALL = ("method=ifca", "clusters=2", "clients=6", "rounds=3", "local.steps=2")
OPTIONS = ("data.spread=0.5", "partition.stripes=3")
BY_PATH = ("data=my_data.blobs", "partition=my_partition.stripes", *OPTIONS)
IN_PROCESS = "fleet.backend=in_process"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A researcher's folder, outside the project."""
    made = tmp_path / "theirs"
    made.mkdir()
    (made / "my_data.py").write_text(example(datasets.__doc__))
    (made / "my_partition.py").write_text(example(partitions.__doc__))
    (made / "plain.py").write_text(PLAIN)
    (made / "driver.py").write_text(DRIVER)
    monkeypatch.chdir(made)
    return made


def typed(folder: Path, *words: str, expected: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "driver.py", *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_extension_in_process_by_path_by_plugin_and_undecorated_with_equal_bits(folder: Path) -> None:
    """By name before by path: a name must be known from the plug-ins alone."""
    plugins = ("plugins=[my_data,my_partition]", "data=blobs", "partition=stripes")
    plain = ("data=plain.plain_blobs", "partition=plain.plain_stripes")
    typed(
        folder, "run", "by_name", *SMALL, *plugins, *OPTIONS, IN_PROCESS,
        "then", "run", "by_path", *SMALL, *BY_PATH, IN_PROCESS,
        "then", "run", "plain", *SMALL, *plain, *OPTIONS, IN_PROCESS,
    )  # fmt: skip
    metrics = {(folder / name / "metrics.csv").read_bytes() for name in ("by_path", "by_name", "plain")}
    assert len(metrics) == 1
    config = (folder / "by_path/config.yaml").read_text()
    assert "name: my_data.blobs" in config and "spread: 0.5" in config and "stripes: 3" in config
    assert "blobs" not in DATASETS  # a report in this process, which never saw either file
    runs = [str(folder / name) for name in ("by_path", "by_name")]
    report = build_report(ReportRequest(runs, str(folder / "report"), figures="no"))
    assert [table.title for table in report.tables] == ["Blobs, Stripes"]
    assert "on Blobs, 6 clients" in (folder / "report/report.html").read_text()
    assert "# ifca on Blobs" in (folder / "by_path/summary.md").read_text()


def test_extension_survives_a_kill_and_a_resume(folder: Path) -> None:
    typed(folder, "killed", "killed", *SMALL, *BY_PATH, IN_PROCESS, expected=-9)
    typed(folder, "resume", "killed", "then", "run", "whole", *SMALL, *BY_PATH, IN_PROCESS)
    assert (folder / "killed/metrics.csv").read_bytes() == (folder / "whole/metrics.csv").read_bytes()


@pytest.mark.full
@pytest.mark.ray
def test_extension_on_two_ray_actors_and_in_trials_has_the_bits_of_this_process(folder: Path) -> None:
    """On a cluster of the driver's own, whose workers know the folder because it is the driver's."""
    plain = ("data=plain.plain_blobs", "partition=plain.plain_stripes", *OPTIONS)
    typed(folder, "on_ray", "there", *SMALL, *plain, "fleet.dashboard=false")
    here = (folder / "here/metrics.csv").read_bytes()
    assert (folder / "there/metrics.csv").read_bytes() == here
    assert (folder / "there-sweep/runs/ifca-seed0/metrics.csv").read_bytes() == here


def test_extension_entry_declares_label_options_and_capabilities(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    try:
        config = load_config(overrides=[*BY_PATH, "clients=6"], env={})
        data, split = DATASETS.entry("my_data.blobs"), PARTITIONS.entry("my_partition.stripes")
        assert (data.name, data.label, split.name, split.label) == ("blobs", "Blobs", "stripes", "Stripes")
        assert data is DATASETS.entry("blobs") and split.value.needs_classes and data.value.seeded
        assert data.options_from(config.data).spread == 0.5
        made = build_federation(config.data, config.partition, 6, 0)
        assert made.groups is not None and made.groups.tolist() == [0, 1, 2, 0, 1, 2]
        with refused("out-of-range", setting="data.spread", given=-1):
            load_config(overrides=["data=my_data.blobs", "data.spread=-1"], env={})
    finally:
        DATASETS.remove("blobs")
        PARTITIONS.remove("stripes")
        for name in ("my_data", "my_partition"):
            sys.modules.pop(name, None)


MISTAKES = """
from collections import OrderedDict
from archipelago.data import Partition
def two(settings, seed): ...
def nothing(settings, options, seed): ...
def wrong(settings, options: int, seed): ...
def undefined(settings, options: "Nobody", seed): ...
def unequal(labels, settings, options, clients, rng):
    return Partition(train=(), test=())
"""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("two", mistake("wrong-signature")),
        ("nothing", mistake("wrong-result", name="mistakes.nothing", says="archipelago.data.Dataset")),
        ("wrong", mistake("wrong-signature")),
        ("undefined", mistake("wrong-signature", annotation="Nobody")),
        (
            "OrderedDict",
            mistake(
                "wrong-kind",
                name="mistakes.OrderedDict",
                says=("data=datamodule", "data.target=mistakes.OrderedDict"),
            ),
        ),
        ("absent", mistake("not-importable", name="absent", module="mistakes")),
    ],
)
def test_extension_data_set_that_cannot_be_one_is_one_sentence(
    data: str, said: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mistakes", raising=False)
    try:
        with said():
            load_dataset(data_settings(name=f"mistakes.{data}"), 0)
    finally:
        DATASETS.remove(f"mistakes.{data}")


def test_extension_partition_of_too_few_clients_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mistakes", raising=False)
    try:
        with refused("wrong-result", clients=4, says="clients=4"):
            build_federation(data_settings(), partition_settings(name="mistakes.unequal"), 4, 0)
    finally:
        PARTITIONS.remove("mistakes.unequal")


def test_extension_partition_is_drawn_again_when_its_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address in the cache knows settings and data, and nothing of somebody's code."""
    monkeypatch.syspath_prepend(str(tmp_path))
    code = (
        "import numpy as np\nfrom archipelago.data import hand_out\n"
        "def split(labels, settings, options, clients, rng):\n"
        "    counts = np.full((len(labels.totals), clients), {each})\n"
        "    return hand_out(labels, counts, rng)\n"
    )
    sizes = []
    for each in (3, 5):
        (tmp_path / f"changing{each}.py").write_text(code.format(each=each))
        found = getattr(__import__(f"changing{each}"), "split")  # noqa: B009  (another module of the same entry)
        PARTITIONS.remove("changing.split")
        PARTITIONS.adopt("changing.split", "", found)
        settings = partition_settings(name="changing.split", cache=str(tmp_path / "cache"))
        sizes.append(build_federation(data_settings(), settings, 4, 0).sizes.tolist())
    PARTITIONS.remove("changing.split")
    assert sizes == [[30] * 4, [50] * 4]


@pytest.mark.parametrize("registry", [DATASETS, PARTITIONS], ids=lambda registry: registry.kind)
def test_extension_options_of_entries_are_no_settings_of_all(registry: object) -> None:
    """`data=digits` has none of the options of `data=synthetic`: what an entry alone reads stands beside it."""
    import dataclasses

    from archipelago.core.settings import DataSettings, PartitionSettings

    common = DataSettings if registry is DATASETS else PartitionSettings
    shared = {field.name for field in dataclasses.fields(common)}
    declared = [
        {field.name for field in dataclasses.fields(entry.options)}
        for entry in registry.values()  # type: ignore[attr-defined]
    ]
    assert any(declared) and not any(names & shared for names in declared)
    assert np.mean([len(names) for names in declared]) < 3


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ('samples: int = setting(7, "mine")', "'samples' of clash.Options.*SyntheticOptions: inherit"),
        ('root: str = setting("x", "mine")', "'root' of clash.Options, which is a setting of DataSettings"),
    ],
)
def test_extension_option_that_means_something_else_already_is_one_sentence(
    option: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "clash.py").write_text(
        "from dataclasses import dataclass\nfrom archipelago.core.settings import setting\n"
        f"@dataclass\nclass Options:\n    {option}\n"
        "def data(settings, options: Options, seed): ...\n"
    )
    code = (
        "from archipelago.core.errors import UserError\nfrom archipelago.experiments.config import load_config\n"
        "try:\n    load_config(overrides=['data=clash.data'], env={})\nexcept UserError as error:\n    print(error)"
    )
    (tmp_path / "driver.py").write_text(code)
    assert re.search(said, typed(tmp_path))


def test_extension_no_other_module_names_a_data_set_or_a_partition() -> None:
    """Whatever the platform must know about an entry is declared where it is registered."""
    entries = [*DATASETS.values(), *PARTITIONS.values()]
    files = {entry.name: Path(inspect.getsourcefile(entry.value.origin) or "") for entry in entries}
    # Other tests may have given arrays a name, which no file has.
    own = {name: file for name, file in files.items() if f'"{name}"' in file.read_text()}
    assert len(own) > 30
    typed = re.compile(rf"\b(?:data|partition)=({'|'.join(own)})\b")
    defaults = {
        ("settings.py", "digits"),
        ("settings.py", "iid"),
        ("__init__.py", "datamodule"),  # a module that is left out of those that are imported
        ("npz.py", "image_folder"),  # what a sentence recommends for samples that memory has no room for
    }
    named = []
    for folder in ("core", "data", "experiments", "sweeps", "runs"):
        for path in sorted((ROOT / "archipelago" / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            documents = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
                if node.body and isinstance(node.body[0], ast.Expr)
            }
            for text in texts:
                if not isinstance(text.value, str) or id(text) in documents:
                    continue
                found = {text.value} & set(own) | set(typed.findall(text.value))
                named += [
                    f"{path.name}:{text.lineno} {name}"
                    for name in found
                    if path != own[name] and (path.name, name) not in defaults
                ]
    assert named == []
