"""What is done wrong on purpose inside the ranks of a verification, and how `phalanx verify` reports it.

    python benchmarks/sabotage.py [--out FILE]

Nothing is timed. Every row is also a test (tests/verification/test_sabotage.py); so is that the same settings are found
exact when nothing is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report

RESULTS = Path(__file__).parent.parent / "docs" / "results"
HEADERS = ["done wrong", "plan", "first failure in the report"]
INTRO = """# Sabotage: what `phalanx verify` finds

One thing at a time is broken on purpose inside real ranks: the loader, a copy of a parameter after the last step, the
sum of gradients, the order of layers, the optimizer. [Verification](../verify.md) has to find it and name what differs.
Under the same plans, unbroken, it reports *exact*.
"""


def measure(folder: Path) -> Iterator[dict[str, Any]]:
    """One result per sabotage, with all failures that its report has."""
    from phalanx.launch.worker_pool import WorkerPool
    from phalanx.verification.plain_side import PlainProcess
    from phalanx.verification.verify import verify_case
    from tests.verification.sabotages import SABOTAGES, StruckPool, settings

    cases = settings(folder)
    with PlainProcess() as process, WorkerPool(2, threads_per_rank=1, device="cpu") as pool:
        for setting, case in cases.items():
            failures = verify_case(case, process, pool).failures
            yield {"what": None, "setting": setting, "plan": case.plan, "failures": failures}
        for what, sabotage in SABOTAGES.items():
            ranks: Any = StruckPool(pool, what)
            found = verify_case(cases[sabotage.setting], process, ranks)
            named = [failure for failure in found.failures if sabotage.found in failure]
            yield {
                "what": what, "setting": sabotage.setting, "plan": cases[sabotage.setting].plan,
                "failures": found.failures, "caught": bool(named),
            }  # fmt: skip


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [result["what"], f"`{result['plan']}`", result["failures"][0] if result["caught"] else "**not found**"]
        for result in results
        if result["what"]
    ]


def summary(results: list[dict[str, Any]]) -> str:
    broken = [result for result in results if result["what"]]
    caught = sum(result["caught"] for result in broken)
    whole = [result for result in results if not result["what"]]
    exact = sum(not result["failures"] for result in whole)
    return f"{caught} of {len(broken)} found and named; unbroken, {exact} of {len(whole)} settings are exact."


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "sabotage.json").read_text(encoding="utf-8"))
    machine, results = data["machine"], data["results"]
    lines = [
        INTRO,
        f"`python benchmarks/sabotage.py` (torch {machine['torch']}, transformers {machine['transformers']}), "
        f"{machine['date']}. Data: [sabotage.json](sabotage.json).",
        "",
        report.markdown(HEADERS, rows(results)),
        "",
        summary(results),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = list(measure(Path(folder)))
    print(report.table(HEADERS, rows(results)))
    print(summary(results))
    if chosen.out:
        report.write(Path(chosen.out), "sabotage", {}, results)


if __name__ == "__main__":
    main()
