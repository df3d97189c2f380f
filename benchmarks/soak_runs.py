"""The runs of the soak: what happens to each, and what it is held against. `soak.py` asks for them by number."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from soak_faults import BATCH, HAPPENS, STEPS, STORE_PORT, TOKENS, Samples
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.errors import PhalanxError
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import read_log
from phalanx.state import checkpoint
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank

WORLD = 4
_BITS, _STEP = 1e-7, 1e-9  # how far parameters and losses may differ: other plans add in another order
_MOST_FILES = 40  # that a run may leave open on a rank besides those that it began with, per loss

# What may happen. Signals come from outside; the others happen within a rank that asks for a certain sample.
SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}
WITHIN = tuple(HAPPENS)
KINDS = (*SIGNALS, "two at once", "a replica", "second in recovery", "while saving", "while changing", "first step",
         "last step", "stop and go on", "again and again", "supervisor", *WITHIN)  # fmt: skip

# What shows only in later steps.
_EARLY = ("corrupt copy", "again and again", "slow", "link cut", "stale messages", "disk full")


@dataclass(frozen=True)
class Setting:
    """One run, as its number says."""

    number: int
    kind: str
    world: int
    plan: str
    on_loss: str
    step: int  # at which it happens, and how far into it
    delay: float
    victims: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, number: int, kinds: Sequence[str]) -> Setting:
        draw = random.Random(number)
        kind = kinds[number % len(kinds)]
        world, plan = draw.choice(_PLANS)
        on_loss = "regrow" if kind == "again and again" else draw.choice(["replace", "shrink", "regrow"])
        options: dict[str, Any] = {}
        if draw.random() < 0.5 or kind == "corrupt copy":
            options["mirror_every"] = draw.choice([1, 1, 2, 3, "auto"])
        if draw.random() < 0.6 or kind in ("while saving", "disk full"):
            options["checkpoint_every"] = 1 if kind == "disk full" else draw.choice([1, 2, 3])
        if kind == "while changing":
            options["plan_at"] = f"{draw.randrange(2, STEPS)}:{draw.choice([p for w, p in _PLANS if w == world])}"
        step = {"first step": 1, "last step": STEPS}.get(kind, draw.randrange(1, STEPS + 1))
        step = min(step, STEPS - 3) if kind in _EARLY else step
        many = 2 if kind == "two at once" else world // 2 if kind == "a replica" else 1
        victims = tuple(draw.sample(range(world), min(many, world)))
        return cls(number, kind, world, plan, on_loss, step, draw.random() * 0.06, victims, options)


_PLANS = (
    (2, "dp=2"), (2, "dp=2,zero=1"), (2, "dp=2,zero=3"), (2, "pp=2,mb=2"), (2, "tp=2"), (3, "dp=3"), (3, "pp=3,mb=2"),
    (4, "dp=4"), (4, "pp=2,dp=2,mb=2"), (4, "tp=2,dp=2"), (4, "dp=4,zero=1,zero_degree=2"), (4, "pp=2,tp=2,mb=2"),
    (4, "dp=4,zero=2"), (4, "pp=4,mb=4"),
)  # fmt: skip


def work(job: int, numbers: Sequence[int], folder: Path, kinds: Sequence[str], at: Any) -> None:
    """Runs one after the other in one process with one pool, until all are made. at: which one, and since when."""
    os.environ["OMP_NUM_THREADS"] = "1"
    expected = _uninterrupted(folder, job)
    with WorkerPool(WORLD, threads_per_rank=1, device="cpu", silence=3.0) as pool:
        for number in numbers:
            at[0], at[1] = float(number), time.time()
            note(folder, job, run(pool, Setting.of(number, kinds), folder, expected))
            at[0] = -1.0


def note(folder: Path, job: int, record: dict[str, Any]) -> None:
    with (folder / f"results-{job}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def hanging(number: int, kinds: Sequence[str], seconds: float) -> dict[str, Any]:
    problem = f"did not come to an end in {seconds:.0f} s"
    return _record(Setting.of(number, kinds), "failed", problem, seconds, [], [])


def _record(
    setting: Setting, outcome: str, problem: str, seconds: float, recoveries: list[float], sources: list[str]
) -> dict[str, Any]:  # fmt: skip
    return {
        **asdict(setting), "outcome": outcome, "problem": problem, "seconds": round(seconds, 2),
        "recoveries": recoveries, "sources": sources,
    }  # fmt: skip


def _uninterrupted(folder: Path, job: int) -> Path:
    """The run of one process, which nothing happens to."""
    out = folder / f"alone-{job}"
    if not (out / "done").exists():
        shutil.rmtree(out, ignore_errors=True)
        Trainer("gpt2", Samples(), _config(out)).fit()
        (out / "done").touch()
    return out


def _config(out: Path, **options: Any) -> RunConfig:
    given = {
        "tiny": True, "dtype": "float64", "seq_len": TOKENS, "batch_size": BATCH, "steps": STEPS, "lr": 3e-3,
        "warmup_steps": 2, "clip": 0.5, "seed": 3, "shuffle": False, "export": False, "device": "cpu",
        "progress": "off", "timeout": 60.0, "silence": 3.0, "out": str(out), **options,
    }  # fmt: skip
    return RunConfig.create(**given)


def run(pool: WorkerPool, setting: Setting, folder: Path, expected: Path) -> dict[str, Any]:
    """One run and its verdict. Its folder is kept where something was wrong."""
    out = folder / f"run-{setting.number}"
    shutil.rmtree(out, ignore_errors=True)
    _mark(out).unlink(missing_ok=True)
    began, problems, outcome, why = time.time(), list[str](), "went on", ""
    shared = _shared_memory()
    try:
        if setting.kind == "supervisor":
            problems += _without_supervisor(setting, out)
        else:
            with _striking(pool, setting, out):
                _fit(pool, setting, out)
    except PhalanxError as error:
        outcome, why = "resumed", _reason(error)
        try:
            _fit(pool, setting, out, on_loss="stop", mirror_every="never", resume="auto")
        except PhalanxError as again:
            problems.append(f"ended ({error.message.splitlines()[0]}), and could not be resumed: {again.message}")
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    records = read_log(out / "log-rank0.jsonl") if (out / "log-rank0.jsonl").exists() else []
    losses = [record for record in records if record["kind"] == "loss"]
    if not problems:
        problems += [*_different(out, expected), *_too_often_again(losses, setting), *_left_open(pool, len(losses))]
    pool._processes.end()
    problems += [f"{name} was left in shared memory" for name in _shared_memory() - shared]
    seconds = time.time() - began
    if outcome == "went on" and not losses:
        outcome = "untouched"
    if problems:
        outcome = "failed"
    else:
        shutil.rmtree(out, ignore_errors=True)
        _mark(out).unlink(missing_ok=True)
    recoveries = [round(loss["seconds"], 3) for loss in losses]
    sources = [loss["source"].replace(f"{out}/", "") for loss in losses]
    return _record(setting, outcome, "; ".join(problems), seconds, recoveries, sources) | {"why_resumed": why}


def _reason(error: PhalanxError) -> str:
    """Why the ranks that were left did not go on, else what happened."""
    words = "the others did not go on without it: "
    lines = error.message.splitlines()
    return next((line.partition(words)[2] for line in lines if words in line), lines[0])


def _fit(pool: WorkerPool, setting: Setting, out: Path, **options: Any) -> None:
    config = _config(out, **{"plan": setting.plan, "on_loss": setting.on_loss, **setting.options, **options})
    index = ((setting.step - 1) * BATCH + setting.victims[0]) % (STEPS * BATCH)
    what = setting.kind if setting.kind in WITHIN else ""
    data = Samples(_mark(out) if what else None, what, index)
    pool._processes.start(setting.world)
    os.environ[STORE_PORT] = str(pool._processes.store_port)
    pool._board.reset()
    with pack(Trainer("gpt2", data, config).job) as payload:
        pool.run(fit_on_rank, payload, world=setting.world, on_loss=config.on_loss)


def _mark(out: Path) -> Path:
    """A file that says that it has happened."""
    return out.with_suffix(".mark")


@contextlib.contextmanager
def _striking(pool: WorkerPool, setting: Setting, out: Path) -> Iterator[None]:
    """Within it signals come, at the moment that the setting says."""
    ended = threading.Event()
    thread = threading.Thread(target=_strike, args=(pool, setting, out, ended), daemon=True)
    pool._board.reset()
    if setting.kind not in WITHIN or setting.kind == "corrupt copy":
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join(10.0)


def _without_supervisor(setting: Setting, out: Path) -> list[str]:
    """A run whose supervisor, the process that started it, is killed: ranks save and end, and the run is resumed."""
    asked = [sys.executable, __file__, json.dumps(asdict(setting)), str(out)]
    supervisor = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, deadline = out / "log-rank0.jsonl", time.time() + 120.0
    while supervisor.poll() is None and time.time() < deadline:
        steps = [record["step"] for record in read_log(log) if record["kind"] == "step"] if log.exists() else []
        if max(steps, default=0) >= setting.step:
            break
        time.sleep(0.005)
    others = _descendants(supervisor.pid)
    supervisor.kill()
    supervisor.wait()
    deadline = time.time() + 30.0
    while (left := [pid for pid in others if _runs(pid)]) and time.time() < deadline:
        time.sleep(0.05)
    if left:
        return [f"{len(left)} processes run on without the one that started them"]
    saved, told = checkpoint.latest(out / "checkpoints"), [step for step, _, _ in ledger(out)]
    if told and (saved is None or saved.name != f"step-{told[-1]:08}"):
        return [f"step {told[-1]} was made, and what the ranks saved without their supervisor is {saved}"]
    raise PhalanxError("the supervisor was killed")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    own = _children(pid)
    return [*own, *(each for child in own for each in _descendants(child))]


def _strike(pool: WorkerPool, setting: Setting, out: Path, ended: threading.Event) -> None:
    phases = {"while saving": ("save",), "while changing": ("compile",)}.get(setting.kind, ("step", "compile"))
    least = 1 if setting.kind == "while changing" else setting.step
    if not _seen(pool, setting.victims[0], phases, least, ended) or ended.wait(setting.delay * (len(phases) == 2)):
        return
    while setting.kind == "corrupt copy" and not _mark(out).exists() and not ended.wait(1e-3):
        pass
    number = SIGNALS.get(setting.kind, signal.SIGSTOP if setting.kind == "stop and go on" else signal.SIGKILL)
    _send(pool, setting.victims, number)
    if setting.kind == "stop and go on":
        ended.wait(1.0)
        _send(pool, setting.victims, signal.SIGCONT)
    if setting.kind == "again and again":  # whoever takes its place, as soon as it trains
        for _ in range(3):
            if not _seen(pool, setting.victims[0], ("recover", "start"), -1, ended):
                return
            if _seen(pool, setting.victims[0], ("step",), 1, ended):
                _send(pool, setting.victims, signal.SIGKILL)
    if setting.kind == "second in recovery":
        second = next((n for n in range(setting.world) if n not in setting.victims), 0)
        if _seen(pool, second, ("recover",), -1, ended):
            _send(pool, [second], signal.SIGKILL)


def _seen(pool: WorkerPool, process: int, phases: Sequence[str], step: int, ended: threading.Event) -> bool:
    slot = pool._board.slots[process]
    while not ended.wait(2e-4):
        view = slot.read()
        if view.phase in phases and view.step >= step:
            return True
    return False


def _send(pool: WorkerPool, processes: Sequence[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(pool.pids[process], number)


def ledger(folder: Path) -> list[tuple[int, int, float]]:
    """Step, samples consumed and loss of every step that counts."""
    found: list[tuple[int, int, float]] = []
    for record in read_log(folder / "log-rank0.jsonl"):
        if record["kind"] in ("loss", "start") and "step" in record:
            found = [each for each in found if each[0] < record["step"]]
        elif record["kind"] == "step":
            found = [each for each in found if each[0] != record["step"]]
            found.append((record["step"], record["samples"], record["loss"]))
    return found


def _different(out: Path, expected: Path) -> list[str]:
    mine, theirs = ledger(out), ledger(expected)
    if [each[:2] for each in mine] != [each[:2] for each in theirs]:
        return [f"the log tells of steps {[each[0] for each in mine]} and samples {[each[1] for each in mine]}"]
    for one, other in zip(mine, theirs, strict=True):
        if not math.isclose(one[2], other[2], rel_tol=_STEP):
            return [f"the loss of step {one[0]} is {one[2]!r} instead of {other[2]!r}"]
    found, wanted = _stored(out), _stored(expected)
    if found.keys() != wanted.keys():
        return [f"other tensors were saved: {sorted(found.keys() ^ wanted.keys())[:3]}"]
    wrong = [n for n in wanted if not torch.allclose(found[n], wanted[n], rtol=_BITS, atol=1e-10)]
    return [f"{len(wrong)} tensors differ, such as {wrong[0]}"] if wrong else []


def _stored(folder: Path) -> dict[str, Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None, f"{folder} has no checkpoint"
    opened = checkpoint.open(newest)
    return {name: opened.read(name) for name in opened.names()}


def _too_often_again(losses: Sequence[dict[str, Any]], setting: Setting) -> Iterator[str]:
    """From ranks that are left nothing is made again, from copies as many steps as lie between them and one more."""
    every = setting.options.get("mirror_every", 1)
    for loss in losses:
        source, repeated = loss["source"], loss["repeated"]
        most = 0 if source == "the ranks that were left" else every if source.startswith("copies") else STEPS
        if isinstance(most, int) and repeated > most:
            yield f"{repeated} steps were made again from {source}"


def _left_open(pool: WorkerPool, num_losses: int) -> Iterator[str]:
    """Files of ranks that survived, as far as they still run."""
    for number, pid in pool.pids.items():
        with contextlib.suppress(OSError):
            files = len(os.listdir(f"/proc/{pid}/fd"))
            if files > 60 + _MOST_FILES * num_losses:
                yield f"rank {number} has {files} open files after {num_losses} losses"


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "phalanx"))}


def end_with_children(pid: int) -> None:
    """A process of ours, and those that it started."""
    for each in (*_descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def main() -> None:
    """One run, whose supervisor this process is."""
    setting = Setting(**json.loads(sys.argv[1]))
    with WorkerPool(setting.world, threads_per_rank=1, device="cpu", silence=3.0) as pool:
        _fit(pool, setting, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
