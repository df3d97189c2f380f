"""`phalanx calibrate`: what programs reach of a device, fitted to runs that somebody measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.models import patiently
from phalanx.errors import ConfigError, DataError

if TYPE_CHECKING:
    from phalanx.planning.runs import Run

FEWEST = 3  # runs, below which a fit says nothing


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


def calibrate(
    runs: Annotated[Path, typer.Argument(help="a CSV file of measured runs; its columns are in docs/planning.md")],
    out: Annotated[Path, typer.Option(help="where to write it, for --calibration")] = Path("calibration.json"),
    source: Annotated[str, typer.Option(help="only runs whose source holds this word: one program's, say")] = "",
) -> None:
    """Fit what programs reach of devices to measured runs, for `phalanx plan --calibration`."""
    from phalanx.planning.runs import read_runs

    found, left_out = read_runs(runs)
    wide = [run for run in found if run.bits == 16]
    left_out += Counter({"products in 8 bits, which plans do not have": len(found) - len(wide)})
    chosen = [run for run in wide if source in run.source]
    devices = sorted({run.device for run in chosen})
    with patiently(f"fitting to {len(chosen)} runs"):
        sections = {device: section for device in devices if (section := _section(chosen, device)) is not None}
    for reason, count in left_out.most_common():
        typer.echo(f"left out {count}: {reason}")
    if not sections:
        named = f" of {source!r}" if source else ""
        enough = f"holds {len(chosen)} timed runs{named} that say enough, and a fit needs {FEWEST} on a device"
        raise DataError(
            f"runs: {runs} {enough}",
            "give more runs, with layers, hidden, heads, seq_len, tp, pp, dp, batches and a time",
        )
    for device, section in sections.items():
        told = section["mean_error"]
        typer.echo(f"{device}: {section['runs']} runs, mean error {told:.1%}, worst {section['worst_error']:.1%}")
    try:
        out.write_text(json.dumps({"fitted_to": runs.name, "devices": sections}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        message = f"option out = '{out}' cannot be written: {error.strerror}"
        raise ConfigError(message, "name a file in a folder that exists and may be written to") from error
    typer.echo(f"written to {out}: plan with --calibration {out}")


def _section(runs: list[Run], device: str) -> dict[str, Any] | None:
    from phalanx.planning.calibrate import fit, fit_memory, software_data, step_seconds

    own = [run for run in runs if run.device == device]
    timed = [run for run in own if run.seconds is not None]
    if len(timed) < FEWEST:
        return None
    software = fit_memory(own, fit(timed))
    errors = {run.source: list[float]() for run in timed}
    for run in timed:
        errors[run.source].append(step_seconds(run, software) / (run.seconds or 1.0) - 1)
    every = [abs(error) for found in errors.values() for error in found]
    return {
        "software": software_data(software),
        "runs": len(timed),
        "mean_error": sum(every) / len(every),
        "worst_error": max(every),
        "residuals": {name: {"runs": len(found), "mean": sum(found) / len(found),
                             "mean_absolute": sum(map(abs, found)) / len(found)} for name, found in errors.items()},
    }  # fmt: skip
