"""Labs whose nodes are network namespaces: rates, training across them, and what is left afterwards: nothing."""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import pytest

from phalanx.lab.run import Lab
from phalanx.lab.script import CutLink, RestoreLink, SlowLink
from tests.lab.labs import is_gone, namespaces_of, needs_namespaces, python, start_cli, wait_for
from tests.run_helpers import SHORT, losses, records, short_run

pytestmark = needs_namespaces

SENDER = str(Path(__file__).parent / "sender.py")
OPTIONS = {"lr": 3e-3, "lr_schedule": "constant", "export": False, "device": "cpu"}
DATA = "synthetic:7"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Step → loss of one rank; makes the capture that the ranks in labs use."""
    out = tmp_path_factory.mktemp("alone")
    short_run("gpt2", DATA, out, **{**OPTIONS, "plan": "mb=2"})
    return losses(out)


def train(out: Path, **options: object) -> list[str]:
    given = {**SHORT, **OPTIONS, "model": "gpt2", "data": DATA, **options, "out": out}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if not isinstance(value, bool)]
    flags += [f"--{'' if value else 'no-'}{name}" for name, value in given.items() if isinstance(value, bool)]
    return ["phalanx", "train", *flags]


def measured_rate(lab: Lab, result: Path, megabytes: int, script: str = "") -> float:
    assert lab.run([sys.executable, SENDER, str(result), str(megabytes)], script) == 0
    return float(result.read_text())


def test_a_link_carries_what_it_is_set_to_within_a_tenth(tmp_path: Path):
    with Lab("nodes=2,link=1gbit,device=cpu:1thread") as lab:
        # Neighbours on a busy machine can only make it slower.
        rate = max(measured_rate(lab, tmp_path / "rate", 40) for _ in range(3))
    assert 0.9e9 < rate < 1.1e9


def test_a_command_is_told_what_the_links_carry(tmp_path: Path):
    with Lab("nodes=2,link=1gbit", logs=tmp_path) as lab:
        assert lab.run(python("print('network', os.environ['PHALANX_NETWORK'])")) == 0
    assert "network 0.125GB/s" in (tmp_path / "rank-1.log").read_text()


def test_a_slowed_link_carries_less_and_the_next_command_finds_it_restored(tmp_path: Path):
    with Lab("nodes=2,link=200mbit") as lab:
        slowed = "0s slow_link node=1 rate=20mbit"
        # What is queued when the rate changes may be sent again, which can only make it slower.
        assert 0.17e8 < max(measured_rate(lab, tmp_path / "rate", 4, slowed) for _ in range(3)) < 0.23e8
        assert measured_rate(lab, tmp_path / "rate", 4) > 0.3e8


@pytest.mark.long
def test_a_link_slowed_while_large_packets_are_queued_goes_on(tmp_path: Path):
    # The receiver gives up when nothing comes for 3 s.
    script = "0.5s slow_link node=1 rate=8mbit; 5s restore_link node=1"
    with Lab("nodes=2,link=1gbit", grace=1) as lab:
        assert lab.run([sys.executable, SENDER, str(tmp_path / "rate"), "120"], script) == 0


def test_a_link_that_was_cut_carries_nothing_until_it_is_restored(tmp_path: Path):
    knock = (
        "import socket\n"
        "def answers():\n"
        "    try: return bool(socket.create_connection((os.environ['MASTER_ADDR'], 7), 0.5))\n"
        "    except ConnectionRefusedError: return True\n"  # by the other node: the link carries
        "    except OSError: return False\n"
        "while True:\n"
        "    open(f'{sys.argv[1]}/{rank}', 'a').write(f'{answers()} ')\n"
        "    time.sleep(0.05)"
    )

    def newest() -> str:
        seen = (tmp_path / "1").read_text().split() if (tmp_path / "1").exists() else []
        return seen[-1] if seen else ""

    with Lab("nodes=2") as lab, lab.start(python(knock, tmp_path)) as session:
        wait_for(lambda: newest() == "True", "the link does not carry")
        session.disturb(CutLink(1))
        wait_for(lambda: newest() == "False", "the link still carries")
        session.disturb(RestoreLink(1))
        wait_for(lambda: newest() == "True", "the link does not carry again")


def test_nodes_see_each_other_and_nothing_else(tmp_path: Path):
    look = "import socket; open(f'{sys.argv[1]}/{rank}', 'w').write(' '.join(n for _, n in socket.if_nameindex()))"
    with Lab("nodes=2,ranks_per_node=2") as lab:
        assert lab.run(python(look, tmp_path)) == 0
        assert lab.network.address(0) != lab.network.address(1)
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["lo eth0"] * 4


def test_a_pipeline_across_two_nodes_has_the_losses_of_one_rank(alone: dict[int, float], tmp_path: Path):
    with Lab("nodes=2,link=1gbit,device=cpu:1thread") as lab:
        assert lab.run(train(tmp_path / "run", plan="pp=2,mb=2")) == 0
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


@pytest.mark.long
def test_a_link_slowed_while_training_slows_the_steps(alone: dict[int, float], tmp_path: Path):
    out, rate = tmp_path / "run", 8_000_000

    def times() -> list[float]:
        log = out / "log-rank0.jsonl"
        return [record["step_seconds"] for record in records(out, "step")] if log.exists() else []

    endless = train(out, plan="dp=2", steps=100_000)
    with Lab("nodes=2,link=1gbit,device=cpu:1thread") as lab, lab.start(endless) as session:
        wait_for(lambda: len(times()) > 12 or not session.running, "training did not start", 120)
        before = len(times())
        session.disturb(SlowLink(1, rate))
        wait_for(lambda: len(times()) > before + 6 or not session.running, "training does not go on", 60)
        assert session.running, session.events
    fast, slow = statistics.median(times()[4:before]), statistics.median(times()[before + 2 :])
    # 214,720 gradients of 4 bytes cross the link once each way, in packets of 1,448 bytes with 66 of headers.
    carried = 214_720 * 32 / rate * (1514 / 1448)
    assert slow - fast == pytest.approx(carried, rel=0.3), (fast, slow)


def test_nothing_is_left_after_a_lab_whether_its_command_succeeded_or_not():
    for code in (0, 1):
        with Lab("nodes=2,link=1gbit", grace=0.1) as lab:
            assert len(namespaces_of(os.getpid())) == 3
            assert lab.run(python(f"sys.exit({code})")) == code
        assert namespaces_of(os.getpid()) == []


def test_what_ranks_leave_running_on_their_nodes_is_ended(tmp_path: Path):
    leave = "import subprocess; left = subprocess.Popen(['sleep', '600'], start_new_session=True)"
    with Lab("nodes=2") as lab:
        assert lab.run(python(f"if rank: {leave}; open(sys.argv[1], 'w').write(str(left.pid))", tmp_path / "pid")) == 0
        assert not is_gone(int((tmp_path / "pid").read_text()))
    wait_for(lambda: is_gone(int((tmp_path / "pid").read_text())), "a process outlived its lab")


def test_after_a_kill_the_ranks_end_and_the_next_lab_removes_the_rest(tmp_path: Path):
    note = "open(f'{sys.argv[1]}/{rank}', 'w').write(f'{os.getpid()}\\n'); time.sleep(600)"
    process = start_cli("nodes=2,link=1gbit", "--", *python(note, tmp_path))
    wait_for(lambda: all(_pid(tmp_path / rank) for rank in "01"), "ranks did not start")
    with Lab("nodes=2"):
        assert len(namespaces_of(process.pid)) == 3, "a living lab was swept away"
    process.kill()
    process.communicate()
    wait_for(lambda: all(is_gone(_pid(tmp_path / rank)) for rank in "01"), "a rank outlived its lab")
    assert len(namespaces_of(process.pid)) == 3
    with Lab("ranks=1"):
        assert namespaces_of(process.pid) == []


def _pid(path: Path) -> int:
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0
