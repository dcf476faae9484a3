"""CON: contrastive learning between clusters, on parameters or on representations.

Ma, "Clustered Federated Learning", PhD thesis, University of Technology Sydney, chapters 4 and 6.

    min l(theta_i) + mu T,   T = -log( exp(sim(i, c(i)) / tau) / sum_k exp(sim(i, k) / tau) )   (4.2a)

    con.form=para (4.3)   sim = cosine of head parameters of theta_i and Theta_k
    con.form=rep  (4.4)   sim = cosine of the outputs of theta_i and Theta_k on a sample, mean over the batch

Readings

T
    paper   the bare ratio, without -log
    code    -log of it
    here    as the code: minimising the ratio would push a client away from its own cluster
Gradient of con.form=para
    code    none: the term is built from detached numbers
    here    it is differentiated; cluster models are constants
Head of con.form=para
    paper   the head, (6.1a)
    code    every layer whose name has "fc"
    here    every fully-connected layer
Representation of con.form=rep
    paper   h(theta_i, D_i)
    code    the logits of the batch
    here    as the code
Beside cks
    paper   chapter 6: contrast on the head, sharing on the backbone
    here    as the paper, with con.form=para
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from archipelago.core.errors import UserError
from archipelago.core.settings import setting
from archipelago.strategies.addon import ADDONS, Addon
from archipelago.strategies.base import ClusteredModels, Context, Strategy, bases_of
from archipelago.strategies.interface import FleetView
from archipelago.strategies.penalties import Penalty, part
from archipelago.strategies.references import Indices, Models, PerClient, Reference


@dataclass
class CONOptions:
    """`con.mu=...`"""

    form: str = setting("para", "contrast on head parameters or on representations", choices=("para", "rep"))
    mu: float = setting(0.5, "coefficient of the contrastive term", at_least=0)
    tau: float = setting(1.0, "temperature", above=0)


@ADDONS.register(
    "con", "contrast between clusters, on parameters or representations (thesis ch. 4)", label="CON"
)
class CON(Addon[ClusteredModels]):
    """mu T in the local objective."""

    Options = CONOptions

    @classmethod
    def refuse(cls, base: type[Strategy], addons: Sequence[str], clusters: int) -> str | None:
        if not issubclass(base, ClusteredModels):
            return f"it contrasts cluster models, which this base does not have; use {bases_of(ClusteredModels)}."
        if clusters < 2:
            return f"a contrast needs at least two clusters, got clusters={clusters}; set clusters=2 or more."
        return None

    @classmethod
    def check(cls, options: CONOptions, context: Context) -> None:
        if options.form == "rep" and context.outputs == 1:
            raise UserError(
                "Expected data with several classes for con.form=rep, got a model with one output: the cosine of two "
                "numbers is 1 or -1 and teaches nothing; use con.form=para.",
                code="needs-classes", setting="con.form",
            )  # fmt: skip

    @property
    def claims(self) -> str | None:
        """(4.3) contrasts heads: chapter 6 leaves the backbone to whoever shares."""
        return "head" if self.options.mu and self.options.form == "para" else None

    def penalties(self, base: ClusteredModels, fleet: FleetView, c: Indices | None) -> list[Penalty]:
        if not self.options.mu or c is None:
            return []
        own = PerClient(np.asarray(c))
        if self.options.form == "rep":
            return [ContrastOfOutputs(self.options.mu, self.options.tau, base.clusters, own)]
        head = fleet.spec.columns("head")
        return [ContrastOfParameters(self.options.mu, self.options.tau, head, base.clusters, own)]


SHORTEST = 1e-8  # what cosine_similarity takes for the length of a vector of zeros


@dataclass(frozen=True)
class ContrastOfParameters:
    """(4.3): the own cluster's head against all clusters' heads."""

    mu: float
    tau: float
    columns: npt.NDArray[np.int64]
    models: Models
    own: PerClient

    @property
    def anchors(self) -> dict[str, Reference]:
        return {"models": self.models, "own": self.own}

    @property
    def outputs(self) -> dict[str, Reference]:
        return {}

    def value(self, parameters: Tensor, anchors: dict[str, Tensor]) -> Tensor:
        head, heads = part(parameters, self.columns), part(anchors["models"], self.columns)
        # cosine_similarity copies K heads at every step, which took longer than the step itself.
        lengths = heads.norm(dim=-1).clamp_min(SHORTEST) * head.norm().clamp_min(SHORTEST)
        return self.mu * contrast(heads @ head / lengths / self.tau, anchors["own"])


@dataclass(frozen=True)
class ContrastOfOutputs:
    """(4.4): outputs on the batch, the own cluster's against all clusters', mean over the samples."""

    per_sample: ClassVar[bool] = True
    mu: float
    tau: float
    models: Models
    own: PerClient

    @property
    def anchors(self) -> dict[str, Reference]:
        return {"own": self.own}

    @property
    def outputs(self) -> dict[str, Reference]:
        return {"models": self.models}

    def value(self, parameters: Tensor, anchors: dict[str, Tensor]) -> Tensor:
        own = anchors["own_outputs"].unsqueeze(1)  # (samples, 1, outputs) against (samples, K, outputs)
        similarity = torch.nn.functional.cosine_similarity(own, anchors["models"], dim=-1)
        return self.mu * contrast(similarity / self.tau, anchors["own"])


def contrast(scores: Tensor, own: Tensor) -> Tensor:
    """-log softmax of the own cluster's score; the last dimension runs over clusters, others are averaged."""
    # A comparison instead of one_hot, which torch.vmap cannot batch.
    chosen = (torch.arange(scores.shape[-1], device=scores.device) == own.long()).to(scores.dtype)
    return -(torch.log_softmax(scores, dim=-1) * chosen).sum(dim=-1).mean()
