"""Faults at random times: what happens to a training run, and whether it goes on as if nothing had happened.

    python benchmarks/faults.py [--injections 64] [--seed 0] [--only kill] [--out FILE] [--seconds 100 --folder FOLDER]

Every injection is a run of two real ranks, started by Phalanx itself (pool) or by a launcher (joined), struck at a
random time after its third step. After a fatal fault all processes must be gone in time, a rank be named, and the run,
started again, have the losses of one that nothing happened to, bit by bit. What is not fatal must not end the run.
Injections that stand in FILE are not repeated.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
from faults_nursery import Nursery
from faults_run import SILENCE, Helpers, Run

from phalanx.launch.worker_pool import WorkerPool

RESULTS = Path(__file__).parent.parent / "docs" / "results"
MODES = ("pool", "joined")
PLANS = ("pp=2,mb=2", "dp=2,zero=1", "tp=2")
LINK = "500kbit"  # a message of a replica's gradients takes longer than a rank may be silent
STEPS = 24  # of a run that is to end by itself, and to which one is resumed that did not
LINK_STEPS = 4
ENDLESS = 100_000
END_WITHIN = 45.0  # seconds, of which a silent rank takes SILENCE to be noticed
HEADERS = ["fault", "mode", "injections", "named", "gone in time", "orphans", "bit-equal", "false alarms"]
INTRO = """# Faults at random times

Runs of two ranks, in a pipeline, as replicas with ZeRO or split by tensor parallelism, are struck at a random time.
*pool* are ranks that Phalanx starts and watches, *joined* those that a launcher starts and that watch each other.

Fatal: one rank is killed (*kill*), made to fault (*segfault*) or stopped for good (*stop*), its data becomes unreadable
(*exception*), the process that was started first is killed (*first*: the one that watches the pool, or the rank that
hosts the store), or everything is asked to end (*term*: SIGTERM). All processes must be gone within 45 s, the message
must name a rank where somebody is left to write one, and the run, started again, must have the losses of one that
nothing happened to, bit by bit.

To be outlived: the whole job is suspended for longer than a rank may be silent (*suspend*), other processes keep all
processors busy (*busy*), one rank gets a tenth of its time (*slow*), or the ranks are on nodes whose link carries 500
kbit/s, so that one message takes longer than a rank may be silent (*link*, which only joined ranks can have). Such a
run must end by itself, with the losses of an undisturbed one.

The first runs on a slow link ended in a false alarm; since then ranks show life beside their looks at others. Later
joined runs whose rank with the store was stopped took more than a minute to end and named nobody (2 of 4); since then
a store that stands still is told from a slow link. The first way to tell them apart gave a false alarm on the slow link
(1 of 2). What stands here of joined ranks under *stop*, *suspend*, *busy*, *slow* and *link* is from after all that.
Five joined runs ended with losses that were not bit-equal, because this benchmark let joined ranks use more threads
than the pool's; it now gives all of them one, and the five were run again.
"""


def _hit(number: int) -> Callable[[Run, random.Random], int]:
    def strike(run: Run, chance: random.Random) -> int:
        victim = chance.choice(run.ranks())
        os.kill(victim, number)
        return victim

    return strike


def _unreadable(run: Run, chance: random.Random) -> int:
    run.trigger.touch()
    return 0


def _kill_first(run: Run, chance: random.Random) -> int:
    os.kill(run.children[0].pid, signal.SIGKILL)
    return run.children[0].pid


def _ask_to_end(run: Run, chance: random.Random) -> int:
    for child in run.children:
        os.kill(child.pid, signal.SIGTERM)
    return 0


# How each fault strikes; the process that was hit.
FATAL: Mapping[str, Callable[[Run, random.Random], int]] = {
    "kill": _hit(signal.SIGKILL), "segfault": _hit(signal.SIGSEGV), "stop": _hit(signal.SIGSTOP),
    "exception": _unreadable, "first": _kill_first, "term": _ask_to_end,
}  # fmt: skip


def _suspend(run: Run, chance: random.Random) -> None:
    pids = run.everyone()
    _signal(pids, signal.SIGSTOP)
    time.sleep(1.5 * SILENCE)
    _signal(pids, signal.SIGCONT)


def _slow(run: Run, chance: random.Random) -> None:
    victim, end = chance.choice(run.ranks()), time.monotonic() + 2 * SILENCE
    while time.monotonic() < end:
        for number, seconds in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.1)):
            _signal([victim], number)
            time.sleep(seconds)


def _busy(run: Run, chance: random.Random) -> None:
    loop = f"import time\nend = time.monotonic() + {2 * SILENCE}\nwhile time.monotonic() < end: pass"
    for other in [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2 * (os.cpu_count() or 1))]:
        other.wait()


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# What is done to a run that must outlive it; the slow link is there from the start.
HARMLESS: Mapping[str, Callable[[Run, random.Random], None]] = {
    "suspend": _suspend, "busy": _busy, "slow": _slow, "link": lambda run, chance: None,
}  # fmt: skip
CASES = [(fault, mode) for fault in (*FATAL, *HARMLESS) for mode in MODES if (fault, mode) != ("link", "pool")]


def fatal(run: Run, fault: str, chance: random.Random) -> dict[str, Any]:
    """Strikes, waits for the end of all, and goes on."""
    run.start(ENDLESS)
    assert run.wait_for_step(3), f"the run ended before it was struck: {run.said()}"
    time.sleep(chance.uniform(0.0, 3.0))
    everyone, began = run.everyone(), time.monotonic()
    victim = FATAL[fault](run, chance)
    ended = run.end(END_WITHIN, everyone)
    seconds = time.monotonic() - began
    launcher_kills = [victim] if run.mode == "joined" and fault == "stop" else []
    said = run.said()
    orphans = [pid for pid in run.clear(everyone) if pid not in launcher_kills]
    run.trigger.unlink(missing_ok=True)
    return {
        "ended": ended, "seconds": seconds, "orphans": len(orphans), "named": _names_a_rank(said),
        "said": next((line for line in said.splitlines() if line.startswith("error:")), ""), **_resumed(run),
    }  # fmt: skip


def _names_a_rank(said: str) -> bool:
    return re.search(r"^error: .*\brank \d", said, re.M) is not None


def _resumed(run: Run) -> dict[str, Any]:
    """Goes on to the first multiple of STEPS that was not reached."""
    steps = (max(run.losses(), default=0) // STEPS + 1) * STEPS
    return {"resumed": run.go_on(steps), "steps": steps}


def harmless(run: Run, fault: str, chance: random.Random) -> dict[str, Any]:
    """What a run must outlive."""
    steps = LINK_STEPS if fault == "link" else STEPS * 4
    run.start(steps)
    if run.wait_for_step(min(3, steps)):
        time.sleep(chance.uniform(0.0, 1.0))
        HARMLESS[fault](run, chance)
    everyone = run.everyone()
    ended = run.end(300.0, everyone)
    said = run.said()
    orphans = run.clear(everyone)
    alarm = any(child.code for child in run.children)
    return {"ended": ended, "alarm": alarm, "orphans": len(orphans), "said": said[:300], "steps": steps}


def undisturbed(plan: str, steps: int, folder: Path, helpers: Helpers) -> dict[int, float]:
    """The losses of a run that nothing happens to; it goes on where it was when more are asked for."""
    run = Run("pool", plan, folder / f"undisturbed-{plan}", 90_000, helpers)
    assert max(run.losses(), default=0) >= steps or run.go_on(steps)
    return run.losses()


def inject(number: int, fault: str, mode: str, seed: int, folder: Path, helpers: Helpers) -> dict[str, Any]:
    """One result; plan and time by chance."""
    chance = random.Random(f"{seed} {number}")
    plan = "dp=2,zero=1" if fault == "link" else chance.choice(PLANS)
    run = Run(mode, plan, folder / f"run-{number}", number * 10, helpers, LINK if fault == "link" else "")
    shutil.rmtree(run.out, ignore_errors=True)  # of an injection that was interrupted
    try:
        found = (fatal if fault in FATAL else harmless)(run, fault, chance)
    finally:
        run.clear(run.everyone())
    expected, got = undisturbed(plan, found["steps"], folder, helpers), run.losses()
    equal = all(got.get(step) == expected[step] for step in range(1, found["steps"] + 1))
    return {"number": number, "fault": fault, "mode": mode, "plan": plan, **found, "equal": equal}


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """One row per fault and mode."""
    keys = dict.fromkeys((result["fault"], result["mode"]) for result in results)
    return [_row(*key, [result for result in results if (result["fault"], result["mode"]) == key]) for key in keys]


def _row(fault: str, mode: str, results: list[dict[str, Any]]) -> list[str]:
    def count(name: str) -> str:
        return f"{sum(bool(result[name]) for result in results)} of {len(results)}"

    somebody_writes = fault in FATAL and fault != "term" and (fault, mode) != ("first", "pool")
    alarms = "" if fault in FATAL else str(sum(result["alarm"] for result in results))
    orphans = str(sum(result["orphans"] for result in results))
    named = count("named") if somebody_writes else ""
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


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []


def measure(numbers: list[int], chosen: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """Every fault in both modes in turn."""
    cases = [case for case in CASES if case[0] in (chosen.only or [*FATAL, *HARMLESS])]
    last = time.monotonic() + chosen.seconds
    with Nursery() as nursery, WorkerPool(2, device="cpu") as pool:
        for number in numbers:
            yield inject(number, *cases[number % len(cases)], chosen.seed, folder, Helpers(nursery, pool))
            if time.monotonic() > last:
                return


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--injections", type=int, default=64, metavar="NUMBER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[*FATAL, *HARMLESS], help="these faults instead of all")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no injection after that; call again to go on")
    parser.add_argument("--folder", type=Path, help="where the runs lie (default: a temporary folder)")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # in either mode, since threads change the order in which numbers are added
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs under way are cleared
    results = read(Path(chosen.out)) if chosen.out else []
    numbers = sorted({*range(chosen.injections)} - {result["number"] for result in results})
    with tempfile.TemporaryDirectory() as folder:
        for result in measure(numbers, chosen, chosen.folder or Path(folder)):
            results.append(result)
            print(json.dumps(result), flush=True)
            if chosen.out:
                report.write(Path(chosen.out), "faults", {"seed": chosen.seed}, results)
    print(report.table(HEADERS, rows(results)))


if __name__ == "__main__":
    main()
