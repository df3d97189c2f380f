"""What can be done to a lab while a command runs in it: links and ranks slowed, ranks stopped, killed, added.

Each disturbance is a value that can be done to a session and undone; the session logs it with its time. `script.py`
puts them on a time line.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.lab.units import rate_text

if TYPE_CHECKING:
    from phalanx.lab.session import Session


@dataclass(frozen=True)
class SlowLink:
    """A node's cable carries less, both ways."""

    node: int
    rate: int  # bits per second

    def do(self, session: Session) -> str:
        session.network.set_rate(self.node, self.rate)
        return f"link of node {self.node} limited to {rate_text(self.rate)}"

    def undo(self, session: Session) -> str:
        return RestoreLink(self.node).do(session)


@dataclass(frozen=True)
class RestoreLink:
    """A node's cable is as in the lab's description again."""

    node: int

    def do(self, session: Session) -> str:
        rate = session.spec.link
        session.network.set_rate(self.node, rate)
        return f"link of node {self.node} back at {rate_text(rate) if rate else 'full speed'}"

    def undo(self, session: Session) -> str:
        return ""


@dataclass(frozen=True)
class SlowRank:
    """A rank gets only a part of its cores' time."""

    rank: int
    percent: int

    def do(self, session: Session) -> str:
        return f"rank {self.rank} slowed: {session.slow_down(self.rank, self.percent)}"

    def undo(self, session: Session) -> str:
        return RestoreRank(self.rank).do(session)


@dataclass(frozen=True)
class RestoreRank:
    """A slowed rank gets its cores back."""

    rank: int

    def do(self, session: Session) -> str:
        return f"rank {self.rank} back at full speed" if session.speed_up(self.rank) else ""

    def undo(self, session: Session) -> str:
        return ""


@dataclass(frozen=True)
class StopRank:
    """A rank stands still, with all its connections open, as if its machine hung."""

    rank: int

    def do(self, session: Session) -> str:
        session.ranks[self.rank].stopped = True
        session.ranks[self.rank].send(signal.SIGSTOP)
        return f"rank {self.rank} stopped"

    def undo(self, session: Session) -> str:
        return ContinueRank(self.rank).do(session)


@dataclass(frozen=True)
class ContinueRank:
    """A stopped rank goes on."""

    rank: int

    def do(self, session: Session) -> str:
        session.ranks[self.rank].stopped = False
        session.ranks[self.rank].send(signal.SIGCONT)
        return f"rank {self.rank} continues"

    def undo(self, session: Session) -> str:
        return ""


@dataclass(frozen=True)
class KillRank:
    """A rank dies without a word. There is no way back; its number stays empty."""

    rank: int

    def do(self, session: Session) -> str:
        session.ranks[self.rank].killed = True
        session.ranks[self.rank].send(signal.SIGKILL)
        return f"rank {self.rank} killed"

    def undo(self, session: Session) -> str:
        return ""


@dataclass(frozen=True)
class AddRank:
    """One more process with the next rank number and a world that is one larger; the others are told nothing.

    Only a job that takes in new ranks by itself can make use of it.
    """

    node: int

    def do(self, session: Session) -> str:
        return f"rank {session.add_rank(self.node)} added on node {self.node}"

    def undo(self, session: Session) -> str:
        return ""


Disturbance = SlowLink | RestoreLink | SlowRank | RestoreRank | StopRank | ContinueRank | KillRank | AddRank
