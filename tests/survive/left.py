"""What a process has that could be left behind by what it started."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from soak_checks import descendants, runs, session_of
from soak_left import listening, shared_memory

from phalanx.launch.worker_pool import WorkerPool

_FILES = 3  # more that this process may have open: the connection to a store that the pool's first job made


@dataclass(frozen=True)
class Seen:
    """What this process has: numbers of processes, ports, pieces of shared memory, how many open files."""

    processes: frozenset[int]
    ports: frozenset[int]
    shared: frozenset[str]
    num_files: int

    @classmethod
    def now(cls, pool: WorkerPool | None) -> Seen:
        """Processes include those that ranks started, whose parents are gone, but not what the pool keeps for ranks."""
        gc.collect()
        found = set(descendants(os.getpid()))
        if pool is not None:
            server, store = pool.processes._server.pid, pool.processes._store  # type: ignore[union-attr]
            found = (found | session_of(server)) - {server, store.pid if store is not None else 0}
        running = frozenset(pid for pid in found if runs(pid))
        shared, ports = frozenset(shared_memory()), frozenset(listening(os.getpid()))
        return cls(running, ports, shared, len(os.listdir("/dev/fd")))

    def left_since(self, before: Seen) -> list[str]:
        """In words."""
        more = self.num_files - before.num_files
        return [
            *(f"process {pid} runs on" for pid in self.processes - before.processes),
            *(f"port {port} is open" for port in self.ports - before.ports),
            *(f"{name} is in shared memory" for name in self.shared - before.shared),
            *([f"{more} more files are open"] if more > _FILES else []),
        ]
