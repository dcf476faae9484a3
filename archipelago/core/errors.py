"""Errors that are meant to be read by a person."""

from __future__ import annotations

from typing import Any


class UserError(Exception):
    """A mistake in what was asked for: one sentence that says what was expected, what was given, what to do.

    The command line prints the sentence and exits with code 2; nothing was started and nothing is lost. `code` names
    the kind of mistake and `values` what the sentence is about, for programs and tests: the prose may change.

        >>> error = UserError("Unknown method 'ifcaa'. Did you mean 'ifca'?", code="unknown-name", name="ifcaa")
            >>> error.code, error.values
            ('unknown-name', {'name': 'ifcaa'})
    """

    kind = "other"  # the code of a class whose errors are all of one kind

    def __init__(self, message: str, *, code: str = "", **values: Any) -> None:
        super().__init__(
            message
        )  # alone: pickling calls with the arguments, and restores the attributes afterwards
        self.code = code or self.kind
        self.values = values

    def rephrased(self, sentence: str) -> UserError:
        """The same mistake in a sentence that says more about where it was made."""
        return UserError(sentence, code=self.code, **self.values)


class ClientFailure(RuntimeError):
    """Something went wrong inside one client; says which client, which round, which stage and why."""

    def __init__(self, client: int, round: int, stage: str, cause: str) -> None:
        super().__init__(client, round, stage, cause)  # all of them, so that it survives pickling
        self.client = client
        self.round = round
        self.stage = stage
        self.cause = cause

    def __str__(self) -> str:
        return f"Client {self.client} failed in round {self.round} during {self.stage}: {self.cause}"


class RunFailure(RuntimeError):
    """A run that came to no result and would come to none if it were resumed: the sentence says why.

    The command line prints the sentence and exits with code 1; what the run wrote stays.
    """
