"""What a plan makes every rank hold, as a table; and whether that is within a budget, or what would be.

Shown by `phalanx program` and `phalanx inspect --plan`; from facts, without torch where they are shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from phalanx.observe.format import bytes_text
from phalanx.plan.lighter import Needs, largest_batch, lighter_plans
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.written import parse_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from phalanx.predict.predict import Prediction
    from phalanx.predict.timeline import Timeline


def pipeline_ranks(prediction: Prediction, timeline: Timeline) -> list[int]:
    """Replicas and tensor-parallel ranks hold the same: the pipeline of rank 0 stands for all."""
    return [rank for rank in Mesh.of(prediction.completed.plan).column(0) if rank in timeline.ranks]


def memory_table(prediction: Prediction) -> Table:
    """One row for each rank of the first pipeline, at its peak."""
    from rich.table import Table

    timeline = prediction.timeline
    parts = list(dict.fromkeys(part for held in timeline.memory for part in held))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("rank", "peak", *parts):
        table.add_column(title, justify="left" if title == "rank" else "right", no_wrap=True)
    for rank in pipeline_ranks(prediction, timeline):
        sizes = (bytes_text(timeline.memory[rank].get(part, 0)) for part in parts)
        table.add_row(str(rank), bytes_text(timeline.peak_memory(rank)), *sizes)
    return table


def fit_lines(
    prediction: Prediction, memory: str, batch_size: int, predict: Callable[[Plan], Prediction]
) -> Iterator[str]:
    """Whether every rank stays within the budget. predict: another plan of the same model, batch and device."""
    budget, needs = parse_bytes("memory", memory), _needs(prediction)
    fullest = max(prediction.timeline.ranks, key=lambda rank: prediction.timeline.peak_memory(rank) or 0)
    held = f"rank {fullest} holds {bytes_text(needs.memory)} at its peak"
    if needs.memory <= budget:
        yield f"fits: {held}, and {bytes_text(budget)} are there; libraries and the allocator take some beside it"
        return
    yield f"does not fit: {held}, and {bytes_text(budget)} are there"
    fitting, least = lighter_plans(
        prediction.completed.plan, batch_size, budget, lambda plan: _needs(predict(plan)), has_host=True
    )  # fmt: skip
    for own in fitting:
        ratio = own.needs.seconds / needs.seconds
        yield f"  {own.change} would: {bytes_text(own.needs.memory)}, {ratio:.2f}× the step"
    if not fitting and least is not None:
        yield f"  no change of this plan would; the least is {bytes_text(least.needs.memory)} by {least.change}"


def batch_line(plan: Plan, memory: str, predict: Callable[[int], Prediction]) -> str:
    """The largest batch within the budget, of whole micro-batches on every replica. predict: a batch of so many."""
    budget, multiple = parse_bytes("memory", memory), plan.dp * plan.mb
    found = largest_batch(lambda samples: _needs(predict(samples)).memory, budget, multiple)
    if found is None:
        return f"no batch fits: the smallest, of {multiple}, needs {bytes_text(_needs(predict(multiple)).memory)}"
    held = bytes_text(_needs(predict(found)).memory)
    return f"largest batch that fits: --batch-size {found} ({plan.dp} × {plan.mb} × {found // multiple}), {held}"


def _needs(prediction: Prediction) -> Needs:
    timeline = prediction.timeline
    return Needs(max(timeline.peak_memory(rank) or 0 for rank in timeline.ranks), prediction.step_seconds)
