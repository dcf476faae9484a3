"""What a command line asks for, ready to be executed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(kw_only=True)
class Request(ABC):
    """One command with its arguments."""

    typed: str = ""  # the whole command line, as it was given

    @abstractmethod
    def execute(self) -> None:
        """Do it; a mistake is a `UserError`, a run that came to no end a `Stopped`."""


@dataclass(kw_only=True)
class Answered(Request):
    """Nothing is left to do: the help was printed."""

    def execute(self) -> None:
        """Nothing."""
