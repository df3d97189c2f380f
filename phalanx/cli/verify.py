"""`phalanx verify`: proves that a plan trains a model exactly as plain PyTorch does."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from phalanx.errors import PhalanxError


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(
    model: Annotated[str, typer.Option(help="Zoo name, HuggingFace folder or cached hub id.")],
    plan: Annotated[
        str, typer.Option(help="The plan to check: mb=2,schedule=zb-h1, or a .json or .yaml file of it.")
    ] = "",
    tiny: Annotated[bool, typer.Option("--tiny", help="Shrink the model to test size, keeping its structure.")] = False,
    dtype: Annotated[str, typer.Option(help="float64 (tolerance 1e-9) or float32 (1e-5).")] = "float64",
    steps: Annotated[int, typer.Option(help="Steps to compare; they alternate between two shapes.")] = 2,
    batch_size: Annotated[int | None, typer.Option(help="Samples of the first step; default: enough.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per sample of the first step.")] = 24,
    dropout: Annotated[float | None, typer.Option(help="Set every dropout of the model; default: its own.")] = None,
    padding: Annotated[bool, typer.Option("--padding", help="Samples of different lengths, padded.")] = False,
    documents: Annotated[bool, typer.Option("--documents", help="Several packed documents per sample.")] = False,
    task: Annotated[str | None, typer.Option(help="The task, where the model does not say.")] = None,
    compile: Annotated[str, typer.Option(help="off, aot_eager, inductor or auto.")] = "off",
    device: Annotated[
        str, typer.Option(help="Where the plan runs: cpu or cuda. The plain model runs on the CPU.")
    ] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Prove that a plan equals the plain model: loss, every gradient, every updated parameter."""
    from phalanx.launch.early import early_server
    from phalanx.verification.verify import verify as run

    with early_server(), _could_not_be_carried_out():
        report = run(
            model, plan, tiny=tiny, dtype=dtype, steps=steps, batch=batch_size, tokens=seq_len, dropout=dropout,
            padding=padding, documents=documents, task=task, compile=compile, device=device, seed=seed,
        )  # fmt: skip
    typer.echo(json.dumps(report.to_dict(), default=str) if as_json else str(report))
    raise typer.Exit(0 if report.ok else 1)


@contextmanager
def _could_not_be_carried_out() -> Iterator[None]:
    """Whatever goes wrong on the way must not look like a plan that was found to be wrong."""
    try:
        yield
    except (PhalanxError, KeyboardInterrupt):
        raise
    except Exception:
        traceback.print_exc()
        raise typer.Exit(2) from None
