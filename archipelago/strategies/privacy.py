"""What client-level privacy a run has had so far: epsilon, from the sums that the server really took.

Every client's upload carries noise N(0, (z S)^2 / m) beside an update of length S at most (`update_privacy.py`). What a
sum of k of them, with weights w, hides is a Gaussian mechanism of noise multiplier z sqrt(c / m), where
c = sum w^2 / max w^2 counts the clients behind it: c = k for equal weights. So a small cluster has less privacy than a
large one, and an upload that the server looks at on its own (clustering by parameters, medians) has c = 1; then who
took part is seen, too, and selection hides nobody. A client whose upload enters several sums counts like that. Rounds
compose by Renyi differential privacy (Mironov, "Renyi Differential Privacy", 2017; Mironov, Talwar, Zhang 2019 for the
sampled Gaussian), computed by the accountant of Opacus.

Readings. Neighbouring federations differ in one client's whole data (add or remove one). Participants are drawn in a
fixed number without replacement; the accountant treats each client as drawn with the probability of its own that
`participation.fraction` is (Poisson sampling), as is usual. Covered is what clients send as models, updates and
gradients; not covered are the choice of a cluster by loss, results of client functions, and metrics of evaluations.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

from archipelago.core.errors import UserError
from archipelago.core.settings import UpdateSettings
from archipelago.strategies.updates import TRANSFORMS


class PrivacyBudget:
    """The Gaussian mechanisms of all rounds so far, and their epsilon."""

    def __init__(self, noise: float, delta: float, participants: int, sampling: float) -> None:
        self.noise, self.delta, self.participants, self.sampling = noise, delta, participants, sampling
        self.mechanisms: Counter[tuple[float, float]] = (
            Counter()
        )  # (noise multiplier, sampling rate) -> how often

    @classmethod
    def of(cls, settings: UpdateSettings, participants: int, sampling: float) -> PrivacyBudget | None:
        """The budget of an experiment; None without noise."""
        for name in settings.transforms:
            entry = TRANSFORMS.entry(name)
            if entry.capabilities.get("private"):
                options = entry.options_from(settings)
                return cls(options.noise, options.delta, participants, sampling)
        return None

    def spend(self, behind: Iterable[float]) -> None:
        """A round's uploads, each with the least number of clients behind a sum that it entered."""
        for clients in behind:
            multiplier = self.noise * (clients / self.participants) ** 0.5
            self.mechanisms[multiplier, self.sampling if clients > 1 else 1.0] += 1

    def epsilon(self) -> float:
        """The epsilon of everything so far, at the chosen delta."""
        if not self.mechanisms:
            return 0.0
        accountant = _accountant()
        accountant.history = [
            (noise, rate, times) for (noise, rate), times in sorted(self.mechanisms.items())
        ]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that another order of Renyi's divergence might give a little less
            return float(accountant.get_epsilon(delta=self.delta))

    def save_state(self) -> list[list[float]]:
        """What a checkpoint must hold."""
        return [[noise, rate, float(times)] for (noise, rate), times in sorted(self.mechanisms.items())]

    def load_state(self, saved: list[list[float]]) -> None:
        """The inverse of `save_state`."""
        self.mechanisms = Counter({(noise, rate): int(times) for noise, rate, times in saved})


def _accountant() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it imports besides accountants
            from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise UserError(
            "Expected Opacus to count epsilon for update=[...,gaussian], got an environment without it: "
            'pip install "archipelago-fl[privacy]".',
            code="needs-package", package="opacus",
        ) from error  # fmt: skip
    return RDPAccountant()
