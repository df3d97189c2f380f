"""Random faults, one run each, with an oracle: the run must be the one that lost nobody.

    python benchmarks/soak.py [--count 1000] [--jobs 4] [--folder soak] [--kinds kill,stop] [--out soak.json]

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
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import soak_page
import soak_runs

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
    options = parser.parse_args(arguments)
    kinds, folder = _kinds(parser, options.kinds), Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = {record["number"] for record in results(folder)}
    wanted = [n for n in range(options.first, options.first + options.count) if n not in known]
    _run_all(wanted, options.jobs, folder, kinds)
    numbers = range(options.first, options.first + options.count)
    found = [record for record in results(folder) if record["number"] in numbers]
    print(report.table(soak_page.HEADERS, soak_page.rows(found)))
    for record in found:
        if record["outcome"] == "failed":
            print(f"{record['number']} ({record['kind']}, {record['plan']}): {record['problem']}", file=sys.stderr)
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


if __name__ == "__main__":
    main()
