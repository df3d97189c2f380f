"""The page of the soak (docs/results/soak.md): what happened to how many runs, and what came of them."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report

RESULTS = Path(__file__).parent.parent / "docs" / "results"
HEADERS = ["what happened", "times", "went on", "resumed", "untouched", "losses", "back to work s (median)", "worst",
           "in runs that failed"]  # fmt: skip
INTRO = """# Soak: random faults, and the run that lost nobody

Each run trains a tiny GPT-2 in float64 on two to five CPU ranks, and faults happen to it one after the other, each one
to three steps after it recovered from the one before. *Went on*: the ranks that were left, or new ones, trained on.
*Resumed*: what happened cannot be survived in place (before training, nobody was left, the supervisor was killed; until
`068a0ca` also the store or the fork server); the run ended and was resumed. *Untouched*: nobody was lost. At its end
every run was compared with a run of one process that nothing happened to: parameters (1e-7), losses (1e-9) and samples
of every step, how many steps were made again, and what is left behind (below). *Back to work*: from when a loss was
noticed until ranks train again; the machine had up to ten times as many processes as cores. *link slow*, *link cut*,
*node cut off*, *node lost and back* (one that does not lead), *leading node lost and back* and *rank of a node* happen
on two nodes of a lab (network namespaces), with a supervisor each."""

LEFT_OUT = """## Runs that were taken out by hand

These are not among the figures above, and what failed among them is not in the number of failures. Others of their kind
were made in their place.

- They found what was mended then: those of `3b8cfb6`, run 11 of `1b32dca`, runs 6 and 13, and run 206 of `0c1abe2`. A
  rank killed while others made ready for a plan left them waiting on one connection to the store; losses between
  which steps were made again counted as losses in a row; a rank that just came and lost the others ended the job; a
  node that came back to a run that had saved something was refused because of what it found in the run's folder; a
  rank waited for ever for the rest of a message whose sender was lost (run 206).
- It failed, and the soak was wrong: run 101 of `70af19e` lost the leading node when that had the only rank, since the
  other's was still coming, and ended as it must; the soak waits now.
- What they tried is no more: runs on nodes of commits before `11b7452`. After that the
  supervision of several nodes changed (the loss of the leading node is survived), and ranks find the job's store in
  another way when one of them is lost.

Runs 0 to 15 are of commits of a branch that became `7adc69c`; `11b7452`, `70af19e`, `4e4d174` and `40e83e1` became
`5b26981`, `082bbc8`, `5a8cc9e` and `58a19eb` when their branch was put onto `1cde385`, which changed how mirrors are
priced (`--mirror-every auto`). Runs 100 to 104 were asked for with `--kinds` of nodes, those before from 16 on with all
other kinds, and those from 200 on with all."""

# How a loss says where state came from, from the longest beginning to the shortest; and what that is called here.
SOURCES = {
    "the ranks that were left; ": "the ranks that were left and mirrors",
    "the ranks that were left": "the ranks that were left",
    "copies of step ": "copies in memory",
    "the checkpoint ": "checkpoints",
    "the beginning: ": "the beginning",
}


def kind_of_source(text: str) -> str:
    return next(kind for begin, kind in SOURCES.items() if text.startswith(begin))


def rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in found:
        for fault in record["faults"]:
            by_kind[fault["kind"]].append(fault | {"failed": bool(record["problem"])})
    everything = [fault for own in by_kind.values() for fault in own]
    return [_row(kind, own) for kind, own in sorted(by_kind.items())] + ([_row("all", everything)] if found else [])


def _row(kind: str, own: Sequence[dict[str, Any]]) -> list[str]:
    outcomes = Counter(fault["outcome"] for fault in own)
    seconds = sorted(each for fault in own for each in fault["losses"])
    times = [f"{statistics.median(seconds):.2f}", f"{seconds[-1]:.2f}"] if seconds else ["", ""]
    counts = [str(outcomes[name]) for name in ("went on", "resumed", "untouched")]
    return [kind, str(len(own)), *counts, str(len(seconds)), *times, str(sum(fault["failed"] for fault in own))]


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "soak.json").read_text(encoding="utf-8"))
    at, found, times = data["machine"], data["results"], "\N{MULTIPLICATION SIGN}"
    faults = [fault for record in found for fault in record["faults"]]
    failed = [f"- {_run_name(r)}: {r['problem'].splitlines()[0]}" for r in found if r["problem"]]
    reasons = Counter(fault["why"] for fault in faults if fault["why"])
    sources = Counter(kind_of_source(source) for fault in faults for source in fault["sources"])
    killer = "the kernel (a memory control group)" if data["setting"]["memory_limit_by_kernel"] else "a watcher"
    states = ", ".join(f"{count} of `{commit}`" for commit, count in Counter(r["commit"] for r in found).items())
    lines = [
        INTRO,
        f"*Memory limit*: killed by {killer}.",
        "",
        f"`python benchmarks/soak.py --faults {len(faults)}` (torch {at['torch']}, {at['cores']} cores), {at['date']}: "
        f"{len(faults)} faults in {len(found)} runs ({states}), {sum(r['seconds'] for r in found) / 60:.0f} minutes of "
        f"runs, {len(failed)} of which failed. Data: [soak.json](soak.json).",
        "",
        report.markdown(HEADERS, rows(found)),
        "",
        f"State came from {', '.join(f'{name} ({n})' for name, n in sources.most_common())}.",
        "",
        _looked_for(found),
        *(["", "Why runs were resumed:", ""] if reasons else []),
        *(f"- {count} {times} {why}" for why, count in reasons.most_common()),
        *(["", "Failures:", "", *failed] if failed else []),
        "",
        LEFT_OUT,
    ]
    return "\n".join([*lines, ""])


def _run_name(run: dict[str, Any]) -> str:
    kinds = ", ".join(fault["kind"] for fault in run["faults"][-1:])
    return f"{run['number']} (`{run['plan']}`, {run['on_loss']}, last {kinds or 'nothing'}, of `{run['commit']}`)"


def _looked_for(found: Sequence[dict[str, Any]]) -> str:
    """What of the runs that are shown was looked through for what they left behind: the first ones less than others."""
    old = Counter(record["place"] for record in found if not record.get("looked_for"))
    every = (
        "What is left behind: at the end of each run the soak looks for processes, whoever started them (beside the "
        "idle ranks of the pool, and when that is closed), for listening ports (of idle ranks, and of the process that "
        "supervises), for shared memory, and for more than 40 open files of an idle rank, however many were lost."
    )
    if not old:
        return every
    return every + (
        f" {old.total()} of these {len(found)} runs were made before it did so, and had less checked: shared memory; "
        f"that all processes of a supervisor that was killed ended ({old['supervisor']} runs); and that a rank had at "
        "most 70 open files and 40 more for each loss, since ranks kept those of what was under way then "
        f"({old['pool']} runs in a pool). For processes left behind by runs in a pool or on nodes ({old['nodes']}), "
        "and for listening ports, nobody looked; and a checkpoint could be any number of steps old."
    )
