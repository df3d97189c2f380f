"""How many collectives a layer takes, and of which size, in every mode: counted on the links of two real ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.launch.worker_pool import WorkerPool
from tests import captured
from tests.engine import redistribution_jobs
from tests.engine.redistribution_jobs import Sent

SAMPLES, TOKENS, WIDTH, BYTES = 4, 8, 64, 8
WHOLE = SAMPLES * TOKENS * WIDTH * BYTES  # of what lies between attention and feed-forward
HALF = WHOLE // 2
LAYERS = range(1, 5)  # block 0 is the embedding, block 5 the head

Counts = dict[str, int]


def reduces(count: int) -> Counts:
    return {"all_reduce": count}


def both(gathers: int, scatters: int) -> Counts:
    return {"all_gather": gathers, "reduce_scatter": scatters}


# plan → collectives in the forward, in the backward (those done again included), and the size of each
EXPECTED: dict[str, tuple[Counts, Counts, int]] = {
    "tp=2": (reduces(2), reduces(2), WHOLE),
    "tp=2,overlap=default_checkpoint": (reduces(2), reduces(4), WHOLE),
    "tp=2,overlap=optim_comm_checkpoint": (reduces(2), reduces(2), WHOLE),
    "tp=2,overlap=overlap_checkpoint": (reduces(4), reduces(8), HALF),
    "tp=2,overlap=oases": (reduces(4), reduces(4), HALF),
    "tp=2,overlap=halves": (reduces(4), reduces(4), HALF),
    "tp=2,sequence=yes": (both(2, 2), both(2, 2), WHOLE),
    "tp=2,sequence=yes,save=input": (both(2, 2), both(4, 2), WHOLE),
    "tp=2,sequence=yes,overlap=default_checkpoint": (both(2, 2), both(4, 4), WHOLE),
    "tp=2,sequence=yes,overlap=optim_comm_checkpoint": (both(2, 2), both(2, 2), WHOLE),
    "tp=2,sequence=yes,save=input,overlap=optim_comm_checkpoint": (both(2, 2), both(4, 2), WHOLE),
    "tp=2,sequence=yes,overlap=overlap_checkpoint": (both(4, 4), both(8, 8), HALF),
    "tp=2,sequence=yes,overlap=oases": (both(4, 4), both(4, 4), HALF),
    "tp=2,sequence=yes,save=input,overlap=oases": (both(4, 4), both(8, 4), HALF),
}


def counted(sent: list[Sent], ops: tuple[str, ...]) -> Counts:
    return dict(Counter(each.kind for each in sent if each.op in ops))


# Those in which a mode, a split of tokens and what is kept meet for the first time.
QUICK = (
    "tp=2,overlap=default_checkpoint", "tp=2,overlap=optim_comm_checkpoint", "tp=2,overlap=oases",
    "tp=2,sequence=yes", "tp=2,sequence=yes,overlap=overlap_checkpoint", "tp=2,sequence=yes,save=input,overlap=oases",
)  # fmt: skip


@pytest.mark.parametrize("plan", [pytest.param(p, marks=() if p in QUICK else (pytest.mark.long,)) for p in EXPECTED])
@pytest.mark.parametrize("name", [pytest.param(captured.GPT2, marks=pytest.mark.long), captured.LLAMA])
def test_every_layer_takes_the_published_number_of_collectives(name: str, plan: str, pool: WorkerPool) -> None:
    case = captured.named(name, samples=SAMPLES, tokens=TOKENS)
    forward, backward, size = EXPECTED[plan]
    for sent in pool.run(redistribution_jobs.count, case, plan, world=2):
        for block in LAYERS:
            own = [each for each in sent if each.block == block]
            assert counted(own, ("CF",)) == forward
            assert counted(own, ("CA", "CB")) == backward
            assert {each.bytes for each in own} == {size}


def test_tokens_that_ranks_do_not_divide_are_padded(pool: WorkerPool) -> None:
    case = captured.named(captured.LLAMA, samples=SAMPLES, tokens=TOKENS - 1)
    for sent in pool.run(redistribution_jobs.count, case, "tp=2,sequence=yes", world=2):
        assert {each.bytes for each in sent if each.block in LAYERS} == {WHOLE}


def test_a_unit_of_degree_one_reduces_nothing_and_takes_its_samples_from_its_neighbours(pool: WorkerPool) -> None:
    """Attention of degree 2 and a feed-forward of degree 1: its sum and its samples' way there and back."""
    case = captured.named(captured.LLAMA, samples=SAMPLES, tokens=TOKENS)
    for sent in pool.run(redistribution_jobs.count, case, "tp=2,degrees=2:1", world=2):
        own = [each for each in sent if each.block == 2]
        assert counted(own, ("CF",)) == {"all_reduce": 1, "all_gather": 1}
        assert counted(own, ("CB",)) == {"all_reduce": 1, "all_gather": 1}
