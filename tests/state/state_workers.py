"""Random layouts, values to go with them, and what the processes of the state tests do."""

from __future__ import annotations

import itertools
import math
import os
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.launch.store import JobStore
from phalanx.state.background import AsyncSaver
from phalanx.state.layout import Box, Layout, StateShard, boxes_of_range
from phalanx.state.rendezvous import StoreRendezvous
from phalanx.state.reshard import reshard

DTYPES = ("float32", "bfloat16", "int64")
Kinds = dict[str, tuple[tuple[int, ...], str]]


def random_kinds(rng: random.Random) -> Kinds:
    """Names with a shape and a dtype: scalars and empty tensors too."""
    return {
        f"t{i}": (tuple(rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randrange(4))), rng.choice(DTYPES))
        for i in range(rng.randrange(1, 5))
    }


def random_layout(rng: random.Random, kinds: Kinds, world: int) -> dict[int, list[StateShard]]:
    """Each tensor cut into flat ranges or grid cells that random ranks own; others may hold replicas."""
    layout: dict[int, list[StateShard]] = {rank: [] for rank in range(world)}
    for name, (shape, dtype) in kinds.items():
        owners: dict[int, list[Box]] = {rng.randrange(world): []}
        for cell in random_cells(rng, shape):
            owners.setdefault(rng.randrange(world), []).extend(cell)
        for rank in range(world):
            if rank in owners:
                layout[rank].append(StateShard(name, shape, dtype, tuple(owners[rank])))
            elif rng.random() < 0.5:
                copied = [box for boxes in owners.values() for box in boxes if rng.random() < 0.7]
                layout[rank].append(StateShard(name, shape, dtype, tuple(copied), owned=False))
    for shards in layout.values():
        rng.shuffle(shards)
    return layout


def random_cells(rng: random.Random, shape: tuple[int, ...]) -> list[list[Box]]:
    if not shape or rng.random() < 0.5:
        size = math.prod(shape)
        cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.randrange(4)))})
        cells = [list(boxes_of_range(shape, a, b)) for a, b in itertools.pairwise(cuts)]
    else:
        dim = rng.randrange(len(shape))
        cut = rng.randrange(shape[dim] + 1)
        cells = []
        for start, size in ((0, cut), (cut, shape[dim] - cut)):
            box = Box(
                tuple(start if d == dim else 0 for d in range(len(shape))),
                tuple(size if d == dim else s for d, s in enumerate(shape)),
            )
            cells.append([box])
    rng.shuffle(cells)
    return cells


def values_of(kinds: Kinds) -> dict[str, Tensor]:
    """Every bit pattern may occur, so that only bit for bit is equal."""
    generator = torch.Generator().manual_seed(7)
    values = {}
    for name, (shape, dtype) in kinds.items():
        kind = getattr(torch, dtype)
        num_bytes = math.prod(shape) * kind.itemsize
        raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        values[name] = raw.view(kind).view(shape)
    return values


def data_of(shards: list[StateShard], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        shard.name: torch.cat(
            [values[shard.name].new_empty(0), *(values[shard.name][b.slices()].reshape(-1) for b in shard.boxes)]
        )
        for shard in shards
    }


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


class Mail:
    """A transport between threads of one process; counts messages and bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, int], queue.Queue[Tensor]] = {}
        self.sent: list[tuple[int, int, torch.dtype, int]] = []

    def seat(self, rank: int) -> _Seat:
        return _Seat(self, rank)

    def box(self, source: int, destination: int) -> queue.Queue[Tensor]:
        with self._lock:
            return self._boxes.setdefault((source, destination), queue.Queue())


class _Seat:
    def __init__(self, mail: Mail, rank: int) -> None:
        self._mail, self._rank = mail, rank

    def send(self, peer: int, tensor: Tensor) -> _Done:
        self._mail.sent.append((self._rank, peer, tensor.dtype, tensor.numel()))
        self._mail.box(self._rank, peer).put(tensor.clone())
        return _Done(lambda: None)

    def recv(self, peer: int, tensor: Tensor) -> _Done:
        return _Done(lambda: tensor.copy_(self._mail.box(peer, self._rank).get(timeout=10)))


class _Done:
    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def wait(self) -> None:
        self._action()


def on_threads(world: int, body: Callable[[int], Any]) -> list[Any]:
    """Runs `body(rank)` for each rank at once; raises the first error."""
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Gloo:
    """A transport over the default process group."""

    def send(self, peer: int, tensor: Tensor) -> Any:
        return dist.isend(tensor, peer)

    def recv(self, peer: int, tensor: Tensor) -> Any:
        return dist.irecv(tensor, peer)


def reshard_in_a_process(rank: int, world: int, store_file: str, num_seeds: int) -> None:
    """Moves random states between three processes and checks what has come."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for seed in range(num_seeds):
        old, new, values = random_case(random.Random(seed), world)
        local = data_of(old[rank], values)
        found = reshard(old, new, local, rank=rank, transport=Gloo())
        assert same_bits(found, data_of(new[rank], values)), f"seed {seed}, rank {rank}"
    dist.barrier()
    dist.destroy_process_group()


def random_case(
    rng: random.Random, world: int
) -> tuple[dict[int, list[StateShard]], dict[int, list[StateShard]], dict[str, Tensor]]:
    kinds = random_kinds(rng)
    return random_layout(rng, kinds, world), random_layout(rng, kinds, world), values_of(kinds)


SHAPE = (9, 4)


def state_of(step: int) -> Tensor:
    return torch.arange(math.prod(SHAPE), dtype=torch.float32).view(SHAPE) + 100 * step


def layout_of_thirds(world: int) -> Layout:
    size = math.prod(SHAPE)
    cuts = [size * rank // world for rank in range(world + 1)]
    return {
        rank: [
            StateShard(name, SHAPE, "float32", boxes_of_range(SHAPE, cuts[rank], cuts[rank + 1]))
            for name in ("model/a", "model/b")
        ]
        for rank in range(world)
    }


def pieces_of(rank: int, world: int, step: int) -> Iterator[tuple[StateShard, Tensor]]:
    for shard in layout_of_thirds(world)[rank]:
        yield shard, data_of([shard], {shard.name: state_of(step)})[shard.name]


def save_in_a_process(rank: int, world: int, port: int, folder: Path, victim: int, moment: str, report: Path) -> None:
    """Saves step 1, then step 2 in whose middle the victim kills itself; the others write down what they were told."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))

    def saver(job: str, timeout: float) -> AsyncSaver:
        meeting_place = StoreRendezvous(JobStore(store, b"a secret", job), rank)
        return AsyncSaver(folder, 2, rank=rank, world=world, rendezvous=meeting_place, timeout=timeout)

    first, second = saver("first", 30), saver("second", 2)
    first.save(1, pieces_of(rank, world, 1), {"step": 1})
    first.wait()
    if rank == victim:
        _die_at(moment)
    try:
        second.save(2, pieces_of(rank, world, 2), {"step": 2})
        second.wait()
        report.write_text("saved")
    except Exception as error:
        report.write_text(f"{type(error).__name__}: {error}")


def _die_at(moment: str) -> None:
    """Makes this process die by SIGKILL when it comes to a function of the saving modules."""
    from phalanx.state import folders, saving

    owner, name = {"write": (saving, "_write_shard"), "index": (folders, "write_json"), "rename": (os, "rename")}[
        moment
    ]
    setattr(owner, name, lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL))
