"""The facts of a model that a plan splits between tensor-parallel ranks, from its captured graph.

Shipped facts know only whole models; what a rank computes, keeps and sends of a split one is found on its own graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cli.models import capture_model, patiently
from phalanx.model.facts.facts import Dims, ModelFacts
from phalanx.plan.plan import Plan
from phalanx.program.local_facts import LocalBlock, LocalFacts

if TYPE_CHECKING:
    from phalanx.model.captured import Captured


def find_local_facts(
    facts: ModelFacts, model: str, task: str | None, tiny: bool, plan: Plan, dims: Dims
) -> LocalFacts:  # fmt: skip
    """The first of the tensor-parallel ranks, which never has less than the others; `facts` are those of the model."""
    with patiently(f"reading and splitting the graph of {facts.name}"):
        _, captured = capture_model(model, task, facts.dtype, tiny)
        return local_facts(captured, facts.dtype, plan, dims)


def local_facts(captured: Captured, dtype: str, plan: Plan, dims: Dims) -> LocalFacts:
    """All parameters count as trained, as in `shape_of_facts`."""
    import torch

    from phalanx.model.shard.shard import shard
    from phalanx.model.shard.work import kept_by, work_of
    from phalanx.runtime.model_shape import bucket_names

    precision = getattr(torch, dtype)
    sharded = shard(captured, plan, 0, precision)
    work = work_of(captured, sharded, plan.tp, precision, dims)
    kept = kept_by(captured, sharded, plan.tp, precision, dims)
    buckets = bucket_names(captured.blocks, captured.trainable, sharded)
    sizes = {name: parameter.local.numel for name, parameter in sharded.parameters.items()}
    blocks = captured.blocks
    return LocalFacts(
        dtype,
        dims,
        buckets.shape,
        tuple(
            LocalBlock(
                work.blocks[number].flops,
                sum(sizes[name] for name in dict.fromkeys(block.names("parameter"))),
                kept[number].own,
                kept[number].shared,
                blocks.crossing(number + 1),
            )
            for number, block in enumerate(blocks.blocks)
        ),
        tuple(sum(sizes[name] for name in names) for names in buckets.names),
        {wire: tensor.nbytes for wire, tensor in work.wires.items()},
    )
