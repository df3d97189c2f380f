"""A session of a loop of the user's own, compared with the plain module: the loss and every gradient of some batches.

Both have the weights that the session has by then. What the session computes is left out of its gradients, and nothing
is updated, so a loop goes on as if it had not been asked. The plain module runs on rank 0, in this process: the module
and the loss of a loop are whatever the script made, which no other process could make again.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.model import reference
from phalanx.model.attach import Ends, arguments_of, second_arguments, without_nothing
from phalanx.model.captured import attention_sites
from phalanx.model.ops import random
from phalanx.own_loop.batch import TARGET, BatchForm
from phalanx.own_loop.session import OwnSession
from phalanx.tasks.base import Batch
from phalanx.verification.case import DTYPES, TOLERANCES, Noise, Step, Training
from phalanx.verification.compare import Floors, Row, compare_gradients
from phalanx.verification.plain_side import gradients_of, plain_inputs, with_noise
from phalanx.verification.report import Report

_NOTE = "loss and gradients with the weights as they are; updates are the loop's own, and nothing was updated"
Loss = Callable[..., Tensor]


def verify_session(session: OwnSession, data: Sequence[Any], loss: Loss | None = None) -> Report:
    """Called by every rank, with the same global batches; the report is the same on each. loss: of a session whose
    outputs leave, of these and of what of a batch the model does not take."""
    _require(session, data, loss)
    started, dtype = time.perf_counter(), session.opened.config.dtype
    with torch.inference_mode(False), torch.enable_grad(), _exact_products():
        cases = [_Batch.of(session, batch, loss) for batch in data]
        ours = [_session_side(session, case) for case in cases]
        values = session.state_dict()
        rows = tuple(_rows(session, cases, ours, values)) if session.is_main else ()
    report = Report(
        session.opened.spec.name, session.plan.text, dtype, TOLERANCES[dtype], rows, (),
        time.perf_counter() - started, (_NOTE,),
    )  # fmt: skip
    return _told(session, report)


@dataclass(frozen=True)
class _Batch:
    """A batch by names. takes: what of it the model does. loss: of its outputs and the rest, where the model does not
    return one; is_outside: and the session neither."""

    named: Batch
    takes: tuple[str, ...]
    loss: Loss | None
    is_outside: bool

    @classmethod
    def of(cls, session: OwnSession, batch: Any, outside: Loss | None) -> _Batch:
        opened, loss = session.opened, outside or session.opened.loss
        if loss is None:
            named = opened.form(batch)
            return cls(named, tuple(named), None, False)
        module = opened.module()
        if outside is None:
            named = opened.form(batch)
        else:
            named = BatchForm(arguments_of(module.forward), next(iter(second_arguments(outside) or ()), TARGET))(batch)
        return cls(named, Ends(module, tuple(named), loss).takes, loss, outside is not None)

    @property
    def inputs(self) -> Batch:
        return {name: self.named[name] for name in self.takes}

    def loss_of(self, outputs: Any, like: Tensor) -> Tensor:
        """As a loop computes it from what the model gave. like: a tensor of the dtype and device of the outputs."""
        assert self.loss is not None
        return self.loss(outputs, **_cast({n: t for n, t in self.named.items() if n not in self.takes}, like))

    def plain_loss(self, session: OwnSession, module: nn.Module) -> Tensor:
        """The same of the plain module."""
        opened, like = session.opened, torch.zeros((), dtype=DTYPES[session.opened.config.dtype])
        inputs = _cast(self.inputs, like)
        if self.loss is None:
            return reference.loss(module, plain_inputs(opened.task, inputs, opened.spec.config, like.dtype))
        output = module(**inputs)
        return self.loss_of(without_nothing(output) if self.is_outside else output, like)


def _session_side(session: OwnSession, case: _Batch) -> Step:
    def compute() -> Tensor:
        if not case.is_outside:
            return session.forward_backward(case.named)
        like = torch.zeros((), dtype=DTYPES[session.opened.config.dtype], device=session.device)
        loss = case.loss_of(session(case.inputs), like)
        loss.backward()
        return loss

    loss, gradients = session.trial(compute)
    losses = torch.zeros(session.world, dtype=torch.float64, device=session.device)
    losses[session.rank] = loss
    session.world_group.all_reduce(losses).wait("the losses of all ranks")
    return Step(losses.tolist(), gradients, {})


def _rows(
    session: OwnSession, cases: Sequence[_Batch], ours: Sequence[Step], values: Mapping[str, Tensor]
) -> Iterator[Row]:
    module = _plain_module(session, values, trained=ours[0].gradients)
    floors = Floors(TOLERANCES[session.opened.config.dtype], Training())
    for number, (case, mine) in enumerate(zip(cases, ours, strict=True), start=1):
        step, noise = _plain_side(session, module, case)
        yield from compare_gradients(number, mine, step, noise, floors)


def _plain_side(session: OwnSession, module: nn.Module, case: _Batch) -> tuple[Step, Noise]:
    config, captured = session.opened.config, session.opened.captured
    keys = random.sample_keys(config.seed, session.samples, next(iter(case.named.values())).shape[0])
    sites = attention_sites(captured.blocks)

    def run(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        with reference.injected(model, keys, sites, DTYPES[config.dtype]):
            loss = case.plain_loss(session, model)
        return gradients_of(loss, model)

    loss, gradients, noise = with_noise(run, module, config.seed, case.named)
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return Step([loss], gradients, trained), noise


def _plain_module(session: OwnSession, values: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> nn.Module:
    """A copy: a module that the user made keeps its values."""
    opened = session.opened
    module = copy.deepcopy(reference.plain(opened.spec, DTYPES[opened.config.dtype], opened.config.dropout))
    module.load_state_dict(values)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    return module


def _require(session: OwnSession, data: Sequence[Any], loss: Loss | None) -> None:
    opened = session.opened
    if opened.config.dtype not in DTYPES:
        raise ConfigError(
            f"verify: the session computes in {opened.config.dtype}, whose rounding hides what is compared",
            f"open it with dtype={' or '.join(DTYPES)} for this",
        )
    if not data:
        raise ConfigError("verify: a session is compared on batches of yours, and none is given", "give data=[batch]")
    if opened.ends is not None and loss is None:
        raise ConfigError(
            "verify: this session was opened for a loss outside (loss='outer')",
            "give it: phalanx.verify(session, data=[batch], loss=function), of the outputs and of what of the batch "
            "the model does not take",
        )
    if opened.ends is None and loss is not None:
        raise ConfigError("verify: this session computes its loss itself", "leave loss out")
    if opened.ends is not None and opened.scope != "whole":
        raise ConfigError(
            f"verify: outputs = {opened.scope!r} gives each replica its own samples, whose losses are yours to average",
            "open a session with outputs='whole' and the same plan for this",
        )


def _cast(batch: Mapping[str, Tensor], like: Tensor) -> Batch:
    return {n: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device) for n, tensor in batch.items()}


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Within, float32 means float32."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def _told(session: OwnSession, report: Report) -> Report:
    """Rank 0's, on every rank."""
    if session.world == 1:
        return report
    text = pickle.dumps(report) if session.is_main else b""
    size = torch.tensor([len(text)], device=session.device)
    session.world_group.broadcast(size, 0).wait("the length of a report")
    data = torch.zeros(int(size), dtype=torch.uint8)
    if session.is_main:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    data = data.to(session.device)
    session.world_group.broadcast(data, 0).wait("a report")
    return pickle.loads(bytes(data.tolist()))
