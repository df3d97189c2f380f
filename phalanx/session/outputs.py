"""Outputs that leave a session and gradients that come back: for a loss that is computed outside.

The forwards of the whole batch run first, then whatever the user does with the outputs, and when a gradient of them is
known the rest of the program. *whole*: every rank gets the outputs of the global batch, so that any loss of it is the
plain one. *replica*: every rank gets those of its replica's samples where they lie, at the end of its pipeline; the
others get zeros of the same shape, whose backward takes part; the losses of replicas are averaged, as DDP does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.engine.reductions import StepRun
from phalanx.errors import ConfigError
from phalanx.model.attach import Ends
from phalanx.model.ops.leave import ROWS, Outbox, outbox
from phalanx.model.shard.sharded import inner_cells
from phalanx.program.lower import end_of_forwards, end_of_gradients
from phalanx.session.session import Session
from phalanx.tasks.base import Batch

Scope = Literal["whole", "replica"]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 8


class Outputs:
    """keep: what is done with a run whose gradients are complete; None where there are none."""

    def __init__(self, session: Session, ends: Ends, scope: Scope, keep: Callable[[StepRun], None] | None) -> None:
        self._session, self._ends, self._scope, self._keep = session, ends, scope, keep
        self._plan, self._device = session.plan, session.compiled.device
        self._end = 0 if keep is None else end_of_forwards(session.step.program)
        self._anchor = torch.zeros((), requires_grad=True)  # so that autograd has something to go back to
        self._waiting: StepRun | None = None

    def __call__(self, part: Batch, first: int, begin: int, num_samples: int) -> Any:
        """part: this rank's samples, which are those from `begin` on of so many."""
        count = next(iter(part.values())).shape[0]
        begin, num_rows = (begin, num_samples) if self._scope == "whole" else (0, count)
        box = Outbox(num_rows)
        inputs = {**part, ROWS: torch.arange(begin, begin + count)}
        if not torch.is_grad_enabled():
            with outbox(box):
                self._session.forward(inputs, first)
            return self._together(self._shared(box, num_rows))
        self._refuse_second()
        run = self._session.step.begin(inputs, first, lr=None)
        with outbox(box):
            self._session.step.engine.run(self._session.step.program, run, until=self._end)
        self._waiting = run
        share = num_samples if self._scope == "whole" else num_samples / self._plan.dp
        outputs = self._shared(box, num_rows)

        pending = [run]

        def back(gradients: Sequence[Tensor]) -> None:
            if not pending:
                raise ConfigError(
                    "backward() came a second time to the outputs of one call of session(…)",
                    "add the losses up and call backward() once, or call session(…) again for the second one",
                )
            pending.clear()
            box.gradients = [gradient * share for gradient in gradients]
            with outbox(box):
                program = self._session.step.program
                self._session.step.engine.run(program, run, until=end_of_gradients(program))
            self._waiting = None
            assert self._keep is not None
            self._keep(run)

        return self._together(list(_Gate.apply(back, self._anchor, *outputs)))

    def _refuse_second(self) -> None:
        """Messages and gathered parameters of a run are on their way until its backward."""
        if self._waiting is not None and (self._plan.pp > 1 or self._plan.gathers):
            raise ConfigError(
                f"session(…) was called again before the backward of the call before, which plan {self._plan.shown} "
                "cannot do",
                "give both batches in one call (torch.cat) and take its outputs apart; or call backward() before the "
                "next call; compute what is not learned from under torch.no_grad()",
            )

    def _together(self, outputs: Sequence[Tensor]) -> Any:
        """As the model returns them."""
        assert self._ends.structure is not None, "the model was read"
        return pytree.tree_unflatten(outputs, self._ends.structure)

    def _shared(self, box: Outbox, num_rows: int) -> list[Tensor]:
        """The outputs as this rank gets them."""
        join_parts(self._session, box)
        formation = self._session.compiled.formation
        ends_here = self._plan.num_stages - 1 in formation.stages
        if self._plan.pp > 1:
            looks = self._looks(box, ends_here and formation.is_tp_leader and formation.dp_index == 0)
        else:
            looks = [(output.shape[1:], output.dtype) for output in self._in_order(box)]
        if self._scope == "replica":
            return self._in_order(box) if ends_here else [self._nothing(num_rows, *look) for look in looks]
        mine = [self._nothing(num_rows, *look).contiguous() for look in looks]
        if ends_here and (self._plan.pp == 1 or formation.is_tp_leader):
            mine = self._in_order(box)
        connected = self._session.connected
        return [_summed(connected.replicas if self._plan.pp == 1 else connected.world, output) for output in mine]

    def _in_order(self, box: Outbox) -> list[Tensor]:
        return [output for _, output in sorted(box.outputs.items())]

    def _nothing(self, num_rows: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=dtype, device=self._device).expand(num_rows, *shape)

    def _looks(self, box: Outbox, tells: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """What the outputs look like, without their rows: only the end of a pipeline knows."""
        assert self._ends.structure is not None
        table = torch.zeros(self._ends.structure.num_leaves, 2 + _MOST_DIMS, dtype=torch.int64)
        for row, output in zip(table, self._in_order(box) if tells else ()):
            dims = output.shape[1:]
            row[: 2 + len(dims)] = torch.tensor([_DTYPES.index(output.dtype), len(dims), *dims])
        told = _summed(self._session.connected.world, table.to(self._device)).tolist()
        return [(tuple(dims[:count]), _DTYPES[dtype]) for dtype, count, *dims in told]


def join_parts(session: Session, box: Outbox) -> None:
    """Outputs of which every rank of a tensor-parallel group has a part become whole on each."""
    tp = session.plan.tp
    for number in sorted(box.split):
        _summed(session.connected.redistribution_group(inner_cells(tp, tp)), box.outputs[number])


class _Gate(torch.autograd.Function):
    """Gives tensors out; when their gradients are known, hands them to `back`."""

    @staticmethod
    def forward(ctx: Any, back: Callable[[Sequence[Tensor]], None], anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.back, ctx.looks = back, [(output.shape, output.dtype, output.device) for output in outputs]
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, ctx.looks, strict=True)
        ]
        ctx.back(given)
        return (None,) * (2 + len(given))


def _summed(group: Group, tensor: Tensor) -> Tensor:
    if len(group.ranks) > 1:
        group.all_reduce(tensor).wait("outputs")
    return tensor
