"""One command running in a lab: a process per rank, what is done to them, and how it ends.

Each process runs on its node and its cores with the variables that torchrun would set, so any command that can be
started by torchrun runs in a lab, `phalanx train` among them. The lab is no supervisor: a job whose rank was killed by
a disturbance may go on. A rank that fails by itself ends the others after a while, as torchrun would.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from phalanx.lab.network import Loopback, Network
from phalanx.lab.script import CutLink, Disturbance, Event, RestoreLink, Script, SlowLink, check_disturbance
from phalanx.lab.slowdown import Slowdown, slow_down
from phalanx.lab.spec import LabSpec
from phalanx.launch.signals import StopSignal, stop_signal

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


def start_process(place: Place, command: list[str], variables: Mapping[str, str], log: Path | None) -> Rank:
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


EVENTS_FILE = "events.jsonl"
_TICK_SECONDS = 0.02


class Session:
    """Ranks that run one command. `start_rank(rank, world, node, local_rank)` starts one; made by `Lab.start`.

    Stay on the thread that started it: the ranks end with that thread.
    """

    def __init__(
        self,
        name: str,
        spec: LabSpec,
        network: Network | Loopback,
        start_rank: Callable[[int, int, int, int], Rank],
        *,
        logs: Path,
        say: Callable[[str], None],
        grace: float,
    ) -> None:
        self.spec, self.network, self.ranks = spec, network, list[Rank]()
        self.events: list[tuple[float, str]] = []  # seconds since the start, what was done or seen
        self._name, self._start_rank, self._logs, self._say, self._grace = name, start_rank, logs, say, grace
        self._slow: dict[int, Slowdown] = {}
        self._changed_links: set[int] = set()
        self._failed: Rank | None = None
        self._end_at, self._closed = float("inf"), False
        self._began = time.monotonic()
        try:
            for rank in range(spec.ranks):
                node, local_rank = divmod(rank, spec.ranks_per_node)
                self.ranks.append(start_rank(rank, spec.ranks, node, local_rank))
        except BaseException:
            self.close()
            raise

    @property
    def seconds(self) -> float:
        """Since the ranks were started."""
        return time.monotonic() - self._began

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.running]

    def disturb(self, disturbance: Disturbance) -> None:
        """Do it now, and log it. Undone when the session ends, as far as it can be."""
        check_disturbance(disturbance, self.spec, len(self.ranks))
        rank = getattr(disturbance, "rank", None)
        if rank is not None and not self.ranks[rank].running:
            return self._log(f"{disturbance} came too late: rank {rank} had ended")
        done = disturbance.do(self)
        if isinstance(disturbance, SlowLink | CutLink):
            self._changed_links.add(disturbance.node)
        self._log(done or f"{disturbance}: nothing to do")

    def wait(self, script: Script = ()) -> int:
        """Until all ranks have ended, doing what the script says; 0 or the exit code of the rank that failed first.

        Ctrl-C and SIGTERM are passed on to the ranks once, a second one ends them at once.
        """
        pending = deque(script)
        with stop_signal() as stop:
            while self.running:
                self._do_due(pending)
                self._look(bool(pending))
                self._obey(stop)
                time.sleep(_TICK_SECONDS)
        self._look(False)
        for event in pending:
            self._log(f"{event.disturbance} came too late: all ranks had ended")
        self.close()
        if stop.signals:
            raise KeyboardInterrupt if stop.signals[0] == signal.SIGINT else SystemExit(128 + stop.signals[0])
        return self._failed.exit_code if self._failed else 0

    def close(self) -> None:
        """End what still runs and undo what was done."""
        if self._closed:
            return
        self._closed = True
        self._end_all()
        for node in self._changed_links:
            RestoreLink(node).do(self)
        for rank in list(self._slow):
            self.speed_up(rank)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def slow_down(self, rank: int, percent: int) -> str:
        """Give a rank less of its cores; how, in words."""
        self.speed_up(rank)
        where = self.ranks[rank]
        slowdown = slow_down(f"{self._name}.rank{rank}", where.pids(), where.place.cores, percent)
        self._slow[rank] = slowdown
        return slowdown.how

    def speed_up(self, rank: int) -> bool:
        slowdown = self._slow.pop(rank, None)
        if slowdown:
            slowdown.end()
        return slowdown is not None

    def add_rank(self, node: int) -> int:
        number, local_rank = len(self.ranks), sum(rank.place.node == node for rank in self.ranks)
        self.ranks.append(self._start_rank(number, number + 1, node, local_rank))
        return number

    def _do_due(self, pending: deque[Event]) -> None:
        while pending and pending[0].seconds <= self.seconds:
            self.disturb(pending.popleft().disturbance)

    def _look(self, more_to_come: bool) -> None:
        """Notice the first failure, and ranks that nobody will ever continue."""
        ended = [rank for rank in self.ranks if not rank.running]
        for rank in ended:
            rank.end()
        failed = [rank for rank in ended if rank.exit_code and not rank.killed]
        if failed and self._failed is None:
            self._failed = failed[0]
            self._end_at = min(self._end_at, self.seconds + self._grace)
            failure = f"rank {failed[0].place.rank} failed with exit code {failed[0].exit_code}"
            self._log("\n    ".join([failure, *failed[0].last_output()]))
        if self.seconds > self._end_at and self.running:
            self._log(f"ending ranks {self._numbers()}: they did not leave within {self._grace:g} s")
            self._end_all()
        if self.running and all(rank.stopped for rank in self.running) and not more_to_come:
            self._log(f"ending ranks {self._numbers()}: stopped, and all others have ended")
            for rank in self.running:
                rank.killed = True
            self._end_all()

    def _obey(self, stop: StopSignal) -> None:
        if stop.signals and self._end_at == float("inf"):
            self._end_at = self.seconds + self._grace
            for rank in self.running:
                rank.send(stop.signals[0])
                rank.send(signal.SIGCONT)
        if len(stop.signals) > 1:
            self._end_all()

    def _end_all(self) -> None:
        for rank in self.ranks:
            rank.end()

    def _numbers(self) -> str:
        return ", ".join(str(rank.place.rank) for rank in self.running)

    def _log(self, text: str) -> None:
        seconds = self.seconds
        self.events.append((seconds, text))
        record = {"seconds": round(seconds, 3), "time": time.time(), "event": text}
        with (self._logs / EVENTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._say(f"{seconds:.1f} s: {text}")
