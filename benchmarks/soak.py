"""A thousand random faults with an oracle: every run must be the one that lost nobody.

    python benchmarks/soak.py [--faults 1000] [--jobs 2] [--folder soak] [--kinds kill,stop] [--out soak.json]

Every run trains a tiny GPT-2 on a few CPU ranks under a random plan, and faults happen to it one after the other, each
a random moment after it recovered from the one before. Held against a run of one process that nothing happened to:
parameters, loss and samples of every step, how many steps were made again, and what is left behind (processes, ports,
shared memory, open files), within time limits. Results are kept run by run in the folder, by their numbers: what was
interrupted goes on where it was, and a number always means the same faults (though not to the millisecond).
"""

from __future__ import annotations

import itertools
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
from soak_checks import end_with_children
from soak_limits import by_kernel
from soak_settings import KINDS, Setting

_LONGEST = 1800.0  # seconds of one run, after which it counts as hanging


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--faults", type=int, default=1000, metavar="N", help="at least so many, in as many runs")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first run")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 4), metavar="N", help="side by side"
    )
    parser.add_argument("--folder", default="soak", metavar="DIR", help="results so far, and what failed")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B", help="what may happen")
    options = parser.parse_args(arguments)
    kinds, folder = _kinds(parser, options.kinds), Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    _run_all(options.first, options.faults, options.jobs, folder, kinds)
    found = results(folder)
    print(report.table(soak_page.HEADERS, soak_page.rows(found)))
    for record in found:
        if record["problem"]:
            print(f"{record['number']} ({record['plan']}): {record['problem']}", file=sys.stderr)
    report.publish(options, "soak", {"kinds": kinds, "memory_limit_by_kernel": by_kernel()}, found, [])
    sys.exit(any(record["problem"] for record in found))


def _kinds(parser: Any, text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds {unknown[0]} is unknown; there are {', '.join(KINDS)}")
    return kinds


def results(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("results-*.jsonl")) for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda record: record["number"])


def num_faults(found: Sequence[dict[str, Any]]) -> int:
    return sum(len(record["faults"]) for record in found)


def _run_all(first: int, faults: int, jobs: int, folder: Path, kinds: list[str]) -> None:
    """Each job makes the next run that nobody has made. One that does not come to an end is ended, which is a result as
    well."""
    context, numbers = multiprocessing.get_context("spawn"), itertools.count(first)
    at = {job: context.Array("d", [-1.0, 0.0]) for job in range(jobs)}  # the run that it is to make, and since when
    running: dict[int, Any] = {}
    while (done := num_faults(found := results(folder))) < faults:
        known = {record["number"] for record in found}
        for job, own in at.items():
            if own[0] < 0:
                own[0], own[1] = float(next(n for n in numbers if n not in known)), time.time()
            if job not in running:
                running[job] = context.Process(target=soak_runs.work, args=(job, folder, kinds, own))
                running[job].start()
            hangs = time.time() - own[1] > _LONGEST
            if hangs or not running[job].is_alive():
                end_with_children(running[job].pid)
                running.pop(job).join()
                problem = f"did not come to an end in {_LONGEST:.0f} s" if hangs else "its process ended"
                setting, own[0] = Setting.of(int(own[0]), kinds), -1.0
                soak_runs.note(folder, job, soak_runs.record_of(setting, [], [problem], _LONGEST))
        time.sleep(0.5)
        if (now := num_faults(results(folder))) != done:
            print(f"{now} faults in {len(known) + 1} runs", file=sys.stderr)
    for process in running.values():
        end_with_children(process.pid)
        process.join()


if __name__ == "__main__":
    main()
