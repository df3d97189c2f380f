"""How fast the devices of this machine are: products of matrices, memory, the link to the host, and collectives between
local ranks, also beneath computation. Each measurement takes about a second at most and is kept at once, so that one
can be stopped and go on.

All ranks compute at the same time, as in training: cores, memory and links that they share are shared here too.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.comm.links import Group, Links
from phalanx.launch.context import RankContext, local_device
from phalanx.launch.worker_pool import WorkerPool
from phalanx.planning.rates import COLLECTIVES, SPEEDS, Rates
from phalanx.profile.beside import Together, beneath, product
from phalanx.profile.store import Row, Store, matching, rates_from

_SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
_MESSAGES = {"cpu": (2**14, 2**18, 2**22, 2**24), "cuda": (2**16, 2**20, 2**24, 2**28)}
_COPIED = {"cpu": 2**25, "cuda": 2**30}
_SECONDS, _ROUNDS, _MOST, _WARM_UP = 0.05, 5, 200, 3
_ANY = "any"  # of a precision that does not matter


@dataclass(frozen=True)
class Question:
    """What is measured: products of matrices with so many rows, something of so many bytes, or how fast things get on
    beside so many ranks, as a share of their speed alone."""

    kind: str
    size: int


def questions(device: str, ranks: int) -> list[Question]:
    """device: cpu or cuda."""
    found = [Question("product", side) for side in _SIDES[device]] + [Question("memory", _COPIED[device])]
    found += [Question("host", _COPIED[device] // 4)] if device == "cuda" else []
    if ranks > 1:
        found += [Question(kind, size) for kind in COLLECTIVES for size in _MESSAGES[device]]
        found += [Question("computing", busy) for busy in range(2, ranks + 1)]
        found += [Question(kind, ranks) for kind in ("computing beneath", "all_reduce beneath")]
    return found


def key_of(question: Question, device: str, dtype: str, ranks: int) -> dict[str, str | int]:
    """Whatever the result depends on."""
    own = dtype if question.kind == "product" else _ANY
    return {
        "size": question.size, "device": device, "dtype": own, "ranks": ranks, "torch": torch.__version__.split("+")[0],
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """What tells it from others: a GPU's name, or a CPU's with the cores that may be used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU {found[1].strip() if found else platform.machine()}, {cores} cores"


def measure(
    store: Store, device: str, dtype: str, ranks: int, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> Rates:
    """Measures what is not in the store yet. device: auto, cpu or cuda. on_progress: how many of how many are done."""
    here = torch.device(local_device(device, 0))
    name, asked = device_name(here), questions(here.type, ranks)
    keys = {question: key_of(question, name, dtype, ranks) for question in asked}
    missing = [question for question in asked if store.get(question.kind, keys[question]) is None]
    with ExitStack() as stack:
        pool = stack.enter_context(WorkerPool(ranks, device=here.type)) if ranks > 1 and missing else None
        for question in missing:
            on_progress(len(asked) - len(missing) + missing.index(question), len(asked))
            own = [question.kind, question.size, dtype]
            if pool is not None:
                found = pool.run(measure_on_rank, *own)
            else:
                found = [measure_on_rank(RankContext.alone(str(here)), *own)]
            store.put(question.kind, keys[question], _slowest(question.kind, found))
    on_progress(len(asked), len(asked))
    rates = rates_of(store.rows(), name, dtype, ranks)
    assert rates is not None
    return rates


def _slowest(kind: str, found: Sequence[float]) -> float:
    """Of all ranks: seconds of collectives, else rates."""
    return max(found) if kind in COLLECTIVES else min(found)


def rates_of(rows: list[Row], device: str, dtype: str, ranks: int) -> Rates | None:
    """The same as `rates_from`, of what this version of torch did."""
    version = torch.__version__.split("+")[0]
    return rates_from(list(matching(rows, torch=version)), device, dtype, ranks)


# On a rank.


def measure_on_rank(context: RankContext, kind: str, size: int, dtype: str) -> float:
    """FLOP/s, bytes/s, or the seconds of a collective; all ranks measure at the same time."""
    device = torch.device(context.device)
    with ExitStack() as stack:
        links = stack.enter_context(Links(context, name="profile")) if context.world > 1 else None
        group = links.group(tuple(range(context.world)), "profile") if links is not None else None
        if kind in SPEEDS:
            assert links is not None
            return _speed(kind, size, Together(links))
        if kind in COLLECTIVES:
            assert links is not None and group is not None
            return _seconds(_collective(kind, size, links, group, device), device, group)
        if kind == "product":
            a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
            out = torch.empty_like(a)
            return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), device, group)
        source = torch.ones(size, dtype=torch.uint8, device=device)
        if kind == "host":
            kept = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return size / _seconds(lambda: kept.copy_(source, non_blocking=True), device, group)
        target = torch.empty_like(source)
        return 2 * size / _seconds(lambda: target.copy_(source), device, group)


def _speed(kind: str, busy: int, ranks: Together) -> float:
    """Of computation beside so many ranks that compute, counting its own; of all ranks' computation with a sum beneath
    it, and of that sum."""
    device = ranks.device.type
    if kind == "computing":
        whole = product(ranks.device, _SIDES[device][-2])
        alone, beside = (ranks.seconds(whole, ranks.rank < number) for number in (1, busy))
        return min(1.0, alone / beside)
    found = beneath(ranks, product(ranks.device), _MESSAGES[device][-1], (busy,))
    return found.compute if kind == "computing beneath" else found.transfer[0]


def _collective(kind: str, size: int, links: Links, group: Group, device: torch.device) -> Callable[[], Any]:
    """size: bytes of the whole tensor that is summed, gathered or scattered; of a message to the next rank."""
    ranks, rank = len(group.ranks), group.index
    count = max(1, size // 4 // ranks) * ranks
    whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
    if kind == "all_reduce":
        return lambda: group.all_reduce(whole).wait("a sum")
    if kind == "all_gather":
        return lambda: group.all_gather(whole, part).wait("a gather")
    if kind == "reduce_scatter":
        return lambda: group.reduce_scatter(part, whole).wait("a scatter")
    peer = rank ^ 1
    if peer >= ranks:
        return lambda: None
    low, high = sorted((rank, peer))
    links.open_channels([(low, high, "f"), (high, low, "b")])
    there, back = ("f", "b") if rank == low else ("b", "f")
    other, out, into = torch.zeros_like(whole), links.channel(peer, there, "out"), links.channel(peer, back, "in")

    def exchange() -> None:
        sent = out.send(whole)
        into.recv(other).wait("a message")
        sent.wait("a message to leave")

    return exchange


def _seconds(work: Callable[[], Any], device: torch.device, group: Group | None) -> float:
    """Of one, in the quickest of a few rounds in which all ranks do equally many: what else the machine does only makes
    it slower."""

    def timed(times: int) -> float:
        if group is not None:
            group.barrier().wait("all ranks")
        begin = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / times

    timed(_WARM_UP)
    times = max(1, min(_MOST, int(_SECONDS / max(timed(1), 1e-7))))
    if group is not None:
        agreed = torch.tensor([float(times)], device=device)
        group.all_reduce(agreed, "max").wait("an agreement")
        times = int(agreed.item())
    return min(timed(times) for _ in range(_ROUNDS))
