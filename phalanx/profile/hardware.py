"""How fast the devices that are here are: products of matrices, memory, the link to the host, and collectives among
the ranks of a node and among those of several nodes, also beneath computation. Each measurement takes about a second at
most and is kept at once, so that one can be stopped and go on.

All ranks compute at the same time, as in training: cores, memory and links that they share are shared here too. They
are started for it, or those of a job that a launcher started; a run that has to choose its plan measures briefly. What
a rank does is in `on_rank.py`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx.comm.links import Links
from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext, local_device
from phalanx.launch.worker_pool import WorkerPool
from phalanx.planning.cluster import NETWORK_VARIABLE
from phalanx.planning.rates import COLLECTIVES, Rates, Spread
from phalanx.profile.beside import Together
from phalanx.profile.on_rank import Care, Question, Team, answer
from phalanx.profile.store import (
    Row,
    Store,
    Subject,
    careful_first,
    far_from,
    matching,
    rates_from,
    subject,
    subjects,
    torch_version,
)

_ANY = "any"  # of a precision that does not matter
_PLACE, _ASKED = "measured rank", "measured"
Keep = Callable[[Question, float], None]
Progress = Callable[[int, int], None]


class Effort(NamedTuple):
    """Of whom: `phalanx profile`, or a run. sides: of square matrices; messages, copied: bytes. longest: seconds that
    one product or collective may take for a larger one to be asked. limit: seconds after which nothing more is begun.
    """

    by: str
    sides: dict[str, tuple[int, ...]]
    messages: dict[str, tuple[int, ...]]
    copied: dict[str, int]
    care: Care
    beneath: bool
    longest: float
    limit: float = float("inf")


CAREFUL = Effort(
    "profile", {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)},
    {"cpu": (2**14, 2**18, 2**22, 2**24), "cuda": (2**16, 2**20, 2**24, 2**28)}, {"cpu": 2**25, "cuda": 2**30},
    Care(0.05, 5, 3), True, longest=0.5,
)  # fmt: skip
BRIEF = Effort(
    "run", {"cpu": (128, 256, 512), "cuda": (1024, 4096, 8192)},
    {"cpu": (2**14, 2**18, 2**21), "cuda": (2**16, 2**22, 2**26)}, {"cpu": 2**24, "cuda": 2**28},
    Care(0.005, 3, 1), False, longest=0.03, limit=10.0,
)  # fmt: skip


def questions(device: str, spread: Spread, effort: Effort = CAREFUL, one_machine: bool = False) -> list[Question]:
    """What planning needs most comes first. device: cpu or cuda. one_machine: whether nodes share what computes."""
    found = [Question("product", side) for side in effort.sides[device]] + [Question("memory", effort.copied[device])]
    found += [Question("host", effort.copied[device] // 4)] if device == "cuda" else []
    ranks, sizes = spread.ranks, effort.messages[device]
    for is_far in (False, True):
        if (spread.nodes if is_far else ranks) > 1:
            found += [Question(kind, size, is_far) for kind in COLLECTIVES for size in sizes]
    if ranks > 1 and (effort.beneath or device == "cpu" or spread.devices < ranks):
        found += [Question("computing", busy) for busy in range(2 if effort.beneath else ranks, ranks + 1)]
    if ranks > 1 and device == "cuda":  # a CPU rank sleeps while it waits
        found += [Question("listening", 1)]
    if spread.nodes > 1 and one_machine:
        found += [Question("computing", spread.world, is_far=True)]
    if effort.beneath:
        for is_far, number in ((False, ranks), (True, spread.world)):
            if (spread.nodes if is_far else ranks) > 1:
                found += [Question(kind, number, is_far) for kind in ("computing beneath", "all_reduce beneath")]
    return found


def key_of(
    question: Question, device: str, dtype: str, spread: Spread, effort: Effort = CAREFUL
) -> dict[str, str | int]:
    """Whatever the result depends on: of what is measured among several nodes also what is said of their network."""
    among = spread if question.is_far else spread.near
    return {
        "size": question.size, "device": device, "dtype": dtype if question.kind == "product" else _ANY,
        "torch": torch_version(), "by": effort.by, "network": _network() if question.is_far else "", **asdict(among),
    }  # fmt: skip


def _network() -> str:
    return os.environ.get(NETWORK_VARIABLE, "")


def device_name(device: torch.device) -> str:
    """What tells it from others: a GPU's name, or a CPU's with the cores that may be used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU {found[1].strip() if found else platform.machine()}, {cores} cores"


def rates_of(rows: list[Row], device: str, dtype: str, spread: Spread) -> Rates | None:
    """What this version of torch did, among several nodes in this network: as `phalanx profile` measured it, else as a
    run did."""
    own = careful_first(list(matching(rows, torch=torch_version())), CAREFUL.by)
    return rates_from(own, device, dtype, spread, far_from(own, device, spread, _network()))


class Seen:
    """What was answered, and what need not be asked because of it."""

    def __init__(self, effort: Effort) -> None:
        self._longest, self._last = effort.longest, dict[tuple[str, bool], tuple[int, float]]()

    def add(self, question: Question, value: float) -> None:
        self._last[question.kind, question.is_far] = question.size, value

    def allows(self, question: Question) -> bool:
        if question.kind not in ("product", *COLLECTIVES) or (question.kind, question.is_far) not in self._last:
            return True
        size, value = self._last[question.kind, question.is_far]
        return (2 * size**3 / value if question.kind == "product" else value) <= self._longest


class Kept:
    """Where measurements of devices of one kind are kept, in one precision."""

    def __init__(
        self, store: Store, device: torch.device, dtype: str, spread: Spread, effort: Effort, one_machine: bool = False
    ) -> None:
        self.store, self.dtype, self.spread, self.effort = store, dtype, spread, effort
        self.name, self.asked = device_name(device), questions(device.type, spread, effort, one_machine)

    def key(self, question: Question) -> dict[str, str | int]:
        return key_of(question, self.name, self.dtype, self.spread, self.effort)

    def forget(self) -> None:
        for question in self.asked:
            self.store.forget(question.kind, self.key(question))

    def missing(self) -> list[Question]:
        """A run asks nothing that was measured carefully, at whatever size, nor what would take long."""
        rows = self.store.rows()
        known = {(row.kind, frozenset(row.key.items())): row.value for row in rows}
        careful = subjects(matching(rows, by=CAREFUL.by)) if self.effort is BRIEF else set[Subject]()
        found, seen = list[Question](), Seen(self.effort)
        for own in self.asked:
            key = self.key(own)
            value = known.get((own.kind, frozenset(key.items())))
            if value is not None:
                seen.add(own, value)
            elif subject(own.kind, key) not in careful and seen.allows(own):
                found.append(own)
        return found

    def keeper(self, missing: Sequence[Question], on_progress: Progress) -> Keep:
        """Keeps what is found of these, one after the other."""
        known = len(self.asked) - len(missing)
        on_progress(known, len(self.asked))
        done = iter(range(known + 1, len(self.asked) + 1))

        def keep(question: Question, value: float) -> None:
            self.store.put(question.kind, self.key(question), value)
            on_progress(next(done), len(self.asked))

        return keep

    def rates(self) -> Rates | None:
        return rates_of(self.store.rows(), self.name, self.dtype, self.spread)


def _no_progress(done: int, of: int) -> None:
    """Where nobody looks."""


def spread_here(device: torch.device, ranks: int) -> Spread:
    """Of so many ranks that are started on this machine."""
    return Spread(ranks, ranks if device.type == "cpu" else min(ranks, torch.cuda.device_count()))


def measure(
    store: Store, device: str, dtype: str, ranks: int, on_progress: Progress = _no_progress, fresh: bool = False
) -> Rates:
    """With ranks that are started for it, what is not in the store yet. device: auto, cpu or cuda. on_progress: how
    many of how many are done. fresh: also what is."""
    here = torch.device(local_device(device, 0))
    kept = Kept(store, here, dtype, spread_here(here, ranks), CAREFUL)
    if fresh:
        kept.forget()
    missing = kept.missing()
    keep = kept.keeper(missing, on_progress)
    if missing and ranks > 1:
        with WorkerPool(ranks, device=here.type) as pool:
            pool.run(answer_and_tell, missing, dtype, on_event=lambda name, found: keep(*found))
    elif missing:
        answer_all(Team.of(RankContext.alone(str(here))), missing, dtype, CAREFUL, keep)
    rates = kept.rates()
    assert rates is not None
    return rates


# On every rank of a job.


def measure_joined(
    context: RankContext, store: Store | None, dtype: str, effort: Effort = CAREFUL,
    on_progress: Progress = _no_progress, fresh: bool = False,
) -> Rates | None:  # fmt: skip
    """With the ranks of this job, which all come here, what rank 0 has not in its store yet. None on others. Raises a
    ConfigError, on all of them, where they are not all alike. store: of rank 0; where it has none, nothing is asked."""
    team, kept = team_of(context), None
    missing, keep = list[Question](), _ignore
    if context.rank == 0 and store is not None:
        kept = Kept(store, torch.device(context.device), dtype, team.spread, effort, team.one_machine)
        if fresh:
            kept.forget()
        missing = kept.missing()
        keep = kept.keeper(missing, on_progress)
    answer_all(team, _agreed(context, missing), dtype, effort, keep)
    return kept and kept.rates()


def _ignore(question: Question, value: float) -> None:
    """Rank 0 keeps what is found."""


def team_of(context: RankContext) -> Team:
    """What ranks say of their places; those of all nodes must be alike."""
    device = torch.device(context.device)
    where = f"{context.node}/{context.device if device.type == 'cuda' else context.rank}"
    own = {"node": context.node, "where": where, "name": device_name(device), "machine": _machine(context)}
    if context.world == 1:
        return Team.of(context)
    context.store.set(f"{_PLACE} {context.rank}", json.dumps(own))
    every = [json.loads(context.store.get(f"{_PLACE} {rank}")) for rank in range(context.world)]
    names = sorted({place["name"] for place in every})
    if len(names) > 1:
        message = f"the ranks of this job have several kinds of devices ({', '.join(names)})"
        raise ConfigError(message, "measure each kind by itself: a job with nodes of one kind only")
    nodes: dict[int, list[int]] = {}
    for rank, place in enumerate(every):
        nodes.setdefault(place["node"], []).append(rank)
    devices = {node: len({every[rank]["where"] for rank in ranks}) for node, ranks in nodes.items()}
    if len({(len(ranks), devices[node]) for node, ranks in nodes.items()}) > 1:
        counts = ", ".join(f"{len(ranks)} on node {node}" for node, ranks in sorted(nodes.items()))
        raise ConfigError(f"the nodes of this job have different numbers of ranks ({counts})", "start as many on each")
    spread = Spread(len(nodes[context.node]), devices[context.node], len(nodes))
    one_machine = len({place["machine"] for place in every}) == 1
    return Team(context, spread, tuple(tuple(nodes[node]) for node in sorted(nodes)), one_machine)


def _machine(context: RankContext) -> str:
    """One that other nodes are on too is told by when it was started; where it does not say, each node is one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else f"node {context.node}"


def _agreed(context: RankContext, missing: list[Question]) -> list[Question]:
    """What rank 0 asks."""
    if context.world == 1:
        return missing
    if context.rank == 0:
        context.store.set(_ASKED, json.dumps([astuple(question) for question in missing]))
        return missing
    return [Question(kind, size, is_far) for kind, size, is_far in json.loads(context.store.get(_ASKED))]


def answer_and_tell(context: RankContext, asked: Sequence[Question], dtype: str) -> None:
    """As a job of ranks that were started for it."""
    answer_all(team_of(context), asked, dtype, CAREFUL, lambda *found: context.emit("measured", found))


def answer_all(team: Team, asked: Sequence[Question], dtype: str, effort: Effort, keep: Keep) -> None:
    """keep: called on rank 0 with each answer: of rates the slowest rank's, of seconds the longest. Random numbers that
    follow are what they would have been."""
    began, context = time.monotonic(), team.context
    cuda = [torch.device(context.device)] if context.device != "cpu" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(cuda))
        links = stack.enter_context(Links(context, name="profile")) if context.world > 1 and asked else None
        ranks, seen = None if links is None else Together(links), Seen(effort)
        for question in filter(seen.allows, asked):
            value = answer(team, links, question, dtype, effort.care)
            passed = time.monotonic() - began
            if ranks is not None:
                value = ranks.most(value) if question.kind in COLLECTIVES else -ranks.most(-value)
                passed = ranks.most(passed)
            seen.add(question, value)
            if context.rank == 0:
                keep(question, value)
            if passed > effort.limit:
                break
    if cuda:
        torch.cuda.empty_cache()
