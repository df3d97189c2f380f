"""Descriptions of labs and time lines of disturbances: what is read, and what a mistake is answered with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.lab.script import (
    EXAMPLE,
    AddRank,
    CutLink,
    Event,
    KillRank,
    RestoreRank,
    SlowLink,
    SlowRank,
    StopRank,
    read_script,
)
from phalanx.lab.session import assign_cores
from phalanx.lab.spec import FASTEST, SLOWEST, LabSpec, rate_text, read_rate

FOUR = LabSpec(nodes=2, ranks_per_node=2, link=10**9)


def test_a_line_describes_a_cluster():
    assert LabSpec.read("nodes=2, ranks_per_node=2,link=1gbit,device=cpu:1thread") == LabSpec(2, 2, 10**9, 1)
    assert LabSpec.read("ranks=4,gpu_share=25%") == LabSpec(1, 4, gpu_share=25)
    assert LabSpec.read("ranks=4,nodes=2,device=cpu") == LabSpec(2, 2)
    assert LabSpec.read("ranks=8,compute=timed") == LabSpec(1, 8, timed=True)
    assert LabSpec.read("ranks=8,compute=real") == LabSpec(1, 8)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_says_the_same_as_a_line(tmp_path: Path, suffix: str):
    path = tmp_path / f"lab.{suffix}"
    lines = {"yaml": "nodes: 2\nranks_per_node: 2\nlink: 1gbit\n"}
    path.write_text(lines.get(suffix, '{"nodes": 2, "ranks_per_node": 2, "link": "1gbit"}'))
    assert LabSpec.read(str(path)) == FOUR


@given(
    st.integers(1, 250), st.integers(1, 16), st.none() | st.integers(SLOWEST, FASTEST),
    st.none() | st.integers(1, 999), st.none() | st.integers(1, 100), st.booleans(),
)  # fmt: skip
def test_a_description_is_read_back_from_its_own_text(
    nodes: int, per_node: int, link: int | None, threads: int | None, share: int | None, timed: bool
):
    of_cpus = share is None
    spec = LabSpec(
        nodes, per_node, link if nodes > 1 else None, threads if of_cpus else None, share, timed and of_cpus
    )  # fmt: skip
    assert LabSpec.read(str(spec)) == spec


@given(st.integers(SLOWEST, FASTEST))
def test_a_rate_is_read_back_from_its_own_text(rate: int):
    assert read_rate("link", rate_text(rate)) == rate


@pytest.mark.parametrize(
    ("text", "rate"), [("1gbit", 10**9), ("2.5 Gbit", 2_500_000_000), ("100MB/s", 8 * 10**8), ("64kbit", 64_000)]
)
def test_rates_are_written_in_bits_or_bytes(text: str, rate: int):
    assert read_rate("link", text) == rate


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "the description is empty", "nodes=2"),
        ("nodes", "'nodes' is not name=value", "write for example nodes=2"),
        ("nodes=", "'nodes=' is not name=value", "write for example"),
        ("node=2", "unknown field 'node'", "did you mean 'nodes'"),
        ("nodes=2,nodes=2", "'nodes' is given twice", "once"),
        ("nodes=0", "nodes=0 is not a number of nodes", "1 … 250"),
        ("nodes=two", "nodes=two is not a number of nodes", "1 … 250"),
        ("ranks_per_node=-1", "ranks_per_node=-1 is not a number of ranks", "1 … 4096"),
        ("ranks=3,nodes=2", "ranks=3 cannot be spread evenly over nodes=2", "multiple"),
        ("ranks=2,ranks_per_node=2", "both ranks and ranks_per_node", "one of them"),
        ("nodes=2,link=fast", "link=fast is not a rate", "units: kbit"),
        ("nodes=2,link=1gbt", "link=1gbt is not a rate", "did you mean 'gbit'"),
        ("nodes=2,link=1kbit", "link=1kbit is outside", "10kbit … 100gbit"),
        ("link=1gbit", "link is given, but one node has no links", "nodes=2"),
        ("nodes=2,latency=1ms", "'latency' is not offered", "netem"),
        ("device=tpu", "device=tpu is not a device", "cpu:1thread"),
        ("device=cpu:0threads", "device=cpu:0threads is not a device", "cpu:1thread"),
        ("device=cuda", "device=cuda is not a device", "gpu_share=25%"),
        ("gpu_share=25", "gpu_share=25 is not a share", "1% … 100%"),
        ("gpu_share=101%", "gpu_share=101% is not a share", "1% … 100%"),
        ("compute=fake", "compute=fake is neither real nor timed", "compute=timed"),
        ("gpu_share=50%,compute=timed", "compute=timed and gpu_share are both given", "leave one of them out"),
        ("gpu_share=50%,device=cpu", "device=cpu and gpu_share are both given", "one of them"),
    ],
)
def test_a_mistake_in_a_description_is_named(text: str, message: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        LabSpec.read(text)
    assert message in caught.value.message and hint in caught.value.hint


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path):
    path = tmp_path / "lab.yaml"
    path.write_text("nods: 2\n")
    with pytest.raises(ConfigError, match=r"lab: .*lab\.yaml: unknown field 'nods'"):
        LabSpec.read(str(path))
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read"):
        LabSpec.read(str(tmp_path / "nowhere.json"))


def test_ranks_get_cores_of_their_own_while_there_are_any():
    assert [assign_cores((2, 3, 5, 7), rank, 2) for rank in range(3)] == [(2, 3), (5, 7), (2, 3)]
    assert [assign_cores((0, 1), rank, 1) for rank in range(3)] == [(0,), (1,), (0,)]


def test_a_script_puts_disturbances_on_a_time_line():
    script = read_script("20s kill rank=3; 0.5min stop_rank rank=0;500ms slow_link node=1 rate=100mbit", FOUR)
    assert script == (
        Event(0.5, SlowLink(1, 10**8)),
        Event(20.0, KillRank(3)),
        Event(30.0, StopRank(0)),
    )
    assert [event.disturbance for event in read_script("1s cut_link node=1", FOUR)] == [CutLink(1)]
    assert len(read_script(EXAMPLE, FOUR)) == 3 and read_script("", FOUR) == ()


def test_a_script_may_stand_in_a_file_with_comments(tmp_path: Path):
    path = tmp_path / "script.txt"
    path.write_text("# one slow rank\n1s slow_rank rank=1 share=50%  # half\n\n2s restore_rank rank=1\n3s add node=1\n")
    events = [SlowRank(1, 50), RestoreRank(1), AddRank(1)]
    assert [event.disturbance for event in read_script(str(path), FOUR)] == events
    path.write_text("1s slow rank=1")
    with pytest.raises(ConfigError, match=r"script\.txt: script: '1s slow rank=1': lacks share"):
        read_script(str(path), FOUR)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("5s", "is not a moment and a disturbance", "5s slow_link"),
        ("soon kill rank=1", "'soon' is not a moment", "5s, 500ms or 2min"),
        ("5h kill rank=1", "'5h' is not a moment", "5s, 500ms or 2min"),
        ("5s slow_lnk node=1 rate=1mbit", "unknown disturbance 'slow_lnk'", "did you mean 'slow_link'"),
        ("5s slow_link node=1", "lacks rate", "slow_link node=1 rate=100mbit"),
        ("5s kill rank=1 node=1", "'node=1' does not belong here", "kill_rank rank=0"),
        ("5s kill rank=1 rank=1", "'rank=1' does not belong here", "kill_rank rank=0"),
        ("5s kill rank=x", "rank=x is not a number", "ranks are numbered from 0"),
        ("5s slow_link node=1 rate=1", "rate=1 is not a rate", "units"),
        ("5s slow rank=1 share=100%", "share=100% is not a share", "5% … 99%"),
        ("5s kill rank=4", "there is no rank 4 then", "rank=0 … rank=3"),
        ("5s add node=0; 4s kill rank=4", "there is no rank 4 then", "rank=0 … rank=3"),
        ("5s slow_link node=2 rate=1mbit", "there is no node 2", "node=0 … node=1"),
    ],
)
def test_a_mistake_in_a_script_is_named(text: str, message: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        read_script(text, FOUR)
    assert message in caught.value.message and hint in caught.value.hint


def test_an_added_rank_can_be_disturbed_afterwards():
    assert len(read_script("5s add node=0; 6s kill rank=4", FOUR)) == 2


def test_what_a_lab_does_not_have_cannot_be_disturbed():
    with pytest.raises(ConfigError, match="one node has no links"):
        read_script("5s slow_link node=0 rate=1mbit", LabSpec(1, 2))
    with pytest.raises(ConfigError, match="one node has no links"):
        read_script("5s cut_link node=0", LabSpec(1, 2))
    with pytest.raises(ConfigError, match="GPU share of a rank that runs cannot be changed"):
        read_script("5s slow rank=0 share=50%", LabSpec(1, 2, gpu_share=50))


def test_descriptions_and_scripts_need_no_torch():
    code = "import sys, phalanx.cli.lab, phalanx.lab.run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
