"""Bad inputs of the trial: code of a user's own, as a plug-in, a network, data, a callback or a method."""

from __future__ import annotations

from pathlib import Path

from tests.trial.case import TINY, Case, Make

_MODULE = """
import torch
from lightning_modules.base import FederatedModule
class Mine(FederatedModule):
    def __init__(self, classes, local):
        super().__init__({network}, classes=classes, local=local)
{methods}
"""
_NETWORK = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))"


def _own(methods: str = "    pass", network: str = _NETWORK) -> str:
    return _MODULE.format(network=network, methods=methods)


_STEP = "    def training_step(self, batch, batch_idx):\n"
_PLUGIN, _MODEL = "'plugins=[mine]'", "model.target=mine.Mine"
_DATA = "data=datamodule data.target=mine.Mine"
_DATAMODULE = """
import numpy as np, torch, lightning
from torch.utils.data import TensorDataset, DataLoader
class Mine(lightning.LightningDataModule):
{methods}
"""
_CALLBACK = "from archipelago import Callback\nclass Mine(Callback):\n"
_METHOD = """
from archipelago.strategies.base import METHODS, SingleModel
@METHODS.register("mine", "of my own", label="Mine")
class Mine(SingleModel):
{methods}
"""


def _loaders(x: str, y: str) -> str:
    made = f"        return DataLoader(TensorDataset({x}, {y}), 8)\n"
    return _DATAMODULE.format(
        methods=f"    def train_dataloader(self):\n{made}    def test_dataloader(self):\n{made}"
    )


# {name: (mine.py, settings, exit code, part of the sentence)}
MODULES: dict[str, tuple[str, str, int, str]] = {
    # while it is imported
    "syntax error": ("def x(:\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: SyntaxError:"),
    "raises at import": ("raise RuntimeError('my own')\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: RuntimeError: my"),
    "sys.exit(0) at import": ("import sys; sys.exit(0)\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: it called"),
    "sys.exit(3) at import": ("import sys; sys.exit(3)\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: it called"),
    "sys.exit(text) at import": ("import sys; sys.exit('bye')\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: it called"),
    "raises KeyboardInterrupt at import": ("raise KeyboardInterrupt\n", _PLUGIN, 130, "Stopped. Nothing was written"),
    "imports what is not there": ("import nothing_like_this\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported:"),
    "imports itself": ("import mine\nmine.nothing\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: AttributeError:"),
    "recursion at import": ("def f(): f()\nf()\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: RecursionError:"),
    "memory at import": ("x = bytearray(1 << 40)\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: MemoryError"),
    "many lines in its error": ("raise ValueError('a\\nb\\nc')\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: ValueError: a b"),
    "error without text": ("raise ValueError\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: ValueError"),
    "error whose text raises": ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: E (mine.py"),
    "nul bytes": ("x = 1\0\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: SyntaxError:"),
    "registers a name twice": (_METHOD.format(methods="    pass").replace('"mine"', '"fedavg"'), _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: ValueError:"),
    "registers no class": ("from archipelago.strategies.base import METHODS\nMETHODS.register('mine', 'x', label='x')(3)\n", _PLUGIN, 2, "Plug-in 'mine' (setting plugins) cannot be imported: TypeError:"),
    "sys.exit in the network's module": ("import sys; sys.exit(0)\n", _MODEL, 2, "Expected model.target to be importable, got 'mine.Mine': it called"),
    "network's module raises": ("raise RuntimeError('my own')\n", _MODEL, 2, "Expected model.target to be importable, got 'mine.Mine':"),
    "network's module is not there": ("", "model.target=other.Mine", 2, "Expected model.target to name an importable LightningModule, got"),
    "network's class is not there": ("", _MODEL, 2, "Expected model.target to name an importable LightningModule, got"),
    "network is a function": ("def Mine(): pass\n", _MODEL, 2, "Expected model.target to name a LightningModule, got 'mine.Mine'"),
    "network is a plain nn.Module": ("import torch\nclass Mine(torch.nn.Module): pass\n", _MODEL, 2, "Expected model.target to name a LightningModule, got 'mine.Mine'"),
    # while it is made
    "network's constructor raises": ("from lightning_modules.base import FederatedModule\nclass Mine(FederatedModule):\n    def __init__(self, classes, local):\n        raise ValueError('my own')\n", _MODEL, 2, "model.target=mine.Mine cannot be made: ValueError: my own (mine.py"),
    "network's constructor exits": ("import sys\nfrom lightning_modules.base import FederatedModule\nclass Mine(FederatedModule):\n    def __init__(self, classes, local):\n        sys.exit(0)\n", _MODEL, 2, "model.target=mine.Mine cannot be made: it called sys.exit(0) (mine.py"),
    "network's constructor asks for more": ("from lightning_modules.base import FederatedModule\nclass Mine(FederatedModule):\n    def __init__(self, classes, local, colour):\n        pass\n", _MODEL, 2, "model.target=mine.Mine needs colour to be made, but is given local,"),
    "network without parameters": (_own(network="torch.nn.Flatten()"), _MODEL, 2, "model.target=mine.Mine cannot be used: ValueError: the network has no parameters to train"),
    "network of another shape": (_own(network="torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(63, 10))"), _MODEL, 1, "Client 0 failed in round 1 during computing losses: RuntimeError:"),
    "network with too few classes": (_own(network="torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))"), _MODEL, 1, "Client 0 failed in round 1 during computing losses: IndexError:"),
    "network of lazy layers": (_own(network="torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))"), _MODEL, 2, "model.target=mine.Mine cannot be used: ValueError: Attempted to use"),
    "network of float64": (_own(network=f"{_NETWORK}.double()"), _MODEL, 2, "Expected a model of float32 tensors, got torch.float64 for"),
    "network of half floats": (_own(network=f"{_NETWORK}.half()"), _MODEL, 2, "Expected a model of float32 tensors, got torch.float16 for"),
    "network of complex numbers": (_own(network="torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10, dtype=torch.cfloat))"), _MODEL, 2, "Expected a model of float32 tensors, got torch.complex64 for"),
    "super().__init__ forgotten": ("from lightning_modules.base import FederatedModule\nclass Mine(FederatedModule):\n    def __init__(self, classes, local):\n        pass\n", _MODEL, 2, "model.target=mine.Mine cannot be used: AttributeError: 'Mine' object"),
    # while it trains
    "training step raises": (_own(f"{_STEP}        raise RuntimeError('my own')\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'):"),
    "training step exits with 0": (_own(f"{_STEP}        import sys; sys.exit(0)\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'): it called"),
    "training step exits with 3": (_own(f"{_STEP}        raise SystemExit(3)\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'): it called"),
    "training step returns None": (_own(f"{_STEP}        return None\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'):"),
    "training step returns a number": (_own(f"{_STEP}        return 3.0\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'):"),
    "training step returns text": (_own(f"{_STEP}        return 'loss'\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'):"),
    "training step returns a vector": (_own(f"{_STEP}        return self(batch[0])\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'):"),
    "training step without gradient": (_own(f"{_STEP}        return torch.tensor(1.0)\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'):"),
    "training step takes all memory": (_own(f"{_STEP}        return torch.zeros(1 << 40).sum()\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'):"),
    "training step recurses": (_own(f"{_STEP}        return self.training_step(batch, batch_idx)\n"), _MODEL, 1, "Client 0 failed in round 1 during local training ('main'):"),
    "loss is never finite": (_own(f"{_STEP}        return super().training_step(batch, batch_idx) * float('nan')\n"), f"{_MODEL} rounds=5", 1, "Nobody trained in rounds 1 to 3: every client's loss or model was not"),
    "no optimizer": (_own("    def configure_optimizers(self):\n        return None\n"), _MODEL, 2, "Expected Mine.configure_optimizers to return one torch optimizer, got"),
    "optimizer raises": (_own("    def configure_optimizers(self):\n        raise RuntimeError('my own')\n"), _MODEL, 2, "model.target=mine.Mine cannot be used: RuntimeError: my own (mine.py"),
    "optimizer of nothing": (_own("    def configure_optimizers(self):\n        return torch.optim.SGD([], lr=1)\n"), _MODEL, 2, "model.target=mine.Mine cannot be used: ValueError: optimizer got an"),
    "optimizer is a number": (_own("    def configure_optimizers(self):\n        return 3\n"), _MODEL, 2, "Expected Mine.configure_optimizers to return one torch optimizer, got"),
    "forward gives NaN": (_own("    def forward(self, x):\n        return super().forward(x) * float('nan')\n"), f"{_MODEL} rounds=5", 1, "Nobody trained in rounds 1 to 3: every client's loss or model was not"),
    # data
    "data without loaders": (_DATAMODULE.format(methods="    pass"), _DATA, 2, "Expected data.target=mine.Mine to have train_dataloader, got neither:"),
    "data whose set-up raises": (_DATAMODULE.format(methods="    def setup(self, stage=None): raise RuntimeError('my own')"), _DATA, 2, "data.target=mine.Mine gave no samples: RuntimeError: my own (mine.py"),
    "data whose set-up exits": (_DATAMODULE.format(methods="    def setup(self, stage=None): raise SystemExit(0)"), _DATA, 2, "data.target=mine.Mine gave no samples: it called sys.exit(0) (mine.py"),
    "data whose loader is none": (_DATAMODULE.format(methods="    def train_dataloader(self): return None\n    def test_dataloader(self): return None"), _DATA, 2, "Expected train_dataloader of data.target=mine.Mine to return one"),
    "data of no samples": (_loaders("torch.zeros(0, 64)", "torch.zeros(0).long()"), _DATA, 2, "Expected samples (x, y) or (x, y, owner) from train_dataloader of"),
    "data of NaN": (_loaders("torch.full((80, 64), float('nan'))", "torch.arange(80) % 4"), _DATA, 2, "data.target=mine.Mine: samples must be finite float32 numbers, but"),
    "data of texts": (_DATAMODULE.format(methods="    def train_dataloader(self): return DataLoader(['a'] * 9)\n    def test_dataloader(self): return DataLoader(['a'] * 9)"), _DATA, 2, "Expected samples (x, y) or (x, y, owner) from train_dataloader of"),
    "data with negative labels": (_loaders("torch.zeros(80, 64)", "torch.arange(80) % 4 - 2"), _DATA, 2, "data.target=mine.Mine: labels must be class numbers 0, 1, 2, ..."),
    # methods and callbacks
    "method without a round": (_METHOD.format(methods="    pass"), f"{_PLUGIN} method=mine", 1, "NotImplementedError (base.py"),
    "method whose round raises": (_METHOD.format(methods="    def round(self, fleet): raise RuntimeError('my own')"), f"{_PLUGIN} method=mine", 1, "RuntimeError: my own (mine.py"),
    "method whose round exits": (_METHOD.format(methods="    def round(self, fleet): raise SystemExit(0)"), f"{_PLUGIN} method=mine", 1, "The code of method 'mine' ended the run: it called sys.exit(0)"),
    "method that forgets its model": (_METHOD.format(methods="    def round(self, fleet): self.model = None"), f"{_PLUGIN} method=mine", 1, "Client 0 failed in round 1 during evaluation on test data: TypeError:"),
    "method with a model of another length": (_METHOD.format(methods="    def round(self, fleet):\n        import numpy as np\n        self.model = np.zeros(3, np.float32)"), f"{_PLUGIN} method=mine", 1, "Client 0 failed in round 1 during evaluation on test data:"),
    "callback raises": (f"{_CALLBACK}    def on_round(self, run, report): raise RuntimeError('my own')\n", "'callbacks=[mine.Mine]'", 2, "Callback 'mine.Mine' failed in round 1 (on_round): RuntimeError: my"),
    "callback exits": (f"{_CALLBACK}    def on_round(self, run, report): raise SystemExit(0)\n", "'callbacks=[mine.Mine]'", 2, "Callback 'mine.Mine' failed in round 1 (on_round): it called"),
    "callback cannot be made": (f"{_CALLBACK}    def __init__(self): raise RuntimeError('my own')\n", "'callbacks=[mine.Mine]'", 2, "Callback 'mine.Mine' cannot be made: RuntimeError: my own (mine.py"),
}  # fmt: skip


def _file(text: str) -> Make:
    def make(folder: Path, runs: Path) -> None:
        (folder / "mine.py").write_text(text)

    return make


def _words(settings: str) -> str:
    given = {word.partition("=")[0] for word in settings.split()}
    return " ".join([*(word for word in TINY.split() if word.partition("=")[0] not in given), settings])


def _case(name: str, text: str, settings: str, code: int, says: str) -> Case:
    begins = code == 1 or name in ("callback raises", "callback exits")  # in a round: the run stays
    return Case(
        f"module: {name}",
        _words(settings),
        says,
        code,
        _file(text),
        leaves=("runs",) if begins else (),
        begins=begins,
    )


_ADOPT = """
import numpy as np
import archipelago as ar
from archipelago.experiments.new_clients import NewClient
run = ar.run(method="ifca", clusters=2, clients=4, rounds={rounds}, local={{"steps": 1}}, storage="{{folder}}/runs",
             name="adopted", fleet={{"backend": "in_process"}}, quiet=True)
x, y = np.zeros((8, 1, 8, 8), np.uint8), np.arange(8) % 4
{code}
"""

# {name: (what is adopted, part of the sentence)}
ADOPTED: dict[str, tuple[str, str]] = {
    "labels out of range": ("ar.adopt(run.path, [NewClient(x, y + 50, x, y)])", "Expected"),
    "negative labels": ("ar.adopt(run.path, [NewClient(x, y - 9, x, y)])", "Expected"),
    "samples of another shape": ("ar.adopt(run.path, [NewClient(x[..., :5], y, x, y)])", "Expected"),
    "fewer labels than samples": ("ar.adopt(run.path, [NewClient(x, y[:3], x, y)])", "Expected"),
    "no samples": ("ar.adopt(run.path, [NewClient(x[:0], y[:0], x, y)])", "Expected"),
    "nobody": ("ar.adopt(run.path, [])", "Expected"),
    "into a folder that is no run": ("ar.adopt('{folder}', [NewClient(x, y, x, y)])", "run"),
}  # fmt: skip


def _adopted(name: str, code: str, says: str) -> Case:
    script = _ADOPT.format(rounds=1, code=code)
    return Case(f"adopt: {name}", "", says, script=script, leaves=("runs",), begins=True)


CASES = [
    *(_case(name, *each) for name, each in MODULES.items()),
    *(_adopted(name, *each) for name, each in ADOPTED.items()),
]
