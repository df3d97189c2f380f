"""One run of the soak: its faults happen, it ends, and the verdict is drawn. `soak.py` asks for runs by number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import soak_nodes
import soak_supervisor
from soak_checks import Followed, differences, made_too_often
from soak_faults import STORE_PORT
from soak_job import STEPS, Samples, Struck, config
from soak_left import (
    LOOKED_FOR,
    beside_ranks,
    left_open,
    left_running,
    listening,
    marked,
    most_open_files,
    shared_memory,
)
from soak_settings import Setting
from soak_strikes import Striker

from phalanx.errors import PhalanxError
from phalanx.launch.worker_pool import WorkerPool
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank

_WORLD, _MOST_ATTEMPTS = 4, 12


def work(job: int, folder: Path, kinds: Sequence[str], at: Any) -> None:
    """Runs one after the other in one process, until it is ended. at: the number of the next, negative until there is
    one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    expected = uninterrupted(folder, job)
    while True:
        if at[0] >= 0:
            record = run(Setting.of(int(at[0]), kinds), folder, expected)
            note(folder, job, record)
            at[0] = -1.0
        time.sleep(0.05)


def note(folder: Path, job: int, record: dict[str, Any]) -> None:
    with (folder / f"results-{job}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def uninterrupted(folder: Path, job: int, **options: Any) -> Path:
    """The run of one process, which nothing happens to."""
    out = folder / f"alone-{job}"
    if not (out / "done").exists():
        shutil.rmtree(out, ignore_errors=True)
        Trainer("gpt2", Samples(), config(out, **options)).fit()
        (out / "done").touch()
    return out


def run(setting: Setting, folder: Path, expected: Path) -> dict[str, Any]:
    """One run and its verdict. Its folder is kept where something was wrong."""
    out, orders = folder / f"run-{setting.number}", folder / f"run-{setting.number}-orders"
    for each in (out, orders):
        shutil.rmtree(each, ignore_errors=True)
    orders.mkdir(parents=True)
    began, shared, ports, mark, num_files = time.time(), shared_memory(), listening(os.getpid()), _mark(setting), 0
    with marked(mark):
        if setting.place == "pool":
            struck, problems, num_files = _in_own_pool(setting, out, orders, mark)
        else:
            struck, problems = {"supervisor": soak_supervisor, "nodes": soak_nodes}[setting.place].run(setting, out)
    records = Followed(out).read()
    losses = [record for record in records if record["kind"] == "loss"]
    if not problems:
        problems += [*differences(out, expected), *made_too_often(records, setting.options)]
        problems += left_open(num_files, len(losses))
    problems += left_running(mark)
    problems += [f"{name} was left in shared memory" for name in shared_memory() - shared]
    problems += [f"port {port} was left open" for port in listening(os.getpid()) - ports]
    _attribute(losses, struck, out)
    if not problems:
        for each in (out, orders):
            shutil.rmtree(each, ignore_errors=True)
    seconds = time.time() - began
    return record_of(setting, struck, problems, seconds) | {"open_files": num_files, "looked_for": LOOKED_FOR}


def _mark(setting: Setting) -> str:
    return f"{os.getpid()}-{setting.number}"


def _in_own_pool(setting: Setting, out: Path, orders: Path, mark: str) -> tuple[list[Struck], list[str], int]:
    """Faults of ranks; a pool of its own, so that whatever is left after it is this run's. The last number is that of
    files that a rank had open."""
    with WorkerPool(_WORLD, threads_per_rank=1, device="cpu", silence=3.0) as pool:
        struck, problems = _in_pool(pool, setting, out, orders)
        timeout = config(out, on_loss=setting.on_loss, **setting.options).timeout
        return struck, [*problems, *beside_ranks(pool, mark, timeout)], most_open_files(list(pool.pids.values()))


def record_of(setting: Setting, struck: Sequence[Struck], problems: Sequence[str], seconds: float) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(setting).items() if name != "faults"}, "commit": _commit(),
        "faults": [each.record() for each in struck], "problem": "; ".join(problems), "seconds": round(seconds, 2),
    }  # fmt: skip


def _commit() -> str:
    """What was run; with a + where files were changed since."""
    place = Path(__file__).parent
    asked = ["git", "-C", str(place), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def _attribute(losses: Sequence[dict[str, Any]], struck: Sequence[Struck], out: Path) -> None:
    """Each loss to the newest fault before it."""
    for loss in losses:
        before = [each for each in struck if each.time < loss["time"]]
        if before:
            before[-1].losses.append(round(loss["seconds"], 3))
            before[-1].sources.append(loss["source"].replace(f"{out}/", ""))


def _in_pool(pool: WorkerPool, setting: Setting, out: Path, orders: Path) -> tuple[list[Struck], list[str]]:
    """Faults of ranks, one after the other. A run that ended with one is resumed, and the others happen to it then."""
    striker = Striker(pool, out, orders, setting.faults)
    options: dict[str, Any] = {"plan": setting.plan, "on_loss": setting.on_loss, **setting.options}
    for _ in range(_MOST_ATTEMPTS):
        seen = len(striker.struck)
        try:
            _fit(pool, setting.world, Samples(orders), striker, config(out, **options))
            return striker.struck, striker.problems
        except PhalanxError as error:
            why = _reason(error)
            if len(striker.struck) == seen or not _may_end(striker.struck[-1], why):
                return striker.struck, [*striker.problems, f"ended ({error.message})"]
            striker.struck[-1].why, options["resume"] = why, "auto"
        except Exception as error:
            return striker.struck, [*striker.problems, f"{type(error).__name__}: {error}"]
    return striker.struck, [*striker.problems, f"was not done after {_MOST_ATTEMPTS} attempts"]


def _fit(pool: WorkerPool, world: int, data: Samples, striker: Striker, config: Any) -> None:
    pool.processes.start(world)
    os.environ[STORE_PORT] = str(pool.processes.host_store())
    with striker.striking(), pack(Trainer("gpt2", data, config).job) as payload:
        pool.run(fit_on_rank, payload, world=world, on_loss=config.on_loss)


def _reason(error: PhalanxError) -> str:
    """Why the ranks that were left did not go on, else what happened."""
    words = "the others did not go on without it: "
    lines = error.message.splitlines()
    return next((line.partition(words)[2] for line in lines if words in line), lines[0])


def _may_end(struck: Struck, why: str) -> bool:
    """Whether a run may end with a fault: all ranks were lost, or none trained yet or any more."""
    if why.startswith("no rank is left"):
        return struck.ranks <= 2 or struck.kind == "again and again"
    return why.startswith(("the ranks were not training", "others had ended")) and struck.step in (-1, 0, 1, STEPS)
