"""The story of a run in words, out of its log: where it began, what changed, what went wrong, how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from phalanx.observe.format import bytes_text, seconds_text

Record = Mapping[str, Any]


def story(records: Iterable[Record]) -> Iterator[str]:
    """One line for everything that happened between steps, and one for every stretch of steps; at the end how many
    records are not as a run writes them."""
    steps: list[Record] = []
    damaged = 0
    for record in records:
        try:
            if record["kind"] == "step":
                list(_stretch([record]))  # which fails here if it is damaged
                steps.append(record)
            elif record["kind"] in _WORDS:
                line = f"{_clock(record)}  {_WORDS[record['kind']](record)}"
                yield from _stretch(steps)
                steps = []
                yield line
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError):
            damaged += 1
    yield from _stretch(steps)
    if damaged:
        yield f"{damaged} damaged record{'s' * (damaged > 1)} left out"


def _stretch(steps: list[Record]) -> Iterator[str]:
    if steps:
        first, last = steps[0], steps[-1]
        seconds = sum(each.get("step_seconds", 0.0) for each in steps) / len(steps)
        name = f"step {first['step']}" if len(steps) == 1 else f"steps {first['step']} to {last['step']}"
        skipped = sum(1 for each in steps if each.get("skipped"))
        lost = f", {skipped} of them skipped" if skipped else ""
        yield f"{_clock(last)}  {name}: loss {first['loss']} to {last['loss']}, {seconds_text(seconds)} each{lost}"


def _clock(record: Record) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))


def _began(record: Record) -> str:
    plan = str(record["header"].get("plan", "")).partition(":")[0]
    first, total = record["first_step"], record["total_steps"]
    if not first:
        return f"the run began, {total} steps, with plan {plan}"
    return f"the run went on after step {first} of {total}, with plan {plan}"


def change_words(record: Record) -> str:
    """`step 200: plan dp=2 → pp=2,mb=4 (as the options say): 1.2 MiB moved, a pause of 100ms`."""
    text = f"step {record['step']}: plan {record['old']} → {record['plan']} ({record['how']})"
    if "refused" in record:
        return f"{text} was refused and the old one stays: {record['refused']}"
    for name in ("batch_size", "seq_len"):
        text += f", {name} {record[name]}" if name in record else ""
    text += f": {bytes_text(record['bytes'])} moved, a pause of {seconds_text(record['seconds'])}"
    if "bits" in record:
        text += f"; {' and '.join(record['bits'])} changed, so bits may differ from here on, within verify's tolerance"
    return text


def loss_words(record: Record) -> str:
    """`rank 1 (stage 1) was killed by signal SIGKILL in step 7 at F1.0; 4 ranks go on before step 7 …`."""
    again = f", {record['repeated']} steps are made again" if record["repeated"] else ""
    why = f" ({record['why']})" if "why" in record else ""
    moved = f", {bytes_text(record['bytes'])} moved" if record["bytes"] else ""
    goes_on = f"{record['ranks']} ranks go on ({record['how']}) before step {record['step']}"
    return (
        f"{'; '.join(record['lost'])}; {goes_on} with plan {record['plan']}: state from "
        f"{record['source']}{why}{again}{moved}, {seconds_text(record['seconds'])} after it was noticed"
    )


def mirror_words(record: Record) -> str:
    """`what one rank alone holds is copied into other ranks' memory every 20 steps …`."""
    if "none" in record:
        return f"no copies in other ranks' memory: {record['none']}"
    size = bytes_text(record["bytes"])
    share = f"{100 * record['share']:.2g} % of the time" if "share" in record else ""
    if record["every"] == 0:
        told = f"what one rank alone holds is mirrored in another's memory, step by step ({size} on rank 0)"
        return told + (f": {share}" if share else "")
    every = "every step" if record["every"] == 1 else f"every {record['every']} steps"
    told = f"what one rank alone holds is copied into other ranks' memory {every} ({size} on rank 0)"
    return told + (f": to mirror it step by step would take {share}" if share else "")


_WORDS = {
    "start": _began,
    "loss": loss_words,
    "change": change_words,
    "checkpoint": lambda record: f"saved in {record['path']}",
    "not_saved": lambda record: f"step {record['step']} could not be saved: {record['message']}",
    "stop": lambda record: f"stopped by {record['signal']} after step {record['step']}",
    "error": lambda record: f"failed: {record['message']}",
    "finish": lambda record: f"the run ended with loss {record['loss']}",
}
