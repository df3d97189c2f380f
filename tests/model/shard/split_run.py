"""A module split between ranks that are all here: the segments of every rank under autograd, and between them
redistributions over all ranks at once. Loss and gradients are put together as training would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.model.interpret import Values, _call, _unchanged
from phalanx.model.shard.shard import shard
from phalanx.model.shard.sharded import Redistribution, Sharded
from phalanx.plan.plan import Plan
from tests import captured
from tests.model.shard.fake_ranks import redistributed


class _Redistributed(torch.autograd.Function):
    """One redistribution, of the values of all ranks."""

    @staticmethod
    def forward(ctx: Any, redistribution: Redistribution, dims: dict[str, int], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.how = redistribution, dims
        return tuple(each.clone() for each in redistributed(redistribution, [*values], dims, "forward"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *redistributed(ctx.how[0], [each.clone() for each in gradients], ctx.how[1], "backward")


def views(case: captured.Case, plan: str) -> list[Sharded]:
    """The model as each tensor-parallel rank sees it."""
    parsed = Plan.parse(plan)
    return [shard(case.captured, parsed, index, captured.DOUBLE) for index in range(parsed.tp)]


def run(case: captured.Case, ranks: Sequence[Sharded]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss and the whole gradient of every parameter."""
    leaves = [_local(case, rank) for rank in ranks]
    values = [_values(case, each) for each in leaves]
    dims = dict(values[0].dims)
    for parts in zip(*(rank.parts for rank in ranks), strict=True):
        for ops in zip(*parts, strict=True):
            if ops[0].redistribution is not None:
                _redistribute(ops[0].redistribution, values, dims)
                continue
            for rank, own, op in zip(ranks, values, ops, strict=True):
                assert op.segment is not None
                own.run(rank.blocks, rank.blocks.blocks[op.segment], _unchanged)
    losses = [own.tables["activation"][case.blocks.loss] for own in values]
    count = values[0].tables["value"][case.blocks.count]
    torch.autograd.backward([loss / count for loss in losses])
    for loss in losses:
        torch.testing.assert_close(loss, losses[0])
    return (losses[0] / count).detach(), {name: _whole(name, ranks, leaves) for name in case.captured.trainable}


def _redistribute(redistribution: Redistribution, values: list[Values], dims: dict[str, int]) -> None:
    tables = [own.tables["activation"] for own in values]
    found: Any = _Redistributed.apply(redistribution, dims, *(table[redistribution.source] for table in tables))
    for table, value in zip(tables, found, strict=True):
        table[redistribution.target] = value


def _local(case: captured.Case, rank: Sharded) -> dict[str, Tensor]:
    found = {}
    for name, value in case.parameters.items():
        local = rank.parameters[name].local
        parts = [value.narrow(local.dim, start, stop - start) for start, stop in local.ranges]
        found[name] = torch.cat(parts, local.dim) if parts else value.clone()
        found[name].requires_grad_(name in case.captured.trainable)
    return found


def _values(case: captured.Case, parameters: dict[str, Tensor]) -> Values:
    values = Values(case.captured.dims(case.batch), {
        "parameter": dict(parameters), "buffer": dict(case.captured.buffers), "constant": dict(case.blocks.constants),
        "input": dict(case.batch), "dropout": {},
    })  # fmt: skip
    values.tables["value"].update(
        zip(case.blocks.values, _call(case.blocks.prologue, values.arguments(case.blocks.prologue_ports), _unchanged),
            strict=True)
    )  # fmt: skip
    return values


def _whole(name: str, ranks: Sequence[Sharded], leaves: Sequence[dict[str, Tensor]]) -> Tensor:
    """The gradient from all ranks' parts, each summed over those that the split says; equal parts must be equal."""
    shape = ranks[0].parameters[name].local.shape
    found, known = torch.zeros(shape, dtype=captured.DOUBLE), torch.zeros(shape, dtype=torch.bool)
    for index, rank in enumerate(ranks):
        local = rank.parameters[name].local
        cell = next((cell for cell in rank.parameters[name].sums if index in cell), (index,))
        own = sum(torch.zeros_like(leaves[i][name]) if (g := leaves[i][name].grad) is None else g for i in cell)
        start = 0
        for first, last in local.ranges or ((0, shape[local.dim] if shape else 1),):
            part = own.narrow(local.dim, start, last - first) if shape else own
            place = (slice(None),) * local.dim + (slice(first, last),) if shape else ()
            assert not known[place].any() or torch.allclose(found[place], part), f"{name} differs between ranks"
            found[place], known[place], start = part, True, start + last - first
    assert known.all(), f"a part of {name} is on no rank"
    return found
