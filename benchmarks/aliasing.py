"""IFCA with copies of models, and with the server's own model objects in the clients' hands.

In the code behind the published IFCA rows (fedbase 0.10.3) a client without a model is given the server's object
itself. Its training then is the server's, clients of a cluster train one after the other instead of side by side,
and a client that changes its cluster later writes the new cluster's values into the object of its old one, while
others still choose. Both sides below are one plain loop and differ in that alone: same data, same initial models, same
batches, fresh momentum each round, losses on all training samples of a client, ties to the larger number.

    python -m benchmarks aliasing
    python -m benchmarks aliasing --rounds 20 data=cifar10 data.root=FOLDER clients=200 clusters=10
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from archipelago.core.randomness import generator, torch_seed
from benchmarks.tables import table

SETTING = ("data=digits", "data.rotations=4", "clients=20", "clusters=4")


class Loop:
    """IFCA's rounds; `aliased` says whether clients hold the server's objects."""

    def __init__(self, settings: Sequence[str], aliased: bool) -> None:
        from archipelago.data import build_federation
        from archipelago.experiments.config import load_config
        from lightning_modules.base import build_module
        from lightning_modules.samples import Samples

        torch.set_num_threads(1)
        config = load_config(None, settings)
        self.seed, self.local, self.aliased = config.seed, config.local, aliased
        federation = build_federation(config.data, config.partition, config.clients, config.seed)
        self.clients = federation.clients
        self.server: list[nn.Module] = [
            build_module(config.model, config.local, federation.input_shape, federation.classes,
                         torch_seed(config.seed, "initial models", client=k))
            for k in range(config.clusters)
        ]  # fmt: skip
        channels_last = getattr(self.server[0], "channels_last", False)
        self.samples = Samples(federation.x, federation.y, mean=federation.mean, std=federation.std,
                               classes=federation.classes, channels_last=channels_last)  # fmt: skip
        self.held: list[nn.Module | None] = [None] * len(self.clients)
        self.c = np.zeros(len(self.clients), np.int64)

    def round(self, number: int) -> dict[str, float]:
        """Assign, train, average, evaluate."""
        for client in range(len(self.clients)):
            self.c[client] = k = self.best(client)
            held = self.held[client]
            if not self.aliased:
                self.held[client] = copy.deepcopy(self.server[k])
            elif held is None:
                self.held[client] = self.server[k]  # no copy: this is the server's own
            else:
                held.load_state_dict(self.server[k].state_dict())
        for client in range(len(self.clients)):
            self.train(client, number)
        for k in range(len(self.server)):
            self.average(k)
        # Models that are the same to float32's precision are one model.
        spread = {
            tuple(np.round(_vector(model)[:: max(1, len(_vector(model)) // 64)], 6)) for model in self.server
        }
        return {"distinct": len(spread), "used": len(set(self.c.tolist())), "accuracy": self.accuracy()}

    def best(self, client: int) -> int:
        """The model of least loss on a client's training samples, now; of equal ones the last."""
        losses = []
        for model in self.server:
            outputs, y = self.outputs(model, self.clients[client].train)
            losses.append(float(nn.functional.cross_entropy(outputs, y)))
        return len(losses) - 1 - int(np.argmin(losses[::-1]))

    def outputs(self, model: nn.Module, index: Any) -> tuple[Tensor, Tensor]:
        """Outputs and targets, without gradients."""
        with torch.no_grad():
            x, y = self.samples.batch(np.asarray(index))
            return model.eval()(x), y

    def train(self, client: int, number: int) -> None:
        """Local steps on the object that the client holds, whoever else holds it."""
        model, index = self.held[client], np.asarray(self.clients[client].train)
        assert model is not None
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.local.lr, momentum=self.local.momentum)
        rng = generator(self.seed, "batches", round=number, client=client)
        batches: list[Any] = []
        while len(batches) < self.local.steps:
            order = rng.permutation(index)
            batches += [order[at : at + self.local.batch] for at in range(0, len(order), self.local.batch)]
        for batch in batches[: self.local.steps]:
            x, y = self.samples.batch(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def average(self, k: int) -> None:
        """The mean of what a cluster's clients hold, by size, into the server's object; an empty cluster stays."""
        members = np.flatnonzero(self.c == k)
        if len(members) == 0:
            return
        sizes = np.array([len(self.clients[client].train) for client in members], float)
        states = [self.held[client].state_dict() for client in members]  # type: ignore[union-attr]  # set above
        mean = {
            name: sum(
                share * state[name].double() for share, state in zip(sizes / sizes.sum(), states, strict=True)
            )
            for name in states[0]
        }
        self.server[k].load_state_dict(mean)

    def accuracy(self) -> float:
        """Of every client's cluster model on its test samples, weighted by training samples."""
        weights = np.array([len(client.train) for client in self.clients], float)
        found = []
        for client, data in enumerate(self.clients):
            outputs, y = self.outputs(self.server[self.c[client]], data.test)
            found.append(float((outputs.argmax(dim=-1) == y).double().mean()))
        return 100 * float(np.average(found, weights=weights))


def _vector(model: nn.Module) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def run(rounds: int | None, miniature: bool, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Both sides for `rounds` rounds (15 by default); `settings` are those of an experiment, as on the command line."""
    count = rounds or (2 if miniature else 15)
    given = tuple(settings) or SETTING
    found = {}
    for name, aliased in (("copies", False), ("server's own objects", True)):
        loop = Loop(given, aliased)
        found[name] = [loop.round(number) for number in range(1, count + 1)]
        print(f"{name}: {count} rounds", flush=True)
    return {"settings": list(given), "rounds": found}


def report(result: dict[str, Any]) -> str:
    """Some rounds of each side."""
    rows = []
    for name, rounds in result["rounds"].items():
        shown = sorted({1, 2, 3, 5, 10, 15, 20, 30, len(rounds)} & set(range(1, len(rounds) + 1)))
        for number in shown:
            each = rounds[number - 1]
            rows.append(
                [name, str(number), str(each["distinct"]), str(each["used"]), f"{each['accuracy']:.1f}"]
            )
    title = f"IFCA with copies and with shared objects: {' '.join(result['settings'])}"
    return table(title, ["clients hold", "round", "distinct models", "clusters in use", "accuracy (%)"], rows)
