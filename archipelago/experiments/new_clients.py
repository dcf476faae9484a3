"""Clients that come after the training: what a finished run gives to somebody it has never seen.

Every method has a protocol for such a client: the cluster of least loss (IFCA, FeSEM, WeCFL, CFL, ...), the E-step
(FedEM), the importance weights (FedSoft), the path of least loss through the levels (FeMAM), the global model
(FedAvg and its kin), then, if asked for, a fine-tuning on its own samples. `holdout_clients=0.1` measures the same
during a run, on clients that were set aside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from archipelago.core.errors import UserError
from archipelago.core.settings import ExperimentSettings
from archipelago.data import Federation, load_dataset
from archipelago.experiments.config import config_from_yaml
from archipelago.experiments.plan import make_plan
from archipelago.runs.checkpoints import latest
from archipelago.runs.reader import Run
from archipelago.runs.trees import read_arrays

if TYPE_CHECKING:
    import pandas as pd

    from actors.fleet import InProcessFleet
    from actors.requests import BlockSetup
    from archipelago.strategies import Strategy


@dataclass(frozen=True)
class Newcomer:
    """Samples of a client that a run has never seen, in the data set's own form (bytes stay bytes)."""

    x_train: npt.NDArray[Any]
    y_train: npt.NDArray[Any]
    x_test: npt.NDArray[Any]
    y_test: npt.NDArray[Any]


def adopt(run: str | Path, newcomers: Sequence[Newcomer], *, finetune: bool = False) -> pd.DataFrame:
    """What each newcomer gets of a run: its cluster, and its metrics on its test samples, one row each.

    The run itself is not changed, and newcomers do not learn from one another.
    """
    import pandas as pd

    if not newcomers:
        raise UserError("Expected at least one newcomer to adopt, got none.")
    opened = Run(run)
    config = config_from_yaml((opened.path / "config.yaml").read_text(encoding="utf-8"))
    found = latest(opened.path)
    if found is None:
        raise UserError(
            f"Expected a run with a checkpoint, got {run} without one: let it come to its first, or resume it."
        )
    dataset = load_dataset(config.data, config.seed)
    federation = Federation.from_indices(dataset, read_arrays(opened.path / "partition.safetensors"))
    plan = make_plan(config, federation)
    ids = np.arange(config.clients, config.clients + len(newcomers))
    fleet = _fleet_of(newcomers, ids, plan.block, federation)
    strategy = _restored(config, plan.server, fleet, len(ids), found[1]["server"])
    prediction = strategy.predict(fleet)
    if finetune:
        prediction = _finetuned(config, strategy, fleet, prediction)
    columns = fleet.evaluate(prediction, "test")
    columns["client"] = np.arange(len(ids))
    if strategy.clustered:
        columns = {"client": columns.pop("client"), "cluster": strategy.labels(fleet), **columns}  # type: ignore[attr-defined]
    return pd.DataFrame(columns)


def _fleet_of(
    newcomers: Sequence[Newcomer], ids: npt.NDArray[np.int64], setup: BlockSetup, federation: Federation
) -> InProcessFleet:
    """The newcomers, and nobody else, in this process; their ids follow those of the run's clients."""
    from actors.block import ClientBlock
    from actors.fleet import InProcessFleet
    from actors.requests import ClientSamples

    clients, parts_x, parts_y, at = {}, [], [], 0
    for i, newcomer in zip(ids.tolist(), newcomers, strict=True):
        position = {}
        for part in ("train", "test"):
            x, y = np.asarray(getattr(newcomer, f"x_{part}")), np.asarray(getattr(newcomer, f"y_{part}"))
            _check(x, y, part, i - int(ids[0]), federation)
            position[part] = np.arange(at, at + len(x))
            parts_x.append(x)
            parts_y.append(y.astype(federation.y.dtype))
            at += len(x)
        clients[i] = ClientSamples(position["train"], position["train"][:0], position["test"])
    setup = dataclasses.replace(setup, holdout=())  # positions among the run's samples, which are not here
    block = ClientBlock(setup, clients, np.concatenate(parts_x), np.concatenate(parts_y))
    sizes = np.zeros(ids[-1] + 1, np.int64)
    sizes[ids] = [len(newcomer.x_train) for newcomer in newcomers]
    fleet = InProcessFleet([block], sizes)
    fleet.set_population(ids)
    return fleet


def _check(
    x: npt.NDArray[Any], y: npt.NDArray[Any], part: str, newcomer: int, federation: Federation
) -> None:
    wanted = f"{part} samples of shape {federation.input_shape} and type {federation.x.dtype}"
    if x.shape[1:] != federation.input_shape or x.dtype != federation.x.dtype:
        raise UserError(
            f"Expected {wanted} for newcomer {newcomer}, got {x.shape[1:]} and {x.dtype}: give them as the run's "
            "data set holds them."
        )
    if len(x) != len(y) or not len(x):
        raise UserError(
            f"Expected as many {part} targets as samples, and at least one, for newcomer {newcomer}; got "
            f"{len(x)} samples and {len(y)} targets."
        )


def _restored(
    config: ExperimentSettings, setup: Any, fleet: InProcessFleet, newcomers: int, state: dict[str, Any]
) -> Strategy:
    """The method as the run left it, with room for the newcomers."""
    from archipelago.strategies import build, build_ensemble

    context = dataclasses.replace(setup.context(), clients=config.clients + newcomers)
    strategy: Strategy
    if setup.ensemble:
        strategy = build_ensemble(setup.ensemble, setup.combine, setup.options, context)
    else:
        strategy = build(setup.method, setup.options, context)
    fleet.begin(0)
    strategy.begin(fleet)
    strategy.load_state(state)
    fleet.begin(config.rounds)
    return strategy


def _finetuned(config: ExperimentSettings, strategy: Strategy, fleet: InProcessFleet, prediction: Any) -> Any:
    from archipelago.strategies import parse_method
    from archipelago.strategies.finetune import Finetune, tuned

    if config.ensemble:
        raise UserError(
            "Expected one method with finetune=True, got an ensemble: give its members +finetune."
        )
    base, addons = parse_method(config.method)
    if "finetune" in addons:
        [addon] = [addon for addon in strategy.addons if isinstance(addon, Finetune)]
        return prediction if addon.due(strategy) else tuned(fleet, prediction)
    # A newcomer has no model of its own: where clients that took part have one, it starts from the server's.
    if strategy.mixes or strategy.additive:
        parse_method("+".join([base, *addons, "finetune"]))  # refuses
    return tuned(fleet, prediction)
