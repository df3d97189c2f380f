"""A run that survives lost ranks among processes of a launcher, which ends the job with the first process that dies.

So no process that the launcher started is a rank. All of them are guards that live as long as the run: the first one
of each machine starts the ranks there and supervises them, as it would without a launcher, and the others wait for the
end. On several machines the very first one decides, and the loss of another is the loss of its ranks
(`launch/spread.py`); when it is lost itself, another decides (`launch/succession.py`). A rank sees the GPUs that its
guard sees.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.errors import LinkError
from phalanx.launch.context import RankContext
from phalanx.launch.follower import Follower
from phalanx.launch.remote import SpreadProcesses
from phalanx.launch.signals import stop_request
from phalanx.launch.spread import Spread
from phalanx.launch.store import JobStore
from phalanx.launch.succession import Succession, forget_claims
from phalanx.launch.worker_pool import WorkerPool
from phalanx.prepare.read_model import find_model
from phalanx.training.job import Job, Summary

_SEEN, _ENDED, _SUMMARY = "guards", "ended", "summary"
_DEVICES = "CUDA_VISIBLE_DEVICES"
_HEAR_SECONDS = 10.0  # for guards to hear what came of the run
_MOVE_SILENCES = 8.0  # silences in which another node leads, if one does, also after one that was lost as well


Run = Callable[[WorkerPool], Summary | None]
Follow = Callable[[Follower], list[Summary]]


def fit_guarded(
    context: RankContext, job: Job, device: str, run: Run, follow: Follow | None = None, term: int = 0
) -> Summary:
    """What came of the run, on every guard. context: of the guard. run: on ranks of a pool. follow: on several
    machines, what another's supervisor does. term: of the run that this guard comes back to, 0 for one that begins."""
    store = context.store
    own = [context.node, context.local_rank, os.environ.get(_DEVICES)]
    store.set(_seen_key(context.rank), json.dumps(own))
    if context.local_rank > 0 or (context.rank > 0 and follow is None):
        return _waited(context, job, store, several=follow is not None)
    told_of = {_seen_key(rank): store.get(_seen_key(rank)) for rank in range(context.world)}
    seen = [json.loads(text) for text in told_of.values()]
    spread = _spread(context, job, seen, told_of, term) if follow is not None else None

    def environment(rank: int) -> dict[str, str]:
        own = seen[rank % len(seen)][2]
        return {} if own is None else {_DEVICES: own}

    pool = WorkerPool(
        context.world, device=device, silence=job.config.silence, environment=environment, spread=spread
    )  # fmt: skip
    if spread is not None and spread.leads:
        forget_claims(job.folder)  # all guards are here: no earlier run goes on
    if spread is None or follow is None or spread.leads:
        found = _lead(job, pool, lambda: store, lambda: run(pool), spread)
        assert found is not None
        return found
    return _follow(context, job, pool, spread, follow)


def _seen_key(rank: int) -> str:
    return f"{_SEEN}/{rank}"


def _spread(context: RankContext, job: Job, seen: Sequence[Any], told_of: Mapping[str, str], term: int) -> Spread:
    places = {rank: (node, local_rank) for rank, (node, local_rank, _) in enumerate(seen)}
    succession = Succession(job.folder, context.node, told_of)
    leads = context.rank == 0 and term == 0
    return Spread(context.store, context.node, places, job.config.silence, leads, succession, term)


def _lead(
    job: Job, pool: WorkerPool, leads: Callable[[], JobStore | None], run: Callable[[], Summary | None],
    spread: Spread | None,
) -> Summary | None:  # fmt: skip
    """What came of the run, told to all guards. leads: the run's store, None as long as another's supervisor leads. On
    several machines this one ends, and the store with it, when the guards of those that are there have heard it."""
    ended = dict[str, Any](left=1)
    try:
        with pool:
            found = run()
        if (store := leads()) is not None:
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
        if (store := leads()) is not None:
            store.set(_ENDED, json.dumps(ended))
            if spread is not None and isinstance(pool.processes, SpreadProcesses):
                _wait_until_heard(store, spread, pool.processes.nodes_here)
                forget_claims(job.folder, spread.node)


def _wait_until_heard(store: JobStore, spread: Spread, nodes: Sequence[int]) -> None:
    own = next(rank for rank, place in spread.places.items() if place == (spread.node, 0))
    keys = [_heard_key(rank) for rank, (node, _) in spread.places.items() if node in nodes and rank != own]
    deadline = time.monotonic() + _HEAR_SECONDS
    while keys and not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.02)


def _heard_key(rank: int) -> str:
    return f"heard/{rank}"


def _follow(context: RankContext, job: Job, pool: WorkerPool, spread: Spread, follow: Follow) -> Summary:
    """On a supervisor that has its orders from another; it may come to lead."""
    followers = list[Follower]()

    def run() -> Summary | None:
        followers.append(Follower(pool, spread))
        return next(iter(follow(followers[0])), None)

    def leads() -> JobStore | None:
        now = followers[0].spread if followers else spread
        return now.root if now.leads else None

    found = _lead(job, pool, leads, run, spread)
    if found is not None and leads() is not None:
        return found
    root = followers[0].spread.root
    if found is not None:
        root.set(_SUMMARY, json.dumps(told(found)))
    return _waited(context, job, root, several=True)


def _waited(context: RankContext, job: Job, store: JobStore, several: bool) -> Summary:
    """On a guard that only lives. Signals that end a run come to all guards; the first one passes them on. several:
    machines, so that the store may come to be on another."""
    with stop_request(speaks=False):
        while True:
            try:
                if store.check([_ENDED]):
                    ended = json.loads(store.get(_ENDED))
                    break
            except RuntimeError as error:
                if not several:
                    raise _no_store(context, error) from error
                store = _moved(context, job, store, error)
            if context.abort.wait(0.1):
                raise LinkError(f"{context.name} stopped waiting for the run: {context.abort.reason}")
    with contextlib.suppress(RuntimeError):
        store.set(_heard_key(context.rank), "yes")
    if "left" in ended:
        raise KeyboardInterrupt if ended["left"] is None else SystemExit(ended["left"])
    return _read(ended, job)


def _read(ended: dict[str, Any], job: Job) -> Summary:
    spec = None if isinstance(job.model, nn.Module) else find_model(job.model, job.config)
    paths = {name: ended[name] and Path(ended[name]) for name in _PATHS}
    return Summary(**{**ended, **paths, "losses": tuple(ended["losses"])}, spec=spec)


def _moved(context: RankContext, job: Job, store: JobStore, lost: RuntimeError) -> JobStore:
    """The run's store, once another node has it. lost: what became of the one that was."""
    succession = Succession(job.folder, context.node, {})
    deadline = time.monotonic() + _MOVE_SILENCES * job.config.silence
    while time.monotonic() < deadline:
        if (found := succession.successor(store, 1)) is not None:
            return found
        time.sleep(0.1)
    raise _no_store(context, lost)


def _no_store(context: RankContext, lost: RuntimeError) -> LinkError:
    error = LinkError(
        f"{context.name} lost the store of its job: the first process of the run is gone",
        "see what became of it; go on with --resume auto",
    )
    error.__cause__ = lost
    return error


_PATHS = ("folder", "checkpoint", "export", "best")


def told(found: Summary) -> dict[str, Any]:
    """Of a summary, for the other guards."""
    told = vars(replace(found, spec=None)).copy()
    told.pop("spec")
    return told | {name: told[name] and str(told[name]) for name in _PATHS}
