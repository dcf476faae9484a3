"""A callback and a logger that a researcher keeps in a folder of their own, outside the project's tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago.core import plugins
from archipelago.core.registry import REGISTRIES

CODE = '''
"""What a researcher adds: a callback with options of its own, and a Lightning logger, each in a few lines."""

import json
from dataclasses import dataclass
from pathlib import Path

import archipelago
from archipelago.core.settings import setting
from archipelago.experiments.callbacks import CALLBACKS
from archipelago.experiments.loggers import LOGGERS


@dataclass
class DiaryOptions:
    word: str = setting("round", "what a line begins with")


@CALLBACKS.register("MODULE_diary", "writes a diary into the run directory")
class Diary(archipelago.Callback):
    Options = DiaryOptions

    def __init__(self, options=None):
        self.word = (options or DiaryOptions()).word

    def write(self, run, text):
        with (run.path / "diary.txt").open("a") as file:
            file.write(text + "\\\\n")

    def on_start(self, run):
        self.write(run, f"start {run.round}")

    def on_round(self, run, report):
        self.write(run, f"{self.word} {report.round} {report.metrics['micro_accuracy']!r}")

    def on_end(self, run):
        self.write(run, f"end {run.round} {sorted(path.name for path in (run.path / 'models').iterdir())}")


@LOGGERS.register("MODULE_lines", "lines of JSON", label="Lines")
def lines(save_dir, name, group):
    return Lines(save_dir, name, group)


def _logger():
    from lightning.pytorch.loggers.logger import Logger

    return Logger


class Lines(_logger()):
    """A logger as Lightning's documentation asks for it."""

    def __init__(self, save_dir, name="", group=None):
        self.file, self._name, self._group = Path(save_dir + ".jsonl"), name, group

    name = property(lambda self: self._name)
    version = property(lambda self: "one")

    def log_hyperparams(self, params, *args, **kwargs):
        self._write({"method": params["method"], "group": self._group})

    def log_metrics(self, metrics, step=None):
        self._write({"step": step, "accuracy": metrics["micro_accuracy"]})

    def _write(self, content):
        with self.file.open("a") as file:
            file.write(json.dumps(content) + "\\\\n")
'''.replace("\\\\", "\\")


def write_module(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the module into `folder` and make that the working directory; everything of it is forgotten afterwards."""
    (folder / f"{name}.py").write_text(CODE.replace("MODULE", name))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.setattr(plugins, "_loaded", set(plugins._loaded))
    for kind in ("callback", "logger"):
        registry = REGISTRIES[kind]
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    return name
