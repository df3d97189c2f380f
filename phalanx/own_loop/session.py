"""A session in the user's own loop: gradients of a batch, an update, an evaluation, one call each.

It stands on the same `Session` as training does; a step is the same program, in two parts. Every rank of the plan makes
the same calls with the same global batch, of which it computes its own part. How one is opened is `open.py`'s work.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from phalanx.adapt.migrate import ChangeRefused
from phalanx.comm.links import Group
from phalanx.data.given import given_batches
from phalanx.engine.inputs import num_samples
from phalanx.engine.reductions import StepRun
from phalanx.errors import ConfigError, counted, nearest
from phalanx.own_loop.batch import part_of, refuse_autocast
from phalanx.own_loop.gradients import taken
from phalanx.own_loop.optimizer import Updates
from phalanx.own_loop.plan import Opened, OwnPlan
from phalanx.own_loop.state import OwnState
from phalanx.plan.complete import require_evaluation
from phalanx.plan.plan import Plan
from phalanx.session.change import Change
from phalanx.session.outputs import Outputs
from phalanx.session.session import Session
from phalanx.tasks.base import Batch

_OUTSIDE = "backward() on a loss of session(inputs)"


class OwnSession:
    """A model under a plan, for a loop of the user's own. Use it in a `with` statement, or let it end with the script.

    `optimizer` is what updates: the one it was opened with, or the user's own once it has made a step.
    """

    def __init__(self, session: Session, opened: Opened) -> None:
        self.opened, self._context = opened, opened.context
        self.samples = 0
        self._kept = OwnState(session, opened.context)
        makes_gradients = "session.forward_backward(batch)" if opened.ends is None else _OUTSIDE
        self._updates = Updates(session, opened.has_optimizer, makes_gradients)
        self._is_closed = False
        self._tried: dict[str, Tensor] | None = None  # gradients of a trial
        self._under = OwnPlan(session, opened)
        self._take(session)
        self._context.slot.enter("loop")

    # A step.

    def forward_backward(self, batch: Any, scale: float = 1.0) -> Tensor:
        """The mean loss of a global batch, the same on every rank; its gradients, times `scale`, are added to those
        that are there."""
        if self._outputs is not None:
            raise ConfigError(
                "this session was opened for a loss outside (loss='outer')",
                "call session(inputs) and the backward() of your loss, or open it with a loss function",
            )
        given = self.opened.form(batch)
        self._under.go_on()
        self._updates.gradients.begin()
        self._updates.before_batch()
        part, first, _ = part_of(self._session, given, self.samples)
        with self._running(part):
            run = self._session.step.backward(part, first)
        self._keep(run, scale)
        self.samples += num_samples(given)
        assert run.loss is not None
        return run.loss

    def __call__(self, *batch: Any, **inputs: Any) -> Any:
        """The model's outputs for a global batch, from which you compute a loss; its `backward()` adds gradients to
        those that are there. Under `torch.no_grad()` without dropout, and nothing is kept for a backward."""
        if self._outputs is None:
            raise ConfigError(
                "this session computes its loss itself, so that no outputs leave it",
                "call session.forward_backward(batch); or open it with loss='outer'",
            )
        given = self.opened.form(inputs or (batch[0] if len(batch) == 1 else batch))
        self._under.go_on()
        self._updates.before_batch()
        part, first, begin = part_of(self._session, given, self.samples)
        with self._running(part):
            outputs = self._outputs(part, first, begin, num_samples(given))
        self.samples += num_samples(given) if torch.is_grad_enabled() else 0
        return outputs

    @torch.no_grad()
    def outputs(self, batch: Any) -> Any:
        """The model's outputs for a global batch, whole on every rank, without dropout; nothing is learned from them.
        For that a session which computes its loss itself reads the model once more, without its labels."""
        if self._outputs is not None:
            return self(batch)
        given = {name: tensor for name, tensor in self.opened.form(batch).items() if name != "labels"}
        if self._left is None:
            assert self.opened.leaving is not None
            session, ends = self.opened.leaving(self._session, given)
            self._left = Outputs(session, ends, "whole", keep=None)
        part, first, begin = part_of(self._session, given, self.samples, with_labels=False)
        with self._running(part, "evaluate"):
            return self._left(part, first, begin, num_samples(given))

    def trial(self, compute: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
        """The loss that `compute` finds with this session, and its gradients, whole on rank 0 and empty elsewhere. None
        of it is kept: gradients that are there stay as they are, and the samples do not count. For `phalanx.verify`."""
        samples, self._tried = self.samples, {}
        try:
            loss = float(compute().detach())
            return loss, self._kept.whole_gradients(self._tried)
        finally:
            self.samples, self._tried = samples, None

    def part(self, rows: Tensor) -> Tensor:
        """What of a global batch's rows belongs to this rank's replica."""
        first, count = self._session.part(0, rows.shape[0])
        return rows[first : first + count]

    def step(self) -> Tensor:
        """One update by the gradients there are, which it uses up; whether it was made: gradients that are not finite
        change nothing."""
        return self._updates.step()

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self._updates.forget()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The norm of all gradients of all ranks as one vector; those above `max_norm` are scaled down to it."""
        return self._updates.clip(max_norm)

    def evaluate(self, batch: Any) -> float:
        """The mean loss of a global batch, without dropout; nothing is learned from it."""
        if self._outputs is not None:
            raise ConfigError(
                "a session for a loss outside (loss='outer') has none to evaluate",
                "compute it from session(inputs) under torch.no_grad()",
            )
        given = self.opened.form(batch)
        require_evaluation(self.plan, num_samples(given))
        with self._running(given, "evaluate"):
            return self._session.evaluate(given_batches(given, self.opened.task), num_samples(given))

    # What is trained.

    def parameters(self) -> Iterator[Tensor]:
        """What this rank updates, for an optimizer of the user's own: whole parameters, or this rank's shards."""
        return iter(self._updates.parameters())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The same, by the model's own names. A shard is part of a parameter along one dim, or a row of elements."""
        return iter([(name, weight.exact) for name, weight in self._updates.weights.items()])

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter of the model, whatever lies here of it."""
        shapes = self._session.compiled.captured.shapes
        if name not in shapes:
            raise ConfigError(f"session.whole_shape: the model has no parameter {name!r}", nearest(name, shapes))
        return shapes[name]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._updates.optimizer

    @optimizer.setter
    def optimizer(self, given: torch.optim.Optimizer) -> None:
        """What is saved and loaded; one that makes a step is taken by itself."""
        self._updates.use(given)

    @property
    def steps(self) -> int:
        """Updates that were made."""
        return self._updates.steps

    def refresh(self) -> None:
        """After parameters were changed by hand: what the model computes with follows. Optimizers see to it
        themselves."""
        self._updates.refresh()

    # What is kept.

    def save(self, folder: Path | str, keep: int = 2) -> Path:
        """A checkpoint in `folder`, which any plan can load; of earlier ones there the newest are kept."""
        with self._context.slot.within("save"):
            return self._kept.save(
                Path(folder).expanduser(), keep, self.steps, self.samples, self.optimizer is not None
            )  # fmt: skip

    def load(self, path: Path | str, weights_only: bool = False) -> None:
        """Goes on from a checkpoint, or from the newest one in a folder of them, whatever plan wrote it. weights_only:
        without the optimizer's state in it."""
        self._updates.steps, self.samples = self._kept.load(
            Path(path).expanduser(), self.optimizer is not None, weights_only
        )  # fmt: skip
        self.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model on the CPU of rank 0, as `load_state_dict` of the module takes it; empty on other ranks,
        which must call it too."""
        return self._kept.state_dict(self.opened.spec)

    def export(self, folder: Path | str) -> Path:
        """The trained model as a HuggingFace folder, of a module of the user's own its weights; of adapters a folder as
        peft has it, unless they are merged."""
        return self._kept.export(Path(folder).expanduser(), self.opened.spec, self.opened.merges)

    # Where it runs.

    @property
    def plan(self) -> Plan:
        return self._session.plan

    def use_schedule(self, schedule: str) -> None:
        """From now on steps follow another schedule of the pipeline, one that leaves blocks where they are."""
        self._updates.under(self._under.use_schedule(schedule))

    def prepare(self, plan: str | Plan) -> None:
        """Begins to make ready for a change to another plan; every rank calls it. It is done a piece before each batch
        (`is_prepared`: whether nothing is left here), and `change` to that plan then takes little more than moving
        state; it can be called at any time, for this or another plan."""
        self._updates.require_own_optimizer()
        self._under.prepare(plan)

    @property
    def is_prepared(self) -> bool:
        return self._under.is_prepared

    def change(self, plan: str | Plan) -> Change:
        """From now on another plan, for the same ranks; every rank calls it. What was made is told: bytes that moved,
        and seconds. Where it is refused (`ChangeRefused`), all is as it was."""
        self._updates.require_changeable()
        before, frozen = self._session.state, self._frozen()
        try:
            _, done = self._under.change(plan)
        except ChangeRefused:
            if self._session.state is not before:
                self._go_on_with(self._session, frozen)
            raise
        self._go_on_with(self._session, frozen)
        return done

    @property
    def rank(self) -> int:
        return self._context.rank

    @property
    def world(self) -> int:
        return self._context.world

    @property
    def stages(self) -> tuple[int, ...]:
        """Of the pipeline, those that this rank computes."""
        return self._session.compiled.formation.stages

    @property
    def device(self) -> torch.device:
        return self._session.compiled.device

    @property
    def world_group(self) -> Group:
        """All ranks, for what a loop wants to tell the others."""
        return self._session.connected.world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def close(self, error: BaseException | None = None) -> None:
        """Ends this rank's part; the others are told of an error."""
        if self._is_closed:
            return
        self._is_closed = True
        self._under.forget()
        self._updates.close()
        if error is None:
            self._session.close()
        self.opened.leave(error)

    def __enter__(self) -> OwnSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(error)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a session cannot be copied or pickled: it stands on the links between ranks",
            "clone session.parameters() for an average of them, call session.save() or state_dict() to keep them, or "
            "open a second session",
        )

    # Inside.

    @property
    def _session(self) -> Session:
        return self._under.session

    def _go_on_with(self, session: Session, frozen: Collection[str]) -> None:
        """From now on with this one, whose state may lie elsewhere."""
        self._take(session)
        self._updates.take(session, frozen)

    def _frozen(self) -> set[str]:
        """By the loop, on any rank: another one may come to have it."""
        said = self.world_group.texts(json.dumps(self._updates.frozen()))
        return {name for text in said for name in json.loads(text)}

    def _take(self, session: Session) -> None:
        """From now on with this one."""
        self._kept.session = session
        ends = self.opened.ends
        self._outputs = None if ends is None else Outputs(session, ends, self.opened.scope, self._keep)
        self._left: Outputs | None = None  # for outputs of a session that computes its loss itself

    @contextlib.contextmanager
    def _running(self, batch: Batch, phase: str = "step") -> Iterator[None]:
        if self._is_closed:  # nobody follows an optimizer of the user's any more
            raise ConfigError("this session is closed and computes no batch", "close it after the last one")
        refuse_autocast(self.device)
        slot = self._context.slot
        slot.at_step(self.steps + 1)
        slot.enter(phase)
        with self.opened.memory.explained(f"a batch of {counted(num_samples(batch), 'sample')}"):
            yield
        slot.enter("loop")

    def _keep(self, run: StepRun, scale: float = 1.0) -> None:
        """Adds the gradients of a run to those that are there."""
        if self._tried is not None:
            self._tried.update(taken(self._session, run))
            return
        self._updates.gradients.add(self._session, run, scale)
