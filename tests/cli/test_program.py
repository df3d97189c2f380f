"""`phalanx program`: what it prints and writes, and what is said about options that cannot act."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.model.facts.facts import load
from phalanx.predict.from_facts import Device
from phalanx.predict.predict import predict
from phalanx.predict.timeline import Timeline
from phalanx.program.instructions import from_text

GPT2 = ("program", "--model", "gpt2", "--seq-len", "256")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main([*GPT2, *arguments]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*GPT2, *arguments]) == 2
    return capsys.readouterr().err


def timeline_of(plan: str, slower: float = 1.0) -> Timeline:
    facts = load("gpt2")
    assert facts is not None
    timeline = predict(facts, plan, None, 8, {"batch": 8, "tokens": 256}, Device()).timeline
    events = (e._replace(start=slower * e.start, end=slower * e.end) for e in timeline.events)
    return Timeline(tuple(events), ({"measured": 1024**3},) * 2)


def test_it_shows_the_plan_with_reasons_stages_the_step_and_memory(capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, "--plan", "pp=2")
    assert lines[0] == "gpt2: causal-lm, bfloat16; a micro-batch is batch 1, tokens 256"
    assert lines[1].startswith("plan pp=2,dp=1,mb=8,schedule=1f1b,stages=")
    text = "\n".join(lines)
    assert "micro-batches 8: fills 2 stages with 11 % bubble" in text
    assert "assumed, not measured: devices that reach 100.0 TFLOP/s" in text and "25.0 GB/s" in text
    stages = [line.split() for line in lines[lines.index("") + 2 :][:2]]
    assert [stage[:2] for stage in stages] == [["0", "0"], ["1", "1"]]
    assert sum(float(stage[-1].rstrip("%")) for stage in stages) == pytest.approx(100, abs=0.2)
    assert any(line.startswith("predicted: step ") and "bubble" in line for line in lines)
    assert any(line.startswith("rank 1 ·") for line in lines)
    header = next(line.split() for line in lines if "peak" in line)
    assert header[3:10] == ["peak", "parameters", "masters", "moments", "gradients", "activations", "inputs"]


def test_without_master_weights_ranks_hold_none(capsys: pytest.CaptureFixture[str]):
    def of_rank_0(*more: str) -> str:
        lines = shown(capsys, "--plan", "pp=2", *more)
        return lines[next(i for i, line in enumerate(lines) if "peak" in line) + 1]

    assert " 0 B " not in of_rank_0() and " 0 B " in of_rank_0("--no-master-weights")


def test_it_is_plain_in_a_file_and_coloured_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert "\x1b" not in "".join(shown(capsys, "--plan", "pp=2"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in "".join(shown(capsys, "--plan", "pp=2"))


def test_replicas_are_shown_once(capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, "--ranks", "4", "--plan", "pp=2,mb=2")
    assert any(line.endswith("one of 2 equal replicas") for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("rank ") and "F0" in line] == ["0", "2"]
    assert any(line.split()[:2] == ["1", "2–3"] for line in lines)


def test_the_assumed_device_can_be_chosen(capsys: pytest.CaptureFixture[str]):
    text = "\n".join(shown(capsys, "--device-flops", "2e12", "--link-bytes", "1e9"))
    assert "devices that reach 2.0 TFLOP/s" in text and "links of 1.0 GB/s" in text


def test_lowered_programs_are_printed_as_text_that_reads_back(capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, "--plan", "pp=2,mb=2", "--lowered")
    facts = load("gpt2")
    assert facts is not None
    compiled = predict(facts, "pp=2,mb=2", None, 8, {"batch": 8, "tokens": 256}, Device()).compiled
    assert [line.partition(": ")[0] for line in lines] == ["rank 0", "rank 1"]
    assert tuple(from_text(line.partition(": ")[2]) for line in lines) == (compiled.program(0), compiled.program(1))


def test_pictures_and_traces_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    lines = shown(capsys, "--plan", "pp=2", "--svg", str(picture), "--trace", str(trace))
    assert lines[-2:] == [f"svg written to {picture}", f"trace written to {trace}"]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert any(event["name"] == "F1.0/13" for event in json.loads(trace.read_text())["traceEvents"])


def test_a_measured_timeline_is_laid_beside_the_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file, picture = tmp_path / "measured.json", tmp_path / "both.svg"
    file.write_text(timeline_of("pp=2", slower=2.0).to_json())
    lines = shown(capsys, "--plan", "pp=2", "--measured", str(file), "--svg", str(picture))
    assert any(line.startswith("measured: step ") for line in lines)
    rows = {cells[0]: cells for cells in map(str.split, lines) if cells}
    assert rows["step"][-1] == rows["F"][-1] == rows["BW"][-1] == "-50.0%"
    assert rows["bubble"][1] == rows["bubble"][2]
    assert ["1.0", "GiB", "1.0", "GiB"] in [cells[-4:] for cells in map(str.split, lines)]
    assert "measured: " in picture.read_text(encoding="utf-8")


def test_the_options_about_the_model_choose_whose_facts_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[object] = []

    def find(*arguments: object, live: bool, lora: str | None):
        asked.extend([*arguments, live, lora])
        return load("gpt2")

    monkeypatch.setattr("phalanx.cli.program.find_facts", find)
    shown(capsys, "--task", "causal-lm", "--dtype", "float32", "--tiny")
    assert asked == ["gpt2", "causal-lm", "float32", True, False, None]


def test_a_zoo_model_needs_no_torch():
    code = (
        "import sys; from phalanx.cli.main import main; code = main(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib') if m in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *GPT2, "--plan", "pp=4"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--plan", "schedule=1f1f"), "unknown schedule '1f1f'", "did you mean '1f1b'"),
        (("--plan", "pp=16"), "16 stages need at least as many blocks, and the model has 14", "fewer stages"),
        (("--plan", "pp=2,mb=9"), "batch of 8 samples into more micro-batches", "mb=8 or less"),
        (("--plan", "pp=2", "--ranks", "3"), "pp=2 does not divide the number of ranks", "use pp=1 or 3"),
        (("--dtype", "bfloat17"), "option dtype = 'bfloat17' is not one of", "bfloat16"),
        (("--device-flops", "0"), "option device-flops = 0.0 is not a speed", "above 0"),
        (("--link-bytes", "-1"), "option link-bytes = -1.0 is not a speed", "above 0"),
        (("--lowered", "--svg", "x.svg"), "option --svg does nothing with --lowered", "leave one"),
        (("--values", "--memory", "80GiB"), "option --memory does nothing with --values", "leave one"),
        (("--lowered", "--values"), "exclude each other", "give one"),
        (("--link-bytes", "inf"), "option link-bytes = inf is not a speed", "above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str, hint: str
):
    error = refused(capsys, *arguments)
    assert message in error and hint in error.partition("→")[2]


def test_the_plan_may_stand_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "plan.yaml").write_text("pp: 2\nmb: 4\n")
    assert shown(capsys, "--plan", str(tmp_path / "plan.yaml")) == shown(capsys, "--plan", "pp=2,mb=4")


def test_slices_are_refused_where_tokens_see_later_ones(capsys: pytest.CaptureFixture[str]):
    assert main(["program", "--model", "bert-base-cased", "--plan", "pp=2,mb=2,slices=4", "--batch-size", "2"]) == 2
    error = capsys.readouterr().err
    assert "slices need causal attention, and in a model for masked-lm tokens see later ones" in error


@pytest.mark.parametrize("option", ["svg", "trace"])
def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str):
    target = tmp_path / "missing" / "file"
    error = refused(capsys, f"--{option}", str(target))
    assert f"option {option} = '{target}' cannot be written: No such file or directory" in error
    assert "→ name a file in a folder that exists" in error


def test_a_png_without_matplotlib_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "option png needs matplotlib" in refused(capsys, "--png", str(tmp_path / "step.png"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe", "is not text"),
        (b"{}", "is not a timeline: KeyError: 'format'"),
        (timeline_of("pp=2").to_json().encode(), "is of 2 ranks, and the plan has 1"),
    ],
)
def test_a_measured_file_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, message: str
):
    file = tmp_path / "measured.json"
    if content is not None:
        file.write_bytes(content)
    error = refused(capsys, "--plan", "pp=1", "--measured", str(file))
    assert f"option measured = '{file}' {message}" in error and "→" in error


def test_it_says_whether_a_plan_fits_and_what_would(capsys: pytest.CaptureFixture[str]):
    assert shown(capsys, "--plan", "pp=2,mb=8", "--memory", "80GiB")[-1].startswith("fits: rank 0 holds ")
    lines = shown(capsys, "--plan", "pp=2,mb=2,dp=2", "--memory", "1500MiB")
    found = next(i for i, line in enumerate(lines) if line.startswith("does not fit: rank "))
    assert lines[found].endswith("and 1.5 GiB are there")
    assert all(line.endswith("× the step") and " would: " in line for line in lines[found + 1 :])
    assert len(lines) > found + 1
    lines = shown(capsys, "--plan", "pp=2,mb=8", "--memory", "1KiB")
    assert lines[-1].startswith("  no change of this plan would; the least is ")
    assert "option memory = 'much' is not an amount of memory" in refused(capsys, "--memory", "much")
