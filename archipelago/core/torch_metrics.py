"""Metrics of torchmetrics, by import path: `evaluation.metrics=[torchmetrics.classification.MulticlassAUROC]`.

Each client's value is what the class says of that client's samples alone, given probabilities and labels (predictions
and targets of a regression), and is summed up over clients as every metric is. `num_classes` is filled in; all other
arguments are `evaluation.metric_options.CLASS.NAME=VALUE`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from archipelago.core.errors import UserError

if TYPE_CHECKING:
    from archipelago.core.metrics import Evaluated


class TorchMetric:
    """A class of torchmetrics as a function of what a client's models said."""

    def __init__(self, path: str, kind: type) -> None:
        import torchmetrics

        if not issubclass(kind, torchmetrics.Metric):
            raise UserError(
                f"Expected metric '{path}' to be a class of torchmetrics or a function, got {kind!r}: name another.",
                code="wrong-kind", kind="metric", name=path,
            )  # fmt: skip
        self.path, self.kind, self.origin = path, kind, kind
        self.name, self.__doc__ = kind.__name__, kind.__doc__
        self.__module__, self.__qualname__ = kind.__module__, kind.__qualname__
        self.better = "lower" if getattr(kind, "higher_is_better", None) is False else "higher"
        self._made: dict[str, Any] = {}

    def __call__(self, evaluated: Evaluated) -> float:
        """The metric of one client."""
        metric = self._metric(evaluated.classes, evaluated.arguments.get(self.name, {}))
        targets, said = evaluated.targets.cpu(), evaluated.outputs.cpu()
        said = said.reshape(targets.shape) if evaluated.classes is None else said.softmax(dim=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a client without samples of some class is ordinary here
            metric.reset()
            metric.update(said, targets)
            return float(metric.compute())

    def _metric(self, classes: int | None, given: Mapping[str, Any]) -> Any:
        key = repr((classes, sorted(given.items())))
        if key not in self._made:
            takes = inspect.signature(self.kind).parameters
            known = {"num_classes": classes} if classes is not None and "num_classes" in takes else {}
            self._made[key] = self.kind(**{**known, **given})
        return self._made[key]

    def check(self, classes: int | None, given: Mapping[str, Any]) -> None:
        """Refuse, with a sentence, a metric that does not give one number for such predictions."""
        import torch

        from archipelago.core.metrics import Evaluated

        outputs = torch.linspace(-1, 1, 4 * (classes or 1)).reshape(4, -1)
        targets = torch.arange(4) % classes if classes is not None else torch.linspace(0, 1, 4)
        try:
            self(Evaluated(outputs, targets, torch.ones(4), classes, {self.name: given}))
        except Exception as error:  # whatever torchmetrics says of its arguments or of the predictions
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            kind = "a regression" if classes is None else f"{classes} classes"
            raise UserError(
                f"Expected evaluation.metrics=[{self.path}] to give one number for {kind}, got: {cause}; give its "
                f"arguments as evaluation.metric_options.{self.name}.NAME=VALUE.",
                code="wrong-result", name=self.name,
            ) from error  # fmt: skip
