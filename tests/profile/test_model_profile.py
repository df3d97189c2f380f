"""Times of a model's blocks: what is measured, how it is kept, what becomes of stale or foreign ones, and what planning
makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.cli.main import main
from phalanx.cli.models import capture_model
from phalanx.config import RunConfig
from phalanx.errors import PlanError
from phalanx.model.facts.facts import load
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import SLICED_LAYER, Machine, Software
from phalanx.planning.work import BlockTime, Shape, at_degree, seconds_at, transformer
from phalanx.predict.from_profile import Reference, block_times, by_instruction, overheads
from phalanx.profile import model as blocks
from phalanx.profile.model import Size, Subject, measure, times_here
from phalanx.profile.segments import PARTS, Effort, SegmentTimes
from phalanx.profile.store import Store
from phalanx.program.instructions import Op

CPU = torch.device("cpu")
TIMES = SegmentTimes(1.0, 2.0, 0.5, 3.0)


@pytest.fixture(scope="module")
def subject() -> Subject:
    spec, captured = capture_model("gpt2", None, "float32", tiny=True)
    return Subject.synthetic(spec, captured, "float32", CPU, 1, 16)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "EFFORT", Effort(rounds=1, seconds=0.0))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "p.sqlite")


def stand_in(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> list[Size]:
    """Nothing is measured; what would have been is noted."""
    asked: list[Size] = []

    def measured(context: object, captured: object, config: RunConfig, degree: int, batch: object):
        asked.append(Size(degree, config.batch_size))
        return dict.fromkeys(subject.first_blocks(), TIMES)

    monkeypatch.setattr(blocks, "measure_on_rank", measured)
    return asked


# Measuring.


def test_every_distinct_block_is_measured_split_or_not(subject: Subject, store: Store, quick: None) -> None:
    found = measure(store, subject, [Size(1, 1), Size(2, 2)])
    assert (found.measured, found.known, found.left, found.refused) == (2, 0, [], {})
    times = times_here(store.rows(), subject.captured, "float32", CPU, 1, 16)
    assert list(times) == sorted(subject.first_blocks().values())
    for by_degree in times.values():
        assert {degree: [own.samples for own in known] for degree, known in by_degree.items()} == {1: [1], 2: [2]}
        assert all(own.forward > 0 for known in by_degree.values() for own in known)


def test_what_is_known_is_not_measured_again_and_what_was_interrupted_goes_on(
    subject: Subject, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = stand_in(monkeypatch, subject)
    sizes = [Size(1, 1), Size(1, 2), Size(1, 4)]
    assert measure(store, subject, sizes, seconds=0).left == sizes[1:]  # the first in any case
    assert measure(store, subject, sizes).known == 1
    assert asked == sizes
    blocks.forget(store, subject, [Size(1, 2)])
    assert measure(store, subject, sizes).measured == 1 and asked[-1] == Size(1, 2)


def test_a_degree_that_the_model_cannot_have_is_left_out_and_said(
    subject: Subject, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(context: object, captured: object, config: object, degree: int, batch: object):
        if degree == 3:
            raise PlanError("three is too many")
        return dict.fromkeys(subject.first_blocks(), TIMES)

    monkeypatch.setattr(blocks, "measure_on_rank", measured)
    found = measure(store, subject, [Size(1, 1), Size(3, 1), Size(3, 2)])
    assert found.measured == 1 and found.refused == {3: "three is too many"} and not found.left


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"ranks": 2}, {"tokens": 32}])
def test_what_was_measured_otherwise_is_not_found(
    subject: Subject, store: Store, monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    stand_in(monkeypatch, subject)
    measure(store, subject, [Size(1, 1)])
    wanted: dict[str, object] = {"dtype": "float32", "ranks": 1, "tokens": 16, **other}
    assert times_here(store.rows(), subject.captured, device=CPU, **wanted) == {}  # pyright: ignore


def test_what_was_measured_compiled_otherwise_is_not_found(
    subject: Subject, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, subject)
    measure(store, subject, [Size(1, 1)])
    found = {mode: times_here(store.rows(), subject.captured, "float32", CPU, 1, 16, mode) for mode in ("off", "auto")}
    assert found["off"] == found["auto"] != {}  # on CPUs the same
    assert times_here(store.rows(), subject.captured, "float32", CPU, 1, 16, "aot_eager") == {}
    compiled = replace(subject, compile="aot_eager")
    assert measure(store, compiled, [Size(1, 1)]).measured == 1


@pytest.mark.parametrize("name", ["graph", "torch", "device"])
def test_stale_and_foreign_rows_are_not_used(
    subject: Subject, store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stand_in(monkeypatch, subject)
    measure(store, subject, [Size(1, 1)])
    rows = [replace(row, key={**row.key, name: "another"}) for row in store.rows()]
    assert times_here(store.rows(), subject.captured, "float32", CPU, 1, 16)
    assert times_here(rows, subject.captured, "float32", CPU, 1, 16) == {}


def test_a_block_of_which_a_part_is_missing_is_left_out() -> None:
    key: dict[str, str | int] = {"block": "a", "degree": 1, "samples": 2}
    rows = [(f"block {part}", key, 1.0) for part in PARTS]
    assert block_times(rows) == {"a": {1: (BlockTime(2, 1.0, 1.0, 0.0),)}}
    assert block_times(rows[:2]) == {} and block_times([("product", {"size": 1}, 1.0)]) == {}


# What becomes of it.


def test_times_lie_on_lines_between_samples() -> None:
    known = (BlockTime(1, 1.0, 2.0, 3.0), BlockTime(3, 2.0, 4.0, 7.0))
    assert seconds_at(known, 0.5) == (1.0, 2.0, 3.0)
    assert seconds_at(known, 2) == (1.5, 3.0, 5.0)
    assert seconds_at(known, 6) == (4.0, 8.0, 14.0)


def test_measured_blocks_stand_before_what_the_device_offers() -> None:
    shape = Shape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocabulary=512, tokens=32)
    work = transformer("m", shape)
    timed = work.timed({"layer": {1: (BlockTime(2, 1.0, 2.0, 3.0),)}})
    machine = Machine(Cluster.read("2 H100").nodes[0], Software(), Plan(), samples=2)
    seconds = machine.seconds(timed.classes[1], "none")
    assert (seconds.forward, seconds.backward, seconds.weight) == (1.0, 2.0, 3.0)
    assert machine.seconds(timed.classes[1], "unit").again == 1.0
    assert machine.seconds(timed.classes[0], "none") == machine.seconds(work.classes[0], "none")
    split = Machine(Cluster.read("2 H100").nodes[0], Software(), Plan(tp=2), samples=2)
    summed = split.seconds(timed.classes[1], "none")
    assert summed.weight == 1.5 and summed.forward > 0.5  # at a degree that was not measured: a half, and sums


def test_what_is_computed_again_takes_its_part_of_what_was_measured() -> None:
    """Were it taken for what the device offers, the cheapest recomputation would seem free where blocks are slower."""
    work = transformer("m", Shape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocabulary=512, tokens=32))
    machine = Machine(Cluster.read("1 H100").nodes[0], Software(launch=0.0), Plan(), samples=2)
    layer, offered = work.classes[1], machine.seconds(work.classes[1], "light")
    times = {"layer": {1: (BlockTime(2, 100 * offered.forward, 1.0, 1.0),)}}
    slower = machine.seconds(work.timed(times).classes[1], "light")
    assert layer.is_layer and offered.again > 0
    assert slower.again == pytest.approx(100 * offered.again)


def test_slices_take_what_was_measured_of_as_many_tokens_and_a_little_more() -> None:
    """Were a slice taken for what the device offers, it would seem faster wherever a block is slower than that."""
    timed = transformer("m", Shape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocabulary=512, tokens=32)).timed(
        {
            "layer": {1: (BlockTime(1, 1.0, 2.0, 3.0), BlockTime(4, 4.0, 8.0, 12.0))},
            "head": {1: (BlockTime(1, 2, 2, 2),)},
        }
    )
    node = Cluster.read("2 H100").nodes[0]
    by_kind = {work.name: work for work in timed.classes}

    def total(name: str, plan: Plan) -> float:
        return Machine(node, Software(), plan, samples=4).seconds(by_kind[name], "none").total

    sliced = Plan(slices=((8, 8, 8, 8),))
    assert total("layer", sliced) == pytest.approx(SLICED_LAYER * total("layer", Plan()))
    assert total("head", sliced) == pytest.approx(total("head", Plan()))  # nothing in it looks back


def test_a_degree_is_that_of_the_nearest_below_it() -> None:
    times = {2: (BlockTime(1, 1.0, 2.0, 4.0),), 4: (BlockTime(1, 0.75, 1.0, 2.0),)}
    assert at_degree(times, 4, 1) == (0.75, 1.0, 2.0)
    assert at_degree(times, 3, 1) == pytest.approx((2 / 3, 4 / 3, 8 / 3))
    assert at_degree(times, 1, 1) == (2.0, 4.0, 8.0) and at_degree(times, 8, 1) == (0.375, 0.5, 1.0)


def test_what_steps_take_besides_is_a_line_over_their_micro_batches() -> None:
    found = [Reference(mb, 10 + 2 * mb + 0.5 * mb + 3, 10 + 2 * mb) for mb in (1, 2, 4)]
    assert overheads(found) == pytest.approx((0.5, 3.0))
    assert overheads([Reference(mb, 1.0, 2.0) for mb in (1, 2)]) == (0.0, 0.0)  # never less than nothing


def test_measured_segments_are_those_of_instructions() -> None:
    from phalanx.predict.from_profile import SegmentSeconds

    found = by_instruction({(3, 1): SegmentSeconds(1, 2, 3, 4)}, speed=0.5)
    assert found == {(Op.F, 3, 1): 0.5, (Op.A, 3, 1): 0.5, (Op.B, 3, 1): 1, (Op.W, 3, 1): 1.5, (Op.BW, 3, 1): 2}


# The command.


def test_profile_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subject: Subject, quick: None
) -> None:
    monkeypatch.setattr("phalanx.profile.store.profiles_path", lambda: tmp_path / "p.sqlite")
    monkeypatch.setattr("phalanx.profile.hardware.answer", lambda *given: 1e9)
    given = ["--model", "gpt2", "--tiny", "--seq-len", "16", "--samples", "1,2", "--dtype", "float32"]
    out = tmp_path / "p.json"
    assert main(["profile", *given, "--device", "cpu", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "forward, input gradients, weight gradients" in said and "degree 1, by samples 1: " in said
    kinds = {row["kind"] for row in json.loads(out.read_text())["rows"]}
    assert {f"block {part}" for part in PARTS} <= kinds
    assert main(["profile", *given, "--samples", "1,2,4", "--seconds", "0", "--device", "cpu"]) == 0
    assert "no time was left" not in capsys.readouterr().out  # one size was missing, and the first is always measured


def profile_file(path: Path, device: str, seconds: float) -> Path:
    """Rates of a device, and what a block of gpt2 takes on it."""
    common = {"device": device, "ranks": 1, "devices": 1, "nodes": 1, "by": "profile", "torch": "2"}
    rows = [("product", {"size": side, "dtype": "bfloat16"}, 1e14) for side in (512, 4096)]
    rows += [("memory", {"size": 2**30, "dtype": "any"}, 1e12)]
    name = load("gpt2").blocks[1].name  # pyright: ignore
    key = {"model": "gpt2", "block": name, "graph": "g", "degree": 1, "samples": 1, "tokens": 1024, "dtype": "bfloat16"}
    rows += [(f"block {part}", key, seconds) for part in PARTS]
    made = [{"kind": kind, "key": {**common, **own}, "value": value, "made": "now"} for kind, own, value in rows]
    path.write_text(json.dumps({"format": "phalanx profile", "version": 1, "rows": made}))
    return path


def test_plans_are_judged_by_measured_blocks_of_the_clusters_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["estimate", "--model", "gpt2", "--seq-len", "1024", "--cluster", "1 A100", "--plan", "dp=1", "--json",
             "--batch-size", "1"]  # fmt: skip
    file = profile_file(tmp_path / "p.json", "NVIDIA A100-SXM4-80GB", seconds=0.25)
    assert main([*asked, "--profile", str(file)]) == 0
    said = capsys.readouterr()
    assert "blocks as measured (" in said.err
    assert json.loads(said.out)["step_seconds"] > 12 * 0.5  # a forward and a backward of twelve layers
    assert main([*asked, "--profile", str(profile_file(tmp_path / "q.json", "NVIDIA H100 80GB HBM3", 0.25))]) == 2
    assert "and the cluster has A100" in capsys.readouterr().err


def test_blocks_count_only_of_the_device_whose_rates_are_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may hold two devices of a kind."""
    first, other = (profile_file(tmp_path / name, f"NVIDIA A100-{name}", 0.25) for name in ("PCIE", "SXM4"))
    both = [json.loads(file.read_text()) for file in (first, other)]
    rates = [row for row in both[1]["rows"] if not row["kind"].startswith("block")]
    first.write_text(json.dumps({**both[0], "rows": both[0]["rows"] + rates}))
    asked = ["estimate", "--model", "gpt2", "--seq-len", "1024", "--cluster", "1 A100", "--plan", "dp=1"]
    assert main([*asked, "--profile", str(first)]) == 0
    assert "blocks as measured" not in capsys.readouterr().err
    assert main([*asked, "--profile", str(other)]) == 0
    assert "blocks as measured" in capsys.readouterr().err
    newer = [{**row, "made": "now, and later"} for row in both[0]["rows"]]
    first.write_text(json.dumps({**both[0], "rows": newer + rates}))  # of two devices the last that was measured counts
    assert main([*asked, "--profile", str(first)]) == 0
    assert "blocks as measured" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["degrees", "samples"])
def test_sizes_that_are_none_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", "gpt2", f"--{option}", "1,none"]) == 2
    said = capsys.readouterr().err
    assert f"option {option} = '1,none' is not a list of numbers" in said and f"--{option} 1,2,4" in said


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (["--degrees", "2"], "name it (--model NAME), or leave out --degrees"),
        (["--seq-len", "8"], "name it (--model NAME), or leave out --seq-len"),
        (["--data", "stdlib", "--samples", "1"], "→ leave out --samples"),
        (["--data", "stdlib", "--model", "gpt2", "--tiny"], "→ leave out --tiny"),
        (["--data", "stdlib", "--ranks", "2"], "→ leave out --ranks"),
        (["--data", "stdlib", "--import", "p.json"], "→ leave out --import"),
        (["--import", "p.json", "--out", "q.json"], "→ leave out --out"),
        (["--import", "p.json", "--model", "gpt2", "--fresh"], "→ leave out --model"),
        (["--import", "p.json", "--fresh"], "→ leave out --fresh"),
        (["--text-key", "body"], "give --data, or leave out --text-key"),
        (["--model", "gpt2", "--on-broken", "skip"], "give --data, or leave out --on-broken"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    given: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *given]) == 2
    said = capsys.readouterr().err
    assert "does nothing" in said and advice in said
