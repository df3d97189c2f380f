"""The machines of a cluster, for people: which they are (`phalanx launch hosts`), and one command on all of them
(`phalanx launch run`), as for looking at their devices or for ending what was left behind.

Which machines is said by a list or a file, by PHALANX_HOSTS, or by SLURM. Commands go over ssh; nothing here starts
ranks, which torchrun, srun and mpirun do.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from phalanx.errors import ConfigError

WORDS = ("hosts", "run")
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_SAY = "name them with --hosts node0,node1, a file with one per line, or PHALANX_HOSTS"


def main(word: str, arguments: Sequence[str]) -> int:
    """`phalanx launch hosts …` or `phalanx launch run …`; the exit code."""
    given = _parser(word).parse_args(list(arguments))
    hosts = find_hosts(given.hosts, os.environ)
    if word == "run":
        if not given.command:
            raise ConfigError("launch run: there is no command", "phalanx launch run nvidia-smi")
        return run_on_all(hosts, given.command, given.ssh)
    print(variables(hosts) if given.env else "\n".join(_address(host) for host in hosts))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.removeprefix('phalanx ')}: {message}", f"{self.prog} --help lists what there is")


def _parser(word: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"phalanx launch {word}", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", help="names, with commas between them, or a file with one per line")
    if word == "hosts":
        parser.add_argument("--env", action="store_true", help="as MY_IPADDR, OTHERS_IPADDR and ALL_IPADDR for a shell")
    else:
        parser.add_argument("--ssh", default=SSH, help=f"how a machine is reached (default: {SSH})")
        parser.add_argument("command", nargs=argparse.REMAINDER, help="what every machine runs")
    return parser


def find_hosts(given: str | None, environment: Mapping[str, str]) -> list[str]:
    """The first is where ranks meet."""
    named = given or environment.get("PHALANX_HOSTS")
    if named:
        path = Path(named).expanduser()
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else named.split(",")
        found = [
            line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip()
        ]  # a slot count may follow
    elif nodes := environment.get("SLURM_JOB_NODELIST"):
        found = slurm_hosts(nodes)
    else:
        found = [socket.gethostname()]
    if wrong := [host for host in found if host.startswith("-")]:  # ssh would take it for an option
        raise ConfigError(f"launch: {wrong[0]!r} is not the name of a machine", _SAY)
    if not found:
        raise ConfigError(f"launch: {named!r} names no machine", _SAY)
    return list(dict.fromkeys(found))


def slurm_hosts(nodes: str) -> list[str]:
    """All hosts of a SLURM node list: 'gpu[07-09,12],cpu3' → gpu07, gpu08, gpu09, gpu12, cpu3."""
    found: list[str] = []
    for begin, ranges, end in re.findall(r"([^\[,]+)(?:\[([^\]]+)\])?([^\[,]*)", nodes):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            is_range = first.isdecimal() and last.isdecimal()
            names = [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)] if is_range else [part]
            found += [f"{begin}{name}{end}" for name in names]
    return found


def slurm_counts(counts: str) -> list[int]:
    """How many tasks each node has: '2(x3),1' → 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]


def variables(hosts: Sequence[str]) -> str:
    """Lines for a shell: `eval "$(phalanx launch hosts --env)"`."""
    addresses = [_address(host) for host in hosts]
    mine = next((address for host, address in zip(hosts, addresses, strict=True) if is_here(host)), "")
    others = [address for address in addresses if address != mine]
    values = {"MY_IPADDR": mine, "OTHERS_IPADDR": " ".join(others), "ALL_IPADDR": " ".join(addresses)}
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"launch: no address is known of {host!r}: {error}", _SAY) from error


def is_here(host: str) -> bool:
    """Whether this is the machine at hand."""
    own = socket.gethostname()
    return host in ("localhost", "127.0.0.1", own, own.partition(".")[0]) or host == socket.getfqdn()


def run_on_all(hosts: Sequence[str], command: Sequence[str], ssh: str = SSH) -> int:
    """At the same time; every line with its host's name before it. The exit code: 0, or that of the first host whose
    command failed."""
    width = max(map(len, hosts))
    processes = {host: _started(host, command, ssh) for host in hosts}
    readers = [
        threading.Thread(target=_show, args=(process, f"{host:{width}}  ")) for host, process in processes.items()
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    codes = {host: process.wait() for host, process in processes.items()}
    for host, code in codes.items():
        if code:
            print(f"{host:{width}}  ended with exit code {code}", file=sys.stderr)
    return next((code if code > 0 else 128 - code for code in codes.values() if code), 0)


def _started(host: str, command: Sequence[str], ssh: str) -> subprocess.Popen[str]:
    """A command of one word is a line for a shell; ssh always gives one to a shell."""
    line = command[0] if len(command) == 1 else shlex.join(command)
    words = ["sh", "-c", line] if is_here(host) else [*shlex.split(ssh), host, line]
    try:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, errors="replace")  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"launch run: {words[0]!r} cannot be started: {error.strerror}", "install it, or name another with --ssh"
        ) from error


def _show(process: subprocess.Popen[str], before: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(before + line, end="" if line.endswith("\n") else "\n", flush=True)
