"""Random faults, one run each, with an oracle: the run must be the one that lost nobody.

    python benchmarks/soak.py [--count 1000] [--jobs 4] [--folder soak] [--kinds kill,stop] [--page soak.md]

Every run trains a tiny GPT-2 on a few CPU ranks under a random plan, and something happens to it at a random moment.
Held against a run of one process that nothing happened to: parameters, loss and samples of every step, how many steps
were made again, and what is left behind (processes, shared memory, open files), within a time limit. Results are kept
run by run in the folder, by their numbers: what was interrupted goes on where it was, and a number always means the
same run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import soak_runs

HEADERS = ["what happened", "runs", "went on", "resumed", "untouched", "failed", "losses", "back to work s (median)",
           "worst", "run s (worst)"]  # fmt: skip
_SILENT_SECONDS = 240.0  # of one run, after which it counts as hanging


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="runs")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 4), metavar="N", help="side by side"
    )
    parser.add_argument("--folder", default="soak", metavar="DIR", help="results so far, and what failed")
    parser.add_argument("--kinds", default=",".join(soak_runs.KINDS), metavar="A,B", help="what may happen")
    parser.add_argument("--page", metavar="FILE", help="write the table as a page")
    options = parser.parse_args(arguments)
    kinds, folder = _kinds(parser, options.kinds), Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = {record["number"] for record in results(folder)}
    wanted = [n for n in range(options.first, options.first + options.count) if n not in known]
    _run_all(wanted, options.jobs, folder, kinds)
    numbers = range(options.first, options.first + options.count)
    found = [record for record in results(folder) if record["number"] in numbers]
    print(report.table(HEADERS, rows(found)))
    for record in found:
        if record["outcome"] == "failed":
            print(f"{record['number']} ({record['kind']}, {record['plan']}): {record['problem']}", file=sys.stderr)
    if options.page:
        Path(options.page).write_text(page(found, options.out))
    report.publish(options, "soak", {"count": options.count, "kinds": kinds}, found, [])
    sys.exit(any(record["outcome"] == "failed" for record in found))


def _kinds(parser: Any, text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in soak_runs.KINDS]:
        parser.error(f"--kinds {unknown[0]} is unknown; there are {', '.join(soak_runs.KINDS)}")
    return kinds


def results(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("results-*.jsonl")) for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda record: record["number"])


def _run_all(numbers: list[int], jobs: int, folder: Path, kinds: list[str]) -> None:
    """Each job takes every so manieth number. One that does not come to an end is ended, which is a result as well."""
    context = multiprocessing.get_context("spawn")
    left = {job: numbers[job::jobs] for job in range(jobs)}
    at = {job: context.Array("d", [-1.0, 0.0]) for job in left}  # the run that it makes, and since when
    running: dict[int, Any] = {}
    done = 0
    while any(left.values()) or running:
        for job, own in left.items():
            if own and job not in running:
                running[job] = context.Process(target=soak_runs.work, args=(job, own, folder, kinds, at[job]))
                running[job].start()
        time.sleep(1.0)
        for job, process in list(running.items()):
            number, since = at[job]
            hangs = number >= 0 and time.time() - since > _SILENT_SECONDS
            if hangs:
                soak_runs.end_with_children(process.pid)
                soak_runs.note(folder, job, soak_runs.hanging(int(number), kinds, _SILENT_SECONDS))
            if hangs or not process.is_alive():
                process.join()
                del running[job]
                known = {record["number"] for record in results(folder)}
                before, left[job] = left[job], [n for n in left[job] if n not in known]
                if not hangs and left[job] and len(before) == len(left[job]):
                    raise SystemExit(f"the process of job {job} ends before its first run: see its error above")
        if (now := len(results(folder))) != done:
            done = now
            print(f"{done} runs", file=sys.stderr)


def rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in found:
        by_kind[record["kind"]].append(record)
    return [_row(kind, own) for kind, own in sorted(by_kind.items())] + ([_row("all", found)] if found else [])


def _row(kind: str, own: Sequence[dict[str, Any]]) -> list[str]:
    outcomes = [record["outcome"] for record in own]
    seconds = sorted(each for record in own for each in record["recoveries"])
    times = [f"{statistics.median(seconds):.2f}", f"{seconds[-1]:.2f}"] if seconds else ["", ""]
    counts = [str(outcomes.count(name)) for name in ("went on", "resumed", "untouched", "failed")]
    return [kind, str(len(own)), *counts, str(len(seconds)), *times, f"{max(r['seconds'] for r in own):.0f}"]


def page(found: Sequence[dict[str, Any]], data: str | None) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [HEADERS, ["---"] * len(HEADERS), *rows(found)]]
    at = report.machine()
    failures = [
        f"- {r['number']} ({r['kind']}, `{r['plan']}`): {r['problem']}" for r in found if r["outcome"] == "failed"
    ]
    link = f" Data: [{Path(data).name}]({Path(data).name})." if data else ""
    return "\n".join([
        "# Soak: random faults, and the run that lost nobody", "",
        "Each run trains a tiny GPT-2 in float64 on two to four CPU ranks while something happens to it at a random "
        "moment. *Went on*: the ranks that were left, or new ones, ended the run. *Resumed*: what happened cannot be "
        "survived in place (before training, or nobody was left), the run ended with an error and was resumed. "
        "*Untouched*: nobody was lost. Every result was compared with a run of one process: parameters (1e-7), losses "
        "(1e-9) and samples of every step, how many steps were made again, processes, shared memory and open files "
        "left behind. *Back to work*: from when a loss was noticed until ranks train again.", "",
        f"`python benchmarks/soak.py --count {len(found)}` (torch {at['torch']}, {at['cores']} cores), {at['date']}."
        f"{link}", "",
        *lines, "", *(["Failures:", "", *failures, ""] if failures else []),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
