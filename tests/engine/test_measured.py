"""Measured timelines hold every instruction in order and no waiting, and lie beside the prediction."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from phalanx.cli.main import main
from phalanx.engine.measured import Recorder, merge
from phalanx.errors import ConfigError
from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.plan import Plan
from phalanx.predict.timeline import Event, Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import SENDS, Op, from_text
from phalanx.program.shape import ModelShape
from tests.engine.clock_jobs import gather_from_another_machine
from tests.faults.ranks import fit
from tests.run_helpers import short_run

PLAN = "pp=2,mb=2,schedule=zb-h1"
SHAPE = ModelShape(4, (), (True,) * 4, (True,) * 4)


@pytest.fixture(scope="module")
def measured(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The timeline of a run on two ranks."""
    out = tmp_path_factory.mktemp("measured")
    fit(pool, out, "gpt2", "synthetic", plan=PLAN, timeline_step=2, device="cpu", export=False)
    return out / "timeline.json"


def of_rank(timeline: Timeline, rank: int) -> list[Event]:
    return [event for event in timeline.events if event.rank == rank]


def test_a_run_writes_every_instruction_of_every_rank_once_and_in_order(measured: Path) -> None:
    timeline = Timeline.from_json(measured.read_text())
    plan = Plan.from_json((measured.parent / "plan.json").read_text())
    num_blocks = sum(plan.stages)
    shape = ModelShape(num_blocks, ((0, num_blocks - 1),), (True,) * (num_blocks + 1), (True,) * (num_blocks + 1))
    compiled = compile_plan(plan, shape)
    for rank, program in enumerate(map(compiled.program, range(plan.world))):
        events = of_rank(timeline, rank)
        assert tuple(event.instruction for event in events) == program
        assert all(event.start <= event.end for event in events)
        assert all(before.end <= after.start for before, after in pairwise(events))
    assert timeline.begin == 0 and timeline.makespan < 60
    assert all(timeline.peak_memory(rank) for rank in (0, 1))


def test_no_rank_computes_with_what_another_has_not_sent_yet(measured: Path) -> None:
    """Ranks of one machine share a clock; and the time in which a computation waits is not part of it."""
    timeline = Timeline.from_json(measured.read_text())
    begun = {str(event.instruction): event.start for event in timeline.events}
    computed = {
        (e.instruction.op, e.instruction.stage, e.instruction.micro_batch): e for e in reversed(timeline.events)
    }
    for sent in (event for event in timeline.events if event.instruction.op in SENDS):
        op, stage = sent.instruction.op, sent.instruction.stage
        assert stage is not None
        used = computed[
            (Op.F, stage + 1, sent.instruction.micro_batch)
            if op is Op.SEND_F
            else (Op.B, stage - 1, sent.instruction.micro_batch)
        ]
        assert begun[str(sent.instruction)] <= used.start


def test_it_lies_beside_the_prediction(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "gpt2", "--seq-len", "16", "--batch-size", "4", "--plan", PLAN, "--measured", str(measured))
    assert main(["program", *arguments]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^predicted: step .*bubble", text, re.M) and re.search(r"^measured: step .*bubble", text, re.M)
    assert all(re.search(rf"^{op} .*[+-][\d.]+%", text, re.M) for op in ("F", "B", "W", "step"))


def test_a_step_that_never_comes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="option timeline_step = 4 is after the last of 3 steps") as caught:
        short_run("gpt2", "synthetic", tmp_path, timeline_step=4)
    assert "between 1 and 3" in str(caught.value)


def test_one_rank_alone_writes_one_too(tmp_path: Path) -> None:
    short_run("gpt2", "synthetic", tmp_path, timeline_step=3, device="cpu", export=False)
    assert Timeline.from_json((tmp_path / "timeline.json").read_text()).ranks == (0,)


def test_resources_have_the_simulators_names() -> None:
    recorder = Recorder(Plan(pp=2, mb=1, stages=(2, 2)), SHAPE, 0, torch.device("cpu"))
    for instruction in from_text("F0.0/0 SF0.0>1 RB0.0<1 NORM STEP"):
        recorder.begin(instruction)
        recorder.end(instruction)
    resources = [event.resource for event in recorder.timeline().events]
    assert resources == ["compute", "0→1 F", "1→0 B", "ranks 0,1", "compute"]


def test_what_a_computation_waited_is_not_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 5.0, 7.0))
    recorder = Recorder(Plan(stages=(4,)), SHAPE, 0, torch.device("cpu"))
    monkeypatch.setattr("phalanx.engine.measured.time.perf_counter", lambda: next(times))
    (forward,) = from_text("F0.0/0")
    recorder.begin(forward)
    recorder.ready(forward)
    recorder.end(forward)
    (event,) = recorder.timeline().events
    assert (event.start, event.end) == (5.0, 7.0)


def test_merged_parts_begin_at_zero_and_keep_each_ranks_memory() -> None:
    forward, step = from_text("F0.0/0 STEP")
    parts = [
        Timeline((Event(0, forward, 12.0, 13.0),), ({"measured": 5},)),
        Timeline((Event(1, step, 11.0, 14.0),), ({}, {"measured": 7})),
    ]
    merged = merge(parts)
    assert [(e.rank, e.start, e.end) for e in merged.events] == [(0, 1.0, 2.0), (1, 0.0, 3.0)]
    assert merged.memory == ({"measured": 5}, {"measured": 7})


def test_the_clock_of_another_machine_is_compared_with_that_of_rank_0(pool: WorkerPool) -> None:
    timeline, nothing = pool.run(gather_from_another_machine, 1000.0, world=2)
    assert nothing is None
    assert [(event.rank, str(event.instruction)) for event in timeline.events] == [
        (0, "COUNT"), (0, "F0.0/0"), (1, "COUNT"), (1, "F0.0/0"),
    ]  # fmt: skip
    assert timeline.makespan < 10
