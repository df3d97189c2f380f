"""The ranks a collective runs over, one group after the other. Messages between two ranks are not collectives."""

from __future__ import annotations

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.holders import holders
from phalanx.program.instructions import Instruction, Op
from phalanx.program.shape import ModelShape

Group = tuple[int, ...]


def groups_of(plan: Plan, shape: ModelShape, rank: int, instruction: Instruction) -> tuple[Group, ...]:
    """The groups in which `rank` runs a collective; a group of one rank is left out, having nothing to do."""
    mesh = Mesh.of(plan)
    groups: tuple[Group, ...] = ()
    match instruction.op:
        case Op.COUNT:
            groups = (mesh.dp_group(rank),)
        case Op.NORM:
            groups = (tuple(range(plan.world)),)
        case Op.GATHER | Op.SHARE:
            groups = (mesh.zero_group(rank),)
        case Op.REDUCE:
            # Scattered among the shards first, so that only a shard travels between the replicas.
            groups = (mesh.zero_group(rank), mesh.replica_group(rank)) if plan.zero else (mesh.dp_group(rank),)
        case Op.TIE:
            assert instruction.block is not None
            _, dp_index = mesh.coordinates(rank)
            groups = (tuple(mesh.rank(p, dp_index) for p in holders(plan, shape, instruction.block)),)
        case _:
            raise AssertionError(f"{instruction} is not a collective")
    return tuple(group for group in groups if len(group) > 1)
