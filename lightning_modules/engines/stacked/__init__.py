"""The engine `stacked`: all clients of a device as one batched model (`engine.py` says how it is put together)."""

from lightning_modules.engines.stacked.engine import (
    STACKED_TOLERANCE,
    StackedEngine,
    StackedParts,
    reason_against_jobs,
)

__all__ = ["STACKED_TOLERANCE", "StackedEngine", "StackedParts", "reason_against_jobs"]
