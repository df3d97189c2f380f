"""What is kept of a session in a loop of the user's own: checkpoints, whole tensors, exported folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError, counted
from phalanx.launch.context import RankContext
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.params.gather_full import gather_full
from phalanx.params.matrix_wise import MatrixWise
from phalanx.session.exporting import export_model, whole_parameters
from phalanx.session.session import Session
from phalanx.state import checkpoint
from phalanx.state.rendezvous import LocalRendezvous, Meeting, StoreRendezvous


class OwnState:
    """All ranks call the same methods in the same order."""

    def __init__(self, session: Session, context: RankContext) -> None:
        self.session, self._context, self._num_meetings = session, context, 0

    @torch.no_grad()
    def save(self, folder: Path, keep: int, steps: int, samples: int, with_optimizer: bool) -> Path:
        """with_optimizer: whether there is one that updates; else what the session has of one stands for nothing."""
        if keep < 1:
            raise ConfigError(f"session.save: keep = {keep} would leave no checkpoint", "give 1 or more")
        state = self.session.state
        optimizer, loss_scale = state.scalars()
        record: dict[str, Any] = {"step": steps, "samples": samples, "loss_scale": loss_scale}
        if with_optimizer:
            record |= {"optimizer": optimizer, "optimizer_class": _kind(state.optimizer.inner)}
        return checkpoint.save(folder, steps, state.shards(), record, keep, meeting=self._meeting())

    @torch.no_grad()
    def load(self, folder: Path, with_optimizer: bool, weights_only: bool) -> tuple[int, int]:
        """The steps made and the samples seen by then. with_optimizer: whether there is one."""
        found = self._opened(folder)
        state, names = self.session.state, set(found.names())
        missing = [name for name in self.session.compiled.captured.shapes if not _keys(name) & names]
        if missing:
            raise CheckpointError(
                f"{found.path} holds no tensor {missing[0]!r}", "it was saved by a run with another model"
            )
        if not weights_only:
            self._require_optimizer_of(found, with_optimizer)
        state.parameters.fill(lambda name, _, piece: piece.read(found, next(iter(_keys(name) & names))))
        if with_optimizer and not weights_only:
            state.restore(found, found.state.get("optimizer", {}), found.state.get("loss_scale"))
        return found.step, int(found.state.get("samples", 0))

    def _opened(self, folder: Path) -> checkpoint.Checkpoint:
        meeting = self._meeting()
        try:
            return checkpoint.open_newest(folder, meeting, print) or checkpoint.open_together(folder, meeting)
        except NotADirectoryError as error:
            raise CheckpointError(
                f"{folder} is no folder: {error.strerror}", "give what session.save() was given, or what it returned"
            ) from None

    def _require_optimizer_of(self, found: checkpoint.Checkpoint, with_optimizer: bool) -> None:
        """Its state would else be lost, or taken for another's."""
        hint = "or take the weights alone: session.load(folder, weights_only=True)"
        if not with_optimizer:
            if any(name.startswith("optimizer/") for name in found.names()):
                raise ConfigError(
                    f"{found.path} holds the state of an optimizer, and this session knows of none yet",
                    f"say which one it is: session.optimizer = optimizer, before session.load(); {hint}",
                )
            return
        inner = self.session.state.optimizer.inner
        saved, own = found.state.get("optimizer_class", ""), _kind(inner)
        if saved and own and saved != own:
            what = f"{found.path} holds the state of {saved}, and {own} updates here"
            raise ConfigError(what, f"make {saved}, {hint}")
        groups, num_groups = _num_groups(found.state.get("optimizer", {})), len(inner.param_groups)
        if groups not in (0, num_groups):
            raise ConfigError(
                f"{found.path} holds {counted(groups, 'parameter group')} of an optimizer, and {own or saved} has "
                f"{num_groups} here",
                f"make the same groups, {hint}",
            )

    @torch.no_grad()
    def state_dict(self, spec: ModelSpec) -> dict[str, Tensor]:
        """Empty on ranks other than 0."""
        tensors = whole_parameters(self.session, self._context, self._next_name())
        found = {name: tensor.cpu().clone() for name, tensor in tensors}
        if self._context.rank > 0:
            return {}
        compiled = self.session.compiled
        found |= {alias: found[name] for alias, name in compiled.captured.aliases.items()}
        others = build(spec, device="meta").state_dict().keys() - found.keys()
        return found | {name: compiled.buffers[name].cpu().clone() for name in others}

    @torch.no_grad()
    def whole_gradients(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """gradients: this rank's. Whole on rank 0, of whatever is updated; empty on others."""
        state, compiled, context = self.session.state, self.session.compiled, self._context
        dtype = str(compiled.dtype).removeprefix("torch.")
        layout = {
            rank: tuple(kept.shard(kept.facts.name, dtype) for kept in state.layout.updated(rank))
            for rank in range(context.world)
        }
        held = [
            (shard, state.parameters.weights[shard.name].piece.packed(gradients[shard.name]).to(compiled.device))
            for shard in layout[context.rank]
        ]
        whole = gather_full(layout, held, context, compiled.device, self._next_name())
        return {name: tensor.cpu().clone() for name, tensor in whole}

    @torch.no_grad()
    def export(self, folder: Path, spec: ModelSpec, merges: bool) -> Path:
        return export_model(self.session, self._context, spec, folder, name=self._next_name(), merges=merges)

    def _next_name(self) -> str:
        """All ranks count alike, so that what they do together never meets what they did before."""
        self._num_meetings += 1
        return f"own/{self._context.generation}/{self._num_meetings}"

    def _meeting(self) -> Meeting:
        context = self._context
        rendezvous = StoreRendezvous(context.store, context.rank) if context.world > 1 else LocalRendezvous()
        return Meeting(context.rank, context.world, rendezvous, key=self._next_name())


def _keys(name: str) -> set[str]:
    return {f"master/{name}", f"model/{name}"}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Its class; nothing of one that stands for others where plans split matrices."""
    return "" if isinstance(optimizer, MatrixWise) else type(optimizer).__name__


def _num_groups(scalars: Mapping[str, Any]) -> int:
    """Of which an optimizer's settings were saved."""
    return len({key.split("/", 2)[1] for key in scalars if key.startswith("optimizer/group.")})
