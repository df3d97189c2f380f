"""What is kept of a session in a loop of the user's own: checkpoints, whole tensors, exported folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.launch.context import RankContext
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.params.gather_full import gather_full
from phalanx.session.exporting import export_model, whole_parameters
from phalanx.session.session import Session
from phalanx.state import checkpoint
from phalanx.state.rendezvous import LocalRendezvous, Meeting, StoreRendezvous


class OwnState:
    """All ranks call the same methods in the same order."""

    def __init__(self, session: Session, context: RankContext) -> None:
        self.session, self._context, self._num_meetings = session, context, 0

    @torch.no_grad()
    def save(self, folder: Path, keep: int, steps: int, samples: int) -> Path:
        state = self.session.state
        optimizer, loss_scale = state.scalars()
        record = {"step": steps, "samples": samples, "optimizer": optimizer, "loss_scale": loss_scale}
        return checkpoint.save(folder, steps, state.shards(), record, keep, meeting=self._meeting())

    @torch.no_grad()
    def load(self, folder: Path, with_optimizer: bool) -> tuple[int, int]:
        """The steps made and the samples seen by then."""
        meeting = self._meeting()
        found = checkpoint.open_newest(folder, meeting, print)
        found = checkpoint.open_together(folder, meeting) if found is None else found
        state, names = self.session.state, set(found.names())
        missing = [name for name in self.session.compiled.captured.shapes if not _keys(name) & names]
        if missing:
            raise CheckpointError(
                f"{found.path} holds no tensor {missing[0]!r}", "it was saved by a run with another model"
            )
        state.parameters.fill(lambda name, _, piece: piece.read(found, next(iter(_keys(name) & names))))
        if with_optimizer:
            state.restore(found, found.state.get("optimizer", {}), found.state.get("loss_scale"))
        return found.step, int(found.state.get("samples", 0))

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
