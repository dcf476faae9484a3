"""The yardstick: the same federated rounds as one would write them by hand, in two processes.

Plain PyTorch: one thread each, a network, `torch.optim.SGD`, images normalised in memory beforehand, a
weighted sum per process exchanged through shared memory. No framework, no checks, no recovery. Batches come
from the platform's generator, so that both sides can be shown to arrive at the same model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.nn import functional as F

from archipelago.core.randomness import generator
from benchmarks.workload import CLASSES, MEAN, STD, Workload

PROCESSES = 2


class Net(nn.Module):
    """The CIFAR CNN of 62,006 parameters, written down once more without the platform."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        return self.fc3(x)


def normalised(workload: Workload) -> tuple[Tensor, Tensor]:
    """All images as float32, ready to be indexed, in the memory format that is fastest for them on either side."""
    x, y = workload.images()
    mean, std = torch.tensor(MEAN).reshape(-1, 1, 1), torch.tensor(STD).reshape(-1, 1, 1)
    images = torch.from_numpy(x).float().div_(255).sub_(mean).div_(std)
    return images.contiguous(memory_format=torch.channels_last), torch.from_numpy(y)


def batches(workload: Workload, client: int, round: int) -> Iterator[Tensor]:
    """Shuffled passes over the client's images, the last batch of a pass short."""
    rng = generator(workload.seed, "batches", slot="main", round=round, client=client)
    left = workload.steps
    while left:
        order = torch.from_numpy(rng.permutation(workload.train_indices(client)))
        for batch in order.split(workload.batch)[:left]:
            left -= 1
            yield batch


class Trainer:
    """Some clients, one after the other, around one network and one optimizer."""

    def __init__(self, workload: Workload, clients: list[int], x: Tensor, y: Tensor) -> None:
        torch.set_num_threads(1)
        self.workload, self.clients, self.x, self.y = workload, clients, x, y
        self.network = Net()
        self.parameters = list(self.network.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=workload.lr, momentum=workload.momentum)
        self.momentum: dict[int, Any] = {}
        sizes = workload.sizes()
        self.shares = (sizes / sizes.sum()).tolist()

    def round(self, round: int, model: Tensor, total: Tensor) -> None:
        """Train every client from `model`; `total` becomes this process's part of the average."""
        total.zero_()
        for client in self.clients:
            self.train(client, round, model)
            with torch.no_grad():
                trained = nn.utils.parameters_to_vector(self.parameters)
            total.add_(trained, alpha=self.shares[client])

    def train(self, client: int, round: int, model: Tensor) -> None:
        """One client's steps."""
        with torch.no_grad():
            pieces = model.split([p.numel() for p in self.parameters])
            for parameter, piece in zip(self.parameters, pieces, strict=True):
                parameter.copy_(piece.view_as(parameter))
        self.optimizer.state.clear()
        for parameter, state in self.momentum.get(client, {}).items():
            self.optimizer.state[parameter] = state
        for rows in batches(self.workload, client, round):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.network(self.x[rows]), self.y[rows])
            loss.backward()
            self.optimizer.step()
        if self.workload.keep_momentum:
            self.momentum[client] = dict(self.optimizer.state)


def _serve(
    workload: Workload, part: int, model: Tensor, totals: Tensor, x: Tensor, y: Tensor, calls: Connection
) -> None:
    """A process of the bare loop: sleeps until a round is asked for."""
    trainer = Trainer(workload, list(range(part, workload.clients, PROCESSES)), x, y)
    calls.send("ready")
    while (round := calls.recv()) is not None:
        trainer.round(round, model, totals[part])
        calls.send(round)


@dataclass
class _Process:
    process: Any
    calls: Connection


class BareLoop:
    """Two processes that train half of the clients each; a context manager."""

    def __init__(self, workload: Workload, start: npt.NDArray[np.float32]) -> None:
        self.model = torch.from_numpy(np.array(start, np.float32)).share_memory_()
        self._totals = torch.zeros(PROCESSES, len(start)).share_memory_()
        x, y = (tensor.share_memory_() for tensor in normalised(workload))
        context = processes.get_context("spawn")
        self._processes: list[_Process] = []
        for part in range(PROCESSES):
            here, there = context.Pipe()
            arguments = (workload, part, self.model, self._totals, x, y, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._processes.append(_Process(process, here))
        for each in self._processes:
            each.calls.recv()

    def __enter__(self) -> BareLoop:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._processes:
            each.calls.send(None)
        for each in self._processes:
            each.process.join(timeout=30)
            each.process.close()

    @property
    def pids(self) -> list[int]:
        """The processes that do the work."""
        return [each.process.pid for each in self._processes]

    def run_round(self, round: int) -> float:
        """One round; its seconds."""
        started = time.perf_counter()
        for each in self._processes:
            each.calls.send(round)
        for each in self._processes:
            each.calls.recv()
        self.model.copy_(self._totals.sum(dim=0))
        return time.perf_counter() - started
