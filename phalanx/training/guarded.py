"""A run that survives lost ranks among processes of a launcher, which ends the job with the first process that dies.

So no process that the launcher started is a rank. All of them are guards that live as long as the run: the first one
starts the ranks of this machine and supervises them, as it would without a launcher, and the others wait for the end.
A rank sees the GPUs that its guard sees.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.errors import LinkError
from phalanx.launch.context import RankContext
from phalanx.launch.signals import stop_request
from phalanx.launch.worker_pool import WorkerPool
from phalanx.training.job import Job, Summary
from phalanx.training.read_model import find_model

_SEEN, _ENDED = "guards", "ended"
_DEVICES = "CUDA_VISIBLE_DEVICES"


def fit_guarded(context: RankContext, job: Job, device: str, run: Callable[[WorkerPool], Summary]) -> Summary:
    """What came of the run, on every guard. context: of the guard. run: on ranks of a pool."""
    store = context.store
    store.set(f"{_SEEN}/{context.rank}", json.dumps(os.environ.get(_DEVICES)))
    if context.rank > 0:
        return _waited(context, job)
    seen = [json.loads(store.get(f"{_SEEN}/{rank}")) for rank in range(context.world)]

    def environment(rank: int) -> dict[str, str]:
        own = seen[rank % len(seen)]
        return {} if own is None else {_DEVICES: own}

    ended: dict[str, Any] = {"left": 1}
    try:
        with WorkerPool(
            context.world, device=device, silence=job.config.silence, environment=environment
        ) as pool:  # fmt: skip
            found = run(pool)
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
        while not context.store.check([_ENDED]):
            if context.abort.wait(0.1):
                raise LinkError(f"{context.name} stopped waiting for the run: {context.abort.reason}")
    ended = json.loads(context.store.get(_ENDED))
    if "left" in ended:
        raise KeyboardInterrupt if ended["left"] is None else SystemExit(ended["left"])
    spec = None if isinstance(job.model, nn.Module) else find_model(job.model, job.config)
    paths = {name: ended[name] and Path(ended[name]) for name in _PATHS}
    return Summary(**{**ended, **paths, "losses": tuple(ended["losses"])}, spec=spec)


_PATHS = ("folder", "checkpoint", "export", "best")


def told(found: Summary) -> dict[str, Any]:
    """Of a summary, for the other guards."""
    told = vars(replace(found, spec=None)).copy()
    told.pop("spec")
    return told | {name: told[name] and str(told[name]) for name in _PATHS}
