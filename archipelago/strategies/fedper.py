"""FedPer: the clients share a backbone, and each keeps a head of its own.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 2019.

    W_B       self.model, private columns aside       W_P_j     the private columns of Private("personal")
    gamma_j   client_weights / sum                    K_P       fedper.layers

Each client trains both parts together from (W_B, its own W_P_j); the server averages W_B alone.

Readings. The private part is the head as the network names it (its fully-connected layers), or the last
`fedper.layers` layers, the paper's K_P; BatchNorm's running statistics go with the layer they belong to. All
clients start from one common head, not from a draw of their own each; self.model carries that head for ever, and
a client that never took part predicts with it on the current backbone. Optimizer state is kept for both parts. A
network that is all head (an mlp) shares nothing, and the run says so. Matched averaging permutes neurons under
heads that do not follow: refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from archipelago.core.settings import setting
from archipelago.strategies.aggregation import refuse_reordering
from archipelago.strategies.base import METHODS, Context, Strategy
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import ModelSpec, Vector, merged
from archipelago.strategies.references import Indices, Merged, Prediction, Private


@dataclass
class FedPerOptions:
    """`fedper.layers=...`"""

    layers: int | None = setting(
        None, "how many of the last layers are private (null: the network's head)", at_least=1
    )


@METHODS.register("fedper", "a shared backbone under private heads (Arivazhagan et al. 2019)", label="FedPer")
class FedPer(Strategy):
    """W_B = sum_j gamma_j W_B,j; W_P,j stays with client j."""

    Options = FedPerOptions
    private = True
    state = ("model",)
    model: Vector  # W_B, with the head every client starts from

    @classmethod
    def check(cls, options: FedPerOptions, context: Context) -> None:
        why = "private heads do not follow reordered neurons"
        refuse_reordering(context.aggregation, "method=fedper", why)

    def setup(self, fleet: FleetView) -> None:
        self.model = fleet.initial(1)[0]

    def round(self, fleet: FleetView) -> None:
        theta = fleet.train(start=self.own(fleet), penalties=self.penalties(fleet), keep="personal")
        mean = self.average(theta, fleet, otherwise=self.model)
        columns = private_columns(fleet.spec, self.options.layers)
        self.model = merged(mean, self.model, columns)  # W_B, the first head untouched
        if self.number == 1 and len(columns) in (0, fleet.spec.size):
            self.events.append(_nothing_to_do("shared" if len(columns) else "private"))

    def own(self, fleet: FleetView) -> Merged:
        """(W_B, W_P_j) of each client."""
        columns = private_columns(fleet.spec, self.options.layers)
        return Merged(self.model, Private("personal", default=self.model), columns)

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.own(fleet)])

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"global": self.model}


def private_columns(spec: ModelSpec, layers: int | None) -> Indices:
    """The columns of the head, or of the last `layers` layers, running statistics included.

    >>> from archipelago.strategies.parameters import ModelEntry
    >>> spec = ModelSpec((ModelEntry("conv.weight", (2,), 0, 2, "parameter", "backbone"),
    ...                   ModelEntry("fc1.weight", (1,), 2, 3, "parameter", "head"),
    ...                   ModelEntry("fc2.weight", (1,), 3, 4, "parameter", "head"),
    ...                   ModelEntry("fc2.bias", (1,), 4, 5, "parameter", "head")))
    >>> private_columns(spec, None).tolist(), private_columns(spec, 1).tolist()
    ([2, 3, 4], [3, 4])
    """
    if layers is None:
        chosen = [entry for entry in spec.entries if entry.part == "head"]
    else:
        named = [entry.name.rpartition(".")[0] for entry in spec.entries if entry.kind == "parameter"]
        last = list(dict.fromkeys(named))[-layers:]
        chosen = [entry for entry in spec.entries if entry.name.rpartition(".")[0] in last]
    columns = [np.arange(entry.start, entry.stop) for entry in chosen]
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def _nothing_to_do(missing: str) -> str:
    if missing == "shared":
        return (
            "fedper shares nothing: the whole network is its private part, so every client trains alone; "
            "set fedper.layers to keep only the last layers private."
        )
    return "fedper keeps nothing private: the network names no head, so everything is averaged; set fedper.layers."
