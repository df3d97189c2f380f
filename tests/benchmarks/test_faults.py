"""What the table of faults says of results, and that the run which is struck fails when it is told to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import faults  # noqa: E402
import faults_job  # noqa: E402
import faults_run  # noqa: E402


def struck(fault: str, mode: str, **more: object) -> dict[str, object]:
    return {"fault": fault, "mode": mode, "ended": True, "orphans": 0, "equal": True, "named": True, **more}


def test_a_row_counts_what_became_of_one_fault_in_one_mode(tmp_path: Path) -> None:
    results = [
        struck("kill", "pool"), struck("kill", "pool", orphans=2, equal=False, named=False),
        struck("suspend", "joined", alarm=True),
    ]  # fmt: skip
    assert faults.rows(results) == [
        ["kill", "pool", "2", "1 of 2", "2 of 2", "2", "1 of 2", ""],
        ["suspend", "joined", "1", "", "1 of 1", "0", "1 of 1", "1"],
    ]
    machine = {"torch": "2", "date": "today", "load": 1.0, "cores": 2}
    (tmp_path / "faults.json").write_text(json.dumps({"machine": machine, "results": results}))
    assert "today, 3 injections." in faults.page(tmp_path)


def test_data_fails_when_it_is_told_to(tmp_path: Path) -> None:
    data = faults_job.Data(str(tmp_path / "told"))
    assert len(data[3]["input_ids"]) == faults_job.TOKENS
    (tmp_path / "told").touch()
    with pytest.raises(OSError, match="sample 3 cannot be read"):
        data[3]


def test_processes_are_found_below_one_another() -> None:
    assert os.getpid() in faults_run.descendants(os.getppid())
    assert faults_run.ancestors(os.getpid(), os.getppid()) == [os.getppid()]
    assert faults_run.state(os.getpid()) == "R" and faults_run.state(2**22 + 1) == ""
