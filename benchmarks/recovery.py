"""From the moment a rank is killed, or hangs, to the next training step, on four ranks.

    python benchmarks/recovery.py [--gpu] [--quick] [--repeats 5] [--out recovery.json]

A rank is killed, or stopped by a signal so that it hangs, at a random moment of a run of a tiny GPT-2; what counts is
the time from the signal to the end of the first step that the new generation makes, beside a usual step of it. With
`shrink` survivors hold the state; with `replace` a process is forked, prepares the run and gets its state from them.
With `a rank to spare` five ranks have a plan for four, and the fifth takes the place. Where the time goes is told part
by part, as the run log has it. With `--gpu` the ranks share one GPU in turns: the multi-process service may end the
others with the one that is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
from shared_gpu import rank_environment

from phalanx.config import RunConfig
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import read_log
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank

WORLD, STEPS, REPEATS = 4, 24, 5
KILL, HANG = signal.SIGKILL, signal.SIGSTOP
SPARE = "a rank to spare"  # a fifth that has no place in the plan, with `shrink`
CASES = (
    ("dp=4", "shrink", KILL), ("pp=2,dp=2,mb=2", "shrink", KILL), ("dp=4", "replace", KILL),
    ("pp=2,dp=2,mb=2", "replace", KILL), ("dp=4", "shrink", HANG), ("pp=2,dp=2,mb=2", "shrink", HANG),
    ("dp=4,zero=1", "shrink", KILL), ("dp=4", SPARE, KILL), ("pp=2,dp=2,mb=2", SPARE, KILL),
)  # fmt: skip
AIMS = {"shrink": 0.5, SPARE: 0.5, "replace": 3.0, "hang": 1.5}  # seconds; but for the last two besides one step
NCCL_AIM = 2.0  # seconds besides one step, whatever happened
HEADERS = ["plan", "on_loss", "what", "times", "to next step s (median)", "worst", "usual step s", "aim"]
PARTS = ["noticed", "heard", "let go", "wait", "start", "meet", "plan", "restore", "first step"]
RESULTS = Path(__file__).parent.parent / "docs" / "results"
INTRO = """# Recovery

How long a run stands still when a rank is killed or hangs: from the signal to the end of the first step that the others
make (with `shrink`) or all of them with a new one (with `replace`), at random moments of runs of a tiny GPT-2. With
`a rank to spare` five ranks have a plan for four (`--on-loss shrink`), and the fifth takes the place of the one that is
lost. With `zero=1` every rank alone holds a part of the state, of which others have copies (`--mirror-every 1`).

Each second table says where the time goes (medians): until the supervisor notices the loss; until the rank has heard of
it and left its step; letting go of the old connections; waiting for the supervisor; with `replace`, the start of a
process, until it is ready to compute; meeting; the plan, its functions and its groups; state; and the first step, which
is no longer than usual but for what it does for the first time. Parts are those of the run's first rank.

Where ranks share one GPU, NCCL needs 0.5 to 1.0 s to give up its communicators, which ranks begin to do before they
meet and have done before they restore their state; a process in the place of another starts CUDA and loads all kernels,
which takes seconds, and a rank to spare has done that."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help="of each case")
    parser.add_argument("--gpu", action="store_true", help="ranks that share one GPU, instead of CPU ranks")
    parser.add_argument("--compile", default="auto", choices=("off", "auto"), help="how segments are compiled")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of those to run")
    parser.add_argument("--quick", action="store_true", help="one of each case")
    options = parser.parse_args(arguments)
    repeats, draw = 1 if options.quick else options.repeats, random.Random(0)
    results: list[dict[str, Any]] = []
    setting = {"gpu": options.gpu, "compile": options.compile, "world": WORLD, "steps": STEPS, "repeats": repeats}
    on = {"device": "cuda" if options.gpu else "cpu", "compile": options.compile}
    environment = rank_environment if options.gpu else None
    pool = WorkerPool(WORLD + 1, threads_per_rank=1, device=on["device"], environment=environment)
    with tempfile.TemporaryDirectory() as folder, pool:
        for plan, on_loss, number in (CASES[each] for each in options.cases):
            outs = (Path(folder) / f"{len(results)}-{n}" for n in range(repeats))
            kills = [_struck(pool, on, out, plan, on_loss, number, draw) for out in outs]
            what = "hang" if number == HANG else "kill"
            results.append({"plan": plan, "on_loss": on_loss, "what": what, "kills": kills})
            print(row(results[-1], options.gpu), parts_row(results[-1])[3:], file=sys.stderr, flush=True)
            report.publish(options, "recovery", setting, results, [])
    print(report.table(HEADERS, [row(result, options.gpu) for result in results]))
    print(report.table([*HEADERS[:3], *PARTS], [parts_row(result) for result in results]))


def _struck(
    pool: WorkerPool, on: Mapping[str, Any], out: Path, plan: str, on_loss: Any, number: int, draw: random.Random
) -> dict[str, Any]:  # fmt: skip
    """One run, one kill or hang."""
    world, on_loss = (WORLD + 1, "shrink") if on_loss == SPARE else (WORLD, on_loss)
    config = RunConfig.create(
        tiny=True, seq_len=32, batch_size=16, steps=STEPS, progress="off", export=False, checkpoint_every="never",
        out=out, plan=plan, on_loss=on_loss, mirror_every=1 if "zero" in plan else "auto", **on,
    )  # fmt: skip
    trainer, victim, after = Trainer("gpt2", "synthetic", config), draw.randrange(WORLD), draw.randrange(8, 16)
    struck: list[float] = []

    def strike() -> None:
        time.sleep(draw.random() * 0.02)
        struck.append(time.time())
        os.kill(pool.pids[victim], number)

    def on_event(name: str, given: Any) -> None:
        if name == "on_step" and given[0]["step"] == after and not struck:
            threading.Thread(target=strike).start()

    with pack(trainer.job) as payload:
        pool.run(fit_on_rank, payload, world=world, on_event=on_event, on_loss=on_loss)
    records = read_log(out / "log-rank0.jsonl")
    (loss,) = (record for record in records if record["kind"] == "loss")
    steps = [record for record in records if record["kind"] == "step"]
    first = next(record for record in steps if record["time"] > loss["time"])
    usual = statistics.median(record["step_seconds"] for record in steps if record["time"] < loss["time"])
    ends = {"noticed": loss["time"] - loss["seconds"] - struck[0], "first step": first["time"] - loss["time"]}
    return {"seconds": first["time"] - struck[0], "usual": usual, "parts": loss["parts"] | ends}


def row(result: Mapping[str, Any], gpu: bool) -> list[str]:
    kills = result["kills"]
    seconds = sorted(kill["seconds"] for kill in kills)
    usual = statistics.median(kill["usual"] for kill in kills)
    numbers = (statistics.median(seconds), seconds[-1], usual)
    aim = NCCL_AIM + usual if gpu else _aim_of_cpus(result, usual)
    return [*_case(result), str(len(kills)), *(f"{number:.3f}" for number in numbers), f"at most {aim:.2f}"]


def _aim_of_cpus(result: Mapping[str, Any], usual: float) -> float:
    return AIMS.get(result["what"]) or AIMS[result["on_loss"]] + usual * (result["on_loss"] != "replace")


def parts_row(result: Mapping[str, Any]) -> list[str]:
    kills = [kill["parts"] | {"heard": kill["seconds"] - sum(kill["parts"].values())} for kill in result["kills"]]
    own = [[kill.get(name, 0.0) for kill in kills] for name in PARTS]
    return [*_case(result), *(f"{statistics.median(seconds):.3f}" for seconds in own)]


def _case(result: Mapping[str, Any]) -> list[str]:
    return [result["plan"], result["on_loss"], result["what"]]


def page(folder: Path = RESULTS) -> str:
    return "\n".join([INTRO, *(_section(path) for path in sorted(folder.glob("recovery*.json"))), ""])


def _section(path: Path) -> str:
    data = json.loads(path.read_text(encoding="utf-8"))
    machine, results, setting, gpu = data["machine"], data["results"], data["setting"], data["setting"]["gpu"]
    repeats = {1: " --quick", REPEATS: ""}.get(setting["repeats"], f" --repeats {setting['repeats']}")
    given = " --gpu" * gpu + repeats + " --compile off" * (setting["compile"] == "off")
    kind = "Four ranks that share one GPU in turns" if gpu else "Four CPU ranks"
    on = f"one {machine['gpus'][0]}, torch {machine['torch']}" if gpu else f"torch {machine['torch']}"
    return "\n".join([
        "", f"## {kind}", "",
        f"`python benchmarks/recovery.py{given}` ({on}), {machine['date']}. {report.busy(machine)} "
        f"Data: [{path.name}]({path.name}).",
        "", report.markdown(HEADERS, [row(result, gpu) for result in results]),
        "", report.markdown([*HEADERS[:3], *PARTS], [parts_row(result) for result in results]),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
