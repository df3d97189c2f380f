"""The processes of a run that `faults.py` strikes: starting, finding and clearing them; what they said and logged."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import faults_job
from faults_nursery import Child, Nursery

from phalanx.errors import PhalanxError
from phalanx.launch.worker_pool import WorkerPool

ROOT = Path(__file__).parent.parent
JOB = Path(__file__).parent / "faults_job.py"
SILENCE = 6.0  # seconds


@dataclass(frozen=True)
class Helpers:
    """What runs are started by, and ranks that runs go on with."""

    nursery: Nursery
    pool: WorkerPool


@dataclass
class Run:
    """The processes of one run. out: its folder; number: of its first job."""

    mode: str
    plan: str
    out: Path
    number: int
    helpers: Helpers
    link: str = ""  # as fast as this, between ranks that are joined on nodes of their own in a lab
    children: list[Child] = field(default_factory=list)

    @property
    def trigger(self) -> Path:
        return self._beside("unreadable")

    def _beside(self, name: str) -> Path:
        return self.out.parent / f"{self.out.name}-{name}"

    def start(self, steps: int) -> None:
        job = [str(self.out), self.plan, str(steps), str(self.trigger), str(SILENCE)]
        if self.link:
            lab = ["lab", f"nodes=2,ranks_per_node=1,link={self.link}", "--", sys.executable, str(JOB)]
            starts = [([*lab, *job], {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})]
        elif self.mode == "joined":
            starts = [(job, variables) for variables in self._variables()]
        else:
            starts = [(job, {})]
        self.children = [
            self.helpers.nursery.start(arguments, variables, self._beside(f"{number}.said"))
            for number, (arguments, variables) in enumerate(starts)
        ]

    def _variables(self) -> list[dict[str, str]]:
        """What SLURM would set for each rank."""
        self.number += 1
        job = {"SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}
        job["SLURM_JOB_ID"] = f"{os.getpid()}{self.number:05}"
        return [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **job} for rank in range(2)]

    def go_on(self, steps: int) -> bool:
        """To so many steps, on ranks that are there already, which spares their start; whether it got there."""
        from phalanx.training.job import pack
        from phalanx.training.trainer import fit_on_rank

        trainer = faults_job.trainer(str(self.out), self.plan, steps, str(self.trigger), SILENCE)
        try:
            with pack(trainer.job) as payload:
                self.helpers.pool.run(fit_on_rank, payload)
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

    def wait_for_step(self, step: int, seconds: float = 300.0) -> bool:
        """Whether it got there; False where it ended before."""
        deadline = time.monotonic() + seconds
        while max(self.losses(), default=0) < step:
            if any(child.code is not None for child in self.children):
                return False
            assert time.monotonic() < deadline, "the ranks did not get under way"
            time.sleep(0.05)
        return True

    def everyone(self) -> list[int]:
        """All processes of the run that are there."""
        found: list[int] = []
        for child in self.children:
            found += [child.pid, *descendants(child.pid)]
        return found

    def ranks(self) -> list[int]:
        if self.mode == "joined":
            return [child.pid for child in self.children]
        (main,) = self.children
        started = [pid for pid in descendants(main.pid) if len(ancestors(pid, main.pid)) == 2]
        return [pid for pid in started if os.readlink(f"/proc/{pid}/fd/1") != os.devnull]  # the store says nothing

    def end(self, seconds: float, everyone: Sequence[int] = ()) -> bool:
        """Whether all ended by themselves in time; a rank that was stopped for good is only killed by its launcher."""
        deadline = time.monotonic() + seconds
        pids = [*everyone, *(child.pid for child in self.children)]
        while not (gone := all(map(_is_gone, pids))) and time.monotonic() < deadline:
            time.sleep(0.1)
        return gone

    def said(self) -> str:
        return "\n".join(child.said.read_text(errors="replace") for child in self.children if child.said.exists())

    def clear(self, pids: Sequence[int]) -> list[int]:
        """Kills what is left of these processes of ours; those that nobody should have left."""
        left = [pid for pid in pids if not _is_gone(pid, stopped=False)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self.children:
            child.wait()
        return left


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
