"""Faults at random times: what happens to a training run, and whether it goes on as if nothing had happened.

    python benchmarks/faults.py [--injections 64] [--seed 0] [--only kill] [--out FILE]

Every injection is a run of two real ranks, started by Phalanx itself (pool) or by a launcher (joined), struck at a
random time after its third step. After a fatal fault all processes must be gone in time, a rank be named, and the run,
started again, have the losses of one that nothing happened to, bit by bit. What is not fatal must not end the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
JOB = Path(__file__).parent / "faults_job.py"
MODES = ("pool", "joined")
PLANS = ("pp=2,mb=2", "dp=2,zero=1", "tp=2")
FATAL = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "stop": signal.SIGSTOP, "exception": None}
HARMLESS = ("suspend", "busy")  # of the whole job for a while; of all processors
STEPS = 24  # of a run that is to end by itself, and to which one is resumed that did not
ENDLESS = 100_000
SILENCE = 6.0  # seconds
END_WITHIN = 45.0  # seconds, of which a silent rank takes SILENCE to be noticed
HEADERS = ["fault", "mode", "injections", "named", "gone in time", "orphans", "resumed bit-equal", "false alarms"]
INTRO = """# Faults at random times

Runs of two ranks, in a pipeline, as replicas with ZeRO or split by tensor parallelism, are struck at a random time:
one rank killed, made to fault, stopped, or its data made unreadable; or, what a run must outlive, the whole job
suspended for longer than a rank may be silent, and all processors kept busy by others. *pool* are ranks that Phalanx
starts and watches, *joined* those that a launcher starts and that watch each other. A run that ended is started again
and must have the losses of one that nothing happened to, bit by bit.
"""


@dataclass
class Run:
    """The processes of one run. out: its folder."""

    mode: str
    plan: str
    out: Path
    number: int
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def trigger(self) -> Path:
        return self.out.parent / f"{self.out.name}-unreadable"

    def start(self, steps: int) -> None:
        command = [sys.executable, str(JOB), str(self.out), self.plan, str(steps), str(self.trigger), str(SILENCE)]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        self.number += 1
        job = {"SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}
        job["SLURM_JOB_ID"] = f"{os.getpid()}{self.number:05}"
        ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **job} for rank in range(2)]
        self.processes = [
            subprocess.Popen(
                command, env={**common, **variables}, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                cwd=ROOT,
            )
            for variables in (ranks if self.mode == "joined" else [{}])
        ]  # fmt: skip

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
            found += [process.pid, *_descendants(process.pid)]
        return found

    def ranks(self) -> list[int]:
        if self.mode == "joined":
            return [process.pid for process in self.processes]
        return [pid for pid in _descendants(self.processes[0].pid) if len(_ancestors(pid, self.processes[0].pid)) == 2]

    def end(self, seconds: float) -> bool:
        """Whether all ended by themselves in time; a rank that was stopped for good is only killed by its launcher."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        return all(process.poll() is not None or _state(process.pid) == "T" for process in self.processes)

    def said(self) -> str:
        return "\n".join(
            process.stderr.read() for process in self.processes if process.stderr and process.poll() is not None
        )

    def clear(self, pids: list[int]) -> list[int]:
        """Kills what is left of these processes of ours; those that nobody should have left."""
        left = [pid for pid in pids if _state(pid) not in ("", "Z", "X")]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        return left


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [below for child in children for below in _descendants(child)]


def _ancestors(pid: int, root: int) -> list[int]:
    """From a process up to `root`, without itself."""
    found: list[int] = []
    while pid != root:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def fatal(run: Run, fault: str, chance: random.Random) -> dict[str, Any]:
    """Strikes one rank, waits for the end of all, and goes on."""
    run.start(ENDLESS)
    run.wait_for_step(3)
    time.sleep(chance.uniform(0.0, 3.0))
    everyone, began = run.everyone(), time.monotonic()
    victim = chance.choice(run.ranks())
    number = FATAL[fault]
    if number is None:
        run.trigger.touch()
    else:
        os.kill(victim, number)
    ended = run.end(END_WITHIN)
    seconds = time.monotonic() - began
    launcher_kills = [victim] if run.mode == "joined" and fault == "stop" else []
    said = run.said()
    orphans = [pid for pid in run.clear(everyone) if pid not in launcher_kills]
    run.trigger.unlink(missing_ok=True)
    return {
        "ended": ended, "seconds": seconds, "orphans": len(orphans), "named": "error: rank " in said,
        "said": next((line for line in said.splitlines() if line.startswith("error:")), ""), **_resumed(run),
    }  # fmt: skip


def _resumed(run: Run) -> dict[str, Any]:
    """Goes on to the first multiple of STEPS that was not reached."""
    steps = (max(run.losses(), default=0) // STEPS + 1) * STEPS
    run.start(steps)
    ended = run.end(300.0)
    run.clear(run.everyone())
    return {"resumed": ended and run.processes[0].returncode == 0, "steps": steps}


def harmless(run: Run, fault: str, chance: random.Random) -> dict[str, Any]:
    """What a run must outlive."""
    run.start(STEPS * 4)
    run.wait_for_step(3)
    time.sleep(chance.uniform(0.0, 2.0))
    everyone = run.everyone()
    if fault == "suspend":
        _suspend(everyone, 1.5 * SILENCE)
    else:
        _busy(2 * (os.cpu_count() or 1), 2 * SILENCE)
    ended = run.end(300.0)
    codes = [process.poll() for process in run.processes]
    said = run.said()
    orphans = run.clear(everyone)
    return {"ended": ended, "alarm": codes != [0] * len(codes), "orphans": len(orphans), "said": said[:300],
            "steps": STEPS * 4}  # fmt: skip


def _suspend(pids: list[int], seconds: float) -> None:
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause)


def _busy(processes: int, seconds: float) -> None:
    loop = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(processes)]
    for other in others:
        other.wait()


def undisturbed(plan: str, steps: int, folder: Path, known: dict[str, Run]) -> dict[int, float]:
    """The losses of a run that nothing happens to; it goes on where it was when more are asked for."""
    run = known.setdefault(plan, Run("pool", plan, folder / f"undisturbed-{len(known)}", 90_000 + 100 * len(known)))
    if max(run.losses(), default=0) < steps:
        run.start(steps)
        assert run.end(600.0) and run.processes[0].returncode == 0, run.said()
    return {step: loss for step, loss in run.losses().items() if step <= steps}


def measure(injections: int, seed: int, kinds: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """One result per injection: every kind in both modes in turn, plans and times by chance."""
    chance, known = random.Random(seed), dict[str, Run]()
    cases = [(kind, mode) for kind in kinds for mode in MODES]
    for number in range(injections):
        fault, mode = cases[number % len(cases)]
        run = Run(mode, chance.choice(PLANS), folder / f"run-{number}", number * 10)
        found = (fatal if fault in FATAL else harmless)(run, fault, chance)
        expected = undisturbed(run.plan, found["steps"], folder, known)
        equal = {step: loss for step, loss in run.losses().items() if step <= found["steps"]} == expected
        yield {"fault": fault, "mode": mode, "plan": run.plan, **found, "equal": equal}


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """One row per fault and mode."""
    keys = dict.fromkeys((result["fault"], result["mode"]) for result in results)
    return [_row(*key, [result for result in results if (result["fault"], result["mode"]) == key]) for key in keys]


def _row(fault: str, mode: str, results: list[dict[str, Any]]) -> list[str]:
    def count(name: str) -> str:
        return f"{sum(bool(result[name]) for result in results)} of {len(results)}"

    named = count("named") if fault in FATAL else ""
    alarms = "" if fault in FATAL else str(sum(result["alarm"] for result in results))
    orphans = str(sum(result["orphans"] for result in results))
    return [fault, mode, str(len(results)), named, count("ended"), orphans, count("equal"), alarms]


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "faults.json").read_text(encoding="utf-8"))
    machine, results = data["machine"], data["results"]
    lines = [
        INTRO,
        f"`python benchmarks/faults.py` (torch {machine['torch']}), {machine['date']}, {len(results)} injections. "
        f"{report.busy(machine)} Data: [faults.json](faults.json).",
        "",
        report.markdown(HEADERS, rows(results)),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--injections", type=int, default=64, metavar="NUMBER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[*FATAL, *HARMLESS], help="these faults instead of all")
    chosen = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for result in measure(chosen.injections, chosen.seed, chosen.only or [*FATAL, *HARMLESS], Path(folder)):
            results.append(result)
            print(json.dumps(result), flush=True)
            if chosen.out:
                report.write(Path(chosen.out), "faults", {"seed": chosen.seed}, results)
    print(report.table(HEADERS, rows(results)))


if __name__ == "__main__":
    main()
