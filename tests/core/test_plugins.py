"""Code of a user's own: found by name and by import path, and one sentence where it cannot be imported."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.core.errors import UserError
from archipelago.core.plugins import import_object, import_path, import_plugin, load_plugins
from archipelago.core.registry import Registry
from archipelago.experiments.config import load_config
from tests.support.errors import refused

ROOT = Path(__file__).parents[2]

MINE = '''
"""A method of somebody's own."""
from dataclasses import dataclass

from archipelago.core.settings import setting
from archipelago.strategies.base import METHODS
from archipelago.strategies.fedavg import FedAvg


@dataclass
class MineOptions:
    """`{section}.strength=...`"""

    strength: float = setting(0.5, "how strong", at_least=0)


{decorator}
class Mine(FedAvg):
    """FedAvg under another name."""

    Options = MineOptions
'''


def write(folder: Path, name: str, *, registered: bool = True) -> None:
    decorator = f'@METHODS.register("{name}_method", "mine", label="Mine")' if registered else ""
    (folder / f"{name}.py").write_text(MINE.format(decorator=decorator, section=name))


def in_folder(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in another folder, as a user outside the checkout does."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)


def test_plugin_of_the_working_directory_brings_a_method_with_options(tmp_path: Path) -> None:
    write(tmp_path, "brought")
    done = in_folder(
        tmp_path,
        "import pickle\n"
        "from archipelago.experiments.config import load_config, config_to_yaml, config_from_yaml\n"
        "words = ['plugins=[brought]', 'method=brought_method', 'brought_method.strength=0.25']\n"
        "config = load_config(overrides=words[::-1], env={})\n"
        "assert config.brought_method.strength == 0.25 and config.plugins == ['brought']\n"
        "assert config_from_yaml(config_to_yaml(config)) == config\n"
        "open('config.pickle', 'wb').write(pickle.dumps(config))\n"
        "open('config.yaml', 'w').write(config_to_yaml(config))\n",
    )
    assert done.returncode == 0, done.stderr
    # Another process knows nothing of the plug-in until the config arrives.
    for read in (
        "import pickle; config = pickle.load(open('config.pickle', 'rb'))",
        "from archipelago.experiments import config as c; config = c.config_from_yaml(open('config.yaml').read())",
    ):
        found = in_folder(tmp_path, f"{read}\nprint(config.method, config.brought_method.strength)")
        assert found.stdout == "brought_method 0.25\n", found.stderr


def test_method_by_import_path_needs_no_registration(tmp_path: Path) -> None:
    write(tmp_path, "unregistered", registered=False)
    done = in_folder(
        tmp_path,
        "from archipelago.experiments.config import load_config\n"
        "config = load_config(overrides=['Mine.strength=2', 'method=unregistered.Mine'], env={})\n"
        "from archipelago.strategies import METHODS\n"
        "entry = METHODS.entry('unregistered.Mine')\n"
        "print(config.method, config.Mine.strength, entry.label, entry.about)\n",
    )
    assert done.stdout == "unregistered.Mine 2.0 Mine FedAvg under another name.\n", done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck (broken.py, line 1)"),
        ("import a_package_nobody_has", "a_package_nobody_has"),
        ("def broken(:\n    pass", "SyntaxError"),
    ],
)
def test_plugin_that_raises_is_one_sentence_that_names_it(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with refused("plugin", name="broken") as raised:
        load_plugins(["broken"])
    assert said in str(raised.value)


@pytest.mark.parametrize("name", ["nobody_has_this", "nobody.has.this", "collections.nobody"])
def test_plugin_that_is_missing_is_one_sentence_that_names_it(name: str) -> None:
    with refused("plugin", name=name):
        import_plugin(name)


@pytest.mark.parametrize("name", ["", "folder/mine", "mine.py/", "..mine", "1mine"])
def test_plugin_name_must_be_a_module(name: str) -> None:
    with refused("plugin"):
        import_plugin(name)


def test_config_refuses_a_missing_plugin_and_a_missing_class() -> None:
    with refused("plugin", name="nobody_has_this"):
        load_config(overrides=["plugins=[nobody_has_this]"], env={})
    with refused("not-importable", name="Nobody", module="collections"):
        load_config(overrides=["method=collections.Nobody"], env={})
    with refused("wrong-kind", kind="method", name="collections.OrderedDict"):
        load_config(overrides=["method=collections.OrderedDict"], env={})


def test_object_of_a_notebook_is_refused_with_the_remedy() -> None:
    with refused("not-importable", name="__main__.Mine", says="%%writefile"):
        import_object("__main__.Mine", "a method")

    class Inner:
        pass

    with refused("no-import-path"):
        import_path(Inner)


def test_registry_finds_one_entry_by_name_and_by_import_path() -> None:
    things: Registry[type] = Registry("thing", base=Exception)
    things.register("user_error", "a sentence", label="Sentence")(UserError)
    by_path = things.entry("archipelago.core.errors.UserError")
    assert by_path is things.entry("user_error") and by_path.section == "user_error"
    assert list(things) == ["user_error"]
    with pytest.raises(ValueError, match="registered twice"):
        things.register("user_error", "another")(KeyError)
    things.register("user_error", "the module imported again")(UserError)
    with refused("unknown-name", nearest="user_error"):
        things.find("user_eror")


def test_composed_settings_are_equal_after_a_pickle_of_a_part() -> None:
    config = load_config(overrides=["method=fedprox", "fedprox.mu=0.5"], env={})
    assert pickle.loads(pickle.dumps(config.partition)) == config.partition
