"""The largest batch that a plan has room for. What plans need less is tested where plans are refused."""

from __future__ import annotations

from phalanx.plan.lighter import largest_batch


def test_the_largest_batch_is_found_in_few_trials():
    tried: list[int] = []

    def needs(batch: int) -> int:
        tried.append(batch)
        return 100 + 7 * batch

    assert largest_batch(needs, 800, multiple=3) == 99
    assert len(tried) < 15
    assert largest_batch(needs, 110, multiple=3) is None
