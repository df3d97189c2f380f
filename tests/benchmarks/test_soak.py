"""The soak: what its numbers mean, what its faults do, and what its table and page say of results."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import report
import soak
import soak_left
import soak_page
import soak_runs
from soak_checks import Followed, made_too_often
from soak_job import Fault, Samples, Struck, give_order
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


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("the ranks that were left", "the ranks that were left"),
        ("the ranks that were left; of rank 1 from the mirror on rank 0", "the ranks that were left and mirrors"),
        ("copies of step 10 in the memory of the ranks that were left", "copies in memory"),
        ("the checkpoint checkpoints/step-00000025", "checkpoints"),
        ("the beginning: there was no checkpoint", "the beginning"),
    ],
)
def test_where_state_came_from_is_counted_by_what_a_loss_says(source: str, kind: str) -> None:
    assert soak_page.kind_of_source(source) == kind


def test_every_source_of_the_soak_is_one_that_is_counted() -> None:
    results = json.loads((soak_page.RESULTS / "soak.json").read_text())["results"]
    sources = [source for run in results for fault in run["faults"] for source in fault["sources"]]
    counts = Counter(map(soak_page.kind_of_source, sources))
    assert counts.total() == sum(len(fault["losses"]) for run in results for fault in run["faults"])
    page = (soak_page.RESULTS / "soak.md").read_text()
    assert all(f"{kind} ({count})" in page for kind, count in counts.items())


def test_a_page_says_which_runs_were_looked_through_for_what(tmp_path: Path) -> None:
    runs = [record(0, []), record(1, []) | {"looked_for": soak_left.LOOKED_FOR}]
    report.write(tmp_path / "soak.json", "soak", {"memory_limit_by_kernel": True}, runs)
    assert "1 of these 2 runs were made before it did so" in soak_page.page(tmp_path)
    report.write(tmp_path / "soak.json", "soak", {"memory_limit_by_kernel": True}, runs[1:])
    assert "before it did so" not in soak_page.page(tmp_path)
    assert "## Runs that were taken out by hand" in soak_page.page(tmp_path)


def loss(source: str, repeated: int) -> dict[str, Any]:
    return {"kind": "loss", "source": source, "repeated": repeated}


def made_again(source: str, repeated: int, mirror_every: int | str = 2, before: tuple[str, ...] = ()) -> list[str]:
    """What is said of a loss after ten steps, checkpoints of which are three steps apart. before: other records."""
    records = [{"kind": "step", "step": step} for step in range(1, 11)]
    records += [{"kind": kind, "source": "the ranks that were left", "repeated": 0} for kind in before]
    options = {"checkpoint_every": 3, "mirror_every": mirror_every}
    return list(made_too_often([*records, loss(source, repeated)], options))


@pytest.mark.parametrize(
    ("source", "most"),
    [
        ("the ranks that were left", 0),
        ("the ranks that were left; of rank 1 from the mirror on rank 0", 0),
        ("copies of step 8 in the memory of the ranks that were left", 2),
        ("the checkpoint x/step-00000006", 6),
        ("the beginning: there was no checkpoint", 6),
    ],
)
def test_no_more_steps_are_made_again_than_their_source_allows(source: str, most: int) -> None:
    assert made_again(source, most) == []
    assert made_again(source, most + 1) == [f"{most + 1} steps were made again from {source} (at most {most})"]


def test_each_checkpoint_that_may_have_been_given_up_allows_as_many_steps_as_lie_between_two() -> None:
    source = "the checkpoint x/step-00000006"
    assert made_again(source, 12, before=("loss", "not_saved")) == []
    assert len(made_again(source, 13, before=("loss", "not_saved"))) == 1


def test_copies_whose_distance_is_found_in_the_run_are_no_older_than_a_checkpoint() -> None:
    source = "copies of step 4 in the memory of the ranks that were left"
    assert made_again(source, 6, "auto") == [] and len(made_again(source, 7, "auto")) == 1


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")


@LINUX
def test_a_process_that_a_run_left_behind_is_found_and_ended_though_its_parent_is_gone() -> None:
    asked = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    with soak_left.marked("a run of a test"):
        orphan = int(subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True).stdout)
    assert soak_left.processes_of("a run of a test") == {orphan}
    assert soak_left.processes_of("a run of a tes") == set()
    assert soak_left.left_running("a run of a test", seconds=0.1) == [f"process {orphan} (sleep) was left running"]
    deadline = time.monotonic() + 10.0
    while soak_left.processes_of("a run of a test") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert soak_left.left_running("a run of a test") == []


@LINUX
def test_a_port_is_left_open_where_a_process_listens_on_it() -> None:
    before = soak_left.listening(os.getpid())
    with socket.socket() as one, socket.socket(socket.AF_INET6) as other, socket.socket() as bound:
        for each, at in ((one, "127.0.0.1"), (other, "::1"), (bound, "127.0.0.1")):
            each.bind((at, 0))
        one.listen()
        other.listen()
        ports = {each.getsockname()[1] for each in (one, other)}
        assert soak_left.listening(os.getpid()) - before == ports
    assert soak_left.listening(os.getpid()) == before


def test_open_files_of_a_rank_do_not_grow_with_losses() -> None:
    assert soak_left.left_open(40, 0) == []
    assert soak_left.left_open(41, 30) == ["a rank has 41 open files after 30 losses"]


SHORT = ("second in recovery", "two at once", "stop", "abort", "kill", "half of them")


@LINUX
def test_a_short_soak_goes_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six faults, one after the other, with all that the soak holds a run against."""
    monkeypatch.setattr("phalanx.launch.processes.Popen", subprocess.Popen)  # processes with a mark of their own
    draw = random.Random(1)
    faults = tuple(Fault(kind, 2, draw.random() * 0.06, draw.getrandbits(32)) for kind in SHORT)
    options = {"checkpoint_every": 3, "mirror_every": 1, "steps": 30, "timeout": 30.0}
    setting = Setting(0, "pool", 4, "pp=2,dp=2,mb=2", "replace", faults, options)
    expected = soak_runs.uninterrupted(tmp_path, 0, steps=30)
    found = soak_runs.run(setting, tmp_path, expected)
    assert found["problem"] == "" and found["looked_for"] == soak_left.LOOKED_FOR
    assert [fault["kind"] for fault in found["faults"]] == list(SHORT)
    assert all(fault["outcome"] == "went on" for fault in found["faults"])


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
