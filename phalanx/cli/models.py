"""What verbs about a model share: its facts or its capture, the dims to show it at, and a word on what takes long.

Facts that are shipped are read without importing torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.errors import ConfigError, nearest
from phalanx.model.facts.facts import BlockFacts, ModelFacts, load
from phalanx.predict.update import Update
from phalanx.written import named_values

if TYPE_CHECKING:
    from phalanx.model.captured import Captured
    from phalanx.model.zoo.zoo import ModelSpec
    from phalanx.plan.plan import Plan
    from phalanx.predict.split_facts import SplitFacts

TOKENS = 2048
DTYPES = ("bfloat16", "float16", "float32", "float64")
HALF = DTYPES[:2]
PIPED_WIDTH = 160  # a file has no width, and a table squeezed into 80 columns cannot be read
_SECONDS = 2.0

MasterWeights = Annotated[
    bool,
    typer.Option(
        "--master-weights/--no-master-weights", help="keep float32 master weights when training in half precision"
    ),
]


OPTIMIZER = "adamw"
Optimizer = Annotated[str, typer.Option(help="adamw, sgd, muon or the dotted path of an optimizer class")]
OptimizerOptions = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="further optimizer argument (repeatable)")
]


def read_update(dtype: str, master_weights: bool, optimizer: str, options: Sequence[str] | None) -> Update:
    """Refuses what is not known, and what does nothing."""
    if dtype not in DTYPES:
        raise ConfigError(f"option dtype = {dtype!r} is not one of {', '.join(DTYPES)}", nearest(dtype, DTYPES))
    if not master_weights and dtype not in HALF:
        message = f"option master_weights = False does nothing with dtype = {dtype}"
        raise ConfigError(message, f"leave it out, or use --dtype {' or '.join(HALF)}")
    return Update.of(optimizer, named_values("optimizer_options", options or ()), master_weights)


Lora = Annotated[
    str | None,
    typer.Option(help="train adapters instead of the model: r=16, also alpha=32, dropout=0.05, targets=q_proj+v_proj"),
]


def find_facts(model: str, task: str | None, dtype: str, tiny: bool, live: bool, lora: str | None = None) -> ModelFacts:
    """The shipped facts where they are about exactly this, otherwise those of a capture."""
    is_folder = (Path(model).expanduser() / "config.json").is_file()  # a folder goes before a zoo model of its name
    shipped = None if tiny or live or is_folder or lora else load(model, dtype)
    if shipped is not None and task in (None, shipped.task):
        return shipped

    import torch

    from phalanx.engine.measure import measure

    spec, captured = capture_model(model, task, dtype, tiny, lora)
    return measure(spec, captured, getattr(torch, dtype))


def capture_model(
    model: str, task: str | None, dtype: str, tiny: bool, lora: str | None = None
) -> tuple[ModelSpec, Captured]:
    """The model as blocks, read from the cache where it was captured before. lora: with adapters, which alone are
    trained."""
    import torch

    from phalanx import tasks
    from phalanx.model import lora as adapters
    from phalanx.model.capture import capture
    from phalanx.model.zoo.zoo import resolve

    spec = resolve(model, task=task, tiny=tiny)
    if lora is not None:
        spec = replace(spec, lora=adapters.Lora.read(lora))
    captured = capture(spec, tasks.get(spec.task).inputs(spec.config), dtype=getattr(torch, dtype))
    if lora is not None:
        captured = replace(captured, trainable=tuple(filter(adapters.is_adapter, captured.trainable)))
    return spec, captured


def describer(
    facts: ModelFacts, model: str, task: str | None, tiny: bool, lora: str | None = None
) -> Callable[[Plan], SplitFacts]:
    """Reads from the model's graph what is not shipped about it under a plan."""

    def describe(plan: Plan) -> SplitFacts:
        from phalanx.engine.describe import describe

        with patiently(f"reading and describing the graph of {facts.name}"):
            return describe(capture_model(model, task, facts.dtype, tiny, lora)[1], plan, facts.dtype)

    return describe


def choose_dims(facts: ModelFacts, batch_size: int, seq_len: int | None) -> dict[str, int]:
    """The dims to show the model at; source and target of an encoder–decoder are equally long."""
    if seq_len is not None and "tokens" not in facts.dims:
        raise ConfigError(
            f"option seq_len = {seq_len} does nothing: the inputs of {facts.name!r} have a fixed size",
            "leave seq_len out",
        )
    if seq_len is not None and facts.max_tokens is not None and seq_len > facts.max_tokens:
        raise ConfigError(
            f"option seq_len = {seq_len} is more than {facts.name!r} has positions for",
            f"choose seq_len between 1 and {facts.max_tokens}",
        )
    length = seq_len or min(TOKENS, facts.max_tokens or TOKENS)
    return {dim: batch_size if dim == "batch" else length for dim in facts.dims}


def run_name(run: Sequence[BlockFacts]) -> str:
    """One block by its name, several of one list as 'model.layers.0 … 79  ×80'."""
    first, last = run[0].name, run[-1].name
    if len(run) == 1:
        return first
    place, _, index = last.rpartition(".")
    return f"{first} … {index if first.startswith(f'{place}.') else last}  ×{len(run)}"


@contextlib.contextmanager
def patiently(what: str, seconds: float = _SECONDS) -> Iterator[None]:
    """Names on stderr what is being done once it has taken `seconds`."""
    timer = threading.Timer(seconds, lambda: print(f"{what} …", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
