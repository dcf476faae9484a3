"""Two clients with one number each to learn: rounds that can be worked out by hand.

The model is y = w x without bias; a client's loss is the mean of (w x - y)^2, its gradient 2 x (w x - y).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.fleet import InProcessFleet
from actors.requests import BlockSetup, ClientSamples
from archipelago.core.settings import EvaluationSettings, LocalSettings, ModelSettings
from archipelago.strategies import Context, Method, build


def scalar_fleet(
    samples: list[list[tuple[Any, float]]],
    *,
    lr: float = 0.1,
    steps: int = 1,
    momentum: float = 0.0,
    model: ModelSettings | None = None,
    classes: int | None = None,
    **local: Any,
) -> InProcessFleet:
    """A fleet whose client i holds the (x, y) pairs `samples[i]`, all in one batch; y = w x unless `model`.

    x is a number, or as many as the model takes.
    """
    from actors.block import ClientBlock

    pairs = [pair for client in samples for pair in client]
    x = np.array([np.atleast_1d(x) for x, _ in pairs], np.float32)
    y = np.array([y for _, y in pairs], np.float32 if classes is None else np.int64)
    clients, at = {}, 0
    for i, client in enumerate(samples):
        index = np.arange(at, at + len(client))
        clients[i] = ClientSamples(train=index, validation=index[:0], test=index)
        at += len(client)
    settings = LocalSettings(steps=steps, batch=100, lr=lr, momentum=momentum, **local)
    setup = BlockSetup(
        seed=0,
        model=model or ModelSettings(name="linear_regression"),
        local=settings,
        evaluation=EvaluationSettings(),
        input_shape=x.shape[1:],
        classes=classes,
        mean=np.zeros(1, np.float32),
        std=np.ones(1, np.float32),
    )
    sizes = np.array([len(client) for client in samples], np.int64)
    fleet = InProcessFleet([ClientBlock(setup, clients, x, y)], sizes)
    fleet.begin(1)
    return fleet


def method_of(method: str, fleet: InProcessFleet, clusters: int = 1, **context: Any) -> Method:
    """A method, set up."""
    options = context.pop("options", {})
    made = build(method, options, Context(clients=len(fleet.all_sizes), clusters=clusters, **context))
    made.setup(fleet)
    return made
