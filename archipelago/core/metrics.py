"""The metrics: what is measured of every client and of a clustering, each declared in one place.

    @METRICS.register("top2", "share of samples whose label is among the two likeliest", label="top-2 accuracy",
                      unit="%", better="higher", tasks=("classes",))
    def top2(evaluated: Evaluated) -> float:
        likeliest = evaluated.outputs.topk(2, dim=1).indices
        return float((likeliest == evaluated.targets[:, None]).any(dim=1).double().mean())

That is all: a plug-in's metric is computed for every client, summed up over clients (`micro_`, `macro_`, `worst10_`,
`std_`), stored, and shown with its label wherever it says; `sweep.metric=validation_micro_top2` tunes by it.
A run computes the platform's metrics and those of its own plug-ins, whatever else this process has imported.

No torch is imported here before a metric is computed: reports and sweeps read what is declared.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias

from archipelago.core.plugins import GROUP, is_ours
from archipelago.core.registry import Entry, Registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

OVER_CLIENTS = ("micro", "macro", "worst10", "std")  # how the values of clients become one number
TASKS = ("classes", "regression")
NEEDS = {
    "groups": "(n,) ground-truth groups",
    "distances": "(n, n) distances that the method compares clients by",
    "labels": "(n, classes) training samples of each class",
}
PLACES = {
    "table": "a column of tables, and bars",
    "curve": "a curve over rounds",
    "worst": "a curve of the worst tenth of clients",
    "progress": "the line of progress, and the short description of a run",
    "summary": "summary.md and the table at the end of a run",
    "monitor": "a gauge of Ray's metrics endpoint (archipelago_NAME)",
    "distributions": "of every cluster model on every ground-truth distribution",
    "parts": "of each part of a prediction alone, where a method names its parts (part_NAME_METRIC)",
    "levels": "against each level of ground-truth groups (METRIC_by_level)",
    "recovery": "rounds after a drift until it is back near where it was (recovery_time)",
}
_OWN = re.compile(r"[A-Za-z_][\w.]*")
# Columns of the table of clients that mean something else, and beginnings that columns of metrics.csv have.
_TAKEN = {
    "client",
    "round",
    "samples",
    "train_samples",
    "group",
    "cluster",
    "held_out",
    "attacker",
    "epsilon",
}
_BEGINNINGS = (
    *(f"{over}_" for over in OVER_CLIENTS),
    "train_",
    "validation_",
    "holdout_",
    "honest_",
    "personal_",
    "cost_",
    "centre_",
    "best_",
    "part_",
)
_BUILT_IN = {"macro_f1"}  # its name is older than the rule

Function: TypeAlias = Callable[..., float]
Counts: TypeAlias = "npt.NDArray[np.float64]"


@dataclass(frozen=True)
class Spec:
    """What a metric declares: all that tables, curves and sweeps must know of it."""

    name: str
    label: str
    short: str = ""  # label where space is short
    unit: str = ""  # % shows a share times 100
    better: str = "higher"  # or lower
    digits: int = 4
    tasks: tuple[str, ...] = TASKS
    shown: tuple[str, ...] = ("table", "curve", "progress", "summary")
    over: str = "clients"  # or clusters: of one assignment
    needs: str = "groups"  # over clusters: what the assignment is held against, one of `NEEDS`

    def __post_init__(self) -> None:
        """A mistake in a declaration is the declaring module's: it names both values."""
        if not _OWN.fullmatch(self.name) or self.name in _TAKEN:
            raise ValueError(
                f"metric {self.name!r}: expected an identifier that is no other column, as in 'top2'"
            )
        if "recovery" in self.shown and self.better != "higher":
            raise ValueError(f"metric {self.name!r}: expected better='higher' of one shown as recovery")
        if self.name.startswith(_BEGINNINGS) and self.name not in _BUILT_IN:
            raise ValueError(
                f"metric {self.name!r}: expected a name without the beginning of a column ({_BEGINNINGS})"
            )
        for what, given, known in (
            ("better", [self.better], ("higher", "lower")),
            ("tasks", self.tasks, TASKS),
            ("shown", self.shown, tuple(PLACES)),
            ("over", [self.over], ("clients", "clusters")),
            ("needs", [self.needs], tuple(NEEDS)),
        ):
            if wrong := [each for each in given if each not in known]:
                raise ValueError(
                    f"metric {self.name!r}: expected {what} among {', '.join(known)}, got {wrong[0]!r}"
                )

    @property
    def scale(self) -> float:
        """What a stored value is multiplied by where it is shown."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def title(self) -> str:
        """Its label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Spec:
        """The spec that `asdict` made and JSON kept; what a later version added is left out."""
        known = {each.name for each in fields(cls)}
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()
        }
        values["shown"] = tuple(place for place in values.get("shown", ()) if place in PLACES)
        return cls(**{key: value for key, value in values.items() if key in known})

    def stored(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }


class MetricRegistry(Registry[Function]):
    """The registry of metrics, which knows what one may declare."""

    def register(  # type: ignore[override]  # of a metric, capabilities are known
        self,
        name: str,
        about: str = "",
        *,
        label: str = "",
        short: str = "",
        unit: str = "",
        better: str = "higher",
        digits: int | None = None,
        tasks: Sequence[str] = TASKS,
        shown: Sequence[str] = ("table", "curve", "progress", "summary"),
        over: str = "clients",
        needs: str = "groups",
        guess: Callable[[Counts, Counts, Counts], Counts] | None = None,
    ) -> Callable[[Function], Function]:
        """Decorator: a function of `Evaluated` (over clusters: of what it needs and an assignment) as a metric.

        `guess` gives its value for clients whose every sample is predicted as one class: of how many samples have
        that class, of how many there are, and of how many classes occur. A report says how far a run is above that.
        """
        label = label or name.rpartition(".")[2]
        if digits is None:
            digits = 2 if unit == "%" else 4
        spec = Spec(
            name, label, short or label, unit, better, digits, tuple(tasks), tuple(shown), over, needs
        )
        more: dict[str, Any] = {} if guess is None else {"guess": guess}
        return super().register(name, about, label=label, spec=spec, **more)

    def _import(self, path: str) -> None:
        import archipelago.core.torchvision_operators  # noqa: F401  (before the first import of torchmetrics)

        super()._import(path)

    def adopt(self, path: str, about: str, found: Any) -> None:
        """A class of torchmetrics is a metric of its own name; a function one of its path."""
        if not isinstance(found, type):
            super().adopt(path, about, found)
            return
        from archipelago.core.torch_metrics import TorchMetric

        metric = TorchMetric(path, found)
        self.register(metric.name, about, label=metric.name, better=metric.better)(metric)
        self.paths[path] = metric.name


METRICS = MetricRegistry("metric")


def chosen(plugins: Iterable[str] = (), also: Iterable[str] = ()) -> list[Entry[Function]]:
    """The metrics of a run: the platform's, those of its plug-ins, of installed packages, and those it names (`also`).

    Not simply all that are registered: what another run of this process imported must not add columns to this one.
    """
    roots = {name.partition(".")[0] for name in plugins} | _installed()
    named = [METRICS.entry(name) for name in also]
    found = [
        entry
        for entry in METRICS.values()
        if (is_ours(root := _root(entry.value)) or root in roots) and entry not in named
    ]
    return found + named


def specs(
    plugins: Iterable[str] = (), task: str | None = None, over: str | None = None, also: Iterable[str] = ()
) -> list[Spec]:
    """What the metrics of a run declare, of one task or one kind if these are given."""
    found = (spec_of(entry) for entry in chosen(plugins, also))
    return [spec for spec in found if task in (None, *spec.tasks) and over in (None, spec.over)]


def spec_of(entry: Entry[Function]) -> Spec:
    """What an entry declares."""
    spec: Spec = entry.capabilities["spec"]
    return spec


def task_of(classes: int | None) -> str:
    """The task of a federation: without classes it is a regression."""
    return "regression" if classes is None else "classes"


def client_columns(classes: int | None, plugins: Iterable[str] = (), also: Iterable[str] = ()) -> list[str]:
    """The columns of a round that sum up its clients, as `sweep.metric` may name them after `validation_`.

    >>> client_columns(None)[:3]
    ['micro_loss', 'micro_mse', 'macro_loss']
    """
    names = [spec.name for spec in specs(plugins, task_of(classes), "clients", also)]
    return [f"{over}_{name}" for over in OVER_CLIENTS for name in names]


def _root(function: Function) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


@functools.cache
def _installed() -> frozenset[str]:
    return frozenset(offered.module.partition(".")[0] for offered in entry_points(group=GROUP))


# What there is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What a client's models said on its samples; there is at least one sample.

    `outputs` are logits (samples, classes), or predictions of the shape of `targets` up to dimensions of size one in
    a regression (`classes` is None). `losses` are per sample.
    """

    outputs: Tensor
    targets: Tensor
    losses: Tensor
    classes: int | None
    arguments: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # of metrics by import path, by name

    @cached_property
    def predicted(self) -> Tensor:
        """The class of the highest output."""
        return self.outputs.argmax(dim=1)

    @cached_property
    def confusion(self) -> npt.NDArray[np.int64]:
        """(classes, classes) samples by true and predicted class."""
        import archipelago.core.torchvision_operators  # noqa: F401  (before the first import of torchmetrics)

        # isort: split
        from torchmetrics.functional.classification import multiclass_confusion_matrix

        assert self.classes is not None, "a regression has no classes"
        # Counting in torchmetrics and dividing in float64: exact, and half the time of its own F1 score.
        counts = multiclass_confusion_matrix(
            self.predicted, self.targets, max(self.classes, 2), validate_args=False
        )
        return counts.cpu().numpy()


@METRICS.register(
    "loss", "mean loss of the samples", label="loss", better="lower", shown=("curve", "summary")
)
def loss(evaluated: Evaluated) -> float:
    return float(evaluated.losses.double().mean())


@METRICS.register(
    "accuracy", "share of samples whose class is predicted", label="accuracy", unit="%", tasks=("classes",),
    shown=("table", "curve", "worst", "progress", "summary", "monitor", "distributions", "parts", "recovery"),
    guess=lambda hits, samples, present: hits / samples,
)  # fmt: skip
def accuracy(evaluated: Evaluated) -> float:
    return int(evaluated.confusion.diagonal().sum()) / len(evaluated.targets)


@METRICS.register(
    "macro_f1", "F1 score, mean over the classes that occur", label="macro-F1", unit="%", tasks=("classes",),
    shown=("table", "curve", "progress", "summary", "monitor"),
    # The F1 of the guessed class, 0 of every other one that occurs; a guess that never holds counts as a class too.
    guess=lambda hits, samples, present: 2 * hits / (samples + hits) / (present + (hits == 0)),
)  # fmt: skip
def macro_f1(evaluated: Evaluated) -> float:
    """scikit-learn's `f1_score(average="macro", zero_division=0)`: over the labels that are true or predicted."""
    confusion = evaluated.confusion
    occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)
    present = occurrences > 0
    f1 = 2.0 * confusion.diagonal()[present] / occurrences[present]
    return math.fsum(f1) / len(f1)


@METRICS.register(
    "mse", "mean squared error", label="mean squared error", short="mse", better="lower", tasks=("regression",),
    shown=("table", "curve", "progress", "summary", "distributions"),
)  # fmt: skip
def mse(evaluated: Evaluated) -> float:
    error = evaluated.outputs.reshape(-1).double() - evaluated.targets.reshape(-1).double()
    return float(error.square().mean())


@METRICS.register(
    "ari", "adjusted Rand index of clusters and ground-truth groups", label="ARI", digits=3, over="clusters",
    shown=("table", "curve", "progress", "summary", "levels", "recovery"),
)  # fmt: skip
def ari(groups: npt.NDArray[Any], assignment: npt.NDArray[Any]) -> float:
    from sklearn.metrics import adjusted_rand_score

    with warnings.catch_warnings():
        # scikit-learn finds many groups of few clients suspicious; here they are ordinary.
        warnings.simplefilter("ignore", UserWarning)
        return float(adjusted_rand_score(groups, assignment))


@METRICS.register(
    "nmi", "normalised mutual information of clusters and ground-truth groups", label="NMI", digits=3,
    over="clusters", shown=("summary",),
)  # fmt: skip
def nmi(groups: npt.NDArray[Any], assignment: npt.NDArray[Any]) -> float:
    from sklearn.metrics import normalized_mutual_info_score

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return float(normalized_mutual_info_score(groups, assignment))


@METRICS.register(
    "silhouette", "how much closer clients are to their own cluster than to the next, by what clusters were made of",
    label="silhouette", digits=3, over="clusters", needs="distances", shown=("table", "summary"),
)  # fmt: skip
def silhouette(away: npt.NDArray[Any], assignment: npt.NDArray[Any]) -> float:
    """Rousseeuw 1987, on distances; NaN where there is one cluster, or one for each client."""
    from sklearn.metrics import silhouette_score

    if not 1 < len(set(assignment.tolist())) < len(assignment):
        return math.nan
    return float(silhouette_score(away, assignment, metric="precomputed"))


@METRICS.register(
    "was", "Wasserstein-adjusted silhouette: clients compared by how uneven their classes are", label="WAS", digits=3,
    tasks=("classes",), over="clusters", needs="labels", shown=("table", "summary"),
)  # fmt: skip
def was(counts: npt.NDArray[Any], assignment: npt.NDArray[Any]) -> float:
    """The silhouette by the 2-Wasserstein distance of clients' class frequencies (Licciardi et al., FedGWC, ICML 2025).

    The frequencies of a client are C equally likely numbers: two such sets are as far apart as their sorted values, so
    that which classes a client has does not matter, only how uneven they are.

    >>> import numpy as np
    >>> round(was(np.array([[9, 1], [1, 9], [5, 5], [5, 5]]), np.array([0, 0, 1, 1])), 3)
    1.0
    """
    import numpy as np

    shares = np.sort(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), axis=1)
    away = np.sqrt(((shares[:, None, :] - shares[None, :, :]) ** 2).mean(axis=2))
    return silhouette(away, assignment)
