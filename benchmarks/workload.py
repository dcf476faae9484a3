"""What is timed: some clients with images of random pixels, and what each of them does in a round."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from archipelago.core.randomness import generator

if TYPE_CHECKING:
    from actors.session import Plan
    from archipelago.data import ClientData

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
CLASSES = 10
NEVER = 10**7  # rounds that are never reached, hence evaluations that never happen


@dataclass(frozen=True)
class Workload:
    """Clients, their images, the network and the steps of a round; the defaults are workload W.

    `ragged`: `samples` is the mean, and who holds how many follows cluster-wise Dirichlet (0.1, 10), as in the
    CIFAR-10 protocol of the papers, with a fifth as many test images. Otherwise all clients hold equally many.
    """

    clients: int = 200
    samples: int = 250
    steps: int = 10
    batch: int = 32
    lr: float = 0.05
    momentum: float = 0.9
    keep_momentum: bool = True
    seed: int = 0
    model: str = "cnn_cifar"
    shape: tuple[int, int, int] = (3, 32, 32)
    ragged: bool = False
    floats: bool = False  # pixels as float32 from 0 to 1, as most scripts hold them, instead of bytes

    def facts(self) -> dict[str, Any]:
        """Plain data for the JSON result."""
        return {
            **asdict(self),
            "data_bytes": self.images_held * (int(np.prod(self.shape)) * (4 if self.floats else 1) + 8),
        }

    @property
    def images_held(self) -> int:
        """Images of all clients: at least one more for each than it trains on, since every client needs a test set."""
        return self.clients * (self.samples + (max(1, self.samples // 5) if self.ragged else 1))

    def images(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Pixels and labels: those to train on, in equal numbers for each client in turn, then those to test on."""
        rng = generator(self.seed, "benchmark images")
        x: npt.NDArray[Any] = rng.integers(0, 256, (self.images_held, *self.shape), dtype=np.uint8)
        if self.floats:
            x = x.astype(np.float32)
            x /= 255
        return x, rng.integers(0, CLASSES, self.images_held)

    def train_indices(self, client: int) -> npt.NDArray[np.int64]:
        """Rows of a client's training images."""
        if self.ragged:
            return _dealt(self)[client].train
        return np.arange(client * self.samples, (client + 1) * self.samples)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Training images of each client."""
        return np.array([len(self.train_indices(client)) for client in range(self.clients)])

    def _clients(self) -> tuple[ClientData, ...]:
        from archipelago.data import ClientData

        if self.ragged:
            return _dealt(self)
        nothing, first_test = np.zeros(0, np.int64), self.clients * self.samples
        return tuple(
            ClientData(self.train_indices(client), nothing, np.array([first_test + client]))
            for client in range(self.clients)
        )

    def settings(self) -> list[str]:
        """The same workload in the platform's words."""
        return [
            "data=synthetic",  # a name for the config; the samples are handed over by `plan`
            f"model={self.model}",
            f"clients={self.clients}",
            f"rounds={NEVER}",
            f"seed={self.seed}",
            f"local.steps={self.steps}",
            f"local.batch={self.batch}",
            f"local.lr={self.lr}",
            f"local.momentum={self.momentum}",
            f"local.keep_optimizer={str(self.keep_momentum).lower()}",
            f"evaluation.every={NEVER}",
        ]

    def plan(self, *overrides: str) -> Plan:
        """The platform's plan of this workload: raw pixels, normalised by the platform."""
        from archipelago.data import Federation
        from archipelago.experiments.config import load_config
        from archipelago.experiments.plan import make_plan

        x, y = self.images()
        channels = self.shape[0]
        federation = Federation(
            x=x,
            y=y,
            clients=self._clients(),
            classes=CLASSES,
            mean=MEAN[:channels],
            std=STD[:channels],
            name="random pixels",
        )
        given = {override.partition("=")[0] for override in overrides}
        own = [*self.settings(), "method=fedavg", "clusters=1"]
        kept = [each for each in own if each.partition("=")[0] not in given]
        return make_plan(load_config(None, [*kept, *overrides]), federation)


@lru_cache(maxsize=4)
def _dealt(workload: Workload) -> tuple[ClientData, ...]:
    """Who holds which rows, by the platform's own partition."""
    from archipelago.core.settings import PartitionSettings
    from archipelago.data.division import Task, divide
    from archipelago.data.partitions import PARTITIONS, Labels

    _, y = workload.images()
    trained = workload.clients * workload.samples
    labels = Labels("random pixels", y[:trained], y[trained:], CLASSES)
    settings = PartitionSettings(name="cluster_dirichlet")
    for name, value in {"alpha": 0.1, "alpha_within": 10.0, "groups": min(10, workload.clients)}.items():
        setattr(settings, name, value)
    task = Task(labels, settings, workload.clients, workload.seed)
    return divide(PARTITIONS.find("cluster_dirichlet"), task).clients


MINIATURE = Workload(clients=6, samples=20, steps=3, batch=8)
