"""`phalanx program`: what a plan makes every rank do, when, and what it costs; predicted, and beside it measured.

A zoo model needs neither torch nor a device: its facts are shipped, and durations follow from an assumed device. Only
what is not shipped (other models, other ways to split their tensors) is described from the model's graph.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.models import (
    DTYPES,
    OPTIMIZER,
    TOKENS,
    Lora,
    MasterWeights,
    Optimizer,
    OptimizerOptions,
    choose_dims,
    describer,
    find_facts,
    read_update,
)
from phalanx.errors import ConfigError, PlanError
from phalanx.written import parse_bytes, plan_text

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.predict.from_facts import Device
    from phalanx.predict.predict import Prediction
    from phalanx.predict.timeline import Timeline


def register(app: typer.Typer) -> None:
    app.command("program")(program)


def program(
    model: Annotated[str, typer.Option(help="zoo name, HuggingFace folder or cached hub id")],
    plan: Annotated[
        str,
        typer.Option(
            help="for example pp=4,mb=8,schedule=zb-h1, or a .json or .yaml file; what it leaves open is decided"
        ),
    ] = "",
    ranks: Annotated[int | None, typer.Option(min=1, help="ranks there are (default: what the plan needs)")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="samples of the global batch")] = 8,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help=f"tokens per sample (default: {TOKENS}, or as many as the model takes)")
    ] = None,
    task: Annotated[str | None, typer.Option(help="what the model learns (default: from the model)")] = None,
    lora: Lora = None,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="precision of training")] = DTYPES[0],
    master_weights: MasterWeights = True,
    optimizer: Optimizer = OPTIMIZER,
    optimizer_options: OptimizerOptions = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="shrink the model to test size")] = False,
    device_flops: Annotated[
        float | None, typer.Option(help="FLOP/s that a device is assumed to reach (default: 1e14)")
    ] = None,
    link_bytes: Annotated[
        float | None, typer.Option(help="bytes/s that a link between ranks is assumed to carry (default: 2.5e10)")
    ] = None,
    host_bytes: Annotated[
        float | None, typer.Option(help="bytes/s between a device and its host, each way (default: 5e10)")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="memory of a device, e.g. 80GiB: says whether the plan fits, and what would")
    ] = None,
    lowered: Annotated[bool, typer.Option("--lowered", help="print the lowered programs, and nothing else")] = False,
    values: Annotated[
        bool, typer.Option("--values", help="print what every instruction reads, writes, adds to and frees")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="draw the step to this SVG file")] = None,
    png: Annotated[Path | None, typer.Option(help="draw the step to this PNG file (needs matplotlib)")] = None,
    trace: Annotated[Path | None, typer.Option(help="write the step as a Chrome/Perfetto trace")] = None,
    measured: Annotated[Path | None, typer.Option(help="lay the timeline that a run wrote beside it")] = None,
) -> None:
    """Show what a plan makes every rank do: stages, instructions over time, bubble and memory."""
    update = read_update(dtype, master_weights, optimizer, optimizer_options)
    _require_shown(lowered, values, memory=memory, svg=svg, png=png, trace=trace, measured=measured)
    if memory is not None:
        parse_bytes("memory", memory)
    from phalanx.predict.predict import predict

    device = _device(device_flops, link_bytes, host_bytes)
    facts = find_facts(model, task, dtype, tiny, live=False, lora=lora)

    dims, describe = choose_dims(facts, batch_size, seq_len), describer(facts, model, task, tiny, lora)
    predicted = partial(predict, facts, dims=dims, device=device, describe=describe, update=update)
    prediction = predicted(plan_text(plan), ranks, batch_size)
    if lowered or values:
        typer.echo("\n".join(_values(prediction) if values else _lowered(prediction)))
        return
    timelines = {"predicted": prediction.timeline}
    if measured:
        timelines["measured"] = _read(measured, prediction.completed.plan.world)
    from phalanx.cli.program_report import print_report

    print_report(facts, prediction, timelines, sys.stdout.isatty())
    if memory is not None:
        from phalanx.cli.memory_table import fit_lines

        def again(plan: Plan) -> Prediction:
            return predicted(plan.full_text, None, batch_size)

        typer.echo("\n".join(["", *fit_lines(prediction, memory, batch_size, again)]))
    _write(timelines, svg=svg, png=png, trace=trace)


def _require_shown(lowered: bool, values: bool, **others: object) -> None:
    """Programs are all that is printed of them."""
    if lowered and values:
        raise ConfigError("options --lowered and --values exclude each other", "give one")
    ignored = next((name for name, given in others.items() if given is not None), None)
    if (lowered or values) and ignored is not None:
        what = "--lowered" if lowered else "--values"
        raise ConfigError(f"option --{ignored} does nothing with {what}", "leave one of them out")


def _device(flops: float | None, link_bytes: float | None, host_bytes: float | None) -> Device:
    from phalanx.predict.costs import Link
    from phalanx.predict.from_facts import Device

    default = Device()
    for name, value in (("device-flops", flops), ("link-bytes", link_bytes), ("host-bytes", host_bytes)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"option {name} = {value} is not a speed", "give a number above 0, for example 1e14")
    link = Link(default.link.latency_s, link_bytes) if link_bytes else default.link
    host = Link(default.host_link.latency_s, host_bytes) if host_bytes else default.host_link
    return Device(flops or default.flops_per_s, default.memory_bytes_per_s, link, host)


def _lowered(prediction: Prediction) -> list[str]:
    from phalanx.program.instructions import to_text

    compiled = prediction.compiled
    return [f"rank {rank}: {to_text(compiled.program(rank))}" for rank in range(compiled.plan.world)]


def _values(prediction: Prediction) -> list[str]:
    """Of one rank for each place in the pipeline: all others have the same."""
    found: list[str] = []
    for pp_index, table in enumerate(prediction.compiled.tables):
        rank = prediction.compiled.mesh.rank(pp_index, 0)
        found += [f"rank {rank}: < reads, > writes, + adds to, x frees", *table.lines()]
    return found


def _read(path: Path, world: int) -> Timeline:
    from phalanx.predict.timeline import Timeline

    try:
        timeline = Timeline.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"option measured = '{path}' cannot be read: {error.strerror}", "name the timeline that a run wrote"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"option measured = '{path}' is not text", "name the timeline that a run wrote") from error
    except PlanError as error:
        raise ConfigError(f"option measured = '{path}' is {error.message}", error.hint) from error
    if timeline.ranks != tuple(range(world)):
        raise ConfigError(
            f"option measured = '{path}' is of {len(timeline.ranks)} ranks, and the plan has {world}",
            "give the plan that was measured",
        )
    return timeline


def _write(timelines: Mapping[str, Timeline], **paths: Path | None) -> None:
    from phalanx.observe.program_files import chrome_trace, svg, write_png

    writers = {
        "svg": lambda path: path.write_text(svg(timelines), encoding="utf-8"),
        "png": lambda path: write_png(timelines, path),
        "trace": lambda path: path.write_text(chrome_trace(timelines), encoding="utf-8"),
    }
    for option, path in paths.items():
        if path is None:
            continue
        try:
            writers[option](path)
        except OSError as error:
            raise ConfigError(
                f"option {option} = '{path}' cannot be written: {error.strerror}",
                "name a file in a folder that exists and may be written to",
            ) from error
        typer.echo(f"{option} written to {path}")
