"""What each instruction does with which values, by name: the meaning of a program, in one place.

A rule knows nothing of order. It tells a *sink*: binding gives every name its life (`bind.py`), checking only notes the
names (`check.py`). Redistributions that do nothing in a direction need no value of their own: under either name it is
the same activation, or the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from phalanx.plan.plan import Plan
from phalanx.program.holders import buckets_of, fetched_of, hosted_of, is_tied, left_of, reduced_of
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.shape import COLLECTIVE, BlockOp, ModelShape
from phalanx.program.values import HOST

Key = tuple[str, str, int | None, int | None, int | None, int | None]  # kind, what, micro-batch, slice, half, stage
Place = tuple[int | None, int | None, int | None, int | None, int | None]  # of an op, without what is done with it
Id = TypeVar("Id")

ITEMS: Key = ("items", "", None, None, None, None)
NORM: Key = ("norm", "", None, None, None, None)


class Sink(Protocol[Id]):
    """What is told of the values. Whatever `arrives` is on its way when its instruction has run, and holds some of what
    it was made of until it is here. `memory`: the value whose memory it shares."""

    def read(self, key: Key) -> Id: ...

    def write(
        self, key: Key, size: str = "", memory: Id | None = None, arrives: bool = False, holds: tuple[Id, ...] = ()
    ) -> Id:
        """A value that was not there before, or a new version of it."""
        ...

    def add(self, key: Key, size: str = "") -> Id:
        """To a sum that is there, or begins with this."""
        ...

    def give(
        self, key: Key, size: str, memory: Id | None = None, arrives: bool = False, holds: tuple[Id, ...] = ()
    ) -> Id:
        """A contribution to the gradient of an activation."""
        ...

    def take(self, key: Key) -> Id | None:
        """The gradient of an activation with all contributions; None: there is none, so it is zero."""
        ...

    def reduce(self, bucket: int, micro_batch: int | None) -> None:
        """Starts the sum of a bucket's gradients over ranks."""
        ...

    def reduce_further(self, bucket: int) -> None:
        """Starts its sum over more ranks."""
        ...

    def read_sums(self, without: Collection[int] = ()) -> None:
        """The gradients of all buckets but some, with everything that was added to them."""
        ...

    def read_sum(self, bucket: int) -> tuple[Id, ...]:
        """The gradients of a bucket, with everything that was added to them."""
        ...

    def read_losses(self) -> None: ...


class Names:
    """What is the same under several names: activations through redistributions that do nothing in the forward,
    gradients through those that do nothing in the backward. Also how large each is, whether a gradient flows to it, and
    what crosses between stages."""

    def __init__(self, plan: Plan, shape: ModelShape) -> None:
        self.activation: dict[str, str] = {}
        self.gradient: dict[str, str] = {}
        self.size: dict[str, str] = {}
        self.differentiable: set[str] = set()
        for block in range(shape.num_blocks):
            for op in shape.ops_of(block):
                self._add(op)
        self.loss = self.activation.get(shape.loss, shape.loss)
        self.d_loss = self.gradient.get(shape.loss, shape.loss)
        self.whole_activations = {self.activation.get(name, name) for name in shape.per_micro_batch}
        self.whole_gradients = {self.gradient.get(name, name) for name in shape.per_micro_batch}
        self._cuts = [shape.crossing(plan.stage_blocks(stage)[0]) for stage in range(plan.num_stages)]

    def _add(self, op: BlockOp) -> None:
        moves = op.kind == "redistribution"
        for name in op.writes:
            source = op.reads[0] if moves else name
            self.size[name] = op.size(name)
            self.activation[name] = self.activation.get(source, source) if moves and not op.forward else name
            self.gradient[name] = self.gradient.get(source, source) if moves and not op.backward else name
            # What comes into the model from outside (in models made for tests) is differentiable.
            flows = (source in self.differentiable or source not in self.size) if moves else name in op.bw.takes
            if flows:
                self.differentiable.add(name)

    def is_loss(self, name: str) -> bool:
        return self.activation.get(name, name) == self.loss

    def is_d_loss(self, name: str) -> bool:
        """Whether its gradient is that of the loss, which follows from the number of items."""
        return self.gradient.get(name, name) == self.d_loss

    def crossing(self, stage: int, slice_: int | None) -> tuple[str, ...]:
        """The activations that a stage gets from the one before it; what belongs to the micro-batch with slice 0."""
        return _distinct(self._cuts[stage], self.activation, self.whole_activations if slice_ else ())

    def returning(self, stage: int, slice_: int | None) -> tuple[str, ...]:
        """Those whose gradients it gives back."""
        names = [name for name in self._cuts[stage] if name in self.differentiable]
        return _distinct(names, self.gradient, self.whole_gradients if slice_ else ())


def _distinct(names: Iterable[str], same: dict[str, str], without: Collection[str]) -> tuple[str, ...]:
    """One of each that are the same, the first."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(same.get(name, name), name)
    return tuple(name for known_as, name in first.items() if known_as not in without)


class Rules(Generic[Id]):
    """The instructions of one rank's program. It is looked ahead only for which forwards are done again, and which
    weight gradients are apart. moved: what OUT and IN move, by the op that needs it (`moved.py`)."""

    def __init__(
        self, plan: Plan, shape: ModelShape, program: Program, pp_index: int, sink: Sink[Id],
        moved: Mapping[Place, tuple[Key, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.shape, self.sink, self._moved = plan, shape, sink, moved or {}
        self.names = Names(plan, shape)
        self._used = "gathered" if plan.gathers else "parameters"  # what computations read
        self.first_stage = _first_stages(plan, pp_index)
        self.trained = [bucket for bucket in buckets_of(plan, shape, pp_index) if shape.trained[bucket]]
        self.hosted, self.left = hosted_of(plan, shape, pp_index), left_of(plan, shape, pp_index)
        self.fetched = frozenset(fetched_of(plan, shape, pp_index))
        reduced = reduced_of(plan, shape, pp_index)
        self.flat = {b for b in self.trained if b in reduced or is_tied(plan, shape, b)}
        self._ops = [shape.ops_of(block) for block in range(shape.num_blocks)]
        self._again: set[Place] = {place_of(it) for it in program if it.op is Op.A}
        self._has_backward: set[Place] = {place_of(it) for it in program if it.op in (Op.B, Op.BW)}
        self._apart: set[Place] = {place_of(it) for it in program if it.op is Op.W}
        self._actions: dict[Op, Callable[[Instruction], None]] = {
            Op.INPUT: self._input, Op.F: self._forward, Op.A: self._forward, Op.CF: self._redistribute,
            Op.CA: self._redistribute, Op.LF: self._redistribute, Op.LA: self._redistribute,
            Op.CB: self._redistribute_back,
            Op.LB: self._redistribute_back, Op.B: self._backward, Op.BW: self._backward, Op.W: self._weight,
            Op.SEND_F: self._send_forward, Op.RECV_F: self._receive_forward, Op.SEND_B: self._send_backward,
            Op.RECV_B: self._receive_backward, Op.GATHER: self._gather, Op.COUNT: self._count, Op.NORM: self._norm,
            Op.STEP: self._optimize, Op.SHARE: self._share, Op.OUT: self._move_out, Op.IN: self._move_in,
            Op.REDUCE: lambda it: sink.reduce(_number(it.block), it.micro_batch),
            Op.SUM: lambda it: sink.reduce_further(_number(it.block)),
            Op.TIE: lambda it: sink.reduce_further(_number(it.block)),
        }  # fmt: skip

    def apply(self, it: Instruction) -> None:
        self._actions[it.op](it)

    # Through the model.

    def _input(self, it: Instruction) -> None:
        self.sink.write(self._inputs(it), self.shape.inputs)

    def _forward(self, it: Instruction) -> None:
        op, again, sink = self.op(it), it.op is Op.A, self.sink
        sink.read(self._inputs(it))
        self._read_parameters(it, op)
        memory = {name: sink.read(self.activation(it, name)) for name in op.reads}
        if op.pasts:
            sink.add(self._of_op("past", it), op.past_bytes)
        same = dict(op.bw.same)
        for name in op.writes:
            if not (again and self.names.is_loss(name)):
                base = memory.get(same.get(name, ""))
                memory[name] = sink.write(self.activation(it, name), op.size(name), base)
        if op.bw.takes and self._saves(it):
            for kind, size in op.bw.saved:
                sink.write(self._of_op(kind, it), size)

    def _redistribute(self, it: Instruction) -> None:
        op, sink = self.op(it), self.sink
        source = sink.read(self.activation(it, op.reads[0]))
        sink.write(
            self.activation(it, op.writes[0]), op.size(op.writes[0]), arrives=op.forward in COLLECTIVE,
            holds=(source,) if op.forward == "all_gather" else (),
        )  # fmt: skip

    def _redistribute_back(self, it: Instruction) -> None:
        op, sink = self.op(it), self.sink
        gradient, source = self._take(it, op.writes[0]), op.reads[0]
        if gradient is not None:
            sink.give(
                self.gradient(it, source), self.names.size.get(source, ""), arrives=op.backward in COLLECTIVE,
                holds=(gradient,) if op.backward == "all_gather" else (),
            )  # fmt: skip

    def _backward(self, it: Instruction) -> None:
        op, fused, sink = self.op(it), it.op is Op.BW, self.sink
        bw = op.bw
        if not bw.takes:
            return
        memory: dict[str, Id | None] = {}
        for name in bw.takes:
            memory[name] = self._take(it, name)
        self._read_parameters(it, op)
        if bw.inputs or (fused and bw.w_inputs):
            sink.read(self._inputs(it))
        for name in bw.all_reads if fused else bw.reads:
            sink.read(self.activation(it, name))
        for kind, _ in bw.saved:
            sink.read(self._of_op(kind, it))
        if op.pasts:
            sink.read(self._of_op("past", it))
            sink.add(self._of_op("d_past", it), op.past_bytes)
        same = dict(bw.d_same)
        for name in bw.gives:
            base = memory.get(same.get(name, ""))
            memory[name] = sink.give(self.gradient(it, name), self.names.size.get(name, ""), memory=base)
        if fused:
            self._add_weight_gradients(it, op)
        elif place_of(it) in self._apart and bw.trains and bw.saved_w:
            sink.write(self._of_op("saved_w", it), bw.saved_w)

    def _weight(self, it: Instruction) -> None:
        op, bw, sink = self.op(it), self.op(it).bw, self.sink
        if not bw.takes or not bw.trains:
            return
        self._read_parameters(it, op)
        if bw.w_inputs:
            sink.read(self._inputs(it))
        for name in bw.w_reads:
            sink.read(self.activation(it, name))
        for name in bw.w_takes:
            self._take(it, name)
        if bw.saved_bw:
            sink.read(self._of_op("saved_bw", it))
        if bw.saved_w:
            sink.read(self._of_op("saved_w", it))
        self._add_weight_gradients(it, op)

    # Between stages.

    def _send_forward(self, it: Instruction) -> None:
        for name in self.names.crossing(_number(it.stage) + 1, it.slice):
            self.sink.read(self.activation(it, name))

    def _receive_forward(self, it: Instruction) -> None:
        for name in self.names.crossing(_number(it.stage), it.slice):
            self.sink.write(self.activation(it, name), self.names.size.get(name, ""), arrives=True)

    def _send_backward(self, it: Instruction) -> None:
        for name in self.names.returning(_number(it.stage), it.slice):
            self.sink.take(self.gradient(it, name))

    def _receive_backward(self, it: Instruction) -> None:
        for name in self.names.returning(_number(it.stage) + 1, it.slice):
            self.sink.write(self.gradient(it, name), self.names.size.get(name, ""), arrives=True)

    # Between device and host.

    def _move_out(self, it: Instruction) -> None:
        if it.stage is None:
            self._move_out_bucket(it)
        for key in self._moved.get(place_of(it), ()):
            here = self.sink.read(key)
            self.sink.write(on_host(key), self._size(key), arrives=True, holds=(here,))

    def _move_out_bucket(self, it: Instruction) -> None:
        """Its gradients, or a part of its state."""
        if it.op_index is None:
            held = self.sink.read_sum(_number(it.block))
            self.sink.write(on_host(of_bucket("d_parameters", it.block)), arrives=True, holds=held)
            self.sink.write(of_bucket("norms", it.block))
        else:
            here = self.sink.read(_of_part("staged", it))
            self.sink.write(on_host(_of_part("state", it)), arrives=True, holds=(here,))
            if it.block in self.fetched:  # which come home with it
                self.sink.add(on_host(of_bucket("parameters", it.block)))

    def _move_in(self, it: Instruction) -> None:
        if it.stage is None:
            self._move_in_bucket(it)
        for key in self._moved.get(place_of(it), ()):
            there = self.sink.read(on_host(key))
            self.sink.write(key, self._size(key), arrives=True, holds=(there,))

    def _move_in_bucket(self, it: Instruction) -> None:
        """Its parameters, or a part of its state, and of its gradients where they left."""
        if it.op_index is None:
            there = self.sink.read(on_host(of_bucket("parameters", it.block)))
            self.sink.write(of_bucket("fetched", it.block), arrives=True, holds=(there,))
            return
        wanted = [_of_part("state", it), *([of_bucket("d_parameters", it.block)] if it.block in self.left else [])]
        there = tuple(self.sink.read(on_host(key)) for key in wanted)
        self.sink.write(_of_part("staged", it), arrives=True, holds=there)

    def _size(self, key: Key) -> str:
        kind, what, *_ = key
        if kind == "activation":
            return self.names.size.get(what, "")
        block, op_index = map(int, what.split(":"))
        return getattr(self._ops[block][op_index].bw, kind)

    # Parameters and the update.

    def _gather(self, it: Instruction) -> None:
        is_fetched = it.block in self.fetched
        source = self.sink.read(of_bucket("fetched" if is_fetched else "parameters", it.block))
        self.sink.write(of_bucket("gathered", it.block), arrives=True, holds=(source,) if is_fetched else ())

    def _count(self, it: Instruction) -> None:
        self.sink.write(ITEMS, arrives=self.plan.dp > 1)

    def _norm(self, it: Instruction) -> None:
        self.sink.read_losses()
        self.sink.read(ITEMS)
        self.sink.read_sums(without=self.left)
        for bucket in self.left:
            self.sink.read(of_bucket("norms", bucket))
        self.sink.write(NORM)

    def _optimize(self, it: Instruction) -> None:
        self.sink.read(NORM)
        if it.block is not None:
            self._optimize_part(it)
            return
        self.sink.read_sums(without=self.hosted)
        for bucket in self.trained:
            if bucket not in self.hosted:
                self.sink.add(of_bucket("state", bucket))
                self.sink.add(of_bucket("parameters", bucket))

    def _optimize_part(self, it: Instruction) -> None:
        if self.plan.steps_on_host:
            self.sink.read(on_host(of_bucket("d_parameters", it.block)))
            self.sink.add(on_host(_of_part("state", it)))
            parameters = of_bucket("parameters", it.block)
            self.sink.write(on_host(parameters) if it.block in self.fetched else parameters, arrives=True)
            return
        if it.block not in self.left:
            self.sink.read_sum(_number(it.block))
        self.sink.add(_of_part("staged", it))
        if it.block not in self.fetched:
            self.sink.add(of_bucket("parameters", it.block))

    def _share(self, it: Instruction) -> None:
        self.sink.read(of_bucket("parameters", it.block))
        self.sink.write(of_bucket("parameters", it.block), arrives=True)

    # Names.

    def op(self, it: Instruction) -> BlockOp:
        assert it.block is not None, "the instruction is not lowered"
        return self._ops[it.block][it.op_index or 0]

    def activation(self, it: Instruction, name: str) -> Key:
        """The loss is one too, and has a kind of its own."""
        names = self.names
        name = names.activation.get(name, name)
        if name == names.loss:
            return "loss", "", it.micro_batch, it.slice, it.half, None
        slice_ = None if name in names.whole_activations else it.slice
        return "activation", name, it.micro_batch, slice_, it.half, self.first_stage.get(it.stage)

    def gradient(self, it: Instruction, name: str) -> Key:
        name = self.names.gradient.get(name, name)
        slice_ = None if name in self.names.whole_gradients else it.slice
        return "gradient", name, it.micro_batch, slice_, it.half, self.first_stage.get(it.stage)

    def _take(self, it: Instruction, name: str) -> Id | None:
        """The gradient of an activation; that of the loss follows from the number of items."""
        if self.names.is_d_loss(name):
            return self.sink.read(ITEMS)
        return self.sink.take(self.gradient(it, name))

    @staticmethod
    def _inputs(it: Instruction) -> Key:
        return "inputs", "", it.micro_batch, None, it.half, None

    @staticmethod
    def _of_op(kind: str, it: Instruction) -> Key:
        """What is about a segment; the past belongs to all slices."""
        slice_ = None if kind in ("past", "d_past") else it.slice
        return kind, f"{it.block}:{it.op_index or 0}", it.micro_batch, slice_, it.half, it.stage

    def _saves(self, it: Instruction) -> bool:
        """Whether a forward leaves something for its backward: not where it is done again, or nothing comes back."""
        place = place_of(it)
        return place in self._has_backward and (it.op is Op.A or place not in self._again)

    def _read_parameters(self, it: Instruction, op: BlockOp) -> None:
        for bucket in self.buckets(it, op):
            fetched = bucket in self.fetched and not self.plan.gathers
            self.sink.read(of_bucket("fetched" if fetched else self._used, bucket))

    def buckets(self, it: Instruction, op: BlockOp) -> tuple[int, ...]:
        return self.shape.buckets(_number(it.block)) if op.buckets is None else op.buckets

    def _add_weight_gradients(self, it: Instruction, op: BlockOp) -> None:
        for key in self.sums(it, op):
            self.sink.add(key)

    def sums(self, it: Instruction, op: BlockOp) -> list[Key]:
        """The flat buffers of buckets that are reduced, or else what the segment adds up by itself."""
        if not op.bw.trains:
            return []
        found: list[Key] = []
        for bucket in self.buckets(it, op):
            if bucket in self.flat or (self.shape.trained[bucket] and bucket >= self.shape.num_blocks):
                found.append(of_bucket("d_parameters", bucket))
            elif self.shape.trained[bucket]:
                found.append(("d_parameters", f"{bucket}/{it.op_index or 0}", None, None, None, None))
        return found


def on_host(key: Key) -> Key:
    """The same in the memory of the host."""
    return HOST + key[0], *key[1:]


def of_bucket(kind: str, bucket: int | None) -> Key:
    return kind, str(bucket), None, None, None, None


def bucket_of(key: Key) -> str:
    """Of a sum of gradients, or of one segment's part of it."""
    return key[1].partition("/")[0]


def _of_part(kind: str, it: Instruction) -> Key:
    """Of the state of a bucket."""
    return kind, f"{it.block}:{it.op_index}", None, None, None, None


def place_of(it: Instruction) -> Place:
    return it.micro_batch, it.slice, it.half, it.block, it.op_index


def _first_stages(plan: Plan, pp_index: int) -> dict[int | None, int]:
    """Per stage of a rank the first of those that follow each other without leaving it."""
    found: dict[int | None, int] = {}
    for stage in plan.stages_of(pp_index):
        found[stage] = found.get(stage - 1, stage)
    return found


def _number(value: int | None) -> int:
    assert value is not None, "the instruction is not lowered"
    return value
