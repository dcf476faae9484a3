"""A method's round beside the arithmetic it cannot do without, written down by hand in plain PyTorch.

The bare side does the local steps, the loss evaluations and the forward passes of frozen models, each frozen
model once per client, sample and round, then the averages: no fleet, no checks, no bookkeeping. Both sides run
in this process on one thread and take turns round by round. After the first round their models are compared:
it is the same arithmetic that is timed.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archipelago.core.randomness import generator
from archipelago.strategies.clustering import kmeans, match_labels
from benchmarks.bare import Net, normalised
from benchmarks.machine import cpu_seconds
from benchmarks.tables import shown, spread, table, verdict
from benchmarks.workload import Workload

LIMIT = 1.10
WARM_UP = 1
CLUSTERS = 4
METHODS = ("ifca", "ifca+cam", "fesem+cam", "fedem")
LAM = 0.01  # cam.lam
CLASSIFIER = slice(-(10 * 84 + 10), -10)  # the last layer without its bias, which is what FeSEM clusters


class Bare:
    """Clients one after the other around one network; `models` holds the cluster models, `shared` CAM's."""

    def __init__(self, workload: Workload, models: npt.NDArray[np.float32], shared: Any) -> None:
        torch.set_num_threads(1)
        self.workload = workload
        self.x, self.y = normalised(workload)
        self.network = Net()
        self.parameters = list(self.network.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=workload.lr, momentum=workload.momentum)
        self.momentum: dict[tuple[int, str], Any] = {}
        self.models = torch.from_numpy(models.copy())
        self.shared = None if shared is None else torch.from_numpy(np.array(shared))
        self.c = np.zeros(workload.clients, np.int64)  # clusters, where they are remembered
        self.pi = torch.full((workload.clients, len(models)), 1.0 / len(models), dtype=torch.float64)
        self.seen = False

    def load(self, vector: Tensor) -> None:
        """Put a model into the network."""
        with torch.no_grad():
            for parameter, piece in zip(
                self.parameters, vector.split([p.numel() for p in self.parameters]), strict=True
            ):
                parameter.copy_(piece.view_as(parameter))

    def outputs(self, vector: Tensor, client: int) -> Tensor:
        """A frozen model's logits on all of a client's samples."""
        self.load(vector)
        with torch.no_grad():
            return self.network(self.x[self.rows(client)])

    def rows(self, client: int) -> slice:
        """A client's samples stand side by side."""
        return slice(client * self.workload.samples, (client + 1) * self.workload.samples)

    def train(
        self,
        client: int,
        round: int,
        start: Tensor,
        *,
        slot: str = "main",
        frozen: Tensor | None = None,
        weights: Tensor | None = None,
        pull: Tensor | None = None,
    ) -> Tensor:
        """One client's steps from `start`; `frozen` and `weights` have a row for each of its samples."""
        workload, first = self.workload, client * self.workload.samples
        self.load(start)
        self.optimizer.state.clear()
        for parameter, state in self.momentum.get((client, slot), {}).items():
            self.optimizer.state[parameter] = state
        rng = generator(workload.seed, "batches", slot=slot, round=round, client=client)
        left = workload.steps
        while left:
            order = torch.from_numpy(rng.permutation(workload.train_indices(client)))
            for batch in order.split(workload.batch)[:left]:
                left -= 1
                self.optimizer.zero_grad()
                logits = self.network(self.x[batch])
                logits = logits if frozen is None else logits + frozen[batch - first]
                losses = F.cross_entropy(logits, self.y[batch], reduction="none")
                loss = (losses if weights is None else losses * weights[batch - first]).mean()
                if pull is not None:
                    live = torch.cat([p.reshape(-1) for p in self.parameters])
                    loss = loss + 0.5 * LAM * (live - pull).square().sum()
                loss.backward()
                self.optimizer.step()
        self.momentum[client, slot] = dict(self.optimizer.state)
        with torch.no_grad():
            return nn.utils.parameters_to_vector(self.parameters).clone()

    def means(self, trained: list[Tensor], c: npt.NDArray[np.int64]) -> Tensor:
        """The mean of each cluster; an empty one keeps its model."""
        rows = [
            torch.stack([trained[i] for i in np.flatnonzero(c == k)]).mean(0)
            if (c == k).any()
            else self.models[k]
            for k in range(len(self.models))
        ]
        return torch.stack(rows)

    def run_round(self, round: int, method: str) -> None:
        """One round of the method."""
        getattr(self, method.replace("+", "_"))(round)

    def ifca(self, round: int) -> None:
        """argmin of K losses, then steps, then means."""
        c, trained = np.zeros(self.workload.clients, np.int64), []
        for i in range(self.workload.clients):
            y = self.y[self.rows(i)]
            c[i] = np.argmin([float(F.cross_entropy(self.outputs(model, i), y)) for model in self.models])
            trained.append(self.train(i, round, self.models[c[i]]))
        self.models = self.means(trained, c)

    def ifca_cam(self, round: int) -> None:
        """The same on top of the shared model, and the shared model on top of the clusters."""
        c, trained, shared = np.zeros(self.workload.clients, np.int64), [], []
        for i in range(self.workload.clients):
            y, under = self.y[self.rows(i)], self.outputs(self.shared, i)  # type: ignore[arg-type]
            own = [self.outputs(model, i) for model in self.models]
            c[i] = np.argmin([float(F.cross_entropy(logits + under, y)) for logits in own])
            trained.append(self.train(i, round, self.models[c[i]], frozen=under))
            shared.append(self.train(i, round, self.shared, slot="shared", frozen=own[c[i]]))  # type: ignore[arg-type]
        self.models, self.shared = self.means(trained, c), torch.stack(shared).mean(0)

    def fesem_cam(self, round: int) -> None:
        """Steps from the cluster of the last round with a pull to it, then K-means on the heads."""
        trained, shared = [], []
        for i in range(self.workload.clients):
            under, own = self.outputs(self.shared, i), self.outputs(self.models[self.c[i]], i)  # type: ignore[arg-type]
            centre = self.models[self.c[i]]
            trained.append(self.train(i, round, centre, frozen=under, pull=centre))
            shared.append(self.train(i, round, self.shared, slot="shared", frozen=own))  # type: ignore[arg-type]
        heads = torch.stack([model[CLASSIFIER] for model in trained]).numpy()
        seed = int(generator(self.workload.seed, "k-means", round=round).integers(2**31))
        found = kmeans(heads, CLUSTERS, seed=seed, weights=None, starts=20, centres=None)
        before = self.c if self.seen else np.full(len(self.c), -1)
        self.c, self.seen = match_labels(before, found.labels, CLUSTERS)[found.labels], True
        self.models, self.shared = self.means(trained, self.c), torch.stack(shared).mean(0)

    def fedem(self, round: int) -> None:
        """The E-step, then weighted steps of every component."""
        trained: list[list[Tensor]] = [[] for _ in self.models]
        for i in range(self.workload.clients):
            y = self.y[self.rows(i)]
            each = [F.cross_entropy(self.outputs(m, i), y, reduction="none") for m in self.models]
            q = torch.softmax(self.pi[i].log() - torch.stack(each, dim=1).double(), dim=1)
            self.pi[i] = q.mean(0)
            for m, model in enumerate(self.models):
                slot = "main" if m == 0 else f"component {m}"
                trained[m].append(self.train(i, round, model, slot=slot, weights=q[:, m].float()))
        self.models = torch.stack([torch.stack(models).mean(0) for models in trained])


def compare(method: str, workload: Workload, rounds: int) -> dict[str, Any]:
    """Rounds of both sides in turn."""
    from actors.session import InProcessSession

    settings = [f"method={method}", f"clusters={CLUSTERS}", "fleet.backend=in_process"]
    cam = ["cam.warmup=0", "cam.schedule=simultaneous", "cam.kmeans=base", f"cam.lam={LAM}"]
    settings += cam if "cam" in method else []
    session = InProcessSession(workload.plan(*settings))
    strategy = session.server.method
    shared = strategy.addons[0].shared if "cam" in method else None  # type: ignore[attr-defined]
    bare = Bare(workload, strategy.base.clusters.values, shared)  # type: ignore[attr-defined]
    seconds: dict[str, list[float]] = {"platform": [], "bare": []}
    processor: dict[str, list[float]] = {"platform": [], "bare": []}
    difference = 0.0
    for round in range(1, WARM_UP + rounds + 1):
        for side in ("platform", "bare") if round % 2 else ("bare", "platform"):
            before, started = cpu_seconds([os.getpid()]), time.perf_counter()
            if side == "platform":
                session.run_round(round)
            else:
                bare.run_round(round, method)
            seconds[side].append(time.perf_counter() - started)
            processor[side].append(cpu_seconds([os.getpid()]) - before)
        if round == 1:
            ours = strategy.base.clusters.values  # type: ignore[attr-defined]
            difference = float(np.max(np.abs(ours - bare.models.numpy())))
    session.close()
    return {
        "seconds": {side: values[WARM_UP:] for side, values in seconds.items()},
        "processor_seconds": {side: values[WARM_UP:] for side, values in processor.items()},
        "largest_difference": difference,
    }


def run(rounds: int | None, miniature: bool) -> dict[str, Any]:
    """All methods, one after the other."""
    workload = Workload(clients=6, samples=20, steps=3, batch=8) if miniature else Workload(clients=12)
    found: dict[str, Any] = {}
    for method in METHODS:
        one = compare(method, workload, rounds or (1 if miniature else 12))
        one["ratios"] = {
            name: spread(np.divide(one[name]["platform"], np.maximum(one[name]["bare"], 1e-3)))
            for name in ("seconds", "processor_seconds")
        }
        found[method] = one
    worst = max(one["ratios"]["seconds"]["median"] for one in found.values())
    return {
        "limit": LIMIT,
        "ratio": worst,
        "kept": worst <= LIMIT,
        "workload": workload.facts(),
        "clusters": CLUSTERS,
        "methods": found,
    }


def report(result: dict[str, Any]) -> str:
    """One line a method."""
    rows = [
        [
            method,
            shown(spread(one["seconds"]["platform"])),
            shown(spread(one["seconds"]["bare"])),
            shown(one["ratios"]["seconds"]),
            shown(one["ratios"]["processor_seconds"]),
            f"{one['largest_difference']:.1e}",
        ]
        for method, one in result["methods"].items()
    ]
    title = (
        f"A method's round over its bare arithmetic: {result['workload']['clients']} clients, K = "
        f"{result['clusters']}, in one process, median (quartiles)\nWorst ratio {result['ratio']:.3f}, limit "
        f"{result['limit']:.2f}: {verdict(result['ratio'], result['limit'])}"
    )
    header = ["", "platform s/round", "bare s/round", "ratio", "processor time", "models differ by"]
    return table(title, header, rows)
