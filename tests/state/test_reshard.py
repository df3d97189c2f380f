from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.state import checkpoint
from phalanx.state.layout import Box, StateShard, boxes_of_range, check_disjoint
from phalanx.state.moves import plan_moves
from phalanx.state.reshard import gather_tensors, load, reshard
from tests.state import state_workers
from tests.state.layouts import check_layout
from tests.state.state_workers import Mail, data_of, on_threads, random_case, same_bits

seeds = st.randoms(use_true_random=False)


@given(seeds, st.integers(1, 4))
def test_every_element_of_the_new_layout_moves_exactly_once(rng: random.Random, world: int) -> None:
    old, new, _ = random_case(rng, world)
    check_layout(old)
    check_layout(new)
    moves = plan_moves(old, new)
    for rank, shards in new.items():
        for shard in shards:
            arriving = [move for move in moves if (move.destination, move.name) == (rank, shard.name)]
            assert sum(move.box.numel for move in arriving) == shard.numel
            check_disjoint(shard.name, [move.box for move in arriving])
            assert all(move.put_to.held.contains(move.box) for move in arriving)
    assert all(move.taken_from.held.contains(move.box) for move in moves)


@given(seeds, st.integers(2, 4))
def test_what_a_rank_has_already_is_not_sent_to_it(rng: random.Random, world: int) -> None:
    old, new, _ = random_case(rng, world)
    for move in plan_moves(old, new):
        if move.source != move.destination:
            own = [h for h in old[move.destination] if h.name == move.name]
            assert not any(box.intersect(move.box) for shard in own for box in shard.boxes)


@given(seeds, st.integers(1, 4))
def test_any_layout_becomes_any_other_bit_for_bit(rng: random.Random, world: int) -> None:
    old, new, values = random_case(rng, world)
    mail = Mail()

    def body(rank: int) -> dict[str, Tensor]:
        return reshard(old, new, data_of(old[rank], values), rank=rank, transport=mail.seat(rank))

    for rank, found in enumerate(on_threads(world, body)):
        assert same_bits(found, data_of(new[rank], values))
    remote = sum(move.box.numel for move in plan_moves(old, new) if move.source != move.destination)
    assert sum(numel for *_, numel in mail.sent) == remote, "nothing but the moves travels"
    messages = Counter(message[:3] for message in mail.sent)
    assert all(count == 1 for count in messages.values()), "one message per pair of ranks and dtype"


@given(seeds)
def test_the_plan_of_moves_does_not_depend_on_the_order_of_ranks(rng: random.Random) -> None:
    old, new, _ = random_case(rng, 3)
    turned = {rank: old[rank] for rank in reversed(old)}, {rank: new[rank] for rank in reversed(new)}
    assert plan_moves(old, new) == plan_moves(*turned)


def test_replicas_share_the_sending() -> None:
    def held(i: int, owned: bool) -> StateShard:
        return StateShard(f"t{i}", (10,), "float32", (Box.whole((10,)),), owned)

    old = {rank: [held(i, rank == 0) for i in range(8)] for rank in range(4)}
    new = {rank: [held(i, rank == 4) for i in range(8)] for rank in (4, 5)}
    sent = Counter[int]()
    for move in plan_moves(old, new):
        sent[move.source] += move.box.numel
    assert sent == {0: 40, 1: 40, 2: 40, 3: 40}
    assert plan_moves(old, new)[0].source == 0, "an owner comes first"


def test_where_boxes_of_ranks_overlap_each_element_still_comes_once_and_a_ranks_own_first() -> None:
    def held(start: int, stop: int) -> list[StateShard]:
        return [StateShard("w", (10,), "float32", (Box((start,), (stop - start,)),))]

    moves = plan_moves({0: held(0, 6), 1: held(4, 10)}, {1: held(0, 10), 2: held(0, 10)})
    spans = [(move.source, move.destination, move.box.offset[0], move.box.end[0]) for move in moves]
    assert spans == [(1, 1, 4, 10), (0, 1, 0, 4), (1, 2, 4, 10), (0, 2, 0, 4)]


def test_a_tensor_that_changes_its_kind_is_named() -> None:
    old, new = (StateShard("w", (4,), dtype, (Box.whole((4,)),)) for dtype in ("float32", "bfloat16"))
    with pytest.raises(AssertionError, match="w changes its kind"):
        plan_moves({0: [old]}, {1: [new]})


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    wanted = StateShard("w", (4,), "float32", (Box.whole((4,)),))
    half = StateShard("w", (4,), "float32", (Box((0,), (2,)),))
    with pytest.raises(AssertionError, match=r"no rank holds .* of w, which rank 1 needs"):
        plan_moves({0: [half]}, {1: [wanted]})


def test_a_state_moves_between_processes_bit_for_bit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    world, store = 3, str(tmp_path / "store")
    processes = [
        context.Process(target=state_workers.reshard_in_a_process, args=(rank, world, store, 25))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * world


def test_a_checkpoint_is_read_into_any_layout(tmp_path: Path) -> None:
    for seed in range(20):
        _, new, values = random_case(random.Random(seed), 3)
        opened = checkpoint.open(checkpoint.save(tmp_path, seed, values.items(), {}, keep=1))
        for shards in new.values():
            assert same_bits(load(opened, shards), data_of(shards, values))


@pytest.mark.parametrize("root", [0, 2])
def test_the_root_gets_whole_tensors_one_at_a_time(root: int) -> None:
    world = 3
    values = {name: torch.randn(5, 3) for name in ("a", "b", "c")}
    cuts = [0, 4, 4, 15]
    layout = {
        rank: [
            StateShard(name, (5, 3), "float32", boxes_of_range((5, 3), cuts[rank], cuts[rank + 1]))
            for name in values
            if name != "c" or rank == 0
        ]
        for rank in range(world)
    }
    layout[0][-1] = StateShard("c", (5, 3), "float32", (Box.whole((5, 3)),))
    mail = Mail()

    def body(rank: int) -> list[tuple[str, Tensor]]:
        options = {"rank": rank, "transport": mail.seat(rank), "root": root}
        local = data_of(layout[rank], values)
        return list(gather_tensors(layout, local, **options))

    of_all = on_threads(world, body)
    assert not any(of_all[rank] for rank in range(world) if rank != root)
    found = of_all[root]
    assert [name for name, _ in found] == ["a", "b", "c"]
    assert same_bits(dict(found), values)
    assert max(numel for *_, numel in mail.sent) <= 15, "no message is larger than one tensor"
