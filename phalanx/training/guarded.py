"""A run that survives lost ranks among processes of a launcher, which ends the job with the first process that dies.

So no process that the launcher started is a rank. All of them are guards that live as long as the run: the first one
of each machine starts the ranks there and supervises them, as it would without a launcher, and the others wait for the
end. On several machines the very first one decides, and the loss of another is the loss of its ranks
(`launch/spread.py`). A rank sees the GPUs that its guard sees.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.errors import LinkError
from phalanx.launch.context import RankContext
from phalanx.launch.follower import Follower
from phalanx.launch.signals import stop_request
from phalanx.launch.spread import Spread
from phalanx.launch.worker_pool import WorkerPool
from phalanx.training.job import Job, Summary
from phalanx.training.read_model import find_model

_SEEN, _ENDED, _SUMMARY = "guards", "ended", "summary"
_DEVICES = "CUDA_VISIBLE_DEVICES"


Run = Callable[[WorkerPool], Summary | None]
Follow = Callable[[Follower], list[Summary]]


def fit_guarded(context: RankContext, job: Job, device: str, run: Run, follow: Follow | None = None) -> Summary:
    """What came of the run, on every guard. context: of the guard. run: on ranks of a pool. follow: on several
    machines, what another's supervisor does."""
    store = context.store
    own = [context.node, context.local_rank, os.environ.get(_DEVICES)]
    store.set(f"{_SEEN}/{context.rank}", json.dumps(own))
    if context.rank > 0 and (follow is None or context.local_rank > 0):
        return _waited(context, job)
    seen = [json.loads(store.get(f"{_SEEN}/{rank}")) for rank in range(context.world)]
    spread = _spread(context, job, seen) if follow is not None else None

    def environment(rank: int) -> dict[str, str]:
        own = seen[rank % len(seen)][2]
        return {} if own is None else {_DEVICES: own}

    pool = WorkerPool(
        context.world, device=device, silence=job.config.silence, environment=environment, spread=spread
    )  # fmt: skip
    if follow is not None and spread is not None and context.rank > 0:
        with pool:
            for summary in follow(Follower(pool, spread))[:1]:
                store.set(_SUMMARY, json.dumps(told(summary)))
        return _waited(context, job)
    return _lead(context, job, pool, run)


def _spread(context: RankContext, job: Job, seen: Sequence[Any]) -> Spread:
    places = {rank: (node, local_rank) for rank, (node, local_rank, _) in enumerate(seen)}
    return Spread(context.store.part("spread"), context.node, places, job.config.silence)


def _lead(context: RankContext, job: Job, pool: WorkerPool, run: Run) -> Summary:
    store, ended = context.store, dict[str, Any](left=1)
    try:
        with pool:
            found = run(pool)
        found = found or _read(json.loads(store.get(_SUMMARY)), job)
        ended = told(found)
        return found
    except KeyboardInterrupt:
        ended = {"left": None}
        raise
    except SystemExit as leaving:
        ended = {"left": leaving.code if isinstance(leaving.code, int) else 1}
        raise
    finally:
        store.set(_ENDED, json.dumps(ended))


def _waited(context: RankContext, job: Job) -> Summary:
    """On a guard that only lives. Signals that end a run come to all guards; the first one passes them on."""
    with stop_request(speaks=False):
        while not _has_ended(context):
            if context.abort.wait(0.1):
                raise LinkError(f"{context.name} stopped waiting for the run: {context.abort.reason}")
    ended = json.loads(context.store.get(_ENDED))
    if "left" in ended:
        raise KeyboardInterrupt if ended["left"] is None else SystemExit(ended["left"])
    return _read(ended, job)


def _read(ended: dict[str, Any], job: Job) -> Summary:
    spec = None if isinstance(job.model, nn.Module) else find_model(job.model, job.config)
    paths = {name: ended[name] and Path(ended[name]) for name in _PATHS}
    return Summary(**{**ended, **paths, "losses": tuple(ended["losses"])}, spec=spec)


def _has_ended(context: RankContext) -> bool:
    try:
        return context.store.check([_ENDED])
    except RuntimeError as error:
        raise LinkError(
            f"{context.name} lost the store of its job: the first process of the run is gone",
            "see what became of it; go on with --resume auto",
        ) from error


_PATHS = ("folder", "checkpoint", "export", "best")


def told(found: Summary) -> dict[str, Any]:
    """Of a summary, for the other guards."""
    told = vars(replace(found, spec=None)).copy()
    told.pop("spec")
    return told | {name: told[name] and str(told[name]) for name in _PATHS}
