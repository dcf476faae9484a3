"""Errors that are meant to be read by a person."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what was asked for: one sentence that says what was expected, what was given, what to do.

    The front door prints the sentence and exits with code 2; nothing was started and nothing is lost.
    """


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

    The front door prints the sentence and exits with code 1; what the run wrote stays.
    """
