"""What layers of a stage compute again, against an integer programme that knows nothing of how the mixer counts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from scipy import optimize

from phalanx.planning.mixes import Ends, Mixer, Option, undominated

NUM_CASES = 60


def options(chance: random.Random) -> list[Option]:
    """As recomputation has them: each keeps less than the last, takes longer and needs more while it runs."""
    kept, seconds, working = 100.0, 10.0, 5.0
    found: list[Option] = []
    for name in ("none", "light", "unit", "block")[: chance.randint(2, 4)]:
        found.append(Option(name, seconds, kept, working))
        kept *= chance.uniform(0.2, 0.9)
        seconds *= chance.uniform(1.0, 1.3)
        working += chance.uniform(0, 60)
    return found


def solved(own: Sequence[Option], layers: int, held: float, room: float, ends: Ends) -> float | None:
    """Seconds of the best counts: integers n, and for each option whether any layer has it."""
    size = len(own)
    seconds, kept = [o.seconds for o in own], [o.kept for o in own]
    whole = (held - 1) * np.array(kept)
    fixed = (held - 1) * (ends.first_kept + ends.last_kept)
    rows: list[list[float]] = [[1.0] * size + [0.0] * size]
    low, high = [float(layers)], [float(layers)]
    for place, option in enumerate(own):
        uses = [0.0] * (2 * size)
        uses[place], uses[size + place] = 1.0, -float(layers)  # n ≤ layers where it is used, else 0
        at_work = [*whole, *[0.0] * size]
        for before in range(place + 1):
            at_work[before] += kept[before]
        at_work[size + place] = option.working
        rows += [uses, at_work]
        low += [-np.inf, -np.inf]
        high += [0.0, room - fixed - ends.first_kept]
    rows.append([*(whole + np.array(kept)), *[0.0] * size])
    low.append(-np.inf)
    high.append(room - fixed - ends.first_kept - ends.last_kept - ends.last_working)
    if fixed + ends.first_kept + ends.first_working > room:
        return None
    rows.append([*whole, *[0.0] * size])
    low.append(-np.inf)
    high.append(room - fixed - ends.first_kept - ends.first_working)
    found = optimize.milp(
        [*seconds, *[0.0] * size], integrality=np.ones(2 * size),
        bounds=optimize.Bounds(0, [layers] * size + [1] * size),
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
    )  # fmt: skip
    return float(found.fun) if found.success else None


def test_no_integer_programme_finds_a_better_mix() -> None:
    chance = random.Random(7)
    fitting = 0
    for _ in range(NUM_CASES):
        own = options(chance)
        layers, held = chance.randint(1, 40), chance.randint(1, 8)
        ends = Ends(*(chance.uniform(0, 50) for _ in range(4)))
        room = chance.uniform(0.1, 1.1) * held * layers * 100
        mix, best = Mixer(own).best(layers, held, room, ends), solved(undominated(own), layers, held, room, ends)
        assert (mix is None) == (best is None)
        if mix is not None and best is not None:
            fitting += 1
            assert best * (1 - 1e-6) <= mix.seconds <= best * 1.001
            assert sum(count for _, count in mix.options) == layers
    assert fitting > NUM_CASES // 2


def test_an_option_that_another_beats_is_left_out() -> None:
    good, bad = Option("none", 1.0, 10.0, 1.0), Option("light", 2.0, 11.0, 1.0)
    assert undominated([bad, good]) == [good]
