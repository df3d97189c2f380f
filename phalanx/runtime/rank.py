"""What lives on this rank's device: parameters, buffers, the optimizer's state, and the engines that run on them.

It is built from values that are read one at a time and gives them back as named pieces; where they come from and go to
is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.data import Batches
from phalanx.launch.seat import Seat
from phalanx.model.captured import Captured
from phalanx.model.segment.compile import Compiler, resolve_mode
from phalanx.model.shard.shard import shard
from phalanx.model.slicing import Sliced, slice_model
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.check import check
from phalanx.program.lower import lower
from phalanx.runtime import holdings
from phalanx.runtime.accumulate import BucketGradients, Gradients
from phalanx.runtime.anatomy import Anatomy
from phalanx.runtime.buckets import BufferPool, Read
from phalanx.runtime.compute import Compute
from phalanx.runtime.engine import Engine, Watch
from phalanx.runtime.evaluation import Evaluator
from phalanx.runtime.exchanges import Exchanges
from phalanx.runtime.flat import Piece
from phalanx.runtime.formation import Connections, Formation
from phalanx.runtime.links import Links
from phalanx.runtime.loss_scale import LossScale
from phalanx.runtime.messages import Messages
from phalanx.runtime.model_shape import bucket_names
from phalanx.runtime.optimizer import Optimizer
from phalanx.runtime.optimizer_choice import make_optimizer
from phalanx.runtime.parameters import load_parameters
from phalanx.runtime.step import Feeder, Step, split
from phalanx.runtime.totals import Totals
from phalanx.runtime.warm_up import WarmUp
from phalanx.runtime.wires import Wires
from phalanx.state.layout import Holding

IN_FLIGHT = 2  # reductions under way at once where whole gradients are not to be kept (ZeRO 2 and 3)


class Rank:
    """Trains and evaluates one captured model under one plan. `step` is called with this rank's part of a batch.

    links: of this seat, to be used and left open; else it makes its own and closes them.
    """

    def __init__(
        self,
        captured: Captured,
        config: RunConfig,
        plan: Plan,
        *,
        seat: Seat,
        trainable: Sequence[str],
        read: Read,
        buffers: Mapping[str, Tensor],
        optimizer_class: type[Any] | None = None,
        watches: Iterable[Watch] = (),
        links: Links | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(seat.device), getattr(torch, config.dtype)
        self._sliced = slice_model(captured, self.dtype) if plan.slices else None
        captured = self._sliced.captured if self._sliced is not None else captured
        self.captured = captured
        self.seat, self.plan = seat, plan
        self._seed, self._buffers = config.seed, buffers
        self.compiler = Compiler(resolve_mode(config.compile, self.device))
        self.formation = _formation(captured, plan, seat.rank, trainable, self.dtype, self._sliced)
        self._anatomy = Anatomy.of(captured.blocks, self.formation.sharded)
        if seat.world > 1:
            seat.slot.sits_at(self.formation.place)
        programs = lower(plan, self.formation.shape)
        self.peaks = check(plan, self.formation.shape, programs)[seat.rank]
        self.links, self._owns_links = links or Links(seat, timeout=config.timeout), links is None
        self.connections = Connections(self.formation, self.links)
        self.parameters = load_parameters(
            self.formation.held(), self.formation.locals(captured.shapes), read, trainable=trainable, dtype=self.dtype,
            master_weights=config.master_weights, device=self.device, sharding=self.formation.sharding(),
            zero=self.connections.gather,
        )  # fmt: skip
        weights = self.parameters.trained
        self.optimizer = Optimizer(make_optimizer(weights, config, optimizer_class), weights, config.clip)
        self.loss_scale = LossScale(self.device) if self.dtype == torch.float16 else None
        engine, feeder = self._engine(trainable, watches, trains=True)
        self.step = Step(feeder, engine, programs[seat.rank], plan)
        size = split(split(config.batch_size, plan.dp)[0], plan.mb)[0]
        self._evaluator = Evaluator(*self._engine((), watches, trains=False), self.formation, self.connections, size)

    @property
    def _whole_wires(self) -> frozenset[str]:
        return self._sliced.whole_wires if self._sliced is not None else frozenset()

    @property
    def keeps_masters(self) -> bool:
        """Whether what is updated is kept in higher precision than what is computed with."""
        return any(weight.exact is not weight.copy for weight in self.parameters.weights.values())

    def part(self, first: int, samples: int) -> tuple[int, int]:
        """Where this rank's part of a global batch of `samples` at stream position `first` begins, and its length."""
        index, sizes = self.formation.dp_index, split(samples, self.plan.dp)
        return first + sum(sizes[:index]), sizes[index]

    def evaluate(self, batches: Batches, samples: int) -> float:
        """The mean loss over the first `samples` samples, in micro-batches of the size that training uses."""
        return self._evaluator(batches, samples)

    def holdings(self) -> Iterator[tuple[Holding, Tensor]]:
        """Everything a checkpoint holds, as far as it lies here."""
        self.parameters.settle()
        return holdings.of_checkpoint(self.formation, self.parameters, self.optimizer)

    def values(self) -> Iterator[tuple[Holding, Tensor]]:
        """The parameters alone, by their own names, in the precision of training."""
        return holdings.of_parameters(self.formation, self.parameters, exact=False)

    def restore_optimizer(
        self, slots: Iterable[tuple[str, str]], read: Callable[[str, Piece], Tensor], scalars: Mapping[str, Any]
    ) -> None:
        """slots: the (slot, parameter) pairs that were saved; read: (key, piece) → what that is of it, in its shape."""

        def piece_of(slot: str, name: str) -> Tensor:
            return read(f"optimizer/{slot}/{name}", self.parameters.weights[name].piece)

        self.optimizer.load(slots, piece_of, scalars)

    @property
    def engines(self) -> tuple[Engine, Engine]:
        """For training and for evaluation."""
        return self.step.engine, self._evaluator.engine

    def warm_up(self, compute: Compute) -> WarmUp:
        """What runs every segment of this rank once, with `compute`."""
        shapes = {name: local.local_shape for name, local in self.formation.locals(self.captured.shapes).items()}
        wires = Wires(self._anatomy, self.step.engine.compute, shapes, self.dtype)
        return WarmUp(self._anatomy, compute, wires, shapes, self.dtype)

    def close(self) -> None:
        self.step.engine.settle()
        if self._owns_links:
            self.links.close()

    def _engine(self, trainable: Sequence[str], watches: Iterable[Watch], trains: bool) -> tuple[Engine, Feeder]:
        formation, connections = self.formation, self.connections
        anatomy = self._anatomy
        compute = Compute(
            anatomy.segments, self.parameters.values, self._buffers, trainable=trainable, device=self.device,
            compiler=self.compiler, recompute=trains and self.plan.recompute, dropout=trains, degrees=anatomy.degrees,
            products=self.plan.adds_gradients,
        )  # fmt: skip
        shapes = {name: local.local_shape for name, local in formation.locals(self.captured.shapes).items()}
        wires = Wires(anatomy, compute, shapes, self.dtype)
        messages, warm_up = None, None
        if self.plan.pp > 1:
            messages = Messages(
                wires, formation.first_blocks, self.seat.rank, connections.channel, self.device, self._whole_wires
            )
        if self.device.type == "cuda" and self.plan.pp * self.plan.tp > 1:
            warm_up = WarmUp(anatomy, compute, wires, shapes, self.dtype)
        exchanges = Exchanges(anatomy.parts, connections.exchange_group) if self.plan.tp > 1 else None
        engine = Engine(
            self.plan, formation.shape, anatomy, compute, self.parameters, exchanges=exchanges, messages=messages,
            watches=watches, warm_up=warm_up, gradients=self._gradients() if trains else None,
            totals=self._totals() if trains else None, whole=self._whole_wires,
        )  # fmt: skip
        return engine, Feeder(
            self.captured, compute, seed=self._seed, dtype=self.dtype, parts=formation.portions(), sliced=self._sliced
        )

    def _gradients(self) -> Gradients:
        pool = BufferPool()
        found: dict[int, BucketGradients] = {}
        home: dict[str, int] = {}
        for index in self.parameters.held():
            shelf = self.parameters.bucket(index).trained
            if shelf is None or index == self.formation.shape.num_buckets or self.connections.is_alone(index):
                continue
            found[index] = BucketGradients(shelf, self.connections.reduction(index, self.plan.zero > 0), pool)
            home |= dict.fromkeys((place.name for place in shelf.layout.places), index)
        return Gradients(found, home, IN_FLIGHT if self.plan.zero >= 2 else None)

    def _totals(self) -> Totals:
        speaks = self.formation.speaks
        owned = {name for name, weight in self.parameters.trained.items() if self.formation.owns(weight)}
        return Totals(
            self.optimizer, self.captured.blocks.count, self.connections.replicas, self.connections.world, owned,
            counts=self.formation.is_first and speaks, speaks=speaks, loss_scale=self.loss_scale,
        )  # fmt: skip


def _formation(
    captured: Captured, plan: Plan, rank: int, trainable: Sequence[str], dtype: torch.dtype, sliced: Sliced | None
) -> Formation:
    blocks = captured.blocks
    sharded = shard(captured, plan, Mesh.of(plan).coordinates(rank)[2], dtype) if plan.tp > 1 else None
    unused = tuple(name for name in captured.shapes if name not in set(blocks.parameters()))
    return Formation(plan, bucket_names(blocks, trainable, sharded, sliced), unused, rank, sharded)
