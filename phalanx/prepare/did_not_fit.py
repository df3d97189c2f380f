"""A run whose plan is open goes on with another one where memory did not suffice for the plan that was chosen.

A rank on which memory runs out before its first step is over ends the attempt on all ranks, since they wait for each
other. Whoever started them begins anew, and the search then has less memory to plan with: less than the estimate of the
plan that did not fit. Ranks of a launcher hear of it from each other and begin anew in their processes; supervisors of
several machines from the one that leads.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from phalanx.comm.links import abort_all
from phalanx.errors import BeginAnew, PhalanxError
from phalanx.launch.context import RankContext
from phalanx.launch.join import run_joined
from phalanx.records import read_record

if TYPE_CHECKING:
    from phalanx.training.job import Job

T = TypeVar("T")
LESS = 0.95  # times what did not fit, what the next plan may need
MOST_OTHERS = 4  # plans that are tried after the first


class DoesNotFit(PhalanxError):
    """A rank lacks memory for its plan. plan: as it is shown. share: of the memory there is, what another plan may be
    looked for in; None where there is to be no other."""

    def __init__(self, message: str, hint: str = "", plan: str = "", share: float | None = None) -> None:
        super().__init__(message, hint)
        self.plan, self.share = plan, share

    @property
    def again(self) -> str:
        return "" if self.share is None else json.dumps([self.message, self.hint, self.plan, self.share])

    @staticmethod
    def told(text: str) -> DoesNotFit:
        """On another rank, from what `again` says."""
        message, hint, plan, share = read_record(tuple[str, str, str, float], text)
        return DoesNotFit(message, hint, plan, share)


@dataclass(frozen=True)
class Tried:
    """Plans of this run that did not fit, the share of the memory that is left to plan with, and what was said of the
    last one."""

    plans: tuple[str, ...] = ()
    share: float = 1.0
    message: str = ""
    hint: str = ""

    def then(self, error: DoesNotFit) -> Tried:
        assert error.share is not None
        return Tried((*self.plans, error.plan), error.share, error.message, error.hint)

    def nothing_else(self) -> DoesNotFit:
        return DoesNotFit(f"{self.message}; the search finds no plan that needs less", self.hint, self.plans[-1])

    @property
    def words(self) -> str:
        """For the reason of the plan that is chosen after them."""
        return f"; {', '.join(self.plans)} did not fit" if self.plans else ""

    @property
    def record(self) -> dict[str, Any]:
        return {"did_not_fit": list(self.plans)} if self.plans else {}


NONE_TRIED = Tried()


def with_plans_that_fit(job: Job, run: Callable[[Job], T], say: Callable[[str], None]) -> T:
    """run: trains a job to its end, on all its ranks."""
    for _ in range(MOST_OTHERS):
        try:
            return run(job)
        except DoesNotFit as error:
            if error.share is None:
                raise
            tried = job.tried.then(error)
        _release()
        say(f"plan {tried.plans[-1]} did not fit, and gives way to one that needs less: {tried.message}")
        job = replace(job, tried=tried)
    return run(job)


def _release() -> None:
    """What an attempt in this process held on the device may hang together in circles."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def run_joined_fitting(context: RankContext, fit: Callable[[RankContext, Job], T], job: Job) -> T:
    """A job on this rank, among others of a launcher; where memory does not suffice on one of them, that is raised on
    all, as long as there may be other plans."""
    begins_anew = len(job.tried.plans) < MOST_OTHERS
    with as_on_every_rank():
        try:
            return run_joined(context, fit, job, silence=job.config.silence, begins_anew=begins_anew)
        except BeginAnew:
            abort_all(context)
            raise


@contextlib.contextmanager
def as_on_every_rank() -> Iterator[None]:
    """What another rank said of memory that did not suffice is raised here as there."""
    try:
        yield
    except BeginAnew as anew:
        raise DoesNotFit.told(anew.again) from None
