"""`phalanx profile`: measures the devices of this machine and a model's blocks on them, or looks at data. What it finds
is kept for planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.plan_data import OnBroken, TextKey, look_at, require_data
from phalanx.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

    from phalanx.launch.context import RankContext
    from phalanx.planning.rates import Rates, Talk
    from phalanx.profile.data import DataProfile
    from phalanx.profile.model import Outcome, Subject
    from phalanx.profile.store import Row, Store

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
    text_key: TextKey = None,
    on_broken: OnBroken = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="measure this model's blocks too; with --data, whose tokenizer and task that is looked at with"
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="what the model learns (default: from the model)")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="shrink the model to test size")] = False,
    seq_len: Annotated[int | None, typer.Option(min=1, help="tokens per sample (default: as in training)")] = None,
    degrees: Annotated[
        str | None, typer.Option(help="tensor-parallel degrees that blocks are measured at (default: 1)")
    ] = None,
    samples: Annotated[
        str | None, typer.Option(help="samples of micro-batches that they are measured with (default: 1,2,4)")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="that measuring blocks may take; another call goes on (default: 60)")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="measure, or look, again")] = False,
    take: Annotated[Path | None, typer.Option("--import", help="take over the measurements in this .json file")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="write what is known of this device and of data, or of this data, to this .json file"),
    ] = None,
) -> None:
    """Measure devices and a model's blocks for planning, or look at data. Devices are this machine's, or those of all
    ranks that torchrun, srun or mpirun started."""
    of_blocks = {"tiny": tiny or None, "degrees": degrees, "samples": samples, "seconds": seconds}
    reading = {"text_key": text_key, "on_broken": on_broken}
    of_devices = {"ranks": ranks, "dtype": dtype, "device": None if device == "auto" else device}
    if data:
        _refuse(of_blocks, "data is looked at")
        _refuse({**of_devices, "import": take}, "data is looked at", about="measurements of devices")
        _look_at_data(data, {"model": model or "phalanx-demo", "task": task, "seq_len": seq_len, **reading}, fresh, out)
        return
    require_data(data, reading)
    if model is None:
        _refuse({**of_blocks, "task": task, "seq_len": seq_len}, "no model is named", "name it (--model NAME), or ")
    if take is not None:
        idle = {**of_devices, "device": None, "model": model, "fresh": fresh or None, "out": out}
        _refuse(idle, "measurements are taken over, and nothing is measured", about="measuring")
    _require_own_ranks(ranks, model, take)
    asked = [(a, b) for a in _numbers("degrees", degrees or "1") for b in _numbers("samples", samples or "1,2,4")]
    for name, value, allowed in (("device", device, DEVICES), ("dtype", dtype, DTYPES)):
        if value is not None and value not in allowed:
            raise ConfigError(f"option {name} = {value!r} is not one of {', '.join(allowed)}", nearest(value, allowed))
    from phalanx.profile.store import Store, profiles_path

    store = Store(profiles_path(), lambda text: typer.echo(text, err=True))
    if take is not None:
        _take(store, take, device)
        return
    if _under_launcher():
        _measure_joined(store, device, dtype, fresh, out)
        return
    _measure(store, device, dtype, ranks, fresh)
    if model is not None:
        limit = 60.0 if seconds is None else seconds
        _measure_model(store, device, dtype, ranks, fresh, model, task, tiny, seq_len, asked, limit)
    if out is not None:
        _export(store, device, out)


def _refuse(
    given: Mapping[str, object], why: str, instead: str = "", about: str = "the blocks of a model"
) -> None:  # fmt: skip
    """Options that would do nothing. instead: what would help besides. about: what they are for."""
    for name, value in given.items():
        if value is not None:
            option, shown = f"--{name.replace('_', '-')}", str(value) if isinstance(value, Path) else value
            message = f"option {name} = {shown!r} does nothing: {why}, and it is about {about}"
            raise ConfigError(message, f"{instead}leave out {option}")


def _numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10**6 for part in parts):
        raise ConfigError(f"option {name} = {text!r} is not a list of numbers", f"write for example --{name} 1,2,4")
    return sorted({int(part) for part in parts})


def _here(device: str, dtype: str | None, ranks: int | None) -> tuple[torch.device, str, int]:
    """The device, the precision and the number of ranks, where they are left open too."""
    import torch

    from phalanx.launch.context import local_device

    here = torch.device(local_device(device, 0))
    number = ranks or (torch.cuda.device_count() if here.type == "cuda" else 1)
    return here, dtype or ("bfloat16" if here.type == "cuda" else "float32"), number


def _under_launcher() -> bool:
    """Whether this is one of several processes."""
    import os

    from phalanx.launch.join import find_place

    place = find_place(os.environ)
    return place is not None and place.world > 1


def _require_own_ranks(ranks: int | None, model: str | None, take: Path | None) -> None:
    """Processes that a launcher started measure together, and nothing but devices."""
    given = {"ranks": ranks, "model": model, "import": take}
    for name, value in given.items():
        if value is not None and _under_launcher():
            message = f"option {name} = '{value}' is for one process, and a launcher (torchrun, srun, mpirun) has " \
                      "started several, which measure devices together"  # fmt: skip
            raise ConfigError(message, f"leave --{name} out, or run it by itself: sbatch --ntasks=1, or no launcher")


def _measure_joined(store: Store, device: str, dtype: str | None, fresh: bool, out: Path | None) -> None:
    """As one rank of a job; the first one keeps, prints and writes what all have measured."""
    from phalanx.config import cache_folder
    from phalanx.launch.join import join, run_joined

    context = join(device, folder=cache_folder())
    assert context is not None
    precision = dtype or ("float32" if context.device == "cpu" else "bfloat16")
    run_joined(context, _measure_on_rank, store, precision, fresh)
    if context.rank == 0 and out is not None:
        _export(store, device, out)


def _measure_on_rank(context: RankContext, store: Store, dtype: str, fresh: bool) -> None:
    from rich.progress import Progress

    from phalanx.profile.hardware import measure_joined

    with Progress(transient=True, disable=context.rank > 0) as shown:
        bar = shown.add_task(f"measuring {context.world} ranks", total=None)
        rates = measure_joined(
            context, store if context.rank == 0 else None, dtype,
            on_progress=lambda done, of: shown.update(bar, completed=done, total=of), fresh=fresh,
        )  # fmt: skip
    if rates is not None:
        _print_rates(rates)


def _measure(store: Store, device: str, dtype: str | None, ranks: int | None, fresh: bool) -> None:
    from rich.progress import Progress

    from phalanx.profile import hardware

    here, precision, number = _here(device, dtype, ranks)
    with Progress(transient=True) as shown:
        bar = shown.add_task(f"measuring {hardware.device_name(here)}", total=None)
        rates = hardware.measure(
            store, device, precision, number, lambda done, of: shown.update(bar, completed=done, total=of), fresh
        )
    _print_rates(rates)


def _measure_model(
    store: Store, device: str, dtype: str | None, ranks: int | None, fresh: bool, model: str, task: str | None,
    tiny: bool, seq_len: int | None, asked: list[tuple[int, int]], seconds: float,
) -> None:  # fmt: skip
    from rich.progress import Progress

    from phalanx import tasks
    from phalanx.cli.models import capture_model
    from phalanx.data.batches import check_length, sample_length
    from phalanx.profile import model as blocks

    here, precision, number = _here(device, dtype, ranks)
    spec, captured = capture_model(model, task, precision, tiny)
    learned = tasks.get(spec.task)
    tokens = sample_length(seq_len, learned, spec.config)
    check_length(learned, spec.config, tokens)
    subject = blocks.Subject.synthetic(spec, captured, precision, here, number, tokens)
    sizes = [blocks.Size(*own) for own in asked]
    if fresh:
        blocks.forget(store, subject, sizes)
    with Progress(transient=True) as shown:
        bar = shown.add_task(f"measuring blocks of {spec.name}", total=None)
        found = blocks.measure(
            store, subject, sizes, seconds, lambda done, of: shown.update(bar, completed=done, total=of)
        )
    _print_blocks(store, subject, found)


def _print_blocks(store: Store, subject: Subject, found: Outcome) -> None:
    from phalanx.profile.model import times_here

    times = times_here(
        store.rows(), subject.captured, subject.dtype, subject.device, subject.ranks, subject.length, subject.compile
    )  # fmt: skip
    typer.echo(f"blocks of {subject.spec.name} in {subject.dtype}, samples of {subject.length} tokens: forward, input "
               "gradients, weight gradients")  # fmt: skip
    for name, by_degree in times.items():
        for degree, known in by_degree.items():
            shown = "; ".join(f"{int(own.samples)}: {', '.join(map(_duration, own[1:]))}" for own in known)
            typer.echo(f"  {name}, degree {degree}, by samples {shown}")
    for degree, why in found.refused.items():
        typer.echo(f"degree {degree} was left out: {why}")
    if found.left:
        typer.echo(f"no time was left for {len(found.left)} of {found.measured + found.known + len(found.left)} sizes: "
                   "run it again to go on, or allow more with --seconds")  # fmt: skip


def _export(store: Store, device: str, out: Path) -> None:
    from phalanx.profile.data import by_profile
    from phalanx.profile.hardware import device_name

    name, every = device_name(_here(device, None, 1)[0]), store.rows()
    own = [row for row in every if row.key.get("device") == name]
    data = by_profile(every)
    store.export(out, [*own, *(row for rows in data for row in rows)])
    typer.echo(f"{len(own)} measurements{_and_data(data)} written to {out}: plan with --profile {out}")


def _and_data(profiles: Sequence[Sequence[Row]]) -> str:
    count = len(profiles)
    return f" and {count} profile{'s' * (count > 1)} of data" if count else ""


def _take(store: Store, path: Path, device: str) -> None:
    """Measurements of other devices are kept for planning; they are never used for what is here."""
    import torch

    from phalanx.launch.context import local_device
    from phalanx.profile.data import KIND, by_profile
    from phalanx.profile.hardware import device_name
    from phalanx.profile.store import read_profile

    rows = read_profile(path)
    own = [row for row in rows if row.kind != KIND]
    here = device_name(torch.device(local_device(device, 0)))
    other = sorted({str(row.key.get("device")) for row in own} - {here})
    store.take(rows)
    typer.echo(f"{len(own)} measurements{_and_data(by_profile(rows))} taken over from {path}")
    if other:
        typer.echo(f"of other devices than the one here ({here}), and not used for it: {', '.join(other)}")


def _print_rates(rates: Rates) -> None:
    from phalanx.observe.format import number_text
    from phalanx.planning.rates import saturation

    peak, small = saturation(rates.products)
    typer.echo(f"{rates.device}, {rates.near.among}, {rates.source}")
    shown = ", ".join(f"{side:.0f}: {number_text(rate, 'FLOP/s')}" for side, rate in rates.products)
    typer.echo(f"products in {rates.dtype}, by the side of matrices: {shown}")
    typer.echo(f"  as planned with: {number_text(peak, 'FLOP/s')}, of which {small:.0f} rows reach half")
    typer.echo(f"memory: {number_text(rates.bandwidth, 'B/s')}")
    if rates.host is not None:
        typer.echo(f"to the host: {number_text(rates.host, 'B/s')}")
    for talk in filter(None, (rates.near, rates.far)):
        _print_talk(talk)


def _print_talk(talk: Talk) -> None:
    from phalanx.observe.format import bytes_text

    if talk.collectives or talk.speeds:
        typer.echo(f"among {talk.among}:")
    for name, points in talk.collectives.items():
        shown = ", ".join(f"{bytes_text(size)}: {_duration(seconds)}" for size, seconds in points)
        typer.echo(f"  {name}: {shown}")
    beside = talk.speeds.get("computing", ())
    if beside:
        shown = ", ".join(f"{count:.0f}: {speed:.0%}" for count, speed in beside)
        typer.echo(f"  speed of computation, by ranks that compute: {shown}")
    for _, speed in talk.speeds.get("listening", ()):
        typer.echo(f"  speed of computation while ranks wait for a message: {speed:.0%}")
    below = [talk.speeds[name][-1][1] for name in ("computing beneath", "all_reduce beneath") if name in talk.speeds]
    if len(below) == 2:
        typer.echo(f"  beneath each other: computation at {below[0]:.0%}, all_reduce at {below[1]:.0%} of its speed")


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _look_at_data(data: list[str], given: Mapping[str, Any], fresh: bool, out: Path | None) -> None:
    from phalanx.profile.store import Store, profiles_path

    name = " + ".join(data)
    known, is_new = look_at(data, given, lambda text: typer.echo(text, err=True), fresh)
    found = known.profile
    samples = "a stream" if found.samples is None else f"{found.samples:,} samples per epoch"
    typer.echo(f"{name}, {found.tokens:,} token{'s' * (found.tokens > 1)} per sample, {samples}")
    if not is_new:
        typer.echo(f"as looked at {known.made}; --fresh looks again")
    _print_lengths(found)
    if out is not None:
        Store(profiles_path()).export(out, known.rows)
        typer.echo(f"written to {out}: plan with --data {out}")


def _print_lengths(found: DataProfile) -> None:
    if not found.has_padding:
        typer.echo(f"no padding: every sample has {found.tokens} tokens, and any sequence length wastes nothing")
        return
    shares = ", ".join(f"{part:.0%} up to {found.share(part)}" for part in (0.5, 0.9, 1.0))
    typer.echo(f"lengths of {len(found.lengths)} samples: mean {found.mean:.0f}, {shares}")
    for own in found.tried():
        mark = "  ← wastes least" if own == found.best else ""
        typer.echo(f"seq_len {own.tokens:6d}: {own.padding:6.1%} padding, {own.cut:6.1%} of the tokens cut off{mark}")
