"""One process per rank: on its node, on its cores, with the variables that torchrun would set.

So any command that can be started by torchrun runs in a lab, `phalanx train` among them. What happens to the processes
afterwards is the session's business.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_OF_LAUNCHERS = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "SLURM_", "PMI_", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")


@dataclass(frozen=True)
class Place:
    """Where a rank is and what it may use."""

    rank: int
    world: int
    node: int
    num_nodes: int
    local_rank: int
    local_world: int
    cores: tuple[int, ...]


@dataclass
class Rank:
    """A started rank. `stopped` and `killed`: by a disturbance, so that it is no failure of the job."""

    place: Place
    process: subprocess.Popen[bytes]
    log: Path | None  # None: its output is shown
    stopped: bool = False
    killed: bool = False
    ended: bool = False

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + the signal that ended it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def send(self, number: int) -> None:
        """A signal to the rank and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kill what is left of the rank."""
        # Once only: later the number may be another process's.
        if not self.ended:
            self.send(signal.SIGKILL)
            self.process.wait()
        self.ended = True

    def pids(self) -> list[int]:
        """The rank's process and those it started."""
        found: list[int] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) == self.process.pid:
                    found.append(int(stat.parent.name))
        return found

    def last_output(self, num_lines: int = 15) -> list[str]:
        if self.log is None:
            return []
        return self.log.read_text(errors="replace").splitlines()[-num_lines:]


def assign_cores(cores: Sequence[int], rank: int, threads: int) -> tuple[int, ...]:
    """The cores of a rank: its own as long as there are enough, then those of others."""
    return tuple(sorted({cores[(rank * threads + index) % len(cores)] for index in range(threads)}))


def torchrun_variables(place: Place, address: str, port: int, interface: str) -> dict[str, str]:
    """What torchrun would tell this rank, and which interface to use."""
    numbers = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world,
        "GROUP_RANK": place.node,
        "GROUP_WORLD_SIZE": place.num_nodes,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": len(place.cores),
    }
    texts = {
        "MASTER_ADDR": address,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "RES_OPTIONS": "timeout:1 attempts:1",  # no name server answers inside, and torch asks for its peers' names
    }
    return {**{name: str(number) for name, number in numbers.items()}, **texts}


def without_launchers(variables: Mapping[str, str]) -> dict[str, str]:
    """Drops what a launcher of the lab itself said: inside it is not true."""
    return {name: value for name, value in variables.items() if not name.startswith(_OF_LAUNCHERS)}


def start(place: Place, command: list[str], variables: Mapping[str, str], log: Path | None) -> Rank:
    """Start a rank. It ends with the thread that started it, so that nothing is left when a lab is killed."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def settle() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        os.sched_setaffinity(0, place.cores)

    output = log.open("wb") if log else None
    try:
        # A session of its own keeps the terminal's Ctrl-C away: the lab passes it on.
        process = subprocess.Popen(
            command, env=dict(variables), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, preexec_fn=settle,
        )  # fmt: skip
    finally:
        if output:
            output.close()
    return Rank(place, process, log)
