"""What happens to data that cannot be read: refused, or skipped and counted, as the user chose.

Every reader reports to one `BrokenData`, which names the place; nothing is ever dropped without being counted.
"""

from __future__ import annotations

import warnings

from phalanx.errors import ConfigError, DataError, nearest

POLICIES = ("refuse", "skip")


class BrokenData:
    """Collects what was broken during one pass over a source."""

    def __init__(self, policy: str, at_once: bool = False) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"on_broken is {policy!r}", nearest(policy, POLICIES))
        self.policy = policy
        self._at_once = at_once  # a pass that may never end cannot wait with its warning
        self.skipped: list[str] = []

    def report(self, place: str, reason: str) -> None:
        """Refuse with an error, or take note of what is skipped."""
        if self.policy == "refuse":
            raise DataError(f"{place}: {reason}", "repair or remove it, or set on_broken=skip to leave it out")
        self.skipped.append(f"{place}: {reason}")
        if self._at_once:
            warnings.warn(f"skipped broken part {len(self.skipped)}: {self.skipped[-1]}", stacklevel=2)


def warn_skipped(skipped: list[str], source: str) -> None:
    """Say how much was left out, naming the first few."""
    if skipped:
        shown = "; ".join(skipped[:3]) + ("; …" if len(skipped) > 3 else "")
        parts = "part" if len(skipped) == 1 else "parts"
        warnings.warn(f"skipped {len(skipped)} broken {parts} of {source}: {shown}", stacklevel=3)
