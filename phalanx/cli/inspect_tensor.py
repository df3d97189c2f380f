"""`phalanx inspect MODEL --tp N`: what tensor parallelism splits, what it cannot, and what its ranks send each other.

The splits are those that training would make: the model is captured and split as for a run, without any weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.cli.models import PIPED_WIDTH, capture_model, patiently
from phalanx.errors import PlanError
from phalanx.model.facts.facts import ModelFacts
from phalanx.observe.format import bytes_text, number_text
from phalanx.plan.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from phalanx.model.shard.report import BlockReport, Collective, Report, WeightSplit

_ORDER = ("vocabulary", "columns", "rows", "elements", "samples", "whole")


def tensor_plan(tp: int, degrees: str | None, sequence: bool, replicate: bool) -> Plan:
    """The plan that the options ask for; refused as a plan is."""
    fields = [f"tp={tp}", f"degrees={degrees}" if degrees is not None else ""]
    fields += ["sequence=yes" if sequence else "", "replicate=yes" if replicate else ""]
    return Plan.parse(",".join(filter(None, fields)))


def samples(plan: Plan, batch: int | None) -> int:
    """As many as are asked for, or as few as the plan can divide."""
    if batch is not None and batch % plan.multiple:
        raise PlanError(
            f"plan: degrees={plan.shown.partition('degrees=')[2].partition(',')[0]} divides the samples between "
            f"{plan.multiple} groups of ranks, and there are {batch}",
            f"use --batch-size {plan.multiple} or a multiple of it",
        )
    return batch or plan.multiple


def find_report(
    facts: ModelFacts, model: str, task: str | None, tiny: bool, plan: Plan, dims: Mapping[str, int]
) -> Report:
    """Captures and splits the model; `facts` are its own."""
    with patiently(f"reading and splitting the graph of {facts.name}"):
        import torch

        from phalanx.model.shard.report import report

        _, captured = capture_model(model, task, facts.dtype, tiny)
        return report(captured, plan, getattr(torch, facts.dtype), dims)


def as_data(found: Report, plan: Plan) -> dict[str, Any]:
    """Everything that is shown, for programs."""
    return {"plan": plan.text, **asdict(found)}


def print_report(facts: ModelFacts, dims: Mapping[str, int], plan: Plan, found: Report) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False)
    shape = ", ".join(f"{name} {size}" for name, size in dims.items())
    console.print(f"{facts.name}  {facts.task}, {facts.dtype}, {shape}; {plan.text}", soft_wrap=True)
    console.print(_split_table(found))
    if found.whole:
        console.print("\nmultiplied alike by several ranks", style="dim")
        console.print(_table((), [(_counted(name, count), reason) for name, reason, count in found.whole]))
    console.print("\nsent between tensor-parallel ranks, for each block and micro-batch", style="dim")
    console.print(_collective_table(found))
    console.print()
    console.print(_totals(found, plan))


def _split_table(found: Report) -> RenderableType:
    rows: list[tuple[str, ...]] = []
    for block in found.blocks:
        share = f"{block.share:.1%}" if block.flops else ""
        name = _name(block)
        for row in _weight_rows(block):
            rows.append((name, *row, share))
            name = share = ""
    return _table(("block", "unit", "split", "weights", "FLOPs split"), rows)


def _weight_rows(block: BlockReport) -> Iterator[tuple[str, str, str]]:
    """Weights of a unit that are split alike, in one row."""
    heads = iter(block.attention)
    for unit in dict.fromkeys(weight.unit for weight in block.weights):
        # Units attend in the order of the graph.
        attends = next(heads, None) if unit not in ("", "feed-forward") else None
        shown = unit if attends is None else f"{unit}: {_heads(attends)}"
        own = sorted((w for w in block.weights if w.unit == unit), key=lambda weight: _ORDER.index(weight.how))
        for how in dict.fromkeys(map(_how, own)):
            yield shown, how, ", ".join(weight.name for weight in own if _how(weight) == how)
            shown = ""


def _heads(ranks: Sequence[tuple[int, int]]) -> str:
    heads, kv_heads = (_per_rank([pair[which] for pair in ranks]) for which in (0, 1))
    return f"heads {heads}" + (f", key/value {kv_heads}" if heads != kv_heads else "")


def _how(weight: WeightSplit) -> str:
    if weight.how == "whole":
        return "whole on every rank"
    if weight.how == "samples":
        return "whole; ranks have other samples"
    sections = f" in {weight.sections} sections" if weight.sections > 1 else ""
    copies = f", the same on {weight.copies} ranks" if weight.copies > 1 else ""
    return f"{weight.how}{sections}: {_per_rank(weight.sizes)}{copies}"


def _per_rank(sizes: Sequence[int]) -> str:
    """12 each; or 13, 12 where ranks have different ones."""
    return f"{sizes[0]} each" if len(set(sizes)) == 1 else ", ".join(map(str, sizes))


def _collective_table(found: Report) -> RenderableType:
    rows: list[tuple[str, ...]] = []
    for block in found.blocks:
        name = _name(block)
        for each in block.collectives:
            size = f"{bytes_text(each.bytes)}{' each' if each.count > 1 else ''}"
            rows.append((name, each.unit, each.direction, _collective_text(each), size))
            name = ""
    return _table(("block", "unit", "", "collective", "of"), rows)


def _collective_text(each: Collective) -> str:
    times = f"{each.count} × " if each.count > 1 else ""
    return f"{times}{each.kind.replace('_', '-')} over {each.ranks} ranks"


def _totals(found: Report, plan: Plan) -> RenderableType:
    least, most = min(found.parameters_per_rank), max(found.parameters_per_rank)
    spread = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    busiest = max(found.flops_per_rank) * plan.tp / sum(found.flops_per_rank) - 1
    uneven = f", the busiest rank {busiest:.1%} more than the mean" if busiest >= 0.0005 else ""
    rows = [
        ("parameters per rank", spread, f"of {found.parameters:,}; {most / found.parameters:.1%} at most"),
        ("matrix FLOPs that are split", f"{found.share:.2%}", f"of {number_text(found.flops)} in the forward{uneven}"),
    ]
    return _table((), rows)


def _name(block: BlockReport) -> str:
    """One block by its name, several of one list as 'model.layers.0 … 79  ×80'."""
    first, last = block.names[0], block.names[-1]
    return first if len(block.names) == 1 else f"{first} … {last.rpartition('.')[2]}  ×{len(block.names)}"


def _counted(name: str, count: int) -> str:
    return name if count == 1 else f"{name}  ×{count}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), show_header=bool(titles))
    for title in titles or [""] * max(map(len, rows), default=0):
        table.add_column(title, no_wrap=title != "weights", justify="right" if title == "FLOPs split" else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
