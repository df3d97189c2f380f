"""`phalanx profile`: measures the devices of this machine and looks at data, and keeps what was found for planning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.config import RunConfig
from phalanx.errors import ConfigError, nearest
from phalanx.written import AUTO

if TYPE_CHECKING:
    from phalanx.plan.rates import Rates
    from phalanx.profile.data import DataProfile
    from phalanx.profile.store import Store

DEVICES, DTYPES = ("auto", "cpu", "cuda"), ("bfloat16", "float16", "float32", "float64")


def register(app: typer.Typer) -> None:
    app.command("profile")(profile)


def profile(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="ranks that compute at the same time (default: the CUDA devices, else 1)")
    ] = None,
    device: Annotated[str, typer.Option(metavar="|".join(DEVICES), help="what to measure")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="|".join(DTYPES), help="precision of products (default: bfloat16, on CPUs float32)"),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="look at data instead: file, folder, 'stdlib' … (repeatable)")
    ] = None,
    model: Annotated[str, typer.Option(help="whose tokenizer and task data is looked at with")] = "phalanx-demo",
    task: Annotated[str | None, typer.Option(help="what the model learns (default: from the model)")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="tokens per sample of data")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="measure again what was measured before")] = False,
    take: Annotated[Path | None, typer.Option("--import", help="take over the measurements in this .json file")] = None,
    out: Annotated[Path | None, typer.Option(help="write what is known of this device to this .json file")] = None,
) -> None:
    """Measure this machine's devices for planning, or look at data."""
    if data:
        _print_data(data, model, task, seq_len)
        return
    for name, value, allowed in (("device", device, DEVICES), ("dtype", dtype, DTYPES)):
        if value is not None and value not in allowed:
            raise ConfigError(f"option {name} = {value!r} is not one of {', '.join(allowed)}", nearest(value, allowed))
    from phalanx.profile.store import Store, profiles_path

    store = Store(profiles_path(), lambda text: typer.echo(text, err=True))
    if take is not None:
        _take(store, take, device)
        return
    _measure(store, device, dtype, ranks, fresh, out)


def _measure(
    store: Store, device: str, dtype: str | None, ranks: int | None, fresh: bool, out: Path | None
) -> None:  # fmt: skip
    import torch

    from phalanx.launch.context import local_device
    from phalanx.profile import hardware

    here = torch.device(local_device(device, 0))
    precision = dtype or ("bfloat16" if here.type == "cuda" else "float32")
    number = ranks or (torch.cuda.device_count() if here.type == "cuda" else 1)
    name = hardware.device_name(here)
    if fresh:
        for question in hardware.questions(here.type, number):
            store.forget(question.kind, hardware.key_of(question, name, precision, number))
    from rich.progress import Progress

    with Progress(transient=True) as shown:
        bar = shown.add_task(f"measuring {name}", total=None)
        rates = hardware.measure(
            store, device, precision, number, lambda done, of: shown.update(bar, completed=done, total=of)
        )
    _print_rates(rates)
    if out is not None:
        own = [row for row in store.rows() if row.key.get("device") == name]
        store.export(out, own)
        typer.echo(f"{len(own)} measurements written to {out}: plan with --profile {out}")


def _take(store: Store, path: Path, device: str) -> None:
    """Measurements of other devices are kept for planning; they are never used for what is here."""
    import torch

    from phalanx.launch.context import local_device
    from phalanx.profile.hardware import device_name
    from phalanx.profile.store import read_profile

    rows = read_profile(path)
    here = device_name(torch.device(local_device(device, 0)))
    other = sorted({str(row.key.get("device")) for row in rows} - {here})
    store.take(rows)
    typer.echo(f"{len(rows)} measurements taken over from {path}")
    if other:
        typer.echo(f"of other devices than the one here ({here}), and not used for it: {', '.join(other)}")


def _print_rates(rates: Rates) -> None:
    from phalanx.observe.format import bytes_text, number_text
    from phalanx.plan.rates import saturation

    peak, small = saturation(rates.products)
    typer.echo(f"{rates.device}, {rates.ranks} rank{'s' * (rates.ranks > 1)}, {rates.source}")
    shown = ", ".join(f"{side:.0f}: {number_text(rate, 'FLOP/s')}" for side, rate in rates.products)
    typer.echo(f"products in {rates.dtype}, by the side of matrices: {shown}")
    typer.echo(f"  as planned with: {number_text(peak, 'FLOP/s')}, of which {small:.0f} rows reach half")
    typer.echo(f"memory: {number_text(rates.bandwidth, 'B/s')}")
    if rates.host is not None:
        typer.echo(f"to the host: {number_text(rates.host, 'B/s')}")
    for name, points in rates.collectives.items():
        shown = ", ".join(f"{bytes_text(size)}: {_duration(seconds)}" for size, seconds in points)
        typer.echo(f"{name}: {shown}")


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _print_data(data: list[str], model: str, task: str | None, seq_len: int | None) -> None:
    from phalanx.profile.data import profile_data
    from phalanx.training.prepare import training_data

    given: dict[str, Any] = {"model": model, "data": tuple(data), "task": task, "seq_len": seq_len}
    config = RunConfig.create(plan=AUTO, **{name: value for name, value in given.items() if value is not None})
    batches = training_data(config)
    typer.echo(batches.describe())
    _print_lengths(profile_data(batches))


def _print_lengths(found: DataProfile) -> None:
    if not found.has_padding:
        typer.echo(f"no padding: every sample has {found.tokens} tokens, and any sequence length wastes nothing")
        return
    shares = ", ".join(f"{part:.0%} up to {found.share(part)}" for part in (0.5, 0.9, 1.0))
    typer.echo(f"lengths of {len(found.lengths)} samples: mean {found.mean:.0f}, {shares}")
    for own in found.tried():
        mark = "  ← wastes least" if own == found.best else ""
        typer.echo(f"seq_len {own.tokens:6d}: {own.padding:6.1%} padding, {own.cut:6.1%} of the tokens cut off{mark}")
