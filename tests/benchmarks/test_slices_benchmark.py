"""The slices benchmark: predictions follow from measured slices, planned ones are never worse, and it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import report
import slice_simulation
import slices
import slices_page
from compare_setting import Size
from slice_ranks import Effort, Kind, median_of
from slice_simulation import BlockTimes, Ends, Known

from phalanx.model.facts.facts import BlockFacts, ModelFacts, TensorFacts, UnitFacts
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan
from phalanx.planning.slice_search import ModelledTimes
from phalanx.predict.costs import Link
from phalanx.predict.from_profile import RankProfile
from phalanx.predict.split_facts import Split, SplitFacts
from phalanx.profile.slice_fit import Measurement
from tests.program.random_plans import chain

BLOCKS, TOKENS = 4, 1024
LAYER = ModelledTimes(start=1e-3, per_token=2e-5, per_pair=2e-8, smallest=64)
FREE, NOTHING = Link(), Ends(0.0, 0.0, 0.0)


def known(layer: ModelledTimes = LAYER, link: Link = FREE, ends: Ends = NOTHING) -> Known:
    crossing = [(TensorFacts(f"x{n}", ("batch", "tokens", 25), "float32"),) for n in range(BLOCKS - 1)]
    units = (UnitFacts("layer", 10, "tokens"),)
    blocks = tuple(BlockFacts("layer", "layer", units, wires, "1000*tokens", ()) for wires in (*crossing, ()))
    facts = ModelFacts("m", "causal-lm", "float32", ("batch", "tokens"), None, 40, blocks, (), ())
    described = {sliced: described_as(Split(sliced=sliced)) for sliced in (False, True)}
    return Known((BlockTimes(layer, 0.4),) * BLOCKS, link, ends, (10,) * BLOCKS, facts, described, RankProfile())


def described_as(split: Split) -> SplitFacts:
    """Blocks that send 100 bytes a token, keep 1000 and need 3000 in their backward."""
    shape = chain(BLOCKS, "100*batch*tokens", "1000*batch*tokens")
    *others, last = [replace(step, working=("0", "0", "0", "3000*tokens")) for (step,) in shape.ops]
    steps = tuple((step,) for step in (*others, replace(last, sizes=("4",))))
    shape = replace(shape, ops=steps)
    return SplitFacts(split, "float32", shape, shape, (10,) * BLOCKS, (10,) * BLOCKS)


def plan_of(samples: int = 1, more: str = "", pp: int = BLOCKS) -> Plan:
    text = f"pp={pp},mb={samples},schedule=1f1b{more}"
    return complete(text, world=pp, batch_size=samples, costs=(1.0,) * BLOCKS).plan


def uniform(samples: int = 1) -> dict[str, Plan]:
    return {str(n): plan_of(samples, f",slices={n}") for n in (2, 4, 8)}


def test_a_step_without_slices_passes_every_block_one_after_the_other() -> None:
    whole = known().blocks[0].seconds(TOKENS, 0)
    assert known().step(plan_of(), TOKENS) == pytest.approx(BLOCKS * whole)


def test_a_sliced_step_on_one_rank_takes_what_its_slices_take() -> None:
    block = known().blocks[0]
    halves = block.seconds(TOKENS // 2, 0) + block.seconds(TOKENS // 2, TOKENS // 2)
    assert known().step(plan_of(more=",slices=2", pp=1), TOKENS) == pytest.approx(BLOCKS * halves)


def test_messages_norm_and_update_are_part_of_a_step() -> None:
    slow = known(link=Link(latency_s=0.5), ends=Ends(norm=0.6, update=0.01, issue=0.0))
    extra = slow.step(plan_of(), TOKENS) - known().step(plan_of(), TOKENS)
    # Six messages one after the other; two collectives, the first of which nobody waits for; ten elements per rank.
    assert extra == pytest.approx(6 * 0.5 + 0.6 + 0.1)


@pytest.mark.parametrize("samples", [1, 2, 8])
@pytest.mark.parametrize("start", [0.0, 1e-3, 1e-1])
@pytest.mark.parametrize("link", [Link(), Link(1e-3, 1e7)])
def test_what_is_planned_is_never_worse_than_whole_or_uniform(samples: int, start: float, link: Link) -> None:
    about, whole = known(replace(LAYER, start=start), link), plan_of(samples)
    best = slice_simulation.planned(about, whole, TOKENS, uniform(samples))
    steps = [about.step(plan, TOKENS) for plan in (whole, *uniform(samples).values())]
    assert about.step(best, TOKENS) <= min(steps)


def test_slices_that_cost_too_much_to_start_are_not_planned() -> None:
    whole = plan_of(8)
    assert slice_simulation.planned(known(replace(LAYER, start=1.0)), whole, TOKENS, uniform(8)) == whole


def test_one_long_sequence_is_cut_into_shrinking_slices() -> None:
    best = slice_simulation.planned(known(replace(LAYER, per_pair=2e-7)), plan_of(), TOKENS, uniform())
    (lengths,) = best.slices
    assert len(lengths) > 2 and lengths[0] > lengths[-1] and sum(lengths) == TOKENS


def test_what_ends_a_step_is_found_again_in_a_timeline() -> None:
    about = known(ends=Ends(norm=0.6, update=0.01, issue=0.0))
    plan = plan_of()
    shape = about.shape(plan)
    found = slice_simulation.ends_of([about.timeline(plan, TOKENS)], plan, shape, about.elements)
    assert found.norm == pytest.approx(0.6) and found.update == pytest.approx(0.01)


def test_memory_is_what_is_kept_and_what_the_slice_at_work_needs() -> None:
    gradients, message, kept, working = 4 * 10, 100 * TOKENS, 1000 * TOKENS, 3000 * TOKENS
    found = known().memory(plan_of(8), TOKENS)
    # With its input and that of the next micro-batch, the gradient that goes back, and the losses of seven.
    assert found[3] == gradients + 3 * message + kept + working + 7 * 4
    assert found[0] == pytest.approx(gradients + 4 * kept + working, abs=2 * message)
    sliced = known().memory(plan_of(8, ",slices=4"), TOKENS)
    assert sliced[0] == pytest.approx(gradients + (7 * kept + working) / 4, abs=message)


def test_ranks_agree_on_medians() -> None:
    kinds = [Kind((Measurement(8, 0, seconds),), forward) for seconds, forward in ((1.0, 0.2), (5.0, 0.3), (2.0, 0.9))]
    assert median_of(kinds) == Kind((Measurement(8, 0, 2.0),), 0.3)


def step(name: str, seconds: float, slicing: str, held: list[int], peaks: list[int | None]) -> dict[str, Any]:
    order = "gpipe" if name == slices.ALL_FIRST else "1f1b"
    return {
        "slices": name, "plan": f"pp=2,{slicing}schedule={order}", "same_as": None, "simulated": seconds * 1.1,
        "seconds": report.summary([seconds]), "held": held, "simulated_memory": [2**31, 2**30],
        "memory": [{"before": 10 if peak else None, "peak": peak, "gradients": 20} for peak in peaks],
    }  # fmt: skip


def case(peaks: tuple[int | None, int | None]) -> dict[str, Any]:
    steps = [
        step("whole", 1.0, "", [2, 1], [50, 50]), step("4", 0.5, "slices=4,", [5, 4], [peaks[0]] * 2),
        step("planned", 0.4, "slices=3-2,", [3, 2], [50, 50]),
        step("gpipe", 0.6, "slices=4,", [16, 16], [peaks[1]] * 2),
    ]  # fmt: skip
    return {"pp": 2, "sequences": 4, "tokens": 256, "steps": steps}


def test_activations_are_compared_with_the_order_that_keeps_everything() -> None:
    gib = 2**30
    steps = {found["slices"]: found for found in case((6 * gib + 30, 17 * gib + 30))["steps"]}
    assert slices_page.memory_sentence(steps) == (
        "GPipe order holds 16 slices on the first stage, 1F1B 5; activations by stage: 2.83× (bound 3.20×), 2.83× "
        "(bound 4.00×); so a held slice takes 1.00, 0.92 GiB, beside 1.00, 2.33 GiB for the slice at work, which both "
        "orders need."
    )


def test_a_third_order_shows_whether_memory_goes_by_the_slices_held() -> None:
    gib = 2**30
    steps = {found["slices"]: found for found in case((6 * gib + 30, 17 * gib + 30))["steps"]}
    steps["eager"] = step("eager", 0.45, "slices=4,", [8, 4], [9 * gib + 30, 6 * gib + 30])
    expected = " `eager` holds 8, 4, which makes 9.00 (9.00), 6.00 (6.00) GiB expected (measured)."
    assert slices_page.memory_sentence(steps).endswith(expected)


def test_without_a_gpu_only_the_bound_is_known() -> None:
    steps = {found["slices"]: found for found in case((None, None))["steps"]}
    assert slices_page.memory_sentence(steps).endswith("1F1B 5; a factor of 3.20.")


def test_rows_show_the_speed_up_and_what_was_planned() -> None:
    assert slices.rows(case((None, 2**30 + 10)))[2:] == [
        ["4", "256", "planned (3-2)", "440.0", "400.0 (400.0–400.0)", "+10.0%", "2.50×", "2.00", "0.00"],
        ["4", "256", "gpipe (4)", "660.0", "600.0 (600.0–600.0)", "+10.0%", "1.67×", "2.00", "1.00"],
    ]


def test_long_slicings_are_shown_in_short() -> None:
    shown = slices.named(step("planned", 1.0, "slices=8-8-4-2-2-2,", [1], [None]))
    assert shown == "planned (2×8-4-3×2)"


@pytest.mark.long
def test_it_measures_writes_and_shows_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = Size(2, 64, 64, samples=1, tokens=64)
    tiny = replace(
        slices.CPU, size=size, alone=size, cases=((2, 64),), slicings=(2,), alone_slicings=(2,),
        effort=Effort(16, 1, (1024,)),
    )  # fmt: skip
    monkeypatch.setattr(slices, "CPU", tiny)
    slices.main(["--rounds", "1", "--out", str(tmp_path / "slices.json")])
    data = json.loads((tmp_path / "slices.json").read_text())
    assert [(r["pp"], r["sequences"], r["tokens"]) for r in data["results"]] == [(1, 1, 64), (2, 2, 64)]
    names = [[found["slices"] for found in result["steps"]] for result in data["results"]]
    assert names == [["whole", "2"], ["whole", "2", "planned", "eager", "gpipe"]]
    steps = data["results"][1]["steps"]
    assert all(found["simulated"] for found in steps)
    assert [found["held"] for found in steps] == [[2, 1], [3, 2], steps[2]["held"], [4, 2], [4, 4]]
    assert capsys.readouterr().out.count("planned (") == 1
    page = slices_page.page(tmp_path)
    assert "## 2 CPU ranks" in page and "## What slicing costs without a pipeline" in page


def test_a_case_for_which_no_time_is_left_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slices, "_profile", lambda *_: (known(), {}))
    slices.main(["--budget", "-1", "--only", "x256"])
    assert "no time left for 1x256" in capsys.readouterr().err
