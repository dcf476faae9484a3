"""Local (NonFed): every client trains alone; nothing is ever averaged.

FeSEM's first baseline (Long, Xie et al.), and the lower end of every comparison with personal models.

Readings

Where clients start
    code    one common random model
    here    as the code
How long they train
    paper   5 or 10 epochs in all
    code    FedBase: as many local steps in total as a federated run
    here    as FedBase, so that the comparison is fair
    option  rounds
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from archipelago.strategies.base import METHODS, Strategy
from archipelago.strategies.expectations import ALL, Cost, Expectations, Known
from archipelago.strategies.interface import FleetView
from archipelago.strategies.parameters import Vector
from archipelago.strategies.references import Prediction, Private


@METHODS.register("local", "every client alone, no federation (NonFed)", label="Local")
class Local(Strategy):
    """theta_i is private to client i."""

    expects = Expectations(
        cost=Cost(down=1, trainings=1),
        known=(
            Known("progress", "batchnorm", "a client's own statistics of few samples", limit=0.04),
            Known(
                "accuracy", ALL, "nothing is shared: a client has its own samples and no others", limit=0.14
            ),
        ),
    )

    private = True
    aggregates = False
    state = ("start",)
    start: Vector

    def setup(self, fleet: FleetView) -> None:
        self.start = fleet.initial(1)[0]

    def own(self) -> Private:
        """Each client's own model, the common start until it has trained."""
        return Private("model", default=self.start)

    def round(self, fleet: FleetView) -> None:
        fleet.train(start=self.own(), penalties=self.penalties(fleet), keep="model")

    def prediction(self, fleet: FleetView) -> Prediction:
        return Prediction([self.own()])

    def models(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"start": self.start}
