"""`phalanx launch hosts` and `phalanx launch run`: the machines of a cluster, for people."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.launch import hosts

OTHER = "192.0.2.7"  # of no machine


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ("node0,node1", {"PHALANX_HOSTS": "unused"}, ["node0", "node1"]),
        (None, {"PHALANX_HOSTS": "node0,node0,node1", "SLURM_JOB_NODELIST": "unused"}, ["node0", "node1"]),
        (None, {"SLURM_JOB_NODELIST": "gpu[07-09,12]-ib,cpu3"},
         ["gpu07-ib", "gpu08-ib", "gpu09-ib", "gpu12-ib", "cpu3"]),
        (None, {}, [socket.gethostname()]),
    ],
)  # fmt: skip
def test_machines_are_named_by_a_list_the_environment_or_slurm(
    given: str | None, environment: dict[str, str], expected: list[str]
) -> None:
    assert hosts.find_hosts(given, environment) == expected


def test_a_file_of_hosts_may_hold_remarks_and_slots(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two nodes\nnode0 slots=8\n\nnode1 slots=8  # slow\n")
    assert hosts.find_hosts(str(tmp_path / "hosts"), {}) == ["node0", "node1"]


def test_addresses_are_printed_one_per_line_or_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "hosts", "--hosts", f"127.0.0.1,{OTHER}"]) == 0
    assert capsys.readouterr().out.split() == ["127.0.0.1", OTHER]
    assert main(["launch", "hosts", "--hosts", f"127.0.0.1,{OTHER}", "--env"]) == 0
    expected = ["export MY_IPADDR=127.0.0.1", f"export OTHERS_IPADDR={OTHER}", f"export ALL_IPADDR='127.0.0.1 {OTHER}'"]
    assert capsys.readouterr().out.splitlines() == expected


def ssh(folder: Path) -> str:
    """One that shows what it was asked for, and then does it."""
    path = folder / "ssh"
    path.write_text('#!/bin/sh\necho "over $1"\nexec sh -c "$2"\n')
    path.chmod(0o755)
    return str(path)


def test_a_command_runs_on_every_machine_with_its_name_before_each_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["launch", "run", "--hosts", "localhost,node1", "--ssh", ssh(tmp_path), "printf", "%s\\n", "two words"]
    assert main(line) == 0
    said = sorted(capsys.readouterr().out.splitlines())
    assert said == ["localhost  two words", "node1      over node1", "node1      two words"]


def test_the_code_of_the_first_machine_that_failed_is_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "run", "--hosts", "localhost,node1", "--ssh", ssh(tmp_path), "exit 3"]) == 3
    assert "node1      ended with exit code 3" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        (["hosts", "--hosts", ","], "',' names no machine", "--hosts node0,node1"),
        (["hosts", "--hosts=-oProxyCommand=x"], "'-oProxyCommand=x' is not the name of a machine", "--hosts"),
        (["hosts", "--hosts", "no.such.invalid"], "no address is known of 'no.such.invalid'", "--hosts"),
        (["hosts", "--envy"], "unrecognized arguments: --envy", "phalanx launch hosts --help"),
        (["run"], "there is no command", "phalanx launch run nvidia-smi"),
        (["run", "--hosts", "node1", "--ssh", "no-such-ssh", "ls"], "'no-such-ssh' cannot be started", "--ssh"),
    ],
)
def test_what_cannot_be_done_on_machines_says_why(line: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hosts.main(line[0], line[1:])
    assert message in caught.value.message and hint in caught.value.hint
