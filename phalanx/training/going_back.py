"""A rank that goes back to an earlier step, because what a lost rank held alone is gone: to the newest that ranks have
copies of in their memory, else to the newest checkpoint, else to the beginning. All ranks go there together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.engine.step import Outcome
from phalanx.errors import CheckpointError, counted
from phalanx.launch.context import RankContext
from phalanx.plan import fields
from phalanx.plan.plan import Plan
from phalanx.prepare.initial_weights import open_weights
from phalanx.session.held import Word
from phalanx.session.mirror import Mirror
from phalanx.session.restoring import Restoring, Scalars
from phalanx.state import checkpoint
from phalanx.state.snapshot import Snapshot, restore
from phalanx.training.job import Job
from phalanx.training.ready import ReadyRank, reader


class RankGoingBack(ReadyRank):
    """`at` is the step that this rank makes, or whose results it deals with; `unreported` one that counts, and that
    nobody was told of yet. `has_saved`: whether this run has written a checkpoint itself, as ranks knew when they last
    lost others."""

    at = 1
    has_saved = False
    unreported: tuple[int, Outcome] | None = None
    missed: Sequence[dict[str, Any]] = ()  # records of the newest steps, as another rank has them

    def __init__(self, job: Job, context: RankContext) -> None:
        super().__init__(job, context)
        every = self.config.mirror_every
        self.mirror = Mirror(every if isinstance(every, int) else None)

    def _went_back(
        self, restoring: Restoring, words: Sequence[Word], told: Sequence[Mapping[str, Any]], newest: int,
        lost: list[str], mirrors: list[str],
    ) -> dict[str, Any]:  # fmt: skip
        """What is said of it. lost: tensors of which nobody has all that is needed of the newest step. mirrors: what is
        said of those."""
        others = f" and {counted(len(lost) - 1, 'other tensor')}" if len(lost) > 1 else ""
        why = [f"nobody else held {lost[0]}{others}"]
        why += [text for word in words for text in word.damaged]
        why += [*(text for own in told for text in own.get("damaged", ())), *mirrors]
        copies = next((own["copies"] for own in told if own.get("copies")), [])
        saved = max((own["saved"] for own in told if "saved" in own), default=-1)
        for step, plan, snapshot, optimizer, loss_scale in copies:
            if step < saved:
                why.append(f"copies in memory are of step {step}")
                break
            places = _copied(words, step, plan)
            own, scalars = self.mirror.of(step, plan), Scalars(optimizer, loss_scale)
            found = restoring.from_copies(places, own, Plan(**fields.read(plan)), scalars)
            if isinstance(found, list):
                why.append(f"of the copies of step {step} those of {found[0]} were lost as well")
                continue
            self.session = restoring.member(found)
            self._go_on_from(Snapshot.from_json(snapshot))
            source = f"copies of step {step} in the memory of the ranks that were left"
            return {"step": self.at, "source": source, "why": "; ".join(why), "repeated": newest - step}
        return self._from_checkpoint(restoring, why, newest)

    def _from_checkpoint(self, restoring: Restoring, why: list[str], newest: int) -> dict[str, Any]:
        """Everything as the newest checkpoint of this run has it, or as it began."""
        found = self.folder.to_go_back_to(self.has_saved, self.folder.meeting(restoring.opening.context), why.append)
        fresh = Snapshot(
            self.config.model_dump(mode="json"), self.run.model_mark, self.run.data_mark, self.run.total_steps
        )  # fmt: skip
        snapshot = fresh if found is None else restore(found, fresh)
        snapshot.passed_over = max(snapshot.passed_over, self.job.passed_over)
        weights, _ = open_weights(self.job.model, self.run.spec, self.config.seed, self.config.init)
        state = restoring.from_reader(reader(found, weights))
        if state is not None and found is not None:
            state.restore(found, snapshot.optimizer, snapshot.loss_scale)
        self.session = restoring.member(state)
        self._go_on_from(snapshot)
        source = f"the checkpoint {found.path}" if found is not None else "the beginning: there was no checkpoint"
        return {"step": self.at, "source": source, "why": "; ".join(why), "repeated": newest - snapshot.step}

    def _go_on_from(self, snapshot: Snapshot) -> None:
        self._take(snapshot)
        self.missed, self.unreported, self.at = [], None, snapshot.step + 1

    def _take(self, snapshot: Snapshot) -> None:
        """In place: others know it as well."""
        self.snapshot.__dict__.update(vars(snapshot))

    def _saved_step(self) -> int:
        """Of the checkpoint that would be gone back to, as far as it seems complete."""
        named = None if self.has_saved else self.folder.named
        path = named or checkpoint.latest(self.folder.checkpoints)
        with contextlib.suppress(CheckpointError):
            return -1 if path is None else checkpoint.open(path, verify=False).step
        return -1


def _copied(words: Sequence[Word], step: int, plan: str) -> dict[int, int]:
    """Who has a copy, by rank of this generation, and of which rank's state."""
    return {
        rank: own
        for rank, word in enumerate(words)
        for copied, text, own in word.copies
        if (copied, text) == (step, plan)
    }
