"""What a strategy may ask of the clients: the fleet, seen from an algorithm.

The fleets themselves (in one process, or on Ray actors) are in `actors/`; a strategy knows only this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from archipelago.strategies.parameters import Matrix, ModelSpec, Vector, Weights
from archipelago.strategies.penalties import Penalty
from archipelago.strategies.references import Indices, Models, Prediction, Reference, SampleWeights
from archipelago.strategies.rules import Rule


class Handle(Protocol):
    """Models that clients made and that stayed where they were made, one for each of `ids`."""

    @property
    def ids(self) -> Indices:
        """The clients, ascending."""

    @property
    def slot(self) -> str:
        """The training that made them: its name in the method, the same in every round."""

    @property
    def arrived(self) -> npt.NDArray[np.bool_]:
        """Which of `ids` delivered a finite model; the others weigh nothing."""

    @property
    def objective(self) -> npt.NDArray[np.float64]:
        """Each client's mean local objective over its steps."""

    @property
    def steps(self) -> npt.NDArray[np.float64]:
        """Local steps that each client took."""

    def combine(self, weights: npt.ArrayLike, otherwise: Models | None = None) -> Models:
        """The (K, n) weighted sums, rows normalised; a row that weighs nothing keeps `otherwise`."""

    def average(
        self,
        by: Indices | None = None,
        weights: npt.ArrayLike = 1.0,
        clusters: int | None = None,
        otherwise: Models | Vector | None = None,
    ) -> Any:
        """The weighted mean of all (a vector), or of each cluster `by` (a `Models`)."""

    def features(self, part: str) -> Matrix:
        """The (n, d) columns of a part of each model ("head", "classifier", ...)."""

    def gather(self, columns: npt.ArrayLike | None = None) -> Matrix:
        """All models' columns in id order: for methods that cannot work with sums."""

    def chunks(self, memory: float = 256e6) -> Iterator[tuple[Indices, Matrix]]:
        """(columns, (n, columns) array) pieces of all models, none larger than `memory` bytes."""

    def distances(self, to: Reference) -> npt.NDArray[np.float64]:
        """Euclidean distance of each client's model to its reference."""


class ClientView(Protocol):
    """A client as its own code sees it: what functions given to `FleetView.map` and `describe` get first.

    It lives where the client does. Forward passes that it makes are counted as what the round costs.
    """

    @property
    def id(self) -> int:
        """The client's id."""

    @property
    def size(self) -> int:
        """n_i: training samples."""

    @property
    def classes(self) -> int | None:
        """Classes of the data set; None in a regression."""

    def samples(self) -> npt.NDArray[np.float32]:
        """(n, ...) training inputs, normalised, as a network sees them."""

    def labels(self) -> npt.NDArray[Any]:
        """(n,) their targets."""

    def label_counts(self) -> npt.NDArray[np.int64]:
        """(classes,) training samples of each class."""

    def outputs(self, model: Vector) -> npt.NDArray[np.float32]:
        """(n, outputs) of a model, in evaluation mode."""

    def features(self, model: Vector, layer: str = "") -> npt.NDArray[np.float32]:
        """(n, d): what enters the classifier of a model, or what the layer of that name puts out, flattened."""

    def sample_losses(self, models: Matrix) -> npt.NDArray[np.float32]:
        """(n, K) training losses under each of K models."""

    def generator(self, purpose: str) -> np.random.Generator:
        """Random draws of this client's own, the same on every layout."""

    def unlabelled(self, split: str = "train") -> ClientView:
        """The same client without labels, by its training or its test inputs: for clients that have no labels."""


class FleetView(Protocol):
    """The clients of a round, or any other selection of clients."""

    @property
    def ids(self) -> Indices:
        """The clients of this view, ascending client ids."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Their numbers of training samples."""

    @property
    def everyone(self) -> FleetView:
        """The view of all clients of the federation that may train."""

    @property
    def spec(self) -> ModelSpec:
        """The layout of a model value."""

    def select(self, ids: npt.ArrayLike) -> FleetView:
        """The view of some clients."""

    def named(self, prefix: str) -> FleetView:
        """The same clients for another method, which shares no slot, private model or draw with this one."""

    def initial(self, count: int, purpose: str = "initial model") -> Models:
        """`count` independently initialised models."""

    def train(
        self,
        start: Reference,
        *,
        on_top_of: Reference | Sequence[Reference] | None = None,
        penalties: Sequence[Penalty] = (),
        sample_weights: SampleWeights | None = None,
        scale: npt.NDArray[np.float64] | None = None,
        slot: str = "main",
        keep: str | None = None,
        fresh: bool = False,
        continues: str | None = None,
        held: int = 0,
        compared: bool = True,
        restart: bool = False,
        only: Sequence[str] | None = None,
        steps: int | None = None,
        rule: Rule | None = None,
        sends: bool = False,
    ) -> Handle:
        """Local training of every client of this view.

        `keep` stores the result as a private model; `fresh` uses a new optimizer, or one that starts as that of the
        slot `continues`, and forgets it; with `sends` the server sees what comes of it as of any other training. The
        first `held` of `on_top_of` are with the clients from earlier rounds: what the round costs does not count them
        as sent. `restart`: the optimizer starts anew in every round, whatever `local.keep_optimizer` says. `only` names
        the tensors that are trained, the others stay as they are; `steps` is how many steps there are, where they are
        not those of the settings; `rule` says how a step follows from gradients, where it is not along the gradient at
        the model (`rules.py`). Records of client models show the round's first training; one with `compared=False` only
        where it is alone.

        The objective is mean(weight * loss(scale * (own + underlying outputs))) plus the penalties.
        """

    def derive(self, reference: Reference, *, slot: str, keep: str | None = None) -> Handle:
        """What a reference means for each client (a `Sum`, mostly), as a result that can be averaged.

        It is made where the client is. `keep` stores it as a private model, which then never leaves the client.
        """

    def forget(self, name: str) -> None:
        """Drop a private model that nobody needs any more, with the commit of this round."""

    def losses(
        self, models: Models, *, on_top_of: Reference | Sequence[Reference] | None = None
    ) -> npt.NDArray[np.float64]:
        """(n, K): each client's mean training loss under each model, on the same data for all K."""

    def best(
        self,
        models: Models,
        *,
        on_top_of: Reference | Sequence[Reference] | None = None,
        first: Indices | None = None,
    ) -> tuple[Indices, npt.NDArray[np.float64]]:
        """(n,) and (n,): the model of least mean training loss for each client, ties to the lowest, and that loss.

        The same bits as from `losses`, usually for a part of its forward passes. `first` says which model probably
        is the best one, as a client's last cluster (-1: no idea). The loss is NaN where none is finite.
        """

    def gradients(self, at: Reference, *, on_top_of: Reference | Sequence[Reference] | None = None) -> Handle:
        """Full-batch gradients of each client's mean training loss with respect to `at`."""

    def evaluate(self, prediction: Prediction, split: str = "test") -> dict[str, npt.NDArray[Any]]:
        """Per-client metrics, one column each."""

    def map(self, function: Callable[..., Any], *, stage: str, **inputs: Reference | Any) -> list[Any]:
        """Run a pure client function `(client, state, **inputs) -> (state, result)` on every client.

        `client` is a `ClientView`. The state it returns is the client's new state: what is not in it is forgotten.
        """

    def describe(self, function: Callable[..., Any], *, stage: str, **inputs: Reference | Any) -> list[Any]:
        """What a pure function `(client, **inputs)` of each client's view returns, in the order of `ids`.

        What it returns is sent to the server, and its numbers are counted as that part of a model.
        """


__all__ = ["ClientView", "FleetView", "Handle", "Weights"]
