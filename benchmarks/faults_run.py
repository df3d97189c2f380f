"""The processes of a run that `faults.py` strikes: starting, finding and clearing them; what they said and logged."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import faults_job

from phalanx.errors import PhalanxError
from phalanx.launch.worker_pool import WorkerPool

ROOT = Path(__file__).parent.parent
JOB = Path(__file__).parent / "faults_job.py"
SILENCE = 6.0  # seconds


@dataclass
class Run:
    """The processes of one run. out: its folder."""

    mode: str
    plan: str
    out: Path
    number: int
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    link: str = ""  # as fast as this, between ranks that are joined on nodes of their own in a lab

    @property
    def trigger(self) -> Path:
        return self.out.parent / f"{self.out.name}-unreadable"

    def start(self, steps: int) -> None:
        job = [str(JOB), str(self.out), self.plan, str(steps), str(self.trigger), str(SILENCE)]
        self.number += 1
        if self.link:
            lab = ["-m", "phalanx", "lab", f"nodes=2,ranks_per_node=1,link={self.link}", "--", sys.executable]
            self.processes = [_process([*lab, *job], {})]
        elif self.mode == "joined":
            self.processes = [_process(job, variables) for variables in self._variables()]
        else:
            self.processes = [_process(job, {})]

    def _variables(self) -> list[dict[str, str]]:
        """What SLURM would set for each rank."""
        job = {"SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}
        job["SLURM_JOB_ID"] = f"{os.getpid()}{self.number:05}"
        return [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **job} for rank in range(2)]

    def go_on(self, steps: int, pool: WorkerPool) -> bool:
        """To so many steps, on ranks that are there already, which spares their start; whether it got there."""
        from phalanx.training.job import pack
        from phalanx.training.trainer import fit_on_rank

        trainer = faults_job.trainer(str(self.out), self.plan, steps, str(self.trigger), SILENCE)
        try:
            with pack(trainer.job) as payload:
                pool.run(fit_on_rank, payload)
        except PhalanxError as error:
            print(error, file=sys.stderr)
            return False
        return True

    def losses(self) -> dict[int, float]:
        """Step → loss, as its log says."""
        log = self.out / "log-rank0.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        found: dict[int, float] = {}
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                record = json.loads(line)
                if record["kind"] == "step":
                    found[record["step"]] = record["loss"]
        return found

    def wait_for_step(self, step: int, seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while max(self.losses(), default=0) < step:
            assert all(process.poll() is None for process in self.processes), self.said()
            assert time.monotonic() < deadline, "the ranks did not get under way"
            time.sleep(0.05)

    def everyone(self) -> list[int]:
        """All processes of the run that are there."""
        found: list[int] = []
        for process in self.processes:
            found += [process.pid, *descendants(process.pid)]
        return found

    def ranks(self) -> list[int]:
        if self.mode == "joined":
            return [process.pid for process in self.processes]
        return [pid for pid in descendants(self.processes[0].pid) if len(ancestors(pid, self.processes[0].pid)) == 2]

    def end(self, seconds: float, everyone: Sequence[int] = ()) -> bool:
        """Whether all ended by themselves in time; a rank that was stopped for good is only killed by its launcher."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        while not (gone := all(map(_is_gone, everyone))) and time.monotonic() < deadline:
            time.sleep(0.1)
        return gone and all(process.poll() is not None or state(process.pid) == "T" for process in self.processes)

    def said(self) -> str:
        return "\n".join(
            process.stderr.read() for process in self.processes if process.stderr and process.poll() is not None
        )

    def clear(self, pids: list[int]) -> list[int]:
        """Kills what is left of these processes of ours; those that nobody should have left."""
        left = [pid for pid in pids if not _is_gone(pid, stopped=False)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        return left


def _process(arguments: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables},
        text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip


def descendants(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [below for child in children for below in descendants(child)]


def ancestors(pid: int, root: int) -> list[int]:
    """From a process up to `root`, without itself."""
    found: list[int] = []
    while pid != root:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _is_gone(pid: int, stopped: bool = True) -> bool:
    """Has ended, whether it was waited for or not; or, if asked for, stands still."""
    return state(pid) in ("", "Z", "X", *(["T"] if stopped else []))
