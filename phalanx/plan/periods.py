"""Periods of a run: stretches of steps with one plan, one size of batches and one length of samples.

What is given as `STEP:VALUE` holds from that step on. Which samples a step is trained on follows from the periods
alone, so a run that is resumed in any of them sees what it would have seen. Pure; nothing is known of models or ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx.errors import ConfigError
from phalanx.plan import fields

T = TypeVar("T")


@dataclass(frozen=True)
class Period:
    """From `step` on, whose first sample stands at place `sample` of the stream."""

    step: int
    sample: int
    plan: str
    batch_size: int
    seq_len: int | None

    def sample_at(self, step: int) -> int:
        """Where the samples of a step begin."""
        return self.sample + (step - self.step) * self.batch_size


class Periods(tuple[Period, ...]):
    """In order; the first begins with step 1."""

    @classmethod
    def of(
        cls, plan: str, batch_size: int, seq_len: int | None, plan_at: Sequence[str], batch_size_at: Sequence[str],
        seq_len_at: Sequence[str],
    ) -> Periods:  # fmt: skip
        plans = {1: plan} | changes("plan_at", plan_at)
        sizes: dict[int, int] = {1: batch_size} | changes("batch_size_at", batch_size_at)
        lengths: dict[int, int | None] = {1: seq_len} | changes("seq_len_at", seq_len_at)
        found: list[Period] = []
        for step in sorted({*plans, *sizes, *lengths}):
            sample = found[-1].sample_at(step) if found else 0
            found.append(Period(step, sample, _last(plans, step), _last(sizes, step), _last(lengths, step)))
        return cls(found)

    def at(self, step: int) -> Period:
        return max((period for period in self if period.step <= step), key=lambda period: period.step)

    def num_steps(self, samples: float) -> int:
        """The fewest steps that see so many samples."""
        last = [period for period in self if period.sample < samples][-1]
        return last.step - 1 + max(1, -int(-(samples - last.sample) // last.batch_size))


def _last(values: Mapping[int, T], step: int) -> T:
    """The newest of these, by the step from which they hold."""
    return values[max(s for s in values if s <= step)]


def changes(option: str, given: Sequence[str]) -> dict[int, Any]:
    """What an option changes at which steps. Plans are texts, everything else numbers."""
    found: dict[int, Any] = {}
    for text in given:
        step, _, value = (part.strip() for part in text.partition(":"))
        if not re.fullmatch(r"\d+", step) or int(step) < 2:
            raise ConfigError(
                f"option {option} = {text!r} does not begin with the step from which it holds, 2 or more",
                f"write e.g. {_EXAMPLES[option]}; what holds from the first step on is set by {option[:-3]}",
            )
        if int(step) in found:
            raise ConfigError(f"option {option} names step {int(step)} twice", "give one value for a step")
        if option == "plan_at":
            fields.read(value)
        elif not re.fullmatch(r"\d+", value) or int(value) < 1:
            raise ConfigError(
                f"option {option} = {text!r}: {value!r} is not a number of 1 or more", f"write e.g. {_EXAMPLES[option]}"
            )
        found[int(step)] = value if option == "plan_at" else int(value)
    return found


_EXAMPLES = {"plan_at": "200:dp=4,zero=1", "batch_size_at": "100:64", "seq_len_at": "100:512"}
