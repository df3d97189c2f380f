"""The engine runs programs exactly, stops where nothing is trained, and lets go of what it no longer needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.engine.engine import Executed
from phalanx.engine.reductions import StepRun, total_items
from phalanx.engine.step import Outcome
from phalanx.errors import LateError
from phalanx.model import reference
from phalanx.predict.memory import Sizes
from phalanx.program.instructions import Instruction, Op, from_text
from phalanx.program.lower import lower_forward
from phalanx.program.passes.blocks import add_inputs, to_blocks
from phalanx.session.session import Session
from tests import captured
from tests.program.lives import live_bytes

SPLITS = [(3,), (1, 2), (1, 1, 1)]
T5 = pytest.param(captured.T5, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def session() -> Session:
    """One rank of GPT-2 for many tests: what it traced is used again, as in training."""
    return captured.named(captured.GPT2).session()


@pytest.fixture(scope="module")
def two_stages() -> Session:
    """The same with two stages on the one rank, which hand over by reference."""
    return captured.named(captured.GPT2).session("schedule=zb-v")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_schedule_and_split_equals_autograd_with_dropout_on(
    schedule: str, sizes: tuple[int, ...], session: Session
) -> None:
    case = captured.named(captured.GPT2)
    captured.require_equal(case.step(session, sizes, schedule), case.plain())


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_stages_on_one_rank_hand_over_exactly(sizes: tuple[int, ...], two_stages: Session) -> None:
    case = captured.named(captured.GPT2)
    assert two_stages.plan.num_stages == 2
    captured.require_equal(case.step(two_stages, sizes, "zb-v"), case.plain())


@pytest.mark.parametrize("plan", ["mb=2,slices=5-3-1", "mb=2,slices=3,recompute=block", "mb=2,slices=3,schedule=zb-h1"])
def test_what_runs_before_ranks_depend_on_each_other_changes_nothing(plan: str) -> None:
    """Layers share functions, and each has a past of its own."""
    case = captured.named(captured.GPT2)
    session, warm = case.session(plan), case.session(plan)
    warm.step.engine._warms_up = True
    losses = [[each.step(case.batch, 0, 1e-3).read() for _ in range(2)] for each in (session, warm)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", [captured.WHISPER, captured.MIXTRAL, T5])
def test_several_activations_and_experts_get_their_gradients(name: str) -> None:
    case = captured.named(name)
    captured.require_equal(case.step(case.session(), (1, 2), "zb-h1"), case.plain())


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_recomputation_changes_nothing_not_even_dropout(schedule: str) -> None:
    case = captured.named(captured.GPT2)
    session = case.session("recompute=yes")
    captured.require_equal(case.step(session, (2, 1), schedule), case.plain())
    (table,) = (linked.table for linked in session.step.engine._linked.values())
    assert table.keeps_only_inputs


@pytest.mark.parametrize("plan", ["recompute=unit", "recompute=light", "recompute=light+unit+block+none"])
def test_what_is_computed_again_may_differ_from_layer_to_layer(plan: str) -> None:
    case = captured.named(captured.GPT2)
    captured.require_equal(case.step(case.session(plan), (2, 1), "zb-h1"), case.plain())


@pytest.mark.parametrize("name", [captured.GPT2, captured.LLAMA])
def test_every_policy_keeps_less_than_the_one_before_it(name: str) -> None:
    kept = [_kept_after_forward(name, plan) for plan in ("", "recompute=light", "recompute=unit", "recompute=block")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4
    mixed = _kept_after_forward(name, "recompute=block*2+light*2")
    assert kept[3] < mixed < kept[1]


def _kept_after_forward(name: str, plan: str) -> int:
    """Bytes of activations and of what segments saved, before the first backward."""
    case = captured.named(name)
    rank = case.session(plan)
    case.step(rank, (3,))
    (linked,) = rank.step.engine._linked.values()
    described = rank.step.engine.parts.tracer(case.micro_batches(rank, (3,))[0]).shape(rank.compiled.formation.shape)
    sizes = Sizes(rank.plan, {}, described, ())
    backward = next(i for i, row in enumerate(linked.table.rows) if row.instruction.op in (Op.A, Op.BW))
    kinds = ("activation", "saved_b", "saved_bw")
    return live_bytes(linked.table, lambda value: sizes(value) if value.kind in kinds else 0)[backward - 1]


class Shares(nn.Module):
    """Its attention and its feed-forward have one weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        weight = nn.Linear(width, width)
        self.attend, self.feed = Attend(weight), nn.Sequential(weight, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.feed(x)


class Attend(nn.Module):
    def __init__(self, weight: nn.Linear) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        heads = self.weight(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shares() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean()


def test_a_weight_that_two_units_share_gets_both_gradients() -> None:
    torch.manual_seed(0)
    case = captured.own(Stack(), x=torch.randn(4, 5, 8), y=torch.randn(4, 5, 8))
    assert {case.blocks.units(case.blocks.blocks[block]) for block in case.blocks.layers} == {
        ("attend", "feed-forward")
    }
    captured.require_equal(case.step(case.session("recompute=unit"), (2, 2)), case.plain())


class Heads(nn.Module):
    """Puts the heads of all samples beside each other: copied, but for a single sample, where it is the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 3)).transpose(1, 2).reshape(-1, x.shape[1], 3)
        mixed = (heads @ heads.transpose(1, 2)).softmax(-1) @ heads
        back = mixed.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
        return x + self.out(back.permute(1, 0, 2)).permute(1, 0, 2).reshape(x.shape)


class HeadStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 6), nn.ModuleList([Heads(), Heads(), Heads()])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (1, 1, 2)], ids=str)
def test_a_micro_batch_may_keep_an_activation_where_others_keep_a_copy(schedule: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    case = captured.own(HeadStack(), ids=torch.arange(20).reshape(4, 5) % 9)
    session = case.session()
    looks = [session.step.engine.parts.tracer(part) for part in case.micro_batches(session, (3, 1))]
    reads = [[op.bw.all_reads for chain in look.ops for op in chain] for look in looks]
    assert reads[0] != reads[1], "what this test is about"
    captured.require_equal(case.step(session, sizes, schedule), case.plain())


def test_compiled_segments_give_the_same() -> None:
    case = captured.named(captured.GPT2)
    captured.require_equal(case.step(case.session(compile="aot_eager"), (3,)), case.plain())


def test_another_seed_drops_other_elements(session: Session) -> None:
    case = captured.named(captured.GPT2)
    losses = [case.step(session, (3,), seed=seed)[0] for seed in (0, 1)]
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[1], case.plain(seed=1)[0], rtol=1e-11, atol=0)


def test_one_capture_serves_other_batch_sizes_and_lengths() -> None:
    case = captured.named(captured.LLAMA)
    shorter = {name: tensor[:2, :5] for name, tensor in case.batch.items()}
    other = captured.Case(case.captured, case.model, shorter, {name: shorter[name] for name in case.raw})
    session = case.session()
    for one, sizes in ((case, (3,)), (other, (1, 1)), (case, (1, 2))):
        captured.require_equal(one.step(session, sizes), one.plain())


def test_blocks_that_share_a_template_share_their_functions() -> None:
    case = captured.named(captured.GPT2)
    session = case.session()
    case.step(session, (3,))
    assert len(session.step.engine.compute._segments) == len(case.blocks.templates) == 3


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_frozen_beginning_stops_the_backward_early_and_the_rest_is_exact(schedule: str) -> None:
    case = captured.named(captured.LLAMA, tie_word_embeddings=False)
    frozen = [n for n in case.parameters if n.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))]
    session = case.session(frozen=frozen)
    got = case.step(session, (2, 1), schedule)
    loss, gradients = case.plain()
    assert set(got[1]) == set(case.parameters) - set(frozen)
    captured.require_equal(got, (loss, {name: gradients[name] for name in got[1]}))
    (table,) = (linked.table for linked in session.step.engine._linked.values())
    saving = {table.values[i].what for row in table.rows for i in row.writes if table.values[i].kind == "saved_bw"}
    names = [block.name for block in case.blocks.blocks]
    assert {names[int(what.partition(":")[0])] for what in saving}.isdisjoint(
        {"embedding", "model.layers.0", "model.layers.1"}
    )


def test_a_frozen_tied_embedding_trains_the_layers_between() -> None:
    case = captured.named(captured.GPT2)
    frozen = ["transformer.wte.weight", "transformer.wpe.weight"]
    got = case.step(case.session(frozen=frozen), (3,))
    loss, gradients = case.plain()
    assert set(got[1]) == set(case.parameters) - set(frozen)
    captured.require_equal(got, (loss, {name: gradients[name] for name in got[1]}))


def test_with_everything_frozen_there_is_a_loss_and_no_gradient() -> None:
    case = captured.named(captured.GPT2)
    session = case.session(frozen=list(case.parameters))
    loss, gradients = captured.run(session, session.step.program, case.micro_batches(session, (3,)))
    assert gradients == {}
    torch.testing.assert_close(loss, case.plain()[0], rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", [captured.GPT2, captured.WHISPER, T5])
def test_without_totals_it_equals_the_model_in_eval_mode_and_keeps_nothing(name: str) -> None:
    case = captured.named(name)
    session = case.session()
    engine, parts = session.evaluation, case.micro_batches(session, (1, 2), training=False)
    program = lower_forward(session.plan, session.compiled.formation.shape, 2)[0]
    items = total_items(parts)
    step = StepRun({(number, 0): part for number, part in enumerate(parts)}, lr=0.0)
    engine.run(program, step)
    pairs = zip(step.linked.table.values, step.values, strict=False)
    losses = [there for value, there in pairs if value.kind == "loss"]
    total = sum(losses) / items
    with captured.evaluating(case.model), torch.no_grad(), reference.Widen():
        expected = reference.loss(case.model, case.raw)
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=0)
    left = [str(v) for v, there in zip(step.linked.table.values, step.values, strict=False) if there is not None]
    assert len(left) == len(losses) == 2


def test_what_was_executed_is_counted(session: Session) -> None:
    case = captured.named(captured.GPT2)
    engine, blocks = session.step.engine, len(case.blocks.blocks)
    executed = Executed()
    engine.watches.append(executed)
    case.step(session, (1, 2), "zb-h1")
    engine.watches.remove(executed)
    assert executed == {"COUNT": 1, "I": 2, "F": 2 * blocks, "B": 2 * blocks, "W": 2 * blocks, "NORM": 1}


def test_watches_are_told_of_every_instruction_and_when_it_has_what_it_needs(session: Session) -> None:
    seen: list[tuple[str, Instruction]] = []

    class Watch:
        def begin(self, instruction: Instruction) -> None:
            seen.append(("begin", instruction))

        def ready(self, instruction: Instruction) -> None:
            seen.append(("ready", instruction))

        def end(self, instruction: Instruction) -> None:
            seen.append(("end", instruction))

    session.step.engine.watches.append(Watch())
    try:
        captured.named(captured.GPT2).step(session, (3,))
    finally:
        session.step.engine.watches.clear()
    expected: list[tuple[str, Instruction]] = []
    for instruction in captured.before_step(session, "1f1b", 1)[:-1]:
        expected += [(moment, instruction) for moment in ("begin", "ready", "end")]
    assert seen == expected


def test_weight_gradients_may_wait_until_all_micro_batches_are_back(session: Session) -> None:
    case = captured.named(captured.GPT2)
    order = to_blocks(from_text("F0.0 F0.1 B0.0 B0.1 W0.1 W0.0"), session.plan.stage_blocks)
    assert Counter(instruction.op for instruction in order)[Op.W] == 2 * len(case.blocks.blocks)
    program = (Instruction(Op.COUNT), *add_inputs(order), Instruction(Op.NORM), Instruction(Op.STEP))
    captured.require_equal(captured.run(session, program, case.micro_batches(session, (1, 2))), case.plain())


def test_parameters_are_never_changed_by_the_passes_through_the_model(session: Session) -> None:
    case = captured.named(captured.GPT2)
    case.step(session, (3,))
    assert all(torch.equal(session.state.parameters.values[name], value) for name, value in case.parameters.items())


class NeverArrives:
    def query(self) -> bool:
        return False


def test_a_step_that_others_never_end_is_not_waited_for_longer_than_they_may_take() -> None:
    waiting: Any = NeverArrives()  # as an event of a GPU
    with pytest.raises(LateError, match="a step did not end in 0 s, though no rank was lost"):
        Outcome(torch.zeros(5, dtype=torch.float64), waiting, timeout=0.01).read()
