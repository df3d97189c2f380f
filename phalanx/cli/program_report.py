"""What `phalanx program` prints: the plan and why it is so, its stages, the step over time, bubble and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.cli.memory_table import pipeline_ranks
from phalanx.cli.models import PIPED_WIDTH, run_name
from phalanx.model.facts.facts import BlockFacts, ModelFacts, runs
from phalanx.observe.format import bytes_text, number_text
from phalanx.observe.program_text import chart, duration_text
from phalanx.plan.mesh import Mesh
from phalanx.predict.from_facts import Device
from phalanx.predict.timeline import COMPUTE, Pair, Timeline, compare
from phalanx.program.instructions import REDISTRIBUTIONS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from phalanx.predict.predict import Prediction

_NOTICEABLE = 0.005  # of a step


def print_report(
    facts: ModelFacts, prediction: Prediction, timelines: Mapping[str, Timeline], is_terminal: bool
) -> None:
    from rich.console import Console

    console = Console(width=None if is_terminal else PIPED_WIDTH, highlight=False, markup=False)
    plan = prediction.completed.plan
    sizes = ", ".join(f"{name} {size}" for name, size in prediction.dims.items())
    console.print(f"{facts.name}: {facts.task}, {facts.dtype}; a micro-batch is {sizes}", soft_wrap=True)
    console.print(f"plan {plan.full_text}", soft_wrap=True)
    for reason in prediction.completed.reasons.values():
        console.print(f"  {reason}", style="dim", soft_wrap=True)
    console.print(f"  activations {plan.kept}", style="dim", soft_wrap=True)
    console.print(_assumption(prediction.device, prediction.is_fused), style="dim", soft_wrap=True)
    console.print()
    console.print(_stage_table(facts, prediction))
    for name, timeline in timelines.items():
        _print_step(console, name, timeline, prediction)
    if "measured" in timelines:
        console.print()
        console.print(_comparison_table(timelines["predicted"], timelines["measured"]))


def _assumption(device: Device, is_fused: bool) -> str:
    return (
        f"assumed, not measured: devices that reach {number_text(device.flops_per_s, 'FLOP/s')} and "
        f"{number_text(device.memory_bytes_per_s, 'B/s')} from memory, links of "
        f"{number_text(device.link.bytes_per_s, 'B/s')} and {duration_text(device.link.latency_s)}, "
        f"{number_text(device.host_link.bytes_per_s, 'B/s')} to the host and back, "
        f"a backward of two forwards, segments that are {'compiled' if is_fused else 'not compiled'}"
    )


def _print_step(console: Console, name: str, timeline: Timeline, prediction: Prediction) -> None:
    mesh = Mesh.of(prediction.completed.plan)
    ranks = pipeline_ranks(prediction, timeline)
    console.print()
    first = f", the first of {mesh.tp} tensor-parallel ranks" if mesh.tp > 1 else ""
    same = f", one of {mesh.dp} equal replicas" if mesh.dp > 1 else ""
    console.print(f"{name}: step {duration_text(timeline.makespan)}, bubble {timeline.mean_bubble:.1%}{first}{same}")
    if timeline is prediction.timeline and prediction.step_seconds < (1 - _NOTICEABLE) * timeline.makespan:
        among = duration_text(prediction.step_seconds)
        console.print(f"in a run {among}: what the step leaves on its way goes on beneath the next", soft_wrap=True)
    for line in chart(timeline, ranks, console.width):
        console.print(line, soft_wrap=True)
    if mesh.tp > 1:
        console.print(_redistribution_text(timeline, ranks), soft_wrap=True)
    console.print()
    console.print(_rank_table(timeline, ranks))


def _redistribution_text(timeline: Timeline, ranks: Sequence[int]) -> str:
    """How long redistributions take, and how much of that a rank computes nothing in the meantime."""
    taken, exposed = zip(*[redistribution_seconds(timeline, rank) for rank in ranks], strict=True)
    hidden = 1 - sum(exposed) / sum(taken) if sum(taken) else 0.0
    return f"redistributions between tp ranks: {duration_text(max(taken))} of a step, {hidden:.1%} of it hidden"


def redistribution_seconds(timeline: Timeline, rank: int) -> tuple[float, float]:
    """The time in which some redistribution of a rank travels, and the part of it in which the rank computes
    nothing."""
    own = [event for event in timeline.events if event.rank == rank]
    sent = [(event.start, event.end) for event in own if event.instruction.op in REDISTRIBUTIONS]
    computed = [(event.start, event.end) for event in own if event.resource == COMPUTE]
    busy = _covered(computed)
    return _covered(sent), _covered([*sent, *computed]) - busy


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one of them lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _stage_table(facts: ModelFacts, prediction: Prediction) -> Table:
    plan, seconds = prediction.completed.plan, prediction.block_seconds
    mesh = Mesh.of(plan)
    table = _table(("stage", "ranks", "blocks"), ("parameters per rank" if plan.tp > 1 else "parameters", "cost"))
    for stage in range(plan.num_stages):
        blocks = plan.stage_blocks(stage)
        share = sum(seconds[block] for block in blocks) / (sum(seconds) or 1)
        own = [facts.blocks[block] for block in blocks]
        first = mesh.rank(plan.pp_index(stage), 0)
        last = first + mesh.dp * mesh.tp - 1
        ranks = str(first) if first == last else f"{first}–{last}"
        parameters = number_text(sum(prediction.parameters[block] for block in blocks))
        table.add_row(str(stage), ranks, _names(own), parameters, f"{share:.1%}")
    return table


def _names(blocks: list[BlockFacts]) -> str:
    return ", ".join(run_name(run) for run in runs(blocks))


def _rank_table(timeline: Timeline, ranks: list[int]) -> Table:
    parts = list(dict.fromkeys(part for held in timeline.memory for part in held))
    table = _table(("rank",), ("busy", "bubble", "peak", *parts))
    for rank in ranks:
        held = timeline.memory[rank] if timeline.memory else {}
        peak = timeline.peak_memory(rank)
        cells = [duration_text(timeline.busy(rank)), f"{timeline.bubble(rank):.1%}", bytes_text(peak)]
        table.add_row(str(rank), *cells, *(bytes_text(held.get(part, 0)) for part in parts))
    return table


def _comparison_table(predicted: Timeline, measured: Timeline) -> Table:
    result = compare(predicted, measured)
    table = _table(("",), ("predicted", "measured", "error"))
    for op, pair in result.kinds.items():
        table.add_row(str(op), *_seconds(pair))
    table.add_row("step", *_seconds(result.makespan))
    table.add_row("bubble", f"{result.bubble.predicted:.1%}", f"{result.bubble.measured:.1%}", "")
    return table


def _seconds(pair: Pair) -> tuple[str, str, str]:
    predicted, measured = (None if x is None else duration_text(x) for x in (pair.predicted, pair.measured))
    return predicted or "-", measured or "-", "-" if pair.error is None else f"{pair.error:+.1%}"


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in left:
        table.add_column(title)
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table
