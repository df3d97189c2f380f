"""The engine runs programs exactly, stops where nothing is trained, and lets go of what it no longer needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.model import reference
from phalanx.program.instructions import Instruction, Op, from_text
from phalanx.program.schedules import SCHEDULES
from phalanx.runtime.accumulate import Accumulator
from phalanx.runtime.engine import Engine, MicroBatch
from tests import captured

SPLITS = [(3,), (1, 2), (1, 1, 1)]


def require_released(parts: list[MicroBatch]) -> None:
    for part in parts:
        assert (part.wires, part.saved, part.gradients, part.for_weights) == ({}, {}, {}, {})


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One engine of GPT-2 for many tests: what it traced is used again, as in training."""
    return captured.named(captured.GPT2).engine()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_schedule_and_split_equals_autograd_with_dropout_on(
    schedule: str, sizes: tuple[int, ...], engine: Engine
) -> None:
    case = captured.named(captured.GPT2)
    parts = case.micro_batches(engine, sizes)
    captured.require_equal(case.step(engine, SCHEDULES[schedule](len(sizes)), parts), case.plain())
    require_released(parts)


T5 = pytest.param(captured.T5, marks=pytest.mark.long)


@pytest.mark.parametrize("name", [captured.WHISPER, captured.MIXTRAL, T5])
def test_several_wires_and_experts_get_their_gradients(name: str) -> None:
    case = captured.named(name)
    engine = case.engine()
    parts = case.micro_batches(engine, (1, 2))
    captured.require_equal(case.step(engine, SCHEDULES["zb-h1"](2), parts), case.plain())
    require_released(parts)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_recomputation_changes_nothing_not_even_dropout(schedule: str) -> None:
    case = captured.named(captured.GPT2)
    engine = case.engine(recompute=True)
    captured.require_equal(case.step(engine, SCHEDULES[schedule](2), case.micro_batches(engine, (2, 1))), case.plain())
    assert engine.keeps_only_inputs()


def test_compiled_segments_give_the_same() -> None:
    case = captured.named(captured.GPT2)
    engine = case.engine(mode="aot_eager")
    captured.require_equal(case.step(engine, SCHEDULES["1f1b"](1), case.micro_batches(engine, (3,))), case.plain())


def test_another_seed_drops_other_elements(engine: Engine) -> None:
    case = captured.named(captured.GPT2)
    losses = [case.step(engine, SCHEDULES["1f1b"](1), case.micro_batches(engine, (3,), seed))[0] for seed in (0, 1)]
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[1], case.plain(seed=1)[0], rtol=1e-11, atol=0)


def test_one_capture_serves_other_batch_sizes_and_lengths() -> None:
    case = captured.named(captured.LLAMA)
    shorter = {name: tensor[:2, :5] for name, tensor in case.batch.items()}
    other = captured.Case(case.captured, case.model, shorter, {name: shorter[name] for name in case.raw})
    engine = case.engine()
    for one, sizes in ((case, (3,)), (other, (1, 1)), (case, (1, 2))):
        parts = one.micro_batches(engine, sizes)
        captured.require_equal(one.step(engine, SCHEDULES["1f1b"](len(sizes)), parts), one.plain())


def test_blocks_that_share_a_template_share_their_functions() -> None:
    case = captured.named(captured.GPT2)
    engine = case.engine()
    case.step(engine, SCHEDULES["1f1b"](1), case.micro_batches(engine, (3,)))
    assert len(engine._segments) == len(case.blocks.templates) == 3


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_frozen_beginning_stops_the_backward_early_and_the_rest_is_exact(schedule: str) -> None:
    case = captured.named(captured.LLAMA, tie_word_embeddings=False)
    frozen = [n for n in case.parameters if n.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))]
    engine = case.engine(frozen=frozen)
    parts = case.micro_batches(engine, (2, 1))
    engine.forward(parts[0])
    kept = {name: saved for name, (_, saved) in parts[0].saved.items()}
    assert [name for name, saved in kept.items() if not saved] == ["embedding", "model.layers.0", "model.layers.1"]
    parts = case.micro_batches(engine, (2, 1))
    got = case.step(engine, SCHEDULES[schedule](2), parts)
    loss, gradients = case.plain()
    assert set(got[1]) == set(case.parameters) - set(frozen)
    captured.require_equal(got, (loss, {name: gradients[name] for name in got[1]}))
    require_released(parts)


def test_a_frozen_tied_embedding_trains_the_layers_between() -> None:
    case = captured.named(captured.GPT2)
    frozen = ["transformer.wte.weight", "transformer.wpe.weight"]
    engine = case.engine(frozen=frozen)
    got = case.step(engine, SCHEDULES["1f1b"](1), case.micro_batches(engine, (3,)))
    loss, gradients = case.plain()
    assert set(got[1]) == set(case.parameters) - set(frozen)
    captured.require_equal(got, (loss, {name: gradients[name] for name in got[1]}))


def test_with_everything_frozen_there_is_a_loss_and_no_gradient() -> None:
    case = captured.named(captured.GPT2)
    engine = case.engine(frozen=list(case.parameters))
    parts = case.micro_batches(engine, (3,))
    loss, gradients = case.step(engine, SCHEDULES["1f1b"](1), parts)
    assert gradients == {}
    torch.testing.assert_close(loss, case.plain()[0], rtol=1e-11, atol=0)
    require_released(parts)


@pytest.mark.parametrize("name", [captured.GPT2, captured.WHISPER, T5])
def test_evaluation_equals_the_model_in_eval_mode_and_keeps_nothing(name: str) -> None:
    case = captured.named(name)
    engine = case.engine(dropout=False)
    parts = case.micro_batches(engine, (1, 2))
    for part in parts:
        engine.forward(part, keep=False)
    total = sum(part.loss for part in parts) / sum(part.values[case.blocks.count] for part in parts)
    case.model.eval()
    with torch.no_grad(), reference.Widen():
        expected = reference.loss(case.model, case.raw)
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=0)
    require_released(parts)


def test_the_engine_counts_what_it_executed(engine: Engine) -> None:
    case = captured.named(captured.GPT2)
    engine.executed.clear()
    case.step(engine, (*SCHEDULES["zb-h1"](2), Instruction(Op.STEP)), case.micro_batches(engine, (1, 2)))
    assert engine.executed == {"F": 2, "B": 2, "W": 2}


def test_weight_gradients_may_wait_until_all_micro_batches_are_back(engine: Engine) -> None:
    case = captured.named(captured.GPT2)
    program = from_text("F0.0 F0.1 B0.0 B0.1 W0.1 W0.0")
    captured.require_equal(case.step(engine, program, case.micro_batches(engine, (1, 2))), case.plain())


def test_parameters_are_read_when_used_and_never_changed(engine: Engine) -> None:
    case = captured.named(captured.GPT2)
    before = {name: value.clone() for name, value in case.parameters.items()}
    case.step(engine, SCHEDULES["1f1b"](1), case.micro_batches(engine, (3,)))
    assert all(torch.equal(engine.parameters[name], value) for name, value in before.items())


class TestAccumulator:
    def test_gradients_of_one_name_are_summed_and_missing_ones_left_out(self) -> None:
        accumulator = Accumulator()
        accumulator.add(["a", "b"], [torch.ones(2), None])
        accumulator.add(["a", "c"], [torch.ones(2), torch.zeros(1)])
        sums = accumulator.take(["c", "b", "a"])
        assert list(sums) == ["c", "a"]
        assert sums["a"].tolist() == [2, 2]

    def test_taking_empties_it(self) -> None:
        accumulator = Accumulator()
        accumulator.add(["a"], [torch.ones(2)])
        accumulator.take(["a"])
        assert accumulator.take(["a"]) == {}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_many_small_gradients_are_summed_in_float32(self, dtype: torch.dtype) -> None:
        accumulator = Accumulator()
        for _ in range(1000):
            accumulator.add(["a"], [torch.ones(1, dtype=dtype)])
        total: Tensor = accumulator.take(["a"])["a"]
        assert (total.dtype, total.item()) == (torch.float32, 1000)
