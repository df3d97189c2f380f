"""Prove for one model that several plans train exactly as plain PyTorch does.

    python examples/prove_plans.py [MODEL]

One process runs the plain model for all of them, because starting it costs more than a tiny comparison.
"""

from __future__ import annotations

import sys

from phalanx.verification.case import Case
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case

PLANS = ("", "mb=3,schedule=gpipe", "mb=2,schedule=zb-h1", "mb=2,recompute=yes")


def main(model: str = "gpt2") -> None:
    with PlainProcess() as process:
        reports = [verify_case(Case(model, plan, tiny=True), process) for plan in PLANS]
    for report in reports:
        worst = max(report.rows, key=lambda row: row.error)
        print(f"{report.plan or 'default':<22} {'exact' if report.ok else 'NOT EQUAL':<10} worst {worst.error:.1e}")
    if not all(report.ok for report in reports):
        sys.exit(1)


if __name__ == "__main__":  # the plain process starts from this file too
    main(*sys.argv[1:2])
