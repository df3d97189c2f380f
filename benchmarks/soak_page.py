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
*Resumed*: what happened cannot be survived in place (before training, nobody was left, the supervisor or the store was
killed); the run ended and was resumed. *Untouched*: nobody was lost. At its end every run was compared with a run of
one process that nothing happened to: parameters (1e-7), losses (1e-9) and samples of every step, how many steps were
made again, processes, shared memory and open files left behind. *Back to work*: from when a loss was noticed until
ranks train again; the machine had up to ten times as many processes as cores. *link slow*, *link cut*, *node cut off*,
*node lost and back* (one that does not lead), *leading node lost and back* and *rank of a node* happen on two nodes of
a lab (network namespaces), with a supervisor each.

What earlier runs found was mended; those runs (of `3b8cfb6`, run 11 of `1b32dca`, runs 6 and 13, and run 206 of
`0c1abe2`, in which a rank waited for ever for the rest of a message whose sender was lost) do not count here,
and others of their kind were made: a rank killed while others made ready for a plan left them waiting on one connection
to the store; losses between which steps were made again counted as losses in a row; a rank that just came and lost the
others ended the job; a node that came back to a run that had saved something was refused because of what it found in
the run's folder. Runs 0 to 15 are of commits of a branch that became `7adc69c`; `11b7452`, `70af19e`, `4e4d174` and
`40e83e1` became `5b26981`, `082bbc8`, `5a8cc9e` and `58a19eb` when their branch was put onto `1cde385`, which changed
how mirrors are priced (`--mirror-every auto`). After `11b7452` the supervision of several nodes changed (the loss of
the leading node is survived), and ranks find the job's store in another way when one of them is lost: runs on nodes of
earlier commits are not among these. Run 101 of `70af19e` does not count: it lost the leading node when that had the
only rank, since the other's was still coming, and ended as it must; the soak waits now. Runs 100 to 104 were asked for
with `--kinds` of nodes, those before from 16 on with all other kinds, and those from 200 on with all."""


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
    sources = Counter(source.partition(" ")[0] for fault in faults for source in fault["sources"])
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
        f"State came from {', '.join(f'{_SOURCES.get(name, name)} ({n})' for name, n in sources.most_common())}.",
        *(["", "Why runs were resumed:", ""] if reasons else []),
        *(f"- {count} {times} {why}" for why, count in reasons.most_common()),
        *(["", "Failures:", "", *failed] if failed else []),
    ]
    return "\n".join([*lines, ""])


def _run_name(run: dict[str, Any]) -> str:
    kinds = ", ".join(fault["kind"] for fault in run["faults"][-1:])
    return f"{run['number']} (`{run['plan']}`, {run['on_loss']}, last {kinds or 'nothing'}, of `{run['commit']}`)"


_SOURCES = {"the": "the ranks that were left", "copies": "copies in memory"}
