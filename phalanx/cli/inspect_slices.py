"""`phalanx inspect MODEL --slices`: what slices of a layer's tokens take on this device, and which slices to use.

A layer runs here as it would in training, with weights of no meaning; its segments are not compiled, since every length
of a slice would be compiled once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phalanx.cli.models import PIPED_WIDTH, capture_model, patiently
from phalanx.errors import ConfigError, nearest
from phalanx.model.facts.facts import ModelFacts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from phalanx.profile.slice_fit import Fit, SliceReport

STAGES = 4
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Found:
    """block: the layer that ran, and on which device."""

    block: str
    device: str
    stages: int
    report: SliceReport


def require_slices(slices: bool, stages: int | None, device: str | None, tp: int) -> None:
    """Options that only act together."""
    if device is not None and device not in DEVICES:
        raise ConfigError(f"option device = {device!r} is not one of {', '.join(DEVICES)}", nearest(device, DEVICES))
    if slices and tp > 1:
        raise ConfigError(
            f"option tp = {tp} does nothing with --slices: layers are measured whole", "leave --tp or --slices out"
        )
    for name, value in (("stages", stages), ("device", device)):
        if value is not None and not slices:
            raise ConfigError(
                f"option {name} = {value!r} does nothing without --slices", f"add --slices or leave {name} out"
            )


def find_slices(
    facts: ModelFacts, model: str, task: str | None, tiny: bool, dims: Mapping[str, int],
    stages: int | None, device: str | None,
) -> Found:  # fmt: skip
    """Captures the model and measures a layer; `facts` are its own."""
    if "tokens" not in dims:
        raise ConfigError(
            f"option slices cuts tokens, and the inputs of {facts.name!r} have none", "leave --slices out"
        )
    with patiently(f"measuring slices of {facts.name}"):
        import torch

        from phalanx import tasks
        from phalanx.launch.context import local_device
        from phalanx.model.slicing import slice_model
        from phalanx.profile.slice_fit import report
        from phalanx.profile.slice_run import SliceRun, layers

        spec, captured = capture_model(model, task, facts.dtype, tiny)
        dtype, place = getattr(torch, facts.dtype), torch.device(local_device(device or "auto", 0))
        sliced = slice_model(captured, dtype)
        batch = tasks.get(spec.task).synthetic(spec.config, batch=dims["batch"], tokens=dims["tokens"], seed=0)
        own = layers(sliced)
        name = captured.blocks.blocks[own[0]].name
        run = SliceRun(sliced, batch, own[:2], dtype=dtype, device=place)
        found = report(run.first(1), run if len(own) > 1 else None, run.tokens, stages or STAGES)
    return Found(name, _device_name(place), stages or STAGES, found)


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def as_data(found: Found) -> dict[str, Any]:
    """Everything that is shown, for programs."""
    report = found.report
    return {
        "block": found.block, "device": found.device, "tokens": report.tokens, "stages": found.stages,
        "fit": _fit_data(report.fit), "fit_of_two": _fit_data(report.fit_of_two) if report.fit_of_two else None,
        "measurements": [asdict(measurement) for measurement in report.measurements],
        "depths": [{**asdict(depth), "plan": depth.text} for depth in report.depths],
        "recommended": report.depth(found.stages).text,
    }  # fmt: skip


def _fit_data(fit: Fit) -> dict[str, Any]:
    return {**asdict(fit.times), "smallest": fit.smallest, "error": fit.error, "worst_error": fit.worst_error}


def print_slices(facts: ModelFacts, dims: Mapping[str, int], found: Found) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False)
    shape = ", ".join(f"{name} {size}" for name, size in dims.items())
    console.print(f"{facts.name}  {facts.task}, {facts.dtype}, {shape}", soft_wrap=True)
    console.print(f"\nms of a slice of {found.block} on {found.device}, forward and backward", style="dim")
    console.print(_times_table(found.report))
    for line in fit_lines(found.report):
        console.print(line, soft_wrap=True)
    console.print("\nbest slices by depth, for equal stages and free messages", style="dim")
    console.print(_depth_table(found.report))
    console.print(f"\n{recommendation(found)}", soft_wrap=True)


def fit_lines(report: SliceReport) -> list[str]:
    """The fit in words, and what it says of the smallest efficient slice."""
    fit, times, worst = report.fit, report.fit.times, report.fit.worst
    lines = [
        f"\nfitted: {times.start * 1e3:.3g} ms + {times.per_token * 1e6:.3g} µs per token + "
        f"{times.per_pair * 1e9:.3g} ns per pair of tokens that attend to each other",
        f"error {fit.error:.1%}; the farthest is a slice of {worst.tokens} tokens after {worst.past}, "
        f"{fit.worst_error:+.1%}",
        f"smallest efficient slice: {fit.smallest} tokens; a shorter one takes as long",
    ]
    if report.fit_of_two is not None:
        lines.append(
            f"with two layers in a stage: {report.fit_of_two.smallest} tokens (in a pipeline half as deep; published "
            "is that depth makes no difference to it); how many slices pay depends on the depth"
        )
    return lines


def recommendation(found: Found) -> str:
    """For the number of stages that was asked for."""
    depth = found.report.depth(found.stages)
    if not depth.text:
        return f"for {depth.stages} stages: leave slices out, they would take longer to start than they gain"
    return f"for {depth.stages} stages and one sequence per step: pp={depth.stages},{depth.text}"


def _times_table(report: SliceReport) -> RenderableType:
    places = ("0", "1/4", "1/2", "all that fits")
    rows: list[list[str]] = []
    for tokens in sorted({m.tokens for m in report.measurements}):
        own = {m.past: f"{m.seconds * 1e3:.3f}" for m in report.measurements if m.tokens == tokens}
        pasts = (0, report.tokens // 4, report.tokens // 2, report.tokens - tokens)
        rows.append([str(tokens), *(own.get(past, "") for past in pasts)])
    return _table(("tokens", *(f"past {place}" for place in places)), rows)


def _depth_table(report: SliceReport) -> RenderableType:
    rows = [
        [str(d.stages), str(len(d.lengths)), str(max(d.lengths)), str(min(d.lengths)), f"{d.speed_up:.2f}×"]
        for d in report.depths
    ]
    return _table(("stages", "slices", "longest", "shortest", "speed-up over no slices"), rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
