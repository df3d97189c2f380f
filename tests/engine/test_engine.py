"""The engine runs programs exactly, stops where nothing is trained, and lets go of what it no longer needs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from phalanx.engine.rank import Rank
from phalanx.engine.reductions import StepRun, total_items
from phalanx.model import reference
from phalanx.program.instructions import COMPUTE, Instruction, Op, from_text
from phalanx.program.lower import lower_forward
from phalanx.program.passes.blocks import add_inputs, to_blocks
from tests import captured

SPLITS = [(3,), (1, 2), (1, 1, 1)]
T5 = pytest.param(captured.T5, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def rank() -> Rank:
    """One rank of GPT-2 for many tests: what it traced is used again, as in training."""
    return captured.named(captured.GPT2).rank()


@pytest.fixture(scope="module")
def two_stages() -> Rank:
    """The same with two stages on the one rank, which hand over by reference."""
    return captured.named(captured.GPT2).rank("schedule=zb-v")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_schedule_and_split_equals_autograd_with_dropout_on(
    schedule: str, sizes: tuple[int, ...], rank: Rank
) -> None:
    case = captured.named(captured.GPT2)
    captured.require_equal(case.step(rank, sizes, schedule), case.plain())


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_stages_on_one_rank_hand_over_exactly(sizes: tuple[int, ...], two_stages: Rank) -> None:
    case = captured.named(captured.GPT2)
    assert two_stages.plan.num_stages == 2
    captured.require_equal(case.step(two_stages, sizes, "zb-v"), case.plain())


@pytest.mark.parametrize("name", [captured.WHISPER, captured.MIXTRAL, T5])
def test_several_activations_and_experts_get_their_gradients(name: str) -> None:
    case = captured.named(name)
    captured.require_equal(case.step(case.rank(), (1, 2), "zb-h1"), case.plain())


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_recomputation_changes_nothing_not_even_dropout(schedule: str) -> None:
    case = captured.named(captured.GPT2)
    rank = case.rank("recompute=yes")
    captured.require_equal(case.step(rank, (2, 1), schedule), case.plain())
    (table,) = (linked.table for linked in rank.step.engine._linked.values())
    assert table.keeps_only_inputs


def test_compiled_segments_give_the_same() -> None:
    case = captured.named(captured.GPT2)
    captured.require_equal(case.step(case.rank(compile="aot_eager"), (3,)), case.plain())


def test_another_seed_drops_other_elements(rank: Rank) -> None:
    case = captured.named(captured.GPT2)
    losses = [case.step(rank, (3,), seed=seed)[0] for seed in (0, 1)]
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[1], case.plain(seed=1)[0], rtol=1e-11, atol=0)


def test_one_capture_serves_other_batch_sizes_and_lengths() -> None:
    case = captured.named(captured.LLAMA)
    shorter = {name: tensor[:2, :5] for name, tensor in case.batch.items()}
    other = captured.Case(case.captured, case.model, shorter, {name: shorter[name] for name in case.raw})
    rank = case.rank()
    for one, sizes in ((case, (3,)), (other, (1, 1)), (case, (1, 2))):
        captured.require_equal(one.step(rank, sizes), one.plain())


def test_blocks_that_share_a_template_share_their_functions() -> None:
    case = captured.named(captured.GPT2)
    rank = case.rank()
    case.step(rank, (3,))
    assert rank.step.engine.compute.num_segments == len(case.blocks.templates) == 3


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_frozen_beginning_stops_the_backward_early_and_the_rest_is_exact(schedule: str) -> None:
    case = captured.named(captured.LLAMA, tie_word_embeddings=False)
    frozen = [n for n in case.parameters if n.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))]
    rank = case.rank(frozen=frozen)
    got = case.step(rank, (2, 1), schedule)
    loss, gradients = case.plain()
    assert set(got[1]) == set(case.parameters) - set(frozen)
    captured.require_equal(got, (loss, {name: gradients[name] for name in got[1]}))
    (table,) = (linked.table for linked in rank.step.engine._linked.values())
    saving = {table.values[i].what for row in table.rows for i in row.writes if table.values[i].kind == "saved_bw"}
    names = [block.name for block in case.blocks.blocks]
    assert {names[int(what.partition(":")[0])] for what in saving}.isdisjoint(
        {"embedding", "model.layers.0", "model.layers.1"}
    )


def test_a_frozen_tied_embedding_trains_the_layers_between() -> None:
    case = captured.named(captured.GPT2)
    frozen = ["transformer.wte.weight", "transformer.wpe.weight"]
    got = case.step(case.rank(frozen=frozen), (3,))
    loss, gradients = case.plain()
    assert set(got[1]) == set(case.parameters) - set(frozen)
    captured.require_equal(got, (loss, {name: gradients[name] for name in got[1]}))


def test_with_everything_frozen_there_is_a_loss_and_no_gradient() -> None:
    case = captured.named(captured.GPT2)
    rank = case.rank(frozen=list(case.parameters))
    loss, gradients = captured.run(rank, rank.step.program, case.micro_batches(rank, (3,)))
    assert gradients == {}
    torch.testing.assert_close(loss, case.plain()[0], rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", [captured.GPT2, captured.WHISPER, T5])
def test_without_totals_it_equals_the_model_in_eval_mode_and_keeps_nothing(name: str) -> None:
    case = captured.named(name)
    rank = case.rank()
    engine, parts = rank.engines[1], case.micro_batches(rank, (1, 2), training=False)
    program = lower_forward(rank.plan, rank.formation.shape, 2)[0]
    items = total_items(parts)
    step = StepRun({(number, 0): part for number, part in enumerate(parts)}, lr=0.0)
    engine.run(program, step)
    pairs = zip(step.linked.table.values, step.values, strict=False)
    losses = [there for value, there in pairs if value.kind == "loss"]
    total = sum(losses) / items
    case.model.eval()
    with torch.no_grad(), reference.Widen():
        expected = reference.loss(case.model, case.raw)
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=0)
    left = [str(v) for v, there in zip(step.linked.table.values, step.values, strict=False) if there is not None]
    assert len(left) == len(losses) == 2


def test_the_engine_counts_what_it_executed(rank: Rank) -> None:
    case = captured.named(captured.GPT2)
    engine, blocks = rank.step.engine, len(case.blocks.blocks)
    engine.executed.clear()
    case.step(rank, (1, 2), "zb-h1")
    assert engine.executed == {"COUNT": 1, "I": 2, "F": 2 * blocks, "B": 2 * blocks, "W": 2 * blocks, "NORM": 1}


def test_watches_are_told_of_every_instruction_and_when_a_computation_has_what_it_needs(rank: Rank) -> None:
    seen: list[tuple[str, Instruction]] = []

    class Watch:
        def begin(self, instruction: Instruction) -> None:
            seen.append(("begin", instruction))

        def ready(self, instruction: Instruction) -> None:
            seen.append(("ready", instruction))

        def end(self, instruction: Instruction) -> None:
            seen.append(("end", instruction))

    rank.step.engine.watches.append(Watch())
    try:
        captured.named(captured.GPT2).step(rank, (3,))
    finally:
        rank.step.engine.watches.clear()
    expected: list[tuple[str, Instruction]] = []
    for instruction in captured.before_step(rank, "1f1b", 1)[:-1]:
        ready = [("ready", instruction)] if instruction.op in COMPUTE else []
        expected += [("begin", instruction), *ready, ("end", instruction)]
    assert seen == expected


def test_weight_gradients_may_wait_until_all_micro_batches_are_back(rank: Rank) -> None:
    case = captured.named(captured.GPT2)
    order = to_blocks(from_text("F0.0 F0.1 B0.0 B0.1 W0.1 W0.0"), rank.plan.stage_blocks)
    assert Counter(instruction.op for instruction in order)[Op.W] == 2 * len(case.blocks.blocks)
    program = (Instruction(Op.COUNT), *add_inputs(order), Instruction(Op.NORM), Instruction(Op.STEP))
    captured.require_equal(captured.run(rank, program, case.micro_batches(rank, (1, 2))), case.plain())


def test_parameters_are_never_changed_by_the_passes_through_the_model(rank: Rank) -> None:
    case = captured.named(captured.GPT2)
    case.step(rank, (3,))
    assert all(torch.equal(rank.parameters.values[name], value) for name, value in case.parameters.items())
