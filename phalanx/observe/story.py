"""The story of a run in words, out of its log: where it began, what changed, what went wrong, how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from phalanx.errors import counted
from phalanx.observe.format import bytes_text, seconds_text

Record = Mapping[str, Any]


def story(records: Iterable[Record]) -> Iterator[str]:
    """One line for everything that happened between steps, and one for every stretch of steps; at the end how many
    records are not as a run writes them."""
    steps: list[Record] = []
    damaged, mirrored = 0, ""
    for record in _as_told_last(records):
        try:
            if record["kind"] == "step":
                list(_stretch([record]))  # which fails here if it is damaged
                steps.append(record)
            elif record["kind"] in _WORDS:
                words = _WORDS[record["kind"]](record)
                line = f"{_clock(record)}  {words}"
                if record["kind"] == "mirror":
                    if words == mirrored:
                        continue  # said where it is new
                    mirrored = words
                yield from _stretch(steps)
                steps = []
                yield line
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError):
            damaged += 1
    yield from _stretch(steps)
    if damaged:
        yield f"{counted(damaged, 'damaged record')} left out"


def _as_told_last(records: Iterable[Record]) -> Iterator[Record]:
    """Without an error of rank 0 before that of the whole run, which it followed from, or is."""
    before: Record | None = None
    for record in records:
        if before is not None and not (_is_error(before, of_run=False) and _is_error(record, of_run=True)):
            yield before
        before = record
    if before is not None:
        yield before


def _is_error(record: Record, of_run: bool) -> bool:
    return record.get("kind") == "error" and record.get("of_run", False) == of_run


def _stretch(steps: list[Record]) -> Iterator[str]:
    if steps:
        first, last = steps[0], steps[-1]
        seconds = sum(each.get("step_seconds", 0.0) for each in steps) / len(steps)
        skipped = sum(1 for each in steps if each.get("skipped"))
        if len(steps) == 1:
            words = f"step {first['step']}: loss {_loss_text(first['loss'])}, {seconds_text(seconds)}"
            lost = ", skipped" if skipped else ""
        else:
            losses = f"{_loss_text(first['loss'])} to {_loss_text(last['loss'])}"
            words = f"steps {first['step']} to {last['step']}: loss {losses}, {seconds_text(seconds)} each"
            lost = f", {skipped} of them skipped" if skipped else ""
        yield f"{_clock(last)}  {words}{lost}"


def _loss_text(loss: Any) -> str:
    return f"{loss:.4f}" if isinstance(loss, float) else str(loss)


def _clock(record: Record) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))


def _began(record: Record) -> str:
    plan = str(record["header"].get("plan", "")).partition(":")[0]
    first, total = record["first_step"], record["total_steps"]
    if not first:
        return f"the run began, {counted(total, 'step')}, with plan {plan}"
    return f"the run went on after step {first} of {total}, with plan {plan}"


def change_words(record: Record) -> str:
    """`step 200: plan dp=2 → pp=2,mb=4 (as the options say): 1.2 MiB moved, a pause of 100ms`."""
    text = f"step {record['step']}: plan {record['old']} → {record['plan']} ({record['how']})"
    if "refused" in record:
        return f"{text} was refused and the old one stays: {record['refused']}"
    for name in ("batch_size", "seq_len"):
        text += f", {name} {record[name]}" if name in record else ""
    text += f": {bytes_text(record['bytes'])} moved, a pause of {seconds_text(record['seconds'])}"
    return text + _bits(record)


def _bits(record: Record) -> str:
    """Of a deterministic run."""
    if "bits" not in record:
        return ""
    return f"; {' and '.join(record['bits'])} changed, so bits may differ from here on, within verify's tolerance"


def loss_words(record: Record) -> str:
    """`rank 1 (stage 1) was killed by signal SIGKILL in step 7 at F1.0; 4 ranks go on before step 7 …`."""
    repeated, ranks = record["repeated"], record["ranks"]
    again = f", {counted(repeated, 'step')} {'is' if repeated == 1 else 'are'} made again" if repeated else ""
    why = f" ({record['why']})" if "why" in record else ""
    moved = f", {bytes_text(record['bytes'])} moved" if record["bytes"] else ""
    goes_on = (
        f"{counted(ranks, 'rank')} {'goes' if ranks == 1 else 'go'} on ({record['how']}) before step {record['step']}"
    )
    chosen = f" ({record['chosen']})" if "chosen" in record else ""
    refused = f", as others were refused ({'; '.join(record['refused'])})" if "refused" in record else ""
    return (
        f"{'; '.join(record['lost'])}; {goes_on} with plan {record['plan']}{chosen}{refused}: state from "
        f"{record['source']}{why}{again}{moved}, {seconds_text(record['seconds'])} after it was noticed{_bits(record)}"
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


def _ahead(record: Record) -> str:
    return f"plan {record['plan']} made ready for the loss of ranks, in {seconds_text(record['seconds'])}"


# What was predicted, measured or generated happened to nobody: it is in the log.
_WORDS = {
    "start": _began,
    "plan": lambda record: f"why this plan ({record['chosen']}): {record['reason']}",
    "loss": loss_words,
    "change": change_words,
    "ahead": _ahead,
    "mirror": mirror_words,
    "checkpoint": lambda record: f"saved in {record['path']}",
    "not_saved": lambda record: f"step {record['step']} could not be saved: {record['message']}",
    "stop": lambda record: f"stopped by {record['signal']} after step {record['step']}",
    "ended": lambda record: f"ended after step {record['step']}: {record['reason']}",
    "rollback": lambda record: str(record["message"]),
    "error": lambda record: f"failed: {record['message']}",
    "lost": lambda record: f"{counted(record['records'], 'record')} could not be written here",
    "finish": lambda record: f"the run ended with loss {_loss_text(record['loss'])}",
}
