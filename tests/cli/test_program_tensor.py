"""`phalanx program` with tensor parallelism: the program, times and memory are those of a rank of the split model."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.cli import models, program
from phalanx.cli.main import main
from phalanx.cli.program_report import redistribution_seconds
from phalanx.engine import describe
from phalanx.model.captured import Captured
from phalanx.plan.plan import Plan
from phalanx.predict.split_facts import Split, SplitFacts
from phalanx.predict.timeline import COMPUTE, Event, Timeline
from phalanx.program.instructions import Instruction, Op, from_text

GPT2 = ("program", "--model", "gpt2", "--tiny", "--dtype", "float32", "--seq-len", "64", "--batch-size", "8")
LAYER = 2  # a block in the middle


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """The model is captured, measured and described under every split once for all tests, as it is uncompiled."""
    read, known = describe.describe, dict[Split, SplitFacts]()

    def described(captured: Captured, plan: Plan, dtype: str) -> SplitFacts:
        split = Split.of(plan)
        if split not in known:
            known[split] = read(captured, plan, dtype, device="cpu")
        return known[split]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "find_facts", cache(program.find_facts))
        patch.setattr(models, "capture_model", cache(models.capture_model))
        patch.setattr(describe, "describe", described)
        yield


def shown(capsys: pytest.CaptureFixture[str], plan: str, *options: str) -> list[str]:
    assert main([*GPT2, "--plan", plan, *options]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def lowered(capsys: pytest.CaptureFixture[str], plan: str) -> list[Instruction]:
    lines = shown(capsys, plan, "--lowered")
    assert len(lines) == 2 and lines[0].partition(": ")[2] == lines[1].partition(": ")[2]
    return list(from_text(lines[0].partition(": ")[2]))


@pytest.mark.parametrize(
    ("overlap", "forward", "backward"),
    [("none", 2, 2), ("default_checkpoint", 2, 4), ("optim_comm_checkpoint", 2, 2), ("overlap_checkpoint", 4, 8),
     ("oases", 4, 4), ("halves", 4, 4)],
)  # fmt: skip
def test_the_programs_have_the_collectives_of_the_mode(
    capsys: pytest.CaptureFixture[str], overlap: str, forward: int, backward: int
) -> None:
    layer = [it for it in lowered(capsys, f"tp=2,overlap={overlap}") if it.block == LAYER]
    assert sum(it.op is Op.CF for it in layer) == forward
    assert sum(it.op in (Op.CB, Op.CA) for it in layer) == backward
    assert {it.half for it in layer if it.op is Op.F} == ({0, 1} if forward == 4 else {None})
    assert len({it.op_index for it in layer if it.op is Op.F}) > 2


def _memory(lines: list[str]) -> dict[str, float]:
    table = next(number for number, line in enumerate(lines) if line.startswith("rank ") and "peak" in line)
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    titles = [title.strip() for title in lines[table].split("  ") if title.strip()][3:]
    cells = lines[table + 1].split()
    sizes = [float(a) * units[b] for a, b in pairwise(cells) if b in units]
    return dict(zip(titles, sizes, strict=True))


def test_a_rank_holds_about_half_of_a_split_model(capsys: pytest.CaptureFixture[str]) -> None:
    whole, half = _memory(shown(capsys, "tp=1")), _memory(shown(capsys, "tp=2"))
    for part in ("parameters", "moments", "peak"):
        assert 0.45 < half[part] / whole[part] < 0.75, part


@pytest.mark.long  # describes the model for six plans
def test_splitting_tokens_and_computing_again_keep_less(capsys: pytest.CaptureFixture[str]) -> None:
    plans = (
        "tp=2", "tp=2,recompute=light", "tp=2,sequence=yes,recompute=light", "tp=2,sequence=yes,recompute=unit",
        "tp=2,sequence=yes,recompute=block",
    )  # fmt: skip
    kept = [_memory(shown(capsys, plan))["activations"] for plan in plans]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)
    plans = ("tp=2", "tp=2,sequence=yes", "tp=2,sequence=yes,save=input", "tp=2,overlap=default_checkpoint")
    kept = [_memory(shown(capsys, plan))["activations"] for plan in plans]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_it_says_what_is_per_rank_and_how_much_of_the_redistributions_is_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, "tp=2,overlap=oases")
    assert any("parameters per rank" in line for line in lines)
    (said,) = (line for line in lines if line.startswith("redistributions between tp ranks: "))
    assert said.endswith("% of it hidden")
    assert "A forward again" in "\n".join(lines)


def test_pictures_and_traces_show_halves_and_redistributions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    shown(capsys, "tp=2,overlap=oases", "--svg", str(picture), "--trace", str(trace))
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert "CF0.0a/2:" in picture.read_text(encoding="utf-8")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name.split("/")[0] for name in names} >= {"F0.0a", "F0.0b", "CF0.0a", "CB0.0b", "A0.0a"}


def test_it_shows_all_ranks_of_a_stage_and_one_pipeline_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "pp=2,dp=2,tp=2,mb=2")
    table = next(number for number, line in enumerate(lines) if line.startswith("stage"))
    assert [line.split()[1] for line in lines[table + 1 : table + 3]] == ["0–3", "4–7"]
    said = next(line for line in lines if line.startswith("predicted: "))
    assert said.endswith("the first of 2 tensor-parallel ranks, one of 2 equal replicas")
    assert {line.split()[1] for line in lines if line.startswith("rank ") and "·" in line} == {"0", "4"}


def test_it_composes_with_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "pp=2,tp=2,mb=2", "--lowered")
    assert [line.partition(":")[0] for line in lines] == [f"rank {rank}" for rank in range(4)]
    assert any(it.op is Op.SEND_F and it.peer == 2 for it in from_text(lines[0].partition(": ")[2]))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("tp=5", "attends with 4 heads, which 5 ranks cannot split"),
        ("tp=2,degrees=2:2+1:1", "is for 2 layers, and the model has 4"),
        ("tp=2,mb=8,overlap=oases", "multiple of 2"),
        ("recompute=block*3", "recompute=block*3 is for 3 layers, and the model has 4: layer 3 has none"),
        ("tp=2,recompute=light*5", "is for 5 layers, and the model has 4: there is no layer 4"),
    ],
)
def test_a_plan_that_does_not_suit_the_model_is_refused(
    capsys: pytest.CaptureFixture[str], plan: str, message: str
) -> None:
    assert main([*GPT2, "--plan", plan]) == 2
    error = capsys.readouterr().err
    assert message in error and "→" in error


def test_an_redistribution_is_hidden_while_the_rank_computes() -> None:
    def event(op: Op, start: float, end: float, resource: str) -> Event:
        return Event(0, Instruction(op, 0, 0, block=0, op_index=0), start, end, resource)

    events = (
        event(Op.F, 0, 2, COMPUTE), event(Op.CF, 1, 4, "ranks 0,1"), event(Op.CB, 3, 6, "ranks 0,1"),
        event(Op.B, 5, 7, COMPUTE),
    )  # fmt: skip
    assert redistribution_seconds(Timeline(events, ({},)), 0) == pytest.approx((5, 3))
