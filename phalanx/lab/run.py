"""A lab: a virtual cluster on this machine in which any command runs as if on that cluster.

Everything it makes on this machine (namespaces, the GPU service, control groups, folders) carries its name, is removed
when the `with` block or the process ends, and by the next lab when the process was killed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from phalanx.errors import ConfigError
from phalanx.lab import gpu, network, owned, slowdown
from phalanx.lab.network import Loopback, Network, NoNetworkError
from phalanx.lab.script import OfLinks, Script, read_script
from phalanx.lab.session import (
    Place,
    Rank,
    Session,
    assign_cores,
    start_process,
    torchrun_variables,
    without_launchers,
)
from phalanx.lab.spec import TIMED, LabSpec, rate_text
from phalanx.launch.store import SECRET_VARIABLE, new_secret
from phalanx.planning.cluster import NETWORK_VARIABLE

GRACE_SECONDS = 30.0
VARIABLE = "PHALANX_LAB"  # tells a command inside what it runs in, notes included, for its reports
_PORT = 29500
_LOGS = ".logs"


def _to_stderr(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


class Lab:
    """Use it in a `with` statement. `effective` is what this machine can provide of `spec`, `notes` say what it cannot.

    logs: folder for the output of all ranks but the first, and for the log of events (default: kept until the end).
    say: gets a line for every event. grace: seconds that ranks get to leave after one has failed, or after Ctrl-C.
    """

    def __init__(
        self,
        spec: LabSpec | str,
        *,
        logs: Path | None = None,
        say: Callable[[str], None] = _to_stderr,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.spec = LabSpec.read(spec) if isinstance(spec, str) else spec
        self.effective, self.notes = self.spec, list[str]()
        self._given_logs, self._say, self._grace = logs, say, grace
        self._stack = ExitStack()

    def __enter__(self) -> Lab:
        if sys.platform != "linux":
            raise ConfigError(f"lab: needs Linux, and this is {sys.platform}", "train on plain local ranks: --ranks 2")
        sweep()
        self._name, self._secret = owned.new_name(), new_secret().hex()
        self._cores = tuple(sorted(os.sched_getaffinity(0)))
        self._threads = self._count_threads()
        atexit.register(self.close)
        try:
            self.logs = self._open_logs()
            self.network = self._open_network()
            self._variables = self._open_devices()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything the lab made."""
        atexit.unregister(self.close)
        self._stack.close()

    def run(self, command: Sequence[str], script: Script | str = ()) -> int:
        """Run a command on all ranks; 0, or the exit code of the rank that failed first."""
        events = read_script(script, self.spec) if isinstance(script, str) else script
        if any(isinstance(event.disturbance, OfLinks) for event in events):
            self.network.require_links()
        with self.start(command) as session:
            return session.wait(events)

    def start(self, command: Sequence[str]) -> Session:
        """Start a command on all ranks. Wait for the session, or close it."""
        argv, port = find_command(command), self._free_port()

        def start_rank(rank: int, world: int, node: int, local_rank: int) -> Rank:
            local_world = max(local_rank + 1, self.spec.ranks_per_node)
            cores = assign_cores(self._cores, rank, self._threads)
            place = Place(rank, world, node, self.spec.nodes, local_rank, local_world, cores)
            log = self.logs / f"rank-{rank}.log" if rank else None
            return start_process(place, [*self.network.enter(node), *argv], self._environment(place, port), log)

        session = Session(
            self._name, self.spec, self.network, start_rank, logs=self.logs, say=self._say, grace=self._grace
        )
        self._stack.callback(session.close)
        return session

    def describe(self) -> list[str]:
        """What the lab is, and what of it is not as asked for: for every report about what ran in it."""
        return [str(self.effective), *(f"note: {note}" for note in self.notes)]

    def _environment(self, place: Place, port: int) -> Mapping[str, str]:
        variables = without_launchers(os.environ)
        variables |= torchrun_variables(place, self.network.address(0), port, self.network.interface)
        variables |= {SECRET_VARIABLE: self._secret, **self._variables}
        if self.spec.gpu_share is not None:
            variables |= gpu.rank_variables(place.rank, self.network.interface)
        if self.spec.timed:
            variables[TIMED] = "1"
        variables.pop(NETWORK_VARIABLE, None)  # of the machine that the lab is on
        if self.effective.link is not None:
            variables[NETWORK_VARIABLE] = f"{self.effective.link / 8e9:.12g}GB/s"
        return {**variables, VARIABLE: "; ".join(self.describe())}

    def _count_threads(self) -> int:
        """Threads per rank."""
        wanted, cores = self.spec.threads, len(self._cores)
        if wanted is not None and wanted > cores:
            raise ConfigError(
                f"lab: device=cpu:{wanted}threads, but this machine has {cores} cores", f"use 1 … {cores} threads"
            )
        threads = wanted or max(1, cores // self.spec.ranks)
        if self.spec.timed:
            self.notes.append(
                "timed: ranks that train wait as long as each block took them alone, one after the other, instead of "
                "computing; messages are real, losses and weights mean nothing"
            )
        elif self.spec.gpu_share is None and threads * self.spec.ranks > cores:
            self.notes.append(
                f"{self.spec.ranks} ranks of {threads} thread{'s' if threads > 1 else ''} share {cores} cores, so they "
                "slow each other down; compute=timed replaces computation by waits of the right length"
            )
        if (self.spec.gpu_share or 0) * self.spec.ranks > 100:
            self.notes.append(f"{self.spec.ranks} × {self.spec.gpu_share}% is more than one GPU: ranks compete for it")
        if self.spec.gpu_share is not None and self.spec.gpu_share not in gpu.PROVEN:
            proven = ", ".join(f"{share}%" for share in gpu.PROVEN)
            self.notes.append(
                f"gpu_share={self.spec.gpu_share}%: matrix products have come out wrong at some shares (40% "
                f"of an H200); {proven} were right: check results"
            )
        return threads

    def _open_logs(self) -> Path:
        if self._given_logs is not None:
            self._given_logs.mkdir(parents=True, exist_ok=True)
            return self._given_logs
        folder = Path(tempfile.gettempdir()) / f"{self._name}{_LOGS}"
        folder.mkdir(mode=0o700)
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _open_network(self) -> Network | Loopback:
        if self.spec.nodes == 1:
            return Loopback("one node has no links")
        try:
            opened = Network(self._name, self.spec.nodes, self.spec.link)
        except NoNetworkError as error:
            limit = f"not limited to {rate_text(self.spec.link)}" if self.spec.link else "this machine's loopback"
            self.notes.append(f"no network namespaces ({error}): links are {limit}")
            self.effective = replace(self.spec, link=None)
            return Loopback(str(error))
        self._stack.callback(opened.close)
        return opened

    def _open_devices(self) -> Mapping[str, str]:
        if self.spec.gpu_share is None:
            return {"CUDA_VISIBLE_DEVICES": ""}  # a cluster of CPUs shows no GPU, whatever this machine has
        return self._stack.enter_context(gpu.shared_gpu(self._name, self.spec.gpu_share))

    def _free_port(self) -> int:
        if isinstance(self.network, Network):
            return _PORT  # nodes have all ports to themselves
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return free.getsockname()[1]


def find_command(command: Sequence[str]) -> list[str]:
    """The command as it is started; `phalanx` is the one that runs the lab, wherever it is installed."""
    if not command:
        raise ConfigError("lab: no command is given", 'write it after --: phalanx lab "nodes=2" -- phalanx train …')
    if command[0] == "phalanx":
        return [sys.executable, "-m", "phalanx", *command[1:]]
    if shutil.which(command[0]) is None:
        raise ConfigError(f"lab: there is no program {command[0]!r}", "give its path, or install it")
    return list(command)


def sweep() -> None:
    """Remove what labs left behind whose process was killed."""
    network.sweep()
    gpu.sweep()
    slowdown.sweep()
    for folder in Path(tempfile.gettempdir()).glob(f"{owned.PREFIX}.*{_LOGS}"):
        if owned.is_abandoned(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
