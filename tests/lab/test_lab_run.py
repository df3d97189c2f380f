"""Commands in labs that need no privilege: where ranks are, how a run ends, what disturbances do to ranks."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.lab import slowdown
from phalanx.lab.run import Lab
from phalanx.lab.script import AddRank, ContinueRank, KillRank, RestoreRank, SlowRank, StopRank
from phalanx.lab.session import EVENTS_FILE, Session
from phalanx.lab.slowdown import Quota
from tests.lab.labs import is_gone, python, start_cli, wait_for

TELL = """import json
with open(f'{sys.argv[1]}/{rank}', 'w') as file:
    json.dump({**os.environ, 'cores': sorted(os.sched_getaffinity(0))}, file)
"""
SLEEP = "open(f'{sys.argv[1]}/{rank}', 'w').close(); time.sleep(600)"
SPIN = "open(f'{sys.argv[1]}/{rank}', 'w').close()\nwhile True: pass"


@pytest.fixture
def said() -> list[str]:
    return []


def told(folder: Path, rank: int) -> dict[str, object]:
    return json.loads((folder / str(rank)).read_text())


def wait_for_ranks(folder: Path, *ranks: int) -> None:
    wait_for(lambda: all((folder / str(rank)).exists() for rank in ranks), "a rank did not start")


def test_every_rank_finds_the_variables_of_torchrun_and_its_own_cores(tmp_path: Path):
    with Lab("ranks=2,device=cpu:1thread") as lab:
        assert lab.run(python(TELL, tmp_path)) == 0
    first, second = told(tmp_path, 0), told(tmp_path, 1)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    for found in (first, second):
        assert shared.items() <= found.items()
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    cores = sorted(os.sched_getaffinity(0))
    assert (first["cores"], second["cores"]) == ([cores[0]], [cores[1 % len(cores)]])


def test_a_launcher_of_the_lab_itself_is_not_seen_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "7")
    with Lab("ranks=1") as lab:
        lab.run(python(TELL, tmp_path))
    assert told(tmp_path, 0)["RANK"] == "0" and "TORCHELASTIC_USE_AGENT_STORE" not in told(tmp_path, 0)


def test_only_the_first_rank_is_heard_and_the_others_are_in_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with Lab("ranks=2", logs=tmp_path) as lab:
        lab.run(python("print('this is', rank)"))
    assert capfd.readouterr().out == "this is 0\n"
    assert (tmp_path / "rank-1.log").read_text() == "this is 1\n"


def test_more_ranks_than_cores_are_noted_in_every_report(tmp_path: Path):
    ranks = len(os.sched_getaffinity(0)) + 1
    with Lab(f"ranks={ranks},device=cpu:1thread") as lab:
        assert "slow each other down" in lab.notes[0] and "compute=timed" in lab.notes[0]
        assert lab.describe()[1] == f"note: {lab.notes[0]}"
        lab.run(python(TELL, tmp_path))
    assert "slow each other down" in str(told(tmp_path, 0)["PHALANX_LAB"])


def test_the_first_rank_that_fails_gives_the_exit_code_and_ends_the_others(said: list[str]):
    with Lab("ranks=2", say=said.append, grace=0.5) as lab:
        code = lab.run(python("print('my reason') if rank else time.sleep(600); sys.exit(3)"))
    assert code == 3
    assert "rank 1 failed with exit code 3\n    my reason" in said[0]
    assert "ending ranks 0: they did not leave within 0.5 s" in said[1]


def test_a_killed_rank_is_no_failure_of_those_that_go_on(tmp_path: Path, said: list[str]):
    code = "time.sleep(600) if rank else time.sleep(1.0)"
    with Lab("ranks=2", say=said.append, logs=tmp_path, grace=0.1) as lab:
        assert lab.run(python(code), "0.2s kill rank=1; 0.4s stop rank=1; 5min stop rank=0") == 0
    texts = [text.split(": ", 1)[1] for text in said]
    assert texts == [
        "rank 1 killed",
        "StopRank(rank=1) came too late: rank 1 had ended",
        "StopRank(rank=0) came too late: all ranks had ended",
    ]
    logged = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [record["event"] for record in logged] == texts and 0.2 <= logged[0]["seconds"] < 5.0


def test_a_rank_that_nobody_will_continue_is_ended_with_the_others(said: list[str]):
    with Lab("ranks=2", say=said.append) as lab:
        assert lab.run(python("time.sleep(600) if rank else time.sleep(0.6)"), "0.1s stop rank=1") == 0
    assert "ending ranks 1: stopped, and all others have ended" in said[-1]


def test_a_stopped_rank_stands_still_until_it_is_continued(tmp_path: Path):
    count = f"{SLEEP.split(';')[0]}\nwhile True: open(sys.argv[1] + '/count', 'a').write('x'); time.sleep(0.01)"
    size = lambda: (tmp_path / "count").stat().st_size  # noqa: E731
    with Lab("ranks=1") as lab, lab.start(python(count, tmp_path)) as session:
        wait_for(lambda: (tmp_path / "count").exists(), "the rank did not start")
        session.disturb(StopRank(0))
        time.sleep(0.1)
        before = size()
        time.sleep(0.3)
        assert size() == before
        session.disturb(ContinueRank(0))
        wait_for(lambda: size() > before, "the rank did not continue")
        session.disturb(StopRank(0))
        session.disturb(ContinueRank(0))
        session.disturb(KillRank(0))
        assert session.wait() == 0


def test_an_added_rank_has_the_next_number_on_its_node(tmp_path: Path):
    with Lab("ranks=2") as lab, lab.start(python(f"{TELL}time.sleep(600)", tmp_path)) as session:
        session.disturb(AddRank(0))
        wait_for(lambda: (tmp_path / "2").exists() and (tmp_path / "2").read_text().endswith("}"), "no rank was added")
        added = told(tmp_path, 2)
        assert session.events[0][1] == "rank 2 added on node 0"
    assert (added["RANK"], added["WORLD_SIZE"], added["LOCAL_RANK"], added["GROUP_RANK"]) == ("2", "3", "2", "0")


def cpu_seconds(session: Session, rank: int, during: float) -> float:
    """Processor time that a rank got in the next `during` seconds."""
    path = Path(f"/proc/{session.ranks[rank].process.pid}/stat")

    def used() -> float:
        return int(path.read_text().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(during)
    return used() - before


@pytest.mark.skipif(slowdown._find_hierarchy() is None, reason="control groups with CPU quotas cannot be written here")
def test_a_quota_leaves_a_rank_its_share_and_is_taken_back(tmp_path: Path):
    with Lab("ranks=1,device=cpu:1thread") as lab, lab.start(python(SPIN, tmp_path)) as session:
        wait_for_ranks(tmp_path, 0)
        group = Path(f"/proc/{session.ranks[0].process.pid}/cgroup")
        before = group.read_text()
        session.disturb(SlowRank(0, 10))
        assert session.events[-1][1] == "rank 0 slowed: quota of 10% of 1 core"
        assert cpu_seconds(session, 0, 1.5) < 0.3
        session.disturb(RestoreRank(0))
        assert group.read_text() == before
        assert session.events[-1][1] == "rank 0 back at full speed"
        session.disturb(SlowRank(0, 50))
        quota = session._slow[0]
        assert isinstance(quota, Quota) and quota._group.is_dir()
    assert not quota._group.exists()


def test_without_quotas_busy_neighbours_slow_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slowdown, "_find_hierarchy", lambda: None)
    with Lab("ranks=1,device=cpu:1thread") as lab, lab.start(python(SLEEP, tmp_path)) as session:
        session.disturb(SlowRank(0, 33))
        assert session.events[-1][1] == "rank 0 slowed: 2 busy neighbours on each of its cores, leaving about 33%"
        busy = [process.pid for process in session._slow[0]._processes]  # pyright: ignore
        core = session.ranks[0].place.cores[0]
        wait_for(lambda: all(os.sched_getaffinity(pid) == {core} for pid in busy), "neighbours are elsewhere")
    assert len(busy) == 2 and all(map(is_gone, busy))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_to_all_ranks(tmp_path: Path, number: int, code: int):
    answer = "lambda number, frame: (open(f'{sys.argv[1]}/got{rank}', 'w'), sys.exit(9))"
    catch = f"import signal\nfor number in (2, 15): signal.signal(number, {answer})"
    process = start_cli("ranks=2", "--", *python(f"{catch}\n{SLEEP}", tmp_path))
    wait_for_ranks(tmp_path, 0, 1)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert (tmp_path / "got0").exists() and (tmp_path / "got1").exists()


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(tmp_path: Path):
    deaf = "import signal; signal.signal(2, signal.SIG_IGN)"
    process = start_cli("ranks=2", "--", *python(f"{deaf}\n{SLEEP}", tmp_path))
    wait_for_ranks(tmp_path, 0, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)  # the grace is longer
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ranks=1"], "no command is given"),
        (["ranks=1", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["rank=1", "--", "true"], "unknown field 'rank'"),
        (["ranks=1", "--script", "1s kill rank=1", "--", "true"], "there is no rank 1 then"),
        (["device=cpu:900threads", "--", "true"], "device=cpu:900threads, but this machine has"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["lab", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_reports_the_lab_and_gives_the_ranks_exit_code(capfd: pytest.CaptureFixture[str]):
    assert main(["lab", "ranks=1,device=cpu:1thread", "--", *python("print('hello'); sys.exit(5)")]) == 5
    shown = capfd.readouterr()
    assert shown.out == "hello\n"
    assert "lab: nodes=1,ranks_per_node=1,device=cpu:1thread" in shown.err and "rank 0 failed" in shown.err


def test_elsewhere_than_on_linux_a_lab_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux, and this is darwin"), Lab("ranks=1"):
        pass


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)


@pytest.mark.parametrize(
    ("ip", "reason"),
    [
        (None, "the program 'ip' (iproute2) is not installed"),
        ("echo 'mount failed: Operation not permitted' >&2; exit 1", "Operation not permitted"),
    ],
)
def test_without_the_privilege_nodes_are_on_unthrottled_loopback_and_it_is_said(
    tmp_path: Path, ip: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
):
    if ip is not None:
        program(tmp_path, "ip", ip)
        program(tmp_path, "tc", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with Lab("nodes=2,link=1gbit,device=cpu:1thread") as lab:
        assert lab.run(python(TELL, tmp_path)) == 0
        [note] = [note for note in lab.notes if "namespaces" in note]
        assert reason in note and "links are not limited to 1gbit" in note
        assert lab.effective.link is None and lab.spec.link == 10**9
        with pytest.raises(ConfigError, match="links cannot be slowed or restored here"):
            lab.run(["true"], "1s slow_link node=1 rate=1mbit")
    found = told(tmp_path, 1)
    assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"], found["GROUP_RANK"]) == ("127.0.0.1", "lo", "1")
    assert "not limited to 1gbit" in str(found["PHALANX_LAB"])
