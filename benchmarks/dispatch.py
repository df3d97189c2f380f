"""What the engine itself takes per instruction, and what making, checking and simulating a program takes.

    python benchmarks/dispatch.py [--rounds 20] [--out FILE]

Nothing is computed: one rank carries out its program with functions that return at once what the segments' functions
would return. What is left is the engine's loop, arguments, results and frees. Processor times of one thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report
import torch
from one_rank import captured_model, open_session

from phalanx import tasks
from phalanx.launch.status_board import BoardWatch, StatusBoard
from phalanx.model.facts import facts as model_facts
from phalanx.model.segment.segments import Call
from phalanx.plan.complete import complete
from phalanx.predict.from_facts import Device, costs_of_facts, shipped
from phalanx.predict.simulate import simulate
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import Op
from phalanx.session.session import Session

RESULTS = Path(__file__).parent.parent / "docs" / "results"
MODEL, TOKENS = "meta-llama/Llama-3.2-1B", 16  # at test size: an instruction costs the same
STEPS = ("mb=32", "mb=32,recompute=block", "mb=32,recompute=unit", "mb=16,slices=4")
LARGE = "meta-llama/Meta-Llama-3-8B"
PROGRAMS = ("pp=8,mb=64", "pp=8,mb=128,schedule=zb-h1", "pp=8,mb=32,slices=4", "pp=8,dp=32,mb=32,zero=1")
ALLOWED_MICROSECONDS = 4.0
ENGINE = ["plan", "instructions of a step", "µs per instruction", "with the status board", "asked"]
MAKING = ["plan", "instructions of a pipeline", "compile s", "simulate s", "both s"]
INTRO = """# What the engine and the compiler take themselves

**Per instruction**: a rank carries out the program of a step whose segments' functions were replaced by ones that
return at once, so that what is left is the engine's loop with arguments, results and frees, and what it tells the
status board, which ranks have beside others. **Per program**: a plan lowered, bound and checked for every rank of a
pipeline, and simulated. Processor times of one thread; medians, in brackets the lowest and highest.
"""
REMARKS = """
## How it came down

Before what follows, the first three plans took 5.4, 4.7 and 3.9 µs, and slices 23.3.

- Arguments are taken from their places by one expression per kind of row, not by a loop over them.
- What holds a past, and the handles that name its slices, are used again by the next micro-batch that is cut alike.
  Predicted for slices: 10. It was 15.
- Parts of values that follow from shapes alone (rotary tables) are kept with them: 15 → 11.
- The call of a row is a function that is written out, arguments and results included; the loop takes rows apart as
  plain tuples and asks nobody to watch where nobody does. Predicted for the first plan: 5.0 → 3.8. It was 4.0.
- Slices of inputs and labels are cut all at once, by three operators of torch's for a micro-batch instead of four for
  each of its slices: with the step before 11.7 → 5.9.

What is left of slices beyond the others is that cutting, and more arguments of every layer.
"""


def main() -> None:
    given = report.options(__doc__ or "")
    given.add_argument("--rounds", type=int, default=20)
    arguments = given.parse_args()
    torch.set_num_threads(1)
    results = [_engine(plan, arguments.rounds) for plan in STEPS]
    results += [_making(plan, max(3, arguments.rounds // 4)) for plan in PROGRAMS]
    for kind, (headers, row) in _KINDS.items():
        print(report.table(headers, [row(own) for own in results if own["kind"] == kind]))
    report.publish(arguments, "dispatch", {"rounds": arguments.rounds}, results, panels(results))


def _engine(plan: str, rounds: int) -> dict[str, Any]:
    session, batch = _session(plan)
    engine, program, board = session.step.engine, session.step.program, BoardWatch(StatusBoard.private(1).slots[0])
    seconds: dict[str, list[float]] = {"alone": [], "board": []}
    for number in range(3 + rounds):
        for name in seconds:
            engine.watches = [board] if name == "board" else []
            run = session.step.begin(batch, 0, lr=0.0)
            took = _processor_seconds(partial(engine.run, program, run, until=Op.NORM))
            engine.abandon(run)
            if number >= 3:
                seconds[name].append(took)
    count = next(i for i, it in enumerate(program) if it.op is Op.NORM)
    times = {name: report.summary([1e6 * own / count for own in found]) for name, found in seconds.items()}
    return {"kind": "engine", "plan": plan, "instructions": count, **times}


def _session(plan: str) -> tuple[Session, dict[str, torch.Tensor]]:
    """Of a model at test size, whose functions return at once."""
    spec, captured = captured_model(MODEL, "float32", tiny=True)
    chosen = complete(plan, world=1, batch_size=32, costs=[1.0] * len(captured.blocks.blocks)).plan
    session = open_session(captured, chosen, "cpu", compile="off", batch_size=32, seq_len=TOKENS)
    session.step.engine.stand_in(_at_once)
    compute = session.step.engine.compute
    compute.prologue, compute.count = cache_first(compute.prologue), cache_first(compute.count)
    return session, tasks.get(spec.task).synthetic(spec.config, batch=32, tokens=TOKENS, seed=0)


def _at_once(op: Op, number: int, call: Call) -> Callable[..., Any]:
    looks = [None if r is None else (r.shape, r.dtype) for r in call.results]
    results = [None if look is None else torch.zeros(look[0], dtype=look[1]) for look in looks]
    return lambda *arguments: list(results)


def cache_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what it returned first: all micro-batches look alike."""
    found: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not found:
            found.append(function(*arguments))
        return found[0]

    return call


def _making(plan: str, rounds: int) -> dict[str, Any]:
    facts, dims = model_facts.load(LARGE), {"tokens": 4096, "batch": 1}
    assert facts is not None
    chosen = complete(plan, world=None, batch_size=8192, costs=[1.0] * len(facts.blocks)).plan
    described = shipped(facts, chosen)
    assert described is not None
    shape, device = described.shape(True), Device()
    costs = costs_of_facts(described, shape, dims, device, chosen.sum_bytes)
    program = compile_plan(chosen, shape)
    compiling = [_processor_seconds(lambda: compile_plan(chosen, shape)) for _ in range(rounds)]
    simulating = [_processor_seconds(lambda: simulate(program, costs)) for _ in range(rounds)]
    count = sum(len(own) for own in program.programs)
    both = [a + b for a, b in zip(compiling, simulating, strict=True)]
    times = {"compile": compiling, "simulate": simulating, "both": both}
    return {"kind": "making", "plan": plan, "instructions": count} | {k: report.summary(v) for k, v in times.items()}


def _processor_seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def engine_row(own: Mapping[str, Any]) -> list[str]:
    times = (_spread(own[name], 1) for name in ("alone", "board"))
    return [own["plan"], str(own["instructions"]), *times, f"at most {ALLOWED_MICROSECONDS:.0f}"]


def making_row(own: Mapping[str, Any]) -> list[str]:
    times = (_spread(own[name], 2) for name in ("compile", "simulate", "both"))
    return [own["plan"], str(own["instructions"]), *times]


def panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    """One of the engine, one of the compiler."""
    rows = {kind: [own for own in results if own["kind"] == kind] for kind in _KINDS}
    engine = {n: [plot.Point.of(own["plan"], own[n]) for own in rows["engine"]] for n in ("alone", "board")}
    making = {n: [plot.Point.of(own["plan"], own[n]) for own in rows["making"]] for n in ("compile", "simulate")}
    return [
        plot.Panel("the engine itself", "plan", "µs per instruction", engine, level=ALLOWED_MICROSECONDS),
        plot.Panel("making a program", "plan", "seconds", making),
    ]


def _spread(value: Mapping[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} ({value['low']:.{digits}f}–{value['high']:.{digits}f})"


_KINDS: Mapping[str, tuple[list[str], Callable[[Mapping[str, Any]], list[str]]]] = {
    "engine": (ENGINE, engine_row), "making": (MAKING, making_row),
}  # fmt: skip


def page(folder: Path = RESULTS) -> str:
    file = folder / "dispatch.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    machine = data["machine"]
    command = f"`python benchmarks/dispatch.py --rounds {data['setting']['rounds']}`"
    lines = [INTRO, f"{command} on {machine['processor']}, {machine['date']}. Data: [{file.name}]({file.name})."]
    lines.append(report.busy(machine))
    for kind, (headers, row) in _KINDS.items():
        lines += ["", report.markdown(headers, [row(own) for own in data["results"] if own["kind"] == kind])]
    return "\n".join([*lines, REMARKS])


if __name__ == "__main__":
    main()
