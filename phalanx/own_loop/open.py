"""Opens a model for a loop of the user's own: in a script that torchrun, SLURM or MPI started, or in one process alone.

What is trained how is decided as for every run (`prepare/read_model.py`); the first batch stands for all that come.
What the session then does is in `session.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.data.given import given_batches
from phalanx.engine.compiled import Compiled
from phalanx.engine.inputs import num_samples
from phalanx.errors import ConfigError, LinkError, PhalanxError, PlanError, nearest
from phalanx.launch.context import RankContext, local_device
from phalanx.launch.join import Joined, join
from phalanx.launch.main_script import refuse_while_loading
from phalanx.launch.status_board import BoardWatch
from phalanx.model.attach import Ends, arguments_of, second_arguments
from phalanx.model.capture import capture
from phalanx.model.ops.leave import ROWS
from phalanx.model.zoo.zoo import Model, ModelSpec, build
from phalanx.own_loop.batch import TARGET, BatchForm
from phalanx.own_loop.plan import Opened, refuse_search
from phalanx.own_loop.session import OwnSession
from phalanx.params.flat import Piece
from phalanx.params.groups import ParameterGroup
from phalanx.plan import fields
from phalanx.plan.complete import complete, needed_ranks
from phalanx.plan.plan import Plan
from phalanx.prepare.budget import MemoryGuard
from phalanx.prepare.deterministic import fixed_kernels
from phalanx.prepare.initial_weights import load_buffers, open_weights
from phalanx.prepare.read_model import find_model, read_model, require_fit, require_may_cut
from phalanx.session.outputs import Scope
from phalanx.session.session import Session
from phalanx.spellings import said_here
from phalanx.tasks.base import Batch, Task
from phalanx.tasks.custom import Custom, infer_inputs, with_dims

# The others are about data, the length of a run, its folder and what it shows, which are the loop's own business.
OPTIONS = (
    "task", "tiny", "model_options", "init", "dropout", "freeze", "lora", "merge_lora", "dtype", "master_weights",
    "compile", "device", "timeout", "silence", "memory", "seed", "deterministic", "slot_size", "lr", "betas", "eps",
    "weight_decay", "optimizer_options",
)  # fmt: skip

OUTER, _FORWARDS = "outer", "schedule=gpipe"

Loss = Callable[..., Tensor]


def open(
    model: Model,
    *,
    example: Any,
    plan: str | Plan = "",
    loss: Loss | Literal["outer"] | None = None,
    outputs: Scope = "whole",
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    groups: Sequence[ParameterGroup | str] = (),
    dims: Mapping[str, Sequence[str | int]] | None = None,
    **options: Any,
) -> OwnSession:
    """`model` under `plan`, for a loop of your own.

    example: a global batch as all that come look, whose values are only used to prove that the model is computed right.
    loss: of the model's output and what of a batch the model does not take; None for a model that returns its loss;
    'outer' if you compute it from what `session(inputs)` returns, `outputs` being those of the whole batch on every
    rank or those of this rank's replica.
    optimizer: its name or class, for `session.step()`; None for one that you make of `session.parameters()`.
    groups: parameters with a learning rate or decay of their own, or frozen. dims: of inputs whose length differs
    between batches or is cut into slices, what each dim is, such as ("batch", "tokens"). options: those of RunConfig in
    `OPTIONS`.
    """
    refuse_while_loading("phalanx.open")
    config, optimizer_class = _config(plan, optimizer, options)
    refuse_search(config.plan)
    if optimizer is None:
        _refuse_hosted_state(config.plan)
    joined = join(config.device)
    if joined is None:
        needed = needed_ranks(config.plan) or 1
        if needed > 1:
            raise ConfigError(
                f"plan {config.plan} needs {needed} ranks, and this process was started alone",
                f"start the script with phalanx launch --ranks {needed} SCRIPT, or with torchrun",
            )
    context = joined or RankContext.alone(local_device(config.device, 0))
    leave = _enter(context, config.silence) if joined else _nobody
    try:
        session = open_on(
            context, model, config, example, loss, outputs, has_optimizer=optimizer is not None, leave=leave,
            optimizer_class=optimizer_class, groups=groups, dims=dims,
        )  # fmt: skip
    except BaseException as error:
        leave(error)
        raise
    _close_at_exit(session)
    return session


def open_on(
    context: RankContext,
    model: Model,
    config: RunConfig,
    example: Any,
    loss: Loss | Literal["outer"] | None = None,
    outputs: Scope = "whole",
    *,
    has_optimizer: bool = False,
    optimizer_class: type[Any] | None = None,
    groups: Sequence[ParameterGroup | str] = (),
    dims: Mapping[str, Sequence[str | int]] | None = None,
    leave: Callable[[BaseException | None], None] | None = None,
) -> OwnSession:
    """On a rank that is there. What the plan leaves open is decided simply."""
    kernels = contextlib.ExitStack()
    kernels.enter_context(fixed_kernels(config, context.device))

    def left(error: BaseException | None) -> None:
        kernels.close()
        (leave or _nobody)(error)

    try:
        with torch.inference_mode(False), torch.enable_grad():  # models are read with their gradients, whoever asks
            return _open_on(
                context, model, config, example, loss, outputs, has_optimizer=has_optimizer,
                optimizer_class=optimizer_class, groups=groups, dims=dims, leave=left,
            )  # fmt: skip
    except BaseException:
        kernels.close()
        raise


def _open_on(
    context: RankContext, model: Model, config: RunConfig, example: Any, loss: Loss | Literal["outer"] | None,
    outputs: Scope, *, has_optimizer: bool, optimizer_class: type[Any] | None,
    groups: Sequence[ParameterGroup | str], dims: Mapping[str, Sequence[str | int]] | None,
    leave: Callable[[BaseException | None], None],
) -> OwnSession:  # fmt: skip
    config = config.override(plan=config.given_plan) if config.searches_plan else config
    context.slot.enter("capture")
    if loss == OUTER:
        config = _with_forwards_first(config)
    elif outputs != "whole":
        raise ConfigError(f"outputs = {outputs!r} does nothing without loss='outer'", "leave outputs out")
    spec = find_model(model, config)
    ended, task, form, batch, ends = _ended(spec, config, example, loss, dims or {})
    config = config.override(batch_size=num_samples(batch))
    require_fit(config, context.world)
    named = [group if isinstance(group, ParameterGroup) else ParameterGroup.read(group) for group in groups]
    read = read_model(ended, task, given_batches(batch, task), config, context, named)
    context.slot.enter("compile")
    weights, _ = open_weights(model, spec, config.seed, config.init)
    device = torch.device(context.device)

    def first(name: str, is_master: bool, piece: Piece) -> Tensor:
        return piece.read(weights, name)

    memory = MemoryGuard(config.memory_bytes, device, config.batch_size, lambda of: _first_part(of, batch))
    with memory.explained("the model's state"):
        session = Session.open(
            read.captured, config, read.plan, context=context, trainable=read.trainable, read=first,
            buffers=load_buffers(read.captured, weights, device), optimizer_class=optimizer_class, groups=read.groups,
            watches=[BoardWatch(context.slot)] if context.world > 1 else [], look=memory.look,
        )  # fmt: skip

    def plan_of(text: str) -> Plan:
        """Another plan for this session, complete."""
        if _hosts_state(text):
            raise PlanError(
                f"plan {text} keeps the optimizer's state on the host, where session.change() cannot bring it",
                "save, open a session with this plan, and load; or leave the optimizer out of offload",
            )
        text = _with_forwards_first(config.override(plan=text)).plan if loss == OUTER else text
        costs = read.captured.blocks.flops(read.captured.dims(batch))
        plan = complete(
            text, world=context.world, batch_size=config.batch_size, costs=costs, slot=config.slot
        ).plan  # fmt: skip
        require_may_cut(read.may_cut, ended, plan)
        return plan

    opened = Opened(
        spec, config, read.captured, task, form, context, memory, has_optimizer, leave, plan_of,
        loss if callable(loss) else None, ends, outputs, merges=config.merge_lora,
        leaving=lambda session, inputs: _leaving(session, spec, config, inputs),
    )  # fmt: skip
    return OwnSession(session, opened)


def _leaving(session: Session, spec: ModelSpec, config: RunConfig, inputs: Batch) -> tuple[Session, Ends]:
    """The state and connections of a session with a model whose outputs leave, for forwards only."""
    ended, task, _, _, ends = _ended(spec, config, inputs, OUTER, {})
    assert ends is not None
    known = task.inputs(ended.config, padding=False, documents=False)
    captured = capture(ended, known, dtype=getattr(torch, config.dtype), dropout=config.dropout, check=False)
    return session.computing(session.compiled.reading(captured)), ends


def _first_part(compiled: Compiled, batch: Batch) -> tuple[Batch, int]:
    """What a rank gets of the example."""
    first, count = compiled.part(0, num_samples(batch))
    return {name: tensor[first : first + count] for name, tensor in batch.items()}, first


def _ended(
    spec: ModelSpec,
    config: RunConfig,
    example: Any,
    loss: Loss | Literal["outer"] | None,
    dims: Mapping[str, Sequence[str | int]],
) -> tuple[ModelSpec, Task, BatchForm, Batch, Ends | None]:
    """The model that returns its loss, as what it is read, its batches by name, and where its outputs leave."""
    module = build(spec, device="meta", dropout=config.dropout)
    arguments = arguments_of(module.forward)
    if loss is None:
        shifts = spec.task in ("text-to-text", "speech-to-text")
        form = BatchForm(arguments, config=spec.config if shifts else None)
        batch = form(example)
        return spec, _task(spec, batch, dims), form, batch, None
    leaves, function = loss == OUTER, loss if callable(loss) else None
    if not leaves and function is None:
        raise ConfigError(f"loss = {loss!r} is not a function", "give a function of the output and labels, or 'outer'")
    form = BatchForm(arguments, None if function is None else next(iter(second_arguments(function) or ()), TARGET))
    batch = form(example)
    read = {**batch, ROWS: torch.arange(num_samples(batch))} if leaves else batch
    ends = Ends(module, tuple(read), function)
    ended = replace(spec, task="custom", factory=lambda: ends(_made(spec, config)), folder=None)
    lengths = dims or _lengths(spec, read)
    return ended, Custom(with_dims(infer_inputs(read), lengths)), form, read, ends if leaves else None


def _with_forwards_first(config: RunConfig) -> RunConfig:
    """A loss outside needs all outputs before any gradient."""
    given = fields.read(config.plan)
    if given.get("slices"):
        raise PlanError(
            "plan: slices do not leave a session one by one, as a loss outside would need them",
            "leave slices out, or give the loss as a function (loss=…), which is read together with the model",
        )
    return config if "schedule" in given else config.override(plan=",".join(filter(None, (config.plan, _FORWARDS))))


def _made(spec: ModelSpec, config: RunConfig) -> nn.Module:
    """The module that the user built, or one of a named model."""
    return spec.factory() if spec.factory is not None else build(replace(spec, lora=None), dropout=config.dropout)


def _task(spec: ModelSpec, batch: Batch, dims: Mapping[str, Sequence[str | int]]) -> Task:
    """The one that the model is for where the batch holds its inputs, which may then differ in length."""
    if spec.task != "custom" and not dims:
        known = tasks.get(spec.task)
        inputs = known.inputs(spec.config, padding="attention_mask" in batch, documents="document_ids" in batch)
        if {each.name for each in inputs} == set(batch):
            return known
    return Custom(with_dims(infer_inputs(batch), dims or _lengths(spec, batch)))


def _lengths(spec: ModelSpec, batch: Batch) -> dict[str, tuple[str | int, ...]]:
    """Which dims differ between batches of a HuggingFace model that reads text: those as long as the text."""
    ids = batch.get("input_ids")
    if spec.config is None or ids is None or ids.dim() != 2:
        return {}
    decodes = bool(getattr(spec.config, "is_encoder_decoder", False))
    found: dict[str, tuple[str | int, ...]] = {}
    for name, tensor in batch.items():
        decoded = decodes and name.startswith(("labels", "decoder_"))
        if tensor.dim() >= 2 and (decoded or tensor.shape[1] == ids.shape[1]):
            found[name] = ("batch", "source" if decodes and not decoded else "tokens", *tensor.shape[2:])
    return found


def _hosts_state(plan: str) -> str:
    """By which word a plan keeps state of the optimizer on the host; none: ''."""
    words = [word for word, _ in fields.read(plan).get("offload", ())]
    return next((word for word in words if word == "parameters" or word.startswith("optimizer")), "")


def _refuse_hosted_state(plan: str) -> None:
    """An optimizer of the user's own finds gradients and parameters where they are computed with."""
    if word := _hosts_state(plan):
        raise PlanError(
            f"plan: offload={word} keeps on the host what an optimizer of your own would look for on the device",
            "let the session make it (phalanx.open(…, optimizer='adamw', lr=…), session.step()), or leave "
            f"{'the optimizer' if word.startswith('optimizer') else word} out of offload",
        )


def _config(
    plan: str | Plan, optimizer: str | type[torch.optim.Optimizer] | None, options: dict[str, Any]
) -> tuple[RunConfig, type[Any] | None]:
    for name in options:
        if name not in OPTIONS:
            known = f"option {name!r} is for phalanx.train: with a loop of your own it is the loop's business"
            what = known if name in RunConfig.model_fields else f"unknown option {name!r}"
            raise ConfigError(what, said_here(name, flags=False) or nearest(name, OPTIONS))
    if optimizer is None:
        for name in ("lr", "betas", "eps", "weight_decay", "optimizer_options"):
            if name in options:
                raise ConfigError(
                    f"option {name} = {options[name]!r} does nothing: the session has no optimizer of its own",
                    "give phalanx.open(…, optimizer='adamw'), or set it in the optimizer that you make",
                )
    named = {"optimizer": optimizer} if isinstance(optimizer, str) else {}
    if isinstance(optimizer, type):
        named["optimizer"] = f"{optimizer.__module__}.{optimizer.__qualname__}"
    config = RunConfig.create(plan=plan, clip=None, steps=1, lr_schedule="constant", **named, **options)
    return config, optimizer if isinstance(optimizer, type) else None


def _enter(context: RankContext, silence: float) -> Callable[[BaseException | None], None]:
    """Takes this rank's place among those that a launcher started."""
    joined = Joined(context, silence)
    joined.__enter__()

    def leave(error: BaseException | None) -> None:
        joined.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    return leave


def _close_at_exit(session: OwnSession) -> None:
    """A script that ends without closing its session has ended its part; after an error the others are told. Of a link
    that was lost nothing is shown: who was lost is said at the end."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if not isinstance(error, LinkError) or os.environ.get("PHALANX_DEBUG", "0") not in ("", "0"):
            before(kind, error, at)

    if session.world > 1:
        sys.excepthook = show

    def close() -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        try:
            session.close(error)
        except PhalanxError as closing:
            if closing is not error:
                sys.stderr.write(f"error: {closing}\n")
        except BaseException:  # the error was shown, or another rank shows it
            return

    atexit.register(close)


def _nobody(error: BaseException | None) -> None:
    """Alone there are no others to tell."""
