"""The ranks a collective runs over. Messages between two ranks are not collectives."""

from __future__ import annotations

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.holders import holders
from phalanx.program.instructions import Instruction, Op
from phalanx.program.shape import ModelShape, Partition

Group = tuple[int, ...]


def group_of(plan: Plan, shape: ModelShape, rank: int, instruction: Instruction) -> Group:
    """The group in which `rank` runs a collective; alone, it has nothing to do."""
    mesh = Mesh.of(plan)
    match instruction.op:
        case Op.COUNT:
            return mesh.dp_group(rank)
        case Op.NORM:
            return mesh.world
        case Op.GATHER | Op.SHARE:
            return mesh.zero_group(rank)
        case Op.REDUCE:
            return mesh.zero_group(rank) if plan.zero else _summing(mesh, shape, rank, instruction)
        case Op.SUM:  # after they were scattered, so that only a shard travels between the replicas
            return _summing(mesh, shape, rank, instruction)
        case Op.CF | Op.CA | Op.CB:
            assert instruction.block is not None and instruction.op_index is not None
            cells = shape.ops_of(instruction.block)[instruction.op_index].cells
            return mesh.beside(rank, _cell(mesh, rank, cells))
        case Op.TIE:
            assert instruction.block is not None
            return tuple(mesh.at_stage(rank, p) for p in holders(plan, shape, instruction.block))
        case _:
            raise AssertionError(f"{instruction} is not a collective")


def _summing(mesh: Mesh, shape: ModelShape, rank: int, instruction: Instruction) -> Group:
    """Everyone with the same shard of a bucket and a share of its gradients: replicas, of each rank of its cell."""
    assert instruction.block is not None
    cell = mesh.beside(rank, _cell(mesh, rank, shape.cells(instruction.block)))
    return tuple(sorted(other for member in cell for other in mesh.replica_group(member)))


def _cell(mesh: Mesh, rank: int, cells: Partition) -> tuple[int, ...]:
    """The tp indices among which a rank is; it is alone where the partition leaves it out."""
    *_, tp_index = mesh.coordinates(rank)
    return next((cell for cell in cells if tp_index in cell), (tp_index,))
