"""What one rank of a tensor-parallel group computes and keeps of a model, and its costs on an assumed device.

Plain data that `cli/program_split.py` fills from the split model; the counterpart of `from_facts.py`, which knows only
models that are not split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.model.facts.facts import DTYPE_BYTES, Dims
from phalanx.plan.plan import Plan
from phalanx.program.block_steps import BlockSteps
from phalanx.program.costs import Costs
from phalanx.program.from_facts import Device, bucket_costs
from phalanx.program.shape import ModelShape


@dataclass(frozen=True)
class LocalBlock:
    """One micro-batch through a block. own_bytes: kept for the backward and known to no other block, when nothing is
    computed again. shared: other tensors that it keeps, by name; blocks of a stage keep each once."""

    flops: int
    parameters: int
    own_bytes: int
    shared: Mapping[str, int]
    crossing: tuple[str, ...]  # wires alive after it

    @property
    def saved_bytes(self) -> int:
        return self.own_bytes + sum(self.shared.values())


@dataclass(frozen=True)
class LocalFacts:
    """dims: of the micro-batch. wires: the bytes of every wire, as it lies here."""

    dtype: str
    dims: Dims
    shape: ModelShape
    blocks: tuple[LocalBlock, ...]
    buckets: tuple[int, ...]  # elements
    wires: Mapping[str, int]

    def seconds(self, device: Device) -> tuple[float, ...]:
        """The forward of each block: its arithmetic or the writing of what it keeps, whichever takes longer."""
        return tuple(
            max(block.flops / device.flops_per_s, block.saved_bytes / device.memory_bytes_per_s)
            for block in self.blocks
        )


def costs_of_local(local: LocalFacts, plan: Plan, device: Device) -> Costs:
    """As `costs_of_facts`, for a plan whose stages are decided."""
    forward = local.seconds(device)
    saved = _saved_bytes(local, plan)
    kept = tuple(map(min, saved, _kept_bytes(local, plan, saved)))
    return Costs(
        forward=forward,
        backward=forward,
        weight=forward,
        cut_bytes=tuple(sum(local.wires[wire] for wire in block.crossing) for block in local.blocks),
        whole_cut_bytes=tuple(
            sum(local.wires[wire] for wire in block.crossing if wire in local.shape.whole_wires)
            for block in local.blocks
        ),
        saved_bytes=kept,
        rebuilt_bytes=tuple(whole - part for whole, part in zip(saved, kept)),
        buckets=tuple(bucket_costs(size, local.dtype, device) for size in local.buckets),
        message_link=device.link,
        group_link=device.link,
        dims=local.dims,
        element_bytes=DTYPE_BYTES[local.dtype],
    )


def _saved_bytes(local: LocalFacts, plan: Plan) -> tuple[int, ...]:
    """Per block, what its backward needs beyond what the blocks before it on its stage keep already."""
    sizes: list[int] = []
    for stage in range(plan.num_stages):
        known: dict[str, int] = {}
        for number in plan.stage_blocks(stage):
            block = local.blocks[number]
            new = {name: size for name, size in block.shared.items() if name not in known}
            known |= new
            sizes.append(block.own_bytes + sum(new.values()))
    return tuple(sizes)


def _kept_bytes(local: LocalFacts, plan: Plan, saved: tuple[int, ...]) -> tuple[int, ...]:
    """Per block, what of `saved` is kept until its backward begins: what the plan does not bring back."""
    found: list[int] = []
    for number, everything in enumerate(saved):
        block = BlockSteps.of(plan, local.shape, number)
        if plan.again:
            found.append(sum(local.wires[wire] for wire in _entering(block)))
        else:
            gathered = {wire for i in block.sent_again for wire in block.steps[i].writes}
            shared = local.blocks[number].shared
            found.append(everything - sum(size for wire, size in shared.items() if wire in gathered))
    return tuple(found)


def _entering(block: BlockSteps) -> set[str]:
    """The wires from which the portions of a block begin that are computed again."""
    passed = {step.writes[0]: step.reads[0] for step in block.steps if step.kind == "exchange" and not step.forward}
    found: set[str] = set()
    for portion in block.portions:
        segments = [block.steps[i] for i in portion if i in block.segments]
        made = {wire for i in portion if i in block.segments + block.sent_again for wire in block.steps[i].writes}
        found |= {_source(wire, passed) for step in segments for wire in step.reads} - made
    return found


def _source(wire: str, passed: Mapping[str, str]) -> str:
    """What a wire was before exchanges that send nothing."""
    return _source(passed[wire], passed) if wire in passed else wire
