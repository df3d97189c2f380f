"""Moving values to the memory of the host and back: instructions put into lowered programs.

What the backward of an op needs leaves after the last of the forward that touches it, and is asked for as many uses of
blocks ahead of its own as the way back takes. Where its backward follows so closely that its memory would not be free
by then, it stays.

The optimizer's state of a bucket comes to the device part by part around STEP and leaves again; or stays, and the
bucket's gradients come to it. Where a bucket's parameters lie on the host, its gradients leave in any case. When
parameters come is in `zero.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from phalanx.errors import PlanError
from phalanx.plan.offload import write_offload
from phalanx.plan.plan import Plan
from phalanx.program.holders import chunks_of, fetched_of, hosted_by_share, hosted_of, layers_of, left_of
from phalanx.program.instructions import Instruction, Op, Program, insert
from phalanx.program.moved import movable
from phalanx.program.rules import Place
from phalanx.program.shape import ModelShape
from phalanx.program.visits import Use, seems_split, use_of


def move_activations(programs: Sequence[Program], plan: Plan, shape: ModelShape) -> tuple[Program, ...]:
    """In the programs of all ranks of a pipeline, complete but for the update."""
    if "activations" not in dict(plan.offload):
        return tuple(programs)
    _check_count(plan, shape)
    moved = tuple(_moved(program, plan, shape, index) for index, program in enumerate(programs))
    if moved == tuple(programs):
        reason = "in every stage the backward of a layer follows its forward too closely"
        message = f"plan: offload={write_offload(plan.offload)} moves no activations: {reason}"
        raise PlanError(message, "give stages more blocks, or leave activations out of offload")
    return moved


def _check_count(plan: Plan, shape: ModelShape) -> None:
    count = dict(plan.offload)["activations"]
    layers = [sum(not shape.layers or b in shape.layers for b in plan.stage_blocks(s)) for s in range(plan.num_stages)]
    if count > max(layers):
        most = f"the stage with most layers has {max(layers)}"
        message = f"plan: offload={write_offload(plan.offload)} is for {count} layers per stage: {most}"
        raise PlanError(message, f"use activations:{max(layers)} or less, or activations for all layers")


def _moved(program: Program, plan: Plan, shape: ModelShape, pp_index: int) -> Program:
    begins, numbers = _uses(program)
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    after: defaultdict[int, list[Instruction]] = defaultdict(list)
    for place, move in movable(plan, shape, program, pp_index).items():
        stage = program[move.first].stage
        assert stage is not None
        to_leave = plan.uses_to_leave(stage, shape.layers)
        to_come = to_leave // 2 + 1  # a block's backward takes twice as long as its forward
        left = bisect_right(begins, move.last) - 1  # the use during which, or after which, it leaves
        free, first = left + to_leave + 2, numbers[move.first]  # uses by which its memory is free, and that needs it
        asked = max(first - to_come, free)
        if asked < first:
            after[move.last].append(_instruction(Op.OUT, stage, place))
            before[begins[asked]].append(_instruction(Op.IN, stage, place))
    return insert(program, before, after)


def _uses(program: Program) -> tuple[list[int], dict[int, int]]:
    """Where each use of a block begins, and for each position in one its number."""
    known: dict[Use, int] = {}
    begins: list[int] = []
    numbers: dict[int, int] = {}
    split = seems_split(program)
    for position, it in enumerate(program):
        use = use_of(it, split)
        if use is None:
            continue
        if use not in known:
            known[use] = len(begins)
            begins.append(position)
        numbers[position] = known[use]
    return begins, numbers


def _instruction(op: Op, stage: int | None, place: Place) -> Instruction:
    micro_batch, slice_, half, block, op_index = place
    return Instruction(op, stage, micro_batch, block, None, half, op_index, slice_)


def check_fetched(plan: Plan, shape: ModelShape) -> None:
    count = dict(plan.offload).get("parameters", 0)
    most = max(len(layers_of(plan, shape, index)) for index in range(plan.pp))
    if count > most:
        message = f"plan: offload={write_offload(plan.offload)} is for {count} layers per rank: the most that one has"
        raise PlanError(f"{message} is {most}", f"use parameters:{most} or less, or parameters for all blocks")
    if plan.hosts_parameters and not any(fetched_of(plan, shape, index) for index in range(plan.pp)):
        reason = "the layers that it names have none of their own"
        message = f"plan: offload={write_offload(plan.offload)} keeps no parameters on the host: {reason}"
        raise PlanError(message, "use parameters for all blocks, or leave it out")


def check_hosted(plan: Plan, shape: ModelShape) -> None:
    if plan.hosted_share and not hosted_by_share(plan, shape):
        reason = "the state of whole buckets lies there, and each has a larger share"
        message = f"plan: offload={write_offload(plan.offload)} keeps nothing of the optimizer on the host: {reason}"
        raise PlanError(message, "use a larger share, or leave it out")


def leave_gradients(program: Program, plan: Plan, shape: ModelShape, pp_index: int) -> Program:
    """A bucket's gradients that leave do so once they are complete. Those that are still being reduced leave behind the
    next bucket's, so that the computation need not wait for them."""
    hosted = left_of(plan, shape, pp_index)
    if not hosted:
        return program
    complete: dict[int, int] = {}
    for position, it in enumerate(program):
        if it.op in _ADDS and it.block is not None:
            complete |= {bucket: position for bucket in shape.buckets(it.block) if bucket in hosted}
        elif it.op in _SUMS and it.block in hosted:
            complete[it.block] = position
    order = sorted(complete, key=lambda bucket: complete[bucket])
    after: defaultdict[int, list[Instruction]] = defaultdict(list)
    for number, bucket in enumerate(order, start=1):
        position = complete[bucket]
        if program[position].op in _SUMS:
            position = complete[order[number]] if number < len(order) else len(program) - 1
        after[position].append(Instruction(Op.OUT, block=bucket))
    return insert(program, {}, after)


_ADDS = frozenset((Op.W, Op.BW))
_SUMS = frozenset((Op.REDUCE, Op.SUM, Op.TIE))


def update(plan: Plan, shape: ModelShape, pp_index: int) -> Program:
    """From the norm to the end of the update, part by part of what lies on the host. STEP itself comes last: it updates
    what lies on the device, and by then everything that moved has arrived."""
    buckets = hosted_of(plan, shape, pp_index)
    parts = [(bucket, part) for bucket in buckets for part in range(chunks_of(plan, shape, bucket))]
    steps = [_of_part(Op.STEP, part) for part in parts]
    norm, step = Instruction(Op.NORM), Instruction(Op.STEP)
    if plan.steps_on_host or not parts:
        return norm, *steps, step
    comes, leaves = [_of_part(Op.IN, part) for part in parts], [_of_part(Op.OUT, part) for part in parts]
    turns = zip([*comes[1:], None], steps, leaves, strict=True)
    return comes[0], norm, *(it for turn in turns for it in turn if it is not None), step


def _of_part(op: Op, part: tuple[int, int]) -> Instruction:
    return Instruction(op, block=part[0], op_index=part[1])
