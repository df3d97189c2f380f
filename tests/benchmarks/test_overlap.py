"""The overlap benchmark: steps are taken apart as it says, modes run in turn, and figures are formed within a round."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import overlap
import overlap_page
import report
from compare_setting import Setting, Size
from overlap_cases import AIM, CPU, GPU
from overlap_figures import figures
from overlap_rank import KINDS, Seen, Task, measure
from overlap_silence import Collective, SilentGroup

from phalanx.comm.links import Group
from phalanx.errors import PhalanxError
from phalanx.lab.gpu import PROVEN
from phalanx.launch.worker_pool import WorkerPool

FEW = ("oases", "default_checkpoint", "optim_comm_checkpoint", "oases, pairs")  # of the modes
TINY = Size(layers=2, width=64, vocabulary=64, samples=4, tokens=8)


def seen(step: float, compute: float, communication: float, base: float = 4.0) -> Seen:
    rounds = {"step": [step] * 3, "compute": [compute] * 3, "communication": [communication] * 3}
    slow = {"step": [base] * 3, "compute": [1.0] * 3, "communication": [3.0] * 3}
    names = ("oases", "default_checkpoint", "optim_comm_checkpoint")
    return Seen(
        (compute, communication), dict.fromkeys(names, 2.0), dict.fromkeys(names, (4, 1000)),
        {names[0]: rounds, names[1]: slow, names[2]: slow},
    )  # fmt: skip


def result(**more: Any) -> dict[str, Any]:
    calibration = [{"lab": "ranks=2,gpu_share=9%", "compute": 0.9, "communication": 1.0}]
    of_modes = figures([seen(2.0, 1.0, 1.5)], "float32")
    for of in of_modes.values():
        of["predicted"] = {"seconds": 2.1, "lost": 0.0, "without": 1.9}
    return {"case": "H 64", "size": {"layers": 2, "width": 64, "samples": 4, "tokens": 8},
            "calibration": calibration, "modes": of_modes, **more}  # fmt: skip


@pytest.fixture(scope="module")
def measured(pool: WorkerPool) -> list[Seen]:
    setting = Setting("llama", TINY, "float32", masters=True)
    captured = setting.capture()
    plans = {mode: plan for mode, plan in overlap._plans(setting, captured).items() if mode in FEW}
    task = Task(setting, plans, (0.0, 1e9), 2, 1, "cpu", "off")
    found = pool.run(measure, task, captured, world=2)
    unfit = pool.run(measure, replace(task, wanted=(1e9, 2e9)), captured, world=2)
    assert [one.seconds for one in unfit] == [{}, {}], "nothing is timed where the calibration is not as wanted"
    return found


def test_every_mode_is_timed_in_every_round_and_computes_the_same_loss(measured: list[Seen]) -> None:
    for one in measured:
        assert {mode: set(kinds) for mode, kinds in one.seconds.items()} == {mode: set(KINDS) for mode in FEW}
        assert all(len(times) == 2 and min(times) > 0 for kinds in one.seconds.values() for times in kinds.values())
        assert len({round(loss, 4) for loss in one.losses.values()}) == 1


def test_all_ranks_know_the_same_calibration(measured: list[Seen]) -> None:
    assert measured[0].calibration == measured[1].calibration


def test_communication_alone_is_what_the_mode_sends(measured: list[Seen]) -> None:
    calls = measured[0].collectives
    (oases, oases_bytes), (default, default_bytes) = calls["oases"], calls["default_checkpoint"]
    once, once_bytes = calls["optim_comm_checkpoint"]
    assert (oases, oases_bytes) == (2 * once, once_bytes), "two halves of half the size"
    assert default >= once + 2 * TINY.layers, "two sums of every layer are repeated"
    activations = TINY.samples * TINY.tokens * TINY.width * 4
    assert default_bytes >= once_bytes + 2 * TINY.layers * activations


def test_a_silent_group_hands_on_tensors_of_the_right_shape_and_notes_what_it_did_not_send() -> None:
    calls: list[Collective] = []
    group = SilentGroup(cast(Group, SimpleNamespace(ranks=(0, 1), index=1)), calls)
    tensor, gathered, part = torch.tensor([1.0, 2.0]), torch.zeros(4), torch.zeros(2)
    group.all_reduce(tensor).wait()
    group.all_gather(gathered, tensor).wait()
    group.reduce_scatter(part, torch.arange(4.0)).wait()
    assert (tensor.tolist(), gathered.tolist(), part.tolist()) == ([1, 2], [1, 2, 1, 2], [2, 3])
    assert [(call.kind, call.nbytes) for call in calls] == [
        ("all_reduce", 8),
        ("all_gather", 16),
        ("reduce_scatter", 16),
    ]


def test_figures_compare_a_step_with_the_ideal_and_with_no_overlap() -> None:
    of = figures([seen(2.0, 1.0, 1.2), seen(1.8, 1.0, 1.5)], "float32")["oases"]
    assert (of["step"]["median"], of["communication"]["median"]) == (2.0, 1.5), "the slowest rank counts"
    assert (of["blocking"]["median"], of["ideal"]["median"]) == (2.5, 1.5)
    assert of["share"]["median"] == pytest.approx(1.5 / 2.0)
    assert of["hidden"]["median"] == pytest.approx(0.5)
    assert of["speed_up"]["median"] == 2.0 and of["ratio"]["median"] == pytest.approx(1 / 1.5)


def test_modes_that_compute_different_losses_end_the_benchmark() -> None:
    one = seen(2.0, 1.0, 1.0)
    one.losses["oases"] = 2.1
    with pytest.raises(SystemExit, match=r"default_checkpoint and oases do not compute the same: losses 2.0 and 2.1"):
        figures([one], "float32")


@given(st.floats(0.05, 20.0))
def test_the_next_link_brings_compute_and_communication_to_the_aim(ratio: float) -> None:
    amount = CPU.next_amount(100_000_000, ratio)
    assert ratio * amount / 100_000_000 == pytest.approx(AIM, rel=1e-3), "communication is as long as the link is slow"


@pytest.mark.parametrize("percent", PROVEN)
@pytest.mark.parametrize("ratio", [0.1, 0.5, AIM, 1.3, 5.0])
def test_the_next_share_of_a_gpu_shortens_what_is_too_long_and_keeps_to_shares_that_compute_right(
    ratio: float, percent: int
) -> None:
    amount = GPU.next_amount(percent, ratio)
    assert amount in PROVEN
    assert amount >= percent if ratio > AIM else amount <= percent


def test_a_case_that_cannot_be_calibrated_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    labs: list[str] = []

    def run(lab: str, *given: object, **named: object) -> list[Seen]:
        labs.append(lab)
        return [Seen((1.0, 2.0))]

    monkeypatch.setattr(overlap.in_lab, "run", run)
    found = overlap.measure(CPU, replace(CPU.cases[0], size=TINY), 2, "off")
    assert found["error"] == "compute : communication did not come between 0.8 and 0.9"
    assert len(labs) == len(found["calibration"]) == overlap.ATTEMPTS and len(set(labs)) == len(labs)
    assert overlap_page.sentence(found).startswith("H 512: compute : communication did not come")


def test_labs_of_cases_can_be_read() -> None:
    from phalanx.lab.spec import LabSpec

    for kind in (CPU, GPU):
        for case in kind.cases:
            try:
                assert LabSpec.read(kind.lab(case.start)).ranks == 2
            except PhalanxError as error:
                pytest.fail(str(error))


def test_tables_and_sentences_say_what_was_measured() -> None:
    (row, *_), text = overlap_page.rows([result()]), overlap_page.sentence(result())
    assert row[:4] == ["H 64", "oases", "4", "0"] and row[4:8] == ["1000", "1500", "2500", "1500"]
    assert row[8:] == ["2000 (2000–2000)", "2100", "+5.0%", "75%", "50%", "2.00×"]
    assert "calibrated to 0.90 and was 0.67 in the rounds" in text
    assert "2.00× as fast as `default_checkpoint`, needs 50% less time than `optim_comm_checkpoint`" in text
    assert (
        "1 of 3 rows are predicted within 10% of what was measured; the mean error is 33.3%, the largest 47.5%" in text
    )


def test_the_page_has_a_section_for_each_result_file(tmp_path: Path) -> None:
    for name, kind in (("overlap", CPU), ("overlap_gpu", GPU)):
        setting = {"kind": {"device": kind.device, "dtype": kind.dtype}, "rounds": 3}
        report.write(tmp_path / f"{name}.json", "overlap", setting, [result()])
    page = overlap_page.page(tmp_path)
    assert "## Two ranks on one GPU" in page and "## Two CPU ranks joined by a slow link" in page
    assert "python benchmarks/overlap.py --gpu --rounds 3" in page
    assert "- H 64: Llama of 2 layers, width 64, 4 × 8 tokens, bfloat16." in page


def test_the_plot_shows_measured_beside_blocking_and_ideal() -> None:
    (panel,) = overlap_page.panels([result(), {"case": "failed", "modes": {}}])
    assert {name: points[0].median for name, points in panel.series.items()} == {
        "blocking": 2.5, "measured": 2.0, "ideal": 1.5,
    }  # fmt: skip
