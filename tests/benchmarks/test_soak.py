"""The soak: what its numbers mean, what its faults do, and what its table and page say of results."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import report
import soak
import soak_page
import soak_runs
from soak_checks import Followed, made_too_often
from soak_job import Samples, Struck, give_order
from soak_limits import by_kernel, memory_limit
from soak_settings import KINDS, Setting


def record(number: int, struck: list[Struck], problem: str = "") -> dict[str, Any]:
    return soak_runs.record_of(Setting.of(number, ["kill", "raise"]), struck, [problem] if problem else [], 3.0)


def struck(kind: str, losses: list[float], why: str = "") -> Struck:
    return Struck(kind, 3, 4, 1.0, why, losses, ["the ranks that were left"] * len(losses))


def test_a_number_always_means_the_same_faults_and_every_kind_has_its_turn() -> None:
    settings = [Setting.of(number, KINDS) for number in range(20)]
    assert settings == [Setting.of(number, KINDS) for number in range(20)]
    assert {fault.kind for setting in settings[:6] for fault in setting.faults} == set(KINDS)
    assert {setting.place for setting in settings} == {"pool", "nodes", "supervisor"}
    firsts = [setting.faults[0].kind for setting in settings if "first step" in {f.kind for f in setting.faults}]
    assert set(firsts) == {"first step"}


def test_only_what_was_asked_for_happens() -> None:
    assert {fault.kind for n in range(20) for fault in Setting.of(n, ["link cut"]).faults} == {"link cut"}


def test_results_are_counted_by_what_happened(tmp_path: Path) -> None:
    found = [
        record(0, [struck("kill", [0.2, 0.4]), struck("slow", [])]),
        record(1, [struck("raise", [])], "2 tensors differ"),
        record(2, [struck("kill", [], "no rank is left that could go on")]),
    ]
    by_kind = {row[0]: row[1:] for row in soak_page.rows(found)}
    assert by_kind["kill"] == ["2", "1", "1", "0", "2", "0.30", "0.40", "0"]
    assert by_kind["raise"] == ["1", "0", "0", "1", "0", "", "", "1"]
    assert by_kind["all"][:4] == ["4", "1", "1", "2"] and soak.num_faults(found) == 4
    report.write(tmp_path / "soak.json", "soak", {"memory_limit_by_kernel": True}, found)
    page = soak_page.page(tmp_path)
    assert "4 faults in 3 runs" in page and "1 of which failed" in page and "2 tensors differ" in page
    assert (
        "- 1 \N{MULTIPLICATION SIGN} no rank is left that could go on" in page
        and "the ranks that were left (2)" in page
    )


def test_steps_made_again_are_more_than_their_source_allows() -> None:
    left = {"source": "the ranks that were left", "repeated": 1}
    copies = {"source": "copies of step 4 …", "repeated": 9}
    assert len(list(made_too_often([left, copies], 2))) == 2
    assert not list(made_too_often([{"source": "the checkpoint x", "repeated": 4}, copies], "auto"))


def test_a_log_is_followed_while_it_grows(tmp_path: Path) -> None:
    log, followed = tmp_path / "log-rank0.jsonl", Followed(tmp_path)
    assert followed.num_losses == 0
    log.write_text('{"time": 1, "kind": "step"}\n{"time": 2, "kind": "loss"}\n{"time": 3, "kind": "st')
    assert (followed.num_losses, followed.num_steps(0.0)) == (1, 0)
    with log.open("a") as file:
        file.write('ep"}\n{"time": 4, "kind": "step"}\n')
    assert (followed.num_steps(0.0), followed.num_steps(3.5)) == (2, 1)


def test_an_order_is_obeyed_once_by_the_process_that_it_names(tmp_path: Path) -> None:
    data = Samples(tmp_path)
    order = give_order(tmp_path, os.getpid(), "raise")
    other = give_order(tmp_path, os.getpid() + 1, "raise")
    with pytest.raises(RuntimeError, match="something that nobody expected"):
        data[0]
    assert data[1]["input_ids"].tolist()[:2] == [13, 20] and not order.exists() and other.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_process_that_takes_too_much_memory_is_killed() -> None:
    takes = "import sys; sys.stdin.readline(); held = [b'x' * (16 << 20) for _ in range(60)]; sys.stdin.readline()"
    process = subprocess.Popen([sys.executable, "-c", takes], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with memory_limit(process.pid) as is_gone:
        process.stdin.write(b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + 30.0
        while process.poll() is None and time.monotonic() < deadline:
            is_gone()
            time.sleep(0.01)
    assert process.wait(1.0) == -9
    assert by_kernel() in (True, False) and not list(Path("/sys/fs/cgroup").glob(f"**/phalanx-soak-{process.pid}"))


def test_an_unknown_kind_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--kinds", "flood"])
    assert "--kinds flood is unknown; there are kill, segfault" in capsys.readouterr().err
