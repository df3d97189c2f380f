"""Rounds: the fastest of our plans against the fastest setting of each peer, in alternating rounds.

Only two or three sides are alive at once, because each holds a whole training state. Ratios are formed within a
round, so that load on the machine hits both sides.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from importlib import metadata
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from compare import TOLERANCE, quartiles, verdict
from compare_setting import Setting
from peer_cases import LLAMA_ONLY, PACKAGES
from peer_workers import Entrant, Workers, WorkersError

from phalanx.lab.run import Lab

TRIED_ROUNDS = 2  # the faster one counts: other load only ever makes a round slower
ANSWER_SECONDS = 300.0  # a peer may compile what it needs when it is used for the first time


class Rounds:
    """Use it in a `with` statement; `choose_ours` comes first."""

    def __init__(
        self, lab: Lab, setting: Setting, *, rounds: int, steps: int, say: Callable[[str], None],
        seconds: float = ANSWER_SECONDS,
    ) -> None:  # fmt: skip
        self._lab, self._setting, self._rounds, self._steps, self._say = lab, setting, rounds, steps, say
        self._patience = seconds
        self._ours: Workers | None = None
        self._our_tried: list[dict[str, Any]] = []
        self._our_seconds: list[float] = []

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._ours is not None:
            self._ours.close()

    def choose_ours(self, plans: Sequence[Entrant]) -> dict[str, Any]:
        """The fastest of our plans stays, to meet every peer."""
        self._ours, self._our_tried = self._fastest(plans)
        if self._ours is None:
            raise SystemExit(f"none of our plans runs: {self._our_tried}")
        return {"plan": self._ours.entrant.variant, "tried": self._our_tried}

    def ours(self) -> dict[str, Any]:
        """Over all rounds so far, with whichever peer."""
        assert self._ours is not None, "choose_ours comes first"
        return {
            "plan": self._ours.entrant.variant, "tried": self._our_tried, "losses": self._ours.losses,
            "peak_bytes": self._ours.peak_bytes(),
            **({"seconds": quartiles(self._our_seconds)} if self._our_seconds else {}),
        }  # fmt: skip

    def meet(self, peer: str, variants: Sequence[Entrant]) -> dict[str, Any]:
        """What came of it: times, ratio (theirs / ours) and peak memory, or why there is none."""
        missing = self._cannot_enter(peer)
        if missing:
            return {"peer": peer, "error": missing, "tried": []}
        workers, tried = self._fastest(variants)
        if workers is None:
            return {"peer": peer, "error": tried[-1]["error"], "tried": tried}
        found = {
            "peer": peer,
            "variant": workers.entrant.variant,
            "own_weights": workers.entrant.own_weights,
            "tried": tried,
        }
        with closing(workers):
            try:
                return found | self._alternate(workers)
            except WorkersError as error:
                return {"peer": peer, "error": str(error), "tried": tried}

    def _cannot_enter(self, peer: str) -> str | None:
        if peer in PACKAGES and not _is_installed(PACKAGES[peer]):
            return "not installed"
        if peer in LLAMA_ONLY and self._setting.shape != "llama":
            return "has no such model"
        return None

    def _fastest(self, variants: Sequence[Entrant]) -> tuple[Workers | None, list[dict[str, Any]]]:
        """The workers that trained fastest for a moment, still alive, and what each of them did."""
        best, best_seconds, tried = None, math.inf, list[dict[str, Any]]()
        for entrant in variants:
            with ExitStack() as stack:
                try:
                    if best is not None:
                        best.rest()
                    workers = stack.enter_context(Workers(self._lab, entrant, self._setting, seconds=self._patience))
                    self._check(workers)
                    seconds = min(workers.steps(self._steps)[0] for _ in range(TRIED_ROUNDS))
                except WorkersError as error:
                    tried.append({"variant": entrant.variant, "error": str(error)})
                    self._say(f"{entrant.peer}, {entrant.variant}: {error}")
                    continue
                tried.append({"variant": entrant.variant, "seconds": seconds, "peak_bytes": workers.peak_bytes()})
                self._say(f"{entrant.peer}, {entrant.variant}: {seconds:.3f} s per step")
                if seconds < best_seconds:
                    if best is not None:
                        best.close()
                    best, best_seconds = workers, seconds
                    stack.pop_all()
        return best, tried

    def _check(self, workers: Workers) -> None:
        """It trains what we train: the same losses, or, with weights of its own, losses that fall."""
        theirs, ours = workers.losses, self._ours.losses if self._ours else workers.losses
        if not all(map(math.isfinite, theirs)):
            raise WorkersError(f"its losses are {theirs}")
        if workers.entrant.own_weights:
            if theirs[-1] and theirs[-1] >= theirs[0]:
                raise WorkersError(f"its losses do not fall: {theirs}")
        elif any(abs(a - b) > TOLERANCE[self._setting.dtype] * abs(b) for a, b in zip(theirs, ours, strict=True)):
            raise WorkersError(f"does not train alike: losses {theirs}, ours {ours}")

    def _alternate(self, workers: Workers) -> dict[str, Any]:
        assert self._ours is not None, "choose_ours comes first"
        seconds: dict[Workers, list[float]] = {self._ours: [], workers: []}
        worked: dict[Workers, list[float]] = {self._ours: [], workers: []}
        workers.steps(1)  # not measured: it may have rested
        for number in range(self._rounds):
            for one in (self._ours, workers) if number % 2 == 0 else (workers, self._ours):
                took, work = one.steps(self._steps)
                seconds[one].append(took)
                worked[one].append(work)
        self._our_seconds += seconds[self._ours]
        ratio = _ratio(seconds[workers], seconds[self._ours])
        self._say(f"{workers.entrant.peer}: {ratio['median']:.2f} of our time; ours is {verdict(ratio)}")
        return {
            "seconds": quartiles(seconds[workers]), "our_seconds": quartiles(seconds[self._ours]), "ratio": ratio,
            "processor_ratio": _ratio(worked[workers], worked[self._ours]), "losses": workers.losses,
            "peak_bytes": workers.peak_bytes(), "load": os.getloadavg()[0],
        }  # fmt: skip


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    return quartiles([a / b for a, b in zip(theirs, ours, strict=True)])


def _is_installed(package: str) -> bool:
    """Without importing it, which some of them make dear."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that holds it
        return False


def versions() -> dict[str, str]:
    """Of the peers that are installed here."""
    found: dict[str, str] = {}
    for name in ("accelerate", "deepspeed", "torchtitan", "megatron-core"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
