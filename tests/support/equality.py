"""The promise of equal results, for one method: any layout, any restore, some of the clients at a time."""

from __future__ import annotations

from tests.support.experiments import checkpoint_of, outcome, run, session_of

SCATTERED = [[7, 0, 3], [5, 1], [2, 6, 4]]
UNEVEN = [[5], [0, 1, 2, 3, 4, 6, 7]]


def assert_same_bits_everywhere(*settings: str) -> None:
    """Four rounds in one block equal two in scattered blocks, a checkpoint, and two in uneven ones."""
    settings = ("partition=dirichlet", "partition.alpha=1.0", "participation.fraction=0.5", *settings)
    whole = session_of(*settings)
    expected = outcome(whole, run(whole, 4))
    first = session_of(*settings, blocks=SCATTERED)
    reports = run(first, 2)
    second = session_of(*settings, blocks=UNEVEN, checkpoint=checkpoint_of(first))
    reports += run(second, 2, first=3)
    assert outcome(second, reports) == expected
