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
from archipelago.data import Federation, load_dataset, partition_seed
from archipelago.experiments.checks import check_adoption
from archipelago.experiments.config import config_from_yaml
from archipelago.experiments.plan import make_plan
from archipelago.experiments.runner import check_code
from archipelago.runs.checkpoints import latest
from archipelago.runs.reader import Run
from archipelago.runs.refusals import check_identity
from archipelago.runs.trees import read_arrays
from archipelago.strategies import assemble, parts_of
from archipelago.strategies.adoption import ADOPTION
from archipelago.strategies.tuning import tuned, why_not_tuned

if TYPE_CHECKING:
    import pandas as pd

    from actors.fleet import InProcessFleet
    from actors.requests import BlockSetup
    from archipelago.strategies import AnyMethod


@dataclass(frozen=True)
class NewClient:
    """Samples of a client that a run has never seen, in the data set's own form (bytes stay bytes).

    >>> x, y = np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1])
    >>> NewClient(x, None, x, y).y_train is None  # no labels to train on
    True
    """

    x_train: npt.NDArray[Any]
    y_train: npt.NDArray[Any] | None  # None: it has no labels, and is adopted by a rule that needs none
    x_test: npt.NDArray[Any]
    y_test: npt.NDArray[Any]


def adopt(
    run: str | Path,
    new_clients: Sequence[NewClient],
    *,
    finetune: bool = False,
    adoption: str = "labels",
    trust: bool = False,
) -> pd.DataFrame:
    """What each new client gets of a run: its cluster, and its metrics on its test samples, one row each.

    `adoption` says how it finds its cluster: "labels" is the method's own protocol, "entropy" and rules of your own
    may do without labels. The run itself is not changed, and new clients do not learn from one another. `trust`: import
    the code of somebody's own that a run from elsewhere names; it is asked for once for each run.

        >>> from archipelago import run as experiment
        >>> made = experiment(method="ifca", clusters=2, rounds=1, storage=folder, name="adopting", **quick)
        >>> x, y = np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1])
        >>> int(adopt(made.path, [NewClient(x, y, x, y)])["cluster"].iloc[0]) in (0, 1)
        True
    """
    import pandas as pd

    if not new_clients:
        raise UserError("Expected at least one new client to adopt, got none.", code="no-clients")
    opened = Run(run)
    check_identity(opened.path)
    check_code(opened.path, trust)
    config = config_from_yaml((opened.path / "config.yaml").read_text(encoding="utf-8"))
    _check_rule(config, adoption, new_clients, finetune)
    found = latest(opened.path, deep=False)
    if found is None:
        raise UserError(
            f"Expected a run with a checkpoint, got {run} without one: let it come to its first, or resume it.",
            code="no-checkpoint", run=run,
        )  # fmt: skip
    dataset = load_dataset(config.data, partition_seed(config.partition, config.seed))
    federation = Federation.from_indices(dataset, read_arrays(opened.path / "partition.safetensors"))
    plan = make_plan(config, federation)
    ids = np.arange(config.clients, config.clients + len(new_clients))
    fleet = _fleet_of(new_clients, ids, plan.block, federation)
    server = dataclasses.replace(plan.server, adoption=adoption)
    method = _restored(config, server, fleet, len(ids), found[1]["server"])
    prediction = method.prediction(fleet)
    if finetune and not method.tunes:
        _refuse_tuning(config)
        prediction = tuned(fleet, prediction)
    columns, clusters = fleet.evaluate(prediction, "test"), method.labels(fleet)
    del columns["client"]  # an id of the fleet; here they are counted
    cluster = {} if clusters is None else {"cluster": clusters}
    return pd.DataFrame({"client": np.arange(len(ids)), **cluster, **columns})


def _fleet_of(
    new_clients: Sequence[NewClient], ids: npt.NDArray[np.int64], setup: BlockSetup, federation: Federation
) -> InProcessFleet:
    """The new clients, and nobody else, in this process; their ids follow those of the run's clients."""
    from actors.blocks import make_block
    from actors.fleet import InProcessFleet
    from actors.requests import ClientSamples

    clients, parts_x, parts_y, at = {}, [], [], 0
    for i, new in zip(ids.tolist(), new_clients, strict=True):
        position = {}
        for part in ("train", "test"):
            x, y = np.asarray(getattr(new, f"x_{part}")), getattr(new, f"y_{part}")
            y = np.zeros(len(x), federation.y.dtype) if y is None else np.asarray(y)
            _check(x, y, part, i - int(ids[0]), federation)
            position[part] = np.arange(at, at + len(x))
            parts_x.append(x)
            parts_y.append(y.astype(federation.y.dtype))
            at += len(x)
        clients[i] = ClientSamples(position["train"], position["train"][:0], position["test"])
    # `holdout` has positions among the run's samples, which are not here; the block computes on the CPU.
    setup = dataclasses.replace(setup, holdout=(), precision="32")
    block = make_block(setup, clients, np.concatenate(parts_x), np.concatenate(parts_y))
    sizes = np.zeros(ids[-1] + 1, np.int64)
    sizes[ids] = [len(new.x_train) for new in new_clients]
    fleet = InProcessFleet([block], sizes)
    fleet.set_population(ids)
    return fleet


def _check(x: npt.NDArray[Any], y: npt.NDArray[Any], part: str, number: int, federation: Federation) -> None:
    wanted = f"{part} samples of shape {federation.input_shape} and type {federation.x.dtype}"
    if x.shape[1:] != federation.input_shape or x.dtype != federation.x.dtype:
        raise UserError(
            f"Expected {wanted} for new client {number}, got {x.shape[1:]} and {x.dtype}: give them as the run's "
            "data set holds them.",
            code="wrong-shape", client=number,
        )  # fmt: skip
    if len(x) != len(y) or not len(x):
        raise UserError(
            f"Expected as many {part} targets as samples, and at least one, for new client {number}; got "
            f"{len(x)} samples and {len(y)} targets.",
            code="unequal-lengths", client=number,
        )  # fmt: skip
    _check_targets(y, part, number, federation.classes)
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise UserError(
            f"Expected finite {part} samples for new client {number}, got some that are NaN or infinite.",
            code="not-finite", what="samples", client=number,
        )  # fmt: skip


def _check_targets(y: npt.NDArray[Any], part: str, number: int, classes: int | None) -> None:
    """A label that the run's models have no output for, or a target that is no number, has no loss."""
    if y.ndim != 1 or y.dtype.kind not in ("iuf" if classes is None else "iu"):
        wanted = "one number" if classes is None else "one class number"
        raise UserError(
            f"Expected {wanted} for each of the {part} samples of new client {number}, got {y.dtype} of "
            f"shape {y.shape}.",
            code="wrong-labels", client=number,
        )  # fmt: skip
    if classes is None and not np.isfinite(y).all():
        raise UserError(
            f"Expected finite {part} targets for new client {number}, got some that are NaN or infinite.",
            code="not-finite", what="labels", client=number,
        )  # fmt: skip
    if classes is not None and (y.min() < 0 or y.max() >= classes):
        raise UserError(
            f"Expected {part} labels in 0..{classes - 1} for new client {number}, as the run's data set has them, got "
            f"labels in {y.min()}..{y.max()}: number them as the run does.",
            code="wrong-labels", client=number, low=y.min(), high=y.max(),
        )  # fmt: skip


def _restored(
    config: ExperimentSettings, setup: Any, fleet: InProcessFleet, new_clients: int, state: dict[str, Any]
) -> AnyMethod:
    """The method as the run left it, with rows for the new clients."""
    total = config.clients + new_clients
    context = dataclasses.replace(
        setup.context(), clients=total, new_clients=np.arange(config.clients, total)
    )
    method = assemble(setup.method, setup.ensemble, setup.combine, setup.options, context)
    fleet.begin(0)
    method.setup(fleet)
    method.load_state(state)
    fleet.begin(config.rounds, rate=context.rates(config.rounds))
    return method


def _check_rule(
    config: ExperimentSettings, adoption: str, new_clients: Sequence[NewClient], finetune: bool
) -> None:
    """Refuse a rule that the run's method has no use for, and clients without labels where the rule needs them."""
    check_adoption(config, adoption, finetune)
    if ADOPTION.find(adoption).needs_labels and any(new.y_train is None for new in new_clients):
        raise UserError(
            f"Expected labels of all new clients with adoption='{adoption}', got a client without (y_train=None): give "
            "them, or adopt by a rule that needs none, as adoption='entropy'.",
            code="needs-labels", setting="adoption", given=adoption,
        )  # fmt: skip


def _refuse_tuning(config: ExperimentSettings) -> None:
    if config.ensemble:
        raise UserError(
            "Expected one method with finetune=True, got an ensemble: fine-tune its members instead, and leave it "
            "out.",
            code="not-an-ensemble",
        )
    base = parts_of(config.method)[0]
    if why_not := why_not_tuned(base.value, new_clients=True):
        sentence = f"A fine-tuning cannot be added to '{base.name}': {why_not}"
        raise UserError(sentence, code="add-on", base=base.name)
