"""Facts against expectations: what every check finds of a run, and the verdict on a method in a situation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from archipelago.strategies.expectations import Expectations, Known
from benchmarks.behaviour.parts import ODD_CLIENT
from benchmarks.behaviour.situations import GROUPS, clusters_of

Facts = Mapping[str, Any]
LAST = 3  # evaluations whose mean is the final accuracy
SMALL = 16  # training samples below which nobody can tell a client's group
DEAD = 1e-3  # a model of a sum whose absence changes no client's test loss by more than this
UNTRAINED = 1e-4  # ... or whose own test loss is what it was at first, at every client
AGE = 5  # rounds after which a new model of a sum must have learned
CHURN = 0.15  # share of the participants that change their cluster in a round, late in the run
FALLEN = 0.03  # accuracy below the best that a run had
STANDING = 0.005  # gain of accuracy over the last third of a run below which it stands still
OBJECTIVE = 0.2  # training loss below which a run has fitted its data
BASELINE_MARGIN = 1.5  # where FedAvg itself falls back, how many times as far others may
GREEN, AMBER, RED, NONE = "green", "amber", "red", "none"


@dataclass(frozen=True)
class Finding:
    """What a check found in one run: its number, whether that is as expected, and words if it is not."""

    check: str
    ok: bool
    value: float
    text: str = ""
    known: Known | None = None  # the reason, if it is declared and goes no further than that


@dataclass(frozen=True)
class Run:
    """One run beside FedAvg's of the same situation and seed."""

    situation: str
    facts: Facts
    baseline: Facts
    expects: Expectations

    def final(self, facts: Facts | None = None) -> float:
        """Mean accuracy of the last evaluations."""
        return float(np.mean((facts or self.facts)["accuracy"][-LAST:]))

    @property
    def margin(self) -> float:
        """Accuracy over FedAvg's."""
        return self.final() - self.final(self.baseline)

    def found(self) -> Iterator[Finding]:
        """What the checks find."""
        for check in CHECKS:
            yield from check(self)

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Clients in a cluster whose group can be told: enough samples, and not of one class only."""
        told = np.array(self.facts["sizes"]) >= SMALL
        if self.situation == "one_class":
            told[ODD_CLIENT] = False
        return told & (np.array(self.facts["assignment"]) >= 0)


def accuracy(run: Run) -> Iterator[Finding]:
    """Not too far below FedAvg."""
    short = -run.margin
    text = f"{100 * short:.1f} points below FedAvg ({run.final():.3f})"
    yield Finding("accuracy", short <= run.expects.below_fedavg, short, text)


def splits(run: Run) -> Iterator[Finding]:
    """One cluster where clients are alike, of methods that say how many there are."""
    assignment = run.facts["assignment"]
    if run.facts["groups"] is None and not run.expects.splits_iid and assignment is not None:
        used = len({c for c in assignment if c >= 0})
        yield Finding("splits", used <= 1, used, f"splits clients that are alike into {used} clusters")


def groups(run: Run) -> Iterator[Finding]:
    """The ground-truth groups, of methods that look for some."""
    from sklearn.metrics import adjusted_rand_score, homogeneity_score

    truth, wanted = run.facts["groups"], run.expects.ari or 0.0
    if truth is None or not wanted or clusters_of(run.situation) == 1:
        return
    if run.facts["assignment"] is None:
        yield Finding("groups", False, 0.0, "has no clusters yet")
        return
    seen = run.seen
    told, found = np.array(truth)[seen], np.array(run.facts["assignment"])[seen]
    more = clusters_of(run.situation) > GROUPS and run.expects.splits_iid
    name, score = ("homogeneity", homogeneity_score) if more else ("ARI", adjusted_rand_score)
    value = float(score(told, found)) if len(told) else 0.0
    yield Finding("groups", value >= wanted, value, f"{name} {value:.2f}, expected {wanted:.2f}")


def parts(run: Run) -> Iterator[Finding]:
    """No model of a sum is dead."""
    for number, part in enumerate(run.facts["parts"], start=1):
        changed, moved = part["changed"], part["moved"]  # None: not finite, so not nothing
        idle = changed is not None and changed < DEAD
        untrained = part["age"] >= AGE and moved is not None and moved < UNTRAINED
        why = "makes no difference" if idle else "was never trained"
        value = 1.0 if untrained else 0.0 if changed is None else changed
        yield Finding("parts", not (idle or untrained), value, f"model {number} of the sum {why}")


def oscillation(run: Run) -> Iterator[Finding]:
    """Neither accuracy nor clusters go back and forth."""
    drop, allowed = _drop(run.facts), BASELINE_MARGIN * _drop(run.baseline)
    text = f"accuracy falls by {100 * drop:.1f} points late in the run"
    yield Finding("oscillation", drop <= max(run.expects.falls_back, allowed), drop, text)
    alike = clusters_of(run.situation) == GROUPS and run.facts["groups"] is not None
    if alike and run.expects.ari and run.facts["assignment"] is not None:
        late = slice(-max(len(run.facts["changed"]) // 4, 1), None)
        moved = [each or 0 for each in run.facts["changed"][late]]
        churn = float(np.sum(moved) / np.sum(run.facts["participants"][late]))
        yield Finding(
            "oscillation", churn <= CHURN, churn, f"{churn:.0%} of the clients change cluster every round"
        )


def progress(run: Run) -> Iterator[Finding]:
    """Still improving, or converged."""
    lost, theirs = sum(run.facts["dropped"]), sum(run.baseline["dropped"])
    asked = max(sum(run.facts["participants"]), 1)
    yield Finding("progress", lost <= theirs, lost / asked, f"{lost} of {asked} results were not finite")
    fallen, allowed = _fallen(run.facts), max(FALLEN, BASELINE_MARGIN * _fallen(run.baseline))
    text = f"ends {100 * fallen:.1f} points below its best"
    yield Finding("progress", fallen <= allowed, fallen, text)
    curve = run.facts["accuracy"]
    before = float(np.mean(curve[: -(len(curve) // 3)][-LAST:]))
    gain, objective = run.final() - before, run.facts["federated_objective"][-1]
    fitted = max(OBJECTIVE, 2 * (run.baseline["federated_objective"][-1] or 0.0))
    unfitted = objective is None or not objective <= fitted
    stands = -run.margin > run.expects.below_fedavg and gain < STANDING and unfitted
    why = "nobody trains any more" if objective is None else f"training loss {objective:.2f}"
    yield Finding("progress", not stands, gain, f"stands still below FedAvg ({why})")


def cost(run: Run) -> Iterator[Finding]:
    """Models and trainings of the dearest round, as declared."""
    if run.expects.cost is None:
        return
    declared = run.expects.cost.at(clusters_of(run.situation))
    for name, limit in declared.items():
        most = dearest(run)[name]
        ok = most <= 1.02 * limit + 0.01
        yield Finding("cost", ok, most, f"{name} {most:.2f}, declared {limit:.2f}")


CHECKS: Sequence[Callable[[Run], Iterator[Finding]]] = (
    accuracy, splits, groups, parts, oscillation, progress, cost,
)  # fmt: skip


def dearest(run: Run) -> dict[str, float]:
    """The largest cost of any round: models down and up, and trainings in FedAvg's."""
    pairs = zip(run.facts["gradients"], run.baseline["gradients"], strict=True)
    return {
        "down": max(run.facts["down"]),
        "up": max(run.facts["up"]),
        "trainings": max((mine / one for mine, one in pairs if one), default=0.0),
    }


def findings(run: Run) -> list[Finding]:
    """Everything that the checks find of a run; a miss that is declared, and no worse than that, has its reason."""
    found = []
    for finding in run.found():
        excuse = None if finding.ok else run.expects.excuse(finding.check, run.situation)
        if excuse is not None and _within(finding, excuse):
            finding = Finding(finding.check, False, finding.value, finding.text, excuse)
        found.append(finding)
    return found


@dataclass
class Verdict:
    """A method in a situation, over its seeds."""

    state: str
    margin: float | None = None  # mean accuracy over FedAvg's
    missed: dict[str, list[Finding]] = field(default_factory=dict)  # by check, with or without a reason
    note: str = ""  # why it was not run, or how it broke

    def unexplained(self, check: str) -> list[Finding]:
        """Misses without a reason."""
        return [finding for finding in self.missed.get(check, ()) if finding.known is None]


def verdict(runs: Sequence[Run]) -> Verdict:
    """Red: a check is missed without a reason by half of the seeds or more. Amber: by fewer, or with a reason."""
    for run in runs:
        if "failed" in run.facts:
            return Verdict(RED, note=run.facts["failed"])
        if "refused" in run.facts:
            return Verdict(NONE, note=run.facts["refused"])
    missed: dict[str, list[Finding]] = {}
    state = GREEN
    for check in CHECKS:
        each = [
            [found for found in findings(run) if found.check == check.__name__ and not found.ok]
            for run in runs
        ]
        if any(each):
            missed[check.__name__] = [found for of_seed in each for found in of_seed]
            bare = sum(any(found.known is None for found in of_seed) for of_seed in each)
            state = RED if state == RED or 2 * bare >= len(runs) else AMBER
    return Verdict(state, float(np.mean([run.margin for run in runs])), missed)


def _within(finding: Finding, known: Known) -> bool:
    return finding.value >= known.limit if finding.check == "groups" else finding.value <= known.limit


def _drop(facts: Facts) -> float:
    """How far accuracy falls at most below what it was before, in the second half of a run."""
    late = np.array(facts["accuracy"][len(facts["accuracy"]) // 2 :])
    return float(np.max(np.maximum.accumulate(late) - late))


def _fallen(facts: Facts) -> float:
    """How far the end is below the best stretch of a run."""
    curve = np.array(facts["accuracy"])
    means = np.convolve(curve, np.ones(LAST) / LAST, mode="valid")
    return float(means.max() - means[-1])
