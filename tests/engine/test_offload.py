"""What lies on the host: bit for bit what left, and a step that changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.engine.engine import Executed
from phalanx.engine.host_copies import HostCopies, HostValue
from phalanx.program.instructions import Op, is_fetch
from phalanx.session.session import Session
from tests import captured
from tests.run_helpers import records, short_run

CPU = torch.device("cpu")


def there_and_back(copies: HostCopies, value: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    held = copies.out(value).wait("")
    assert isinstance(held, HostValue)
    back = copies.back(held).wait("")
    held.release()
    return back  # pyright: ignore


def test_tensors_come_back_as_they_were_in_memory_of_their_own() -> None:
    base = torch.randn(4, 6)
    value = [base.t(), base[1:, ::2], torch.tensor(3), torch.empty(0, 2), torch.randn(2, 3, dtype=torch.bfloat16)]
    back = there_and_back(HostCopies(CPU), value)
    for one, other in zip(value, back, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
        assert not one.numel() or one.data_ptr() != other.data_ptr()
    assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()  # views of one memory still
    single = there_and_back(HostCopies(CPU), base)
    assert isinstance(single, Tensor) and torch.equal(single, base)


def test_memory_of_the_host_is_used_again() -> None:
    copies, places = HostCopies(CPU), set[int]()
    for _ in range(3):
        held = copies.out([torch.randn(5), torch.randn(7)]).wait("")
        assert isinstance(held, HostValue) and held.num_bytes == 48
        places |= {buffer.data_ptr() for buffer in held.buffers}
        held.release()
    assert len(places) == 2


def trained(session: Session, batch: dict[str, Tensor], steps: int = 3) -> dict[str, Tensor]:
    """Parameters and the optimizer's state after some steps."""
    for step in range(steps):
        outcome = session.step(batch, 4 * step, lr=1e-2)
        assert outcome.read()[2]
    return {shard.name: data.clone() for shard, data in session.state.shards()}


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("plan", [
    "mb=2,offload=activations", "mb=2,recompute=block,schedule=zb-h1,offload=activations:2",
])  # fmt: skip
def test_training_is_the_same_to_the_last_bit(plan: str) -> None:
    case = captured.named(captured.GPT2, samples=4, tokens=8, dropout=0.1)
    session = case.session(plan)
    plain = case.session(plan.partition(",offload")[0])
    executed = Executed()
    session.step.engine.watches.append(executed)
    require_same(trained(session, case.batch), trained(plain, case.batch))
    assert executed[Op.OUT] == executed[Op.IN] > 0


@pytest.mark.parametrize(("plan", "options"), [
    ("mb=2,offload=optimizer", {"clip": 0.1}),
    ("mb=2,offload=activations+optimizer-step:0.6", {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}),
    ("mb=2,offload=parameters", {"clip": 0.1}),
    ("mb=2,recompute=block,offload=activations+parameters+optimizer-step", {"clip": 0.1}),
    ("mb=2,offload=parameters+optimizer:0.4+optimizer-step:0.6", {"clip": 0.1}),
])  # fmt: skip
def test_updates_on_either_side_are_the_same_to_the_last_bit(plan: str, options: dict[str, Any]) -> None:
    case = captured.named(captured.LLAMA, samples=4, tokens=8, vocab_size=640)  # the embedding is larger than a layer
    session, plain = case.session(plan, **options), case.session("mb=2", **options)
    # In parts, but for what the model begins with, which stays on the device where not all lies on the host.
    assert max(session.compiled.hosted().values()) > 1 or session.plan.hosted_share < 1
    require_same(trained(session, case.batch), trained(plain, case.batch))
    session.close()


def test_a_block_at_a_time_every_micro_batch_gives_the_same() -> None:
    """In another order of adding."""
    case = captured.named(captured.LLAMA, samples=4, tokens=8)
    session = case.session("mb=2,schedule=block-major,recompute=block,offload=activations+parameters+optimizer-step")
    assert session.plan.stages == (1,) * len(case.captured.blocks.flops(case.captured.dims(case.batch)))
    found, expected = trained(session, case.batch), trained(case.session("mb=2"), case.batch)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)
    fetched = sum(is_fetch(it) for it in session.step.program)
    assert fetched < len([it for it in session.step.program if it.op in (Op.F, Op.BW)]) // 2 + 4
    session.close()


def test_a_run_on_the_host_is_evaluated_saved_resumed_and_exported_as_one_without(tmp_path: Path) -> None:
    options = {"steps": 4, "lr": 1e-2, "eval_every": 2, "eval_data": "synthetic:4", "checkpoint_every": 2}
    plan = "mb=2,offload=activations+parameters+optimizer-step"
    plain = short_run(captured.GPT2, "synthetic:8", tmp_path / "plain", plan="mb=2", **options)
    moved = short_run(captured.GPT2, "synthetic:8", tmp_path / "moved", plan=plan, **options)
    assert moved.losses == plain.losses
    for field, count in (("eval_loss", 2), ("grad_norm", 4)):
        one, other = ([r.get(field) for r in records(tmp_path / name, "step")] for name in ("plain", "moved"))
        assert one == other and sum(value is not None for value in one) == count
    middle = tmp_path / "moved" / "checkpoints" / "step-00000002"
    again = short_run(captured.GPT2, "synthetic:8", tmp_path / "again", plan="mb=2", resume=str(middle), **options)
    assert again.losses == plain.losses[2:]
    ours, expected = (result.module().state_dict() for result in (moved, plain))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
