"""The memory of a step by its table: more where more is kept, and never less than what lies there all the time."""

from __future__ import annotations

from phalanx.engine.step_memory import peak_bytes
from tests import captured


def needed(plan: str) -> int:
    """After a step, so that the optimizer has its state."""
    case = captured.named(captured.GPT2, samples=6, tokens=64)
    session = case.session(plan)
    session.step(case.batch, 0, 0.0).read()
    found = peak_bytes(session.step, session.compiled, session.state, session.step.begin(case.batch, 0, 0.0))
    parameters = sum(value.nbytes for value in case.parameters.values())
    assert found > 4 * parameters  # themselves, their gradients, two averages
    session.close()
    return found


def test_smaller_micro_batches_and_recomputation_need_less() -> None:
    whole = needed("")
    assert needed("mb=3") < whole
    assert needed("recompute=yes") < whole
