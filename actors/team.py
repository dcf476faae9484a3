"""Who belongs to a session on Ray: client actors, the server, and who holds whose copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.copies import neighbour_of_server, neighbours
from actors.watchdog import SERVER, Member


@dataclass(frozen=True)
class Team:
    """What the server must know of the others. `epoch` grows with every loss: who is of an older one is not heard."""

    clients: tuple[Member, ...]
    server: Member
    patience: float
    epoch: int = 0
    copies: bool = True

    @property
    def neighbours(self) -> list[int]:
        """For each block of clients the one that holds its copy (`actors/copies.py`); empty without copies."""
        return neighbours([member.node for member in self.clients]) if self.copies else []

    @property
    def holds_server(self) -> int:
        """The block that holds the server's copy."""
        return neighbour_of_server(self.server.node, [member.node for member in self.clients])

    @property
    def members(self) -> dict[Any, Member]:
        """Everybody, by number of block or as the server."""
        return {**dict(enumerate(self.clients)), SERVER: self.server}

    @property
    def names(self) -> list[str]:
        """Names of everybody."""
        return [member.name for member in self.members.values()]
