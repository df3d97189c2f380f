"""`phalanx inspect MODEL`: the model as planning sees it, one row for each block, and what training it takes; without a
model, the names that are known.

A zoo model is shown from the facts shipped with the package, without importing torch; anything else is captured first.
What tensor parallelism makes of it (`--tp`) is shown by `inspect_tensor.py`, what slices take by `inspect_slices.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli import inspect_slices, inspect_tensor
from phalanx.cli.models import (
    DTYPES,
    OPTIMIZER,
    PIPED_WIDTH,
    TOKENS,
    MasterWeights,
    Optimizer,
    OptimizerOptions,
    choose_dims,
    describer,
    find_facts,
    read_update,
    run_name,
)
from phalanx.errors import ConfigError
from phalanx.expressions import evaluate
from phalanx.model.facts.facts import BlockFacts, Dims, ModelFacts, load, runs
from phalanx.model.zoo import zoo_table
from phalanx.observe.format import bytes_text, number_text
from phalanx.predict.update import ADAMW, TrainingBytes, Update
from phalanx.written import plan_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from phalanx.plan.plan import Plan
    from phalanx.predict.predict import Prediction
    from phalanx.predict.split_facts import SplitFacts


def register(app: typer.Typer) -> None:
    app.command("inspect")(inspect)


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            help="zoo name, HuggingFace folder or cached hub id (default: list the zoo)", show_default=False
        ),
    ] = None,
    named: Annotated[str | None, typer.Option("--model", help="the same, as with other verbs")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="samples (default: 1, or as few as the plan needs)")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help=f"tokens per sample (default: {TOKENS}, or as many as the model takes)")
    ] = None,
    task: Annotated[str | None, typer.Option(help="what the model learns (default: from the model)")] = None,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="precision of training")] = DTYPES[0],
    master_weights: MasterWeights = True,
    optimizer: Optimizer = OPTIMIZER,
    optimizer_options: OptimizerOptions = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="shrink the model to test size")] = False,
    live: Annotated[bool, typer.Option("--live", help="capture a zoo model too, instead of reading its facts")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    tp: Annotated[int, typer.Option(help="show how so many tensor-parallel ranks split it")] = 1,
    degrees: Annotated[str | None, typer.Option(help="over how many of them each unit is split, as in a plan")] = None,
    sequence: Annotated[bool, typer.Option("--sequence", help="split activations between units by tokens")] = False,
    replicate: Annotated[bool, typer.Option("--replicate", help="allow fewer heads than ranks")] = False,
    plan: Annotated[
        str | None, typer.Option(help="show what each rank would hold under this plan, e.g. pp=2,dp=4,zero=1")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="with --plan: of a device, e.g. 80GiB; says what fits")] = None,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="with --memory: the largest batch size that fits, at this plan")
    ] = False,
    slices: Annotated[bool, typer.Option("--slices", help="measure slices of a layer's tokens on this device")] = False,
    stages: Annotated[
        int | None, typer.Option(min=1, help=f"of the pipeline to cut slices for (default: {inspect_slices.STAGES})")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="|".join(inspect_slices.DEVICES), help="where slices are measured")
    ] = None,
) -> None:
    """Show a model's blocks: parameters, FLOPs, activations, what crosses each cut; with --tp how it is split, with
    --slices what parts of its sequences take."""
    update = read_update(dtype, master_weights, optimizer, optimizer_options)
    if model is not None and named is not None:
        raise ConfigError(f"two models are named: {model} and {named}", "name one")
    model = model or named
    if model is None:
        return _list_zoo(as_json)
    inspect_slices.require_slices(slices, stages, device, tp)
    if memory is not None and plan is None:
        raise ConfigError(f"option memory = {memory!r} does nothing without a plan", "give --plan as well")
    if largest_batch and memory is None:
        raise ConfigError("option largest_batch does nothing without memory", "give --memory and --plan as well")
    split_plan = inspect_tensor.tensor_plan(tp, degrees, sequence, replicate)
    samples = inspect_tensor.samples(split_plan, batch_size)
    facts = find_facts(model, task, dtype, tiny, live)
    dims = choose_dims(facts, samples, seq_len)
    measured = inspect_slices.find_slices(facts, model, task, tiny, dims, stages, device) if slices else None
    split = inspect_tensor.find_report(facts, model, task, tiny, split_plan, dims) if split_plan.tp > 1 else None
    describe = describer(facts, model, task, tiny)
    held = _Memory(facts, plan, dims, memory, describe, largest_batch, update) if plan is not None else None
    if as_json:
        data = as_data(facts, dims, update) | ({"tensor": inspect_tensor.as_data(split, split_plan)} if split else {})
        data |= {"slices": inspect_slices.as_data(measured)} if measured else {}
        data |= {"memory": held.as_data()} if held else {}
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    elif measured:
        inspect_slices.print_slices(facts, dims, measured)
    elif split:
        inspect_tensor.print_report(facts, dims, split_plan, split)
    else:
        _print(facts, dims, update)
    if held and not as_json:
        held.print()


class _Memory:
    """What ranks would hold under a plan, and whether that fits."""

    def __init__(
        self, facts: ModelFacts, plan: str, dims: dict[str, int], budget: str | None,
        describe: Callable[[Plan], SplitFacts], finds_batch: bool = False, update: Update = ADAMW,
    ) -> None:  # fmt: skip
        self._facts, self._dims, self._budget, self._describe = facts, dims, budget, describe
        self._finds_batch, self._update = finds_batch, update
        self._prediction = self._predict(plan_text(plan))

    def as_data(self) -> dict[str, Any]:
        timeline = self._prediction.timeline
        return {"plan": self._prediction.completed.plan.full_text, "ranks": timeline.memory, "fit": list(self._fit())}

    def print(self) -> None:
        from rich.console import Console

        from phalanx.cli.memory_table import memory_table

        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False)
        plan = self._prediction.completed.plan.shown
        console.print(f"\nmemory of a rank under plan {plan}, batch {self._dims['batch']}")
        console.print(memory_table(self._prediction))
        for line in self._fit():
            console.print(line)

    def _fit(self) -> Iterator[str]:
        from phalanx.cli.memory_table import batch_line, fit_lines

        if self._budget is not None:
            batch = self._dims["batch"]
            yield from fit_lines(self._prediction, self._budget, batch, lambda plan: self._predict(plan.full_text))
            if self._finds_batch:
                plan = self._prediction.completed.plan
                yield batch_line(plan, self._budget, lambda samples: self._predict(plan.full_text, samples))

    def _predict(self, plan: str, batch: int | None = None) -> Prediction:
        from phalanx.predict.from_facts import Device
        from phalanx.predict.predict import predict

        dims = {**self._dims, "batch": batch or self._dims["batch"]}
        return predict(self._facts, plan, None, dims["batch"], dims, Device(), self._describe, update=self._update)


def _list_zoo(as_json: bool) -> None:
    """Every model that is known by name."""
    found = [facts for name in zoo_table.names() if (facts := load(name)) is not None]
    if as_json:
        rows = [{"model": each.name, "parameters": each.num_parameters, "task": each.task} for each in found]
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    width = max(len(facts.name) for facts in found)
    for facts in found:
        typer.echo(f"{facts.name.ljust(width)}  {number_text(facts.num_parameters):>7}  {facts.task}")


def totals(facts: ModelFacts, dims: Dims, update: Update = ADAMW) -> dict[str, int]:
    """What the whole model takes: work per batch and per token, and memory without any sharding."""
    kept, training = TrainingBytes.of(facts.dtype, update), facts.flops(dims)
    return {
        "parameters": facts.num_parameters,
        "forward_flops": facts.flops(dims, training=False),
        "training_flops": training,
        "training_flops_per_token": training // (dims["batch"] * facts.tokens_per_sample(dims)),
        "saved_bytes": facts.saved_bytes(dims),
        "weight_bytes": facts.parameter_bytes,
        "gradient_bytes": kept.gradient * facts.num_parameters,
        "optimizer_bytes": (kept.master + kept.moments) * facts.num_parameters,
    }


def as_data(facts: ModelFacts, dims: Dims, update: Update = ADAMW) -> dict[str, Any]:
    """Everything that is shown, for programs."""
    return {
        "model": facts.name,
        "task": facts.task,
        "dtype": facts.dtype,
        "dims": dict(dims),
        "totals": totals(facts, dims, update),
        "blocks": [_block_data(block, dims) for block in facts.blocks],
        "tied": [{"name": t.name, "parameters": t.parameters, "blocks": list(t.blocks)} for t in facts.tied],
        "notes": list(facts.notes),
    }


def _block_data(block: BlockFacts, dims: Dims) -> dict[str, Any]:
    return {
        "name": block.name,
        "template": block.template,
        "parameters": block.parameters,
        "forward_flops": evaluate(block.flops, dims),
        "saved_bytes": evaluate(block.saved_bytes, dims),
        "units": [
            {"name": unit.name, "parameters": unit.parameters, "forward_flops": evaluate(unit.flops, dims)}
            for unit in block.units
        ],
        "crossing": [
            {"name": t.name, "shape": t.sizes(dims), "dtype": t.dtype, "bytes": t.bytes(dims)} for t in block.crossing
        ],
    }


def _print(facts: ModelFacts, dims: Dims, update: Update) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    shape = ", ".join(f"{name} {size}" for name, size in dims.items())
    console.print(f"{facts.name}  [dim]{facts.task}, {facts.dtype}, {shape}[/dim]", highlight=False)
    console.print(_block_table(facts, dims))
    console.print(_totals_table(facts, dims, update))
    for note in facts.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _block_table(facts: ModelFacts, dims: Dims) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("block", "units", "parameters", "forward FLOPs", "saved", "crosses to the next block"):
        numeric = title in ("parameters", "forward FLOPs", "saved")
        table.add_column(title, justify="right" if numeric else "left", no_wrap=title != "units")
    for run in runs(facts.blocks):
        block = run[0]
        crossing = [f"{list(t.sizes(dims))} {t.dtype}, {bytes_text(t.bytes(dims))}" for t in block.crossing]
        cells = (
            run_name(run),
            ", ".join(unit.name for unit in block.units if unit.name),
            number_text(block.parameters),
            number_text(evaluate(block.flops, dims)),
            bytes_text(evaluate(block.saved_bytes, dims)),
            "\n".join(crossing),
        )
        table.add_row(*map(Text, cells))
    return table


def _totals_table(facts: ModelFacts, dims: Dims, update: Update) -> RenderableType:
    from rich.table import Table

    sums = totals(facts, dims, update)
    per = "token" if "tokens" in facts.dims else "sample"
    masters = "float32 master weights and " if TrainingBytes.of(facts.dtype, update).master else ""
    rows = {
        "parameters": (f"{sums['parameters']:,}", _tied_text(facts)),
        f"training FLOPs per {per}": (number_text(sums["training_flops_per_token"]), "forward and backward"),
        "saved for the backward pass": (bytes_text(sums["saved_bytes"]), "one batch, nothing recomputed"),
        "weights": (bytes_text(sums["weight_bytes"]), facts.dtype),
        "gradients": (bytes_text(sums["gradient_bytes"]), "float64" if facts.dtype == "float64" else "float32"),
        "optimizer state": (bytes_text(sums["optimizer_bytes"]), f"{update.shown}: {masters}{update.words}"),
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, (value, remark) in rows.items():
        table.add_row(name, value, remark)
    return table


def _tied_text(facts: ModelFacts) -> str:
    return "; ".join(f"{tied.name} is used by {', '.join(tied.blocks)}" for tied in facts.tied)
