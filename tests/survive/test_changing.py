"""Ranks are killed while state moves to another plan: it comes from those that are left, mixed as they have it then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.adapt.exchange import Message
from phalanx.adapt.migrate import _Stream
from phalanx.launch.context import RankContext
from phalanx.session import change as change_module

LEFT = "the ranks that were left"


@dataclass(frozen=True)
class Dies:
    """rank: kills itself when the plan changes, before it moves a portion of this number, or `after` it has. unheard:
    a rank that does not hear any more that all have the portion before. damages: a rank whose messages of a portion
    before come damaged, so that the portions counted are those that go back."""

    rank: int
    at: int
    after: bool = False
    unheard: int | None = None
    damages: tuple[int, int] | None = None


def dies(context: RankContext, payload: Any, how: Dies) -> Any:
    """Every bucket is a portion."""
    move, agree, migrate, pack = _Stream._move, migrate_module.agree, change_module.migrate, Message.pack
