"""The engine `compiled`: kernels in C, compiled at first use with the system's compiler."""

from lightning_modules.engines.compiled.engine import CompiledEngine

__all__ = ["CompiledEngine"]
