"""The benchmarks of one device at test size: every step of them but the GPU's own figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import gpu_trace
import largest
import memory
import offload


def test_a_case_is_predicted_and_run() -> None:
    case = memory.Case(memory.Setting("gpt2", 4, 32), "mb=2,recompute=light,offload=optimizer", "bfloat16, masters")
    found = memory.measure(case, "cpu", steps=3)
    assert len(found["seconds"]) == 1 and found["seconds"][0] > 0
    assert found["predicted"]["parameters"] > 0 and found["on_host"]["moments"] > 0


@pytest.mark.long
def test_the_largest_of_test_size_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["largest.py", "--device", "cpu", "--steps", "3", "--one", "mb=2 0"])
    largest.main()
    found = json.loads(capsys.readouterr().out)
    assert len(found["seconds"]) == 1 and found["predicted"] > 0 and found["tokens"] == 16 * 32
    shown = largest.row({"cap": None, "layers": 2, "candidate": "mb=2"} | found, "no device that is known")
    assert shown[0] == shown[5] == "–"  # no cap, and no share of a rate that nobody knows


def test_the_page_says_what_the_cap_costs() -> None:
    rows = [{"cap": cap, "layers": 2, "parameters": 5e9, "seconds": [seconds]} for cap, seconds in [(16, 5), (None, 4)]]
    assert largest._prices(rows) == ["- 5.00B parameters within 16 GiB, at 0.80× the tokens/s of the whole card."]


def test_of_a_trace_is_known_what_no_computation_hid() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1000.0, "dur": 100.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1050.0, "dur": 100.0,
         "args": {"bytes": 4096}},
        {"ph": "X", "cat": "kernel", "name": "norm", "ts": 1160.0, "dur": 40.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1140.0, "dur": 40.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5000.0},
        {"ph": "i", "name": "mark", "ts": 0.0},
    ]  # fmt: skip
    done = gpu_trace.read(events)
    computing, moving = gpu_trace.busy(done, "compute"), gpu_trace.busy(done, gpu_trace.OUT, gpu_trace.IN)
    assert [each.size for each in done if each.kind == gpu_trace.OUT] == [4096]
    assert gpu_trace.length(computing) == pytest.approx(140e-6) and gpu_trace.length(moving) == pytest.approx(130e-6)
    assert gpu_trace.length(gpu_trace.without(moving, computing)) == pytest.approx(60e-6)
    assert [(round(length * 1e6), name) for _, length, name in gpu_trace.gaps(done, 10e-6)] == [(60, "norm")]
    assert gpu_trace.picture(done, 10).splitlines()[0] == "compute █████   ██"


def test_the_page_of_offload_compares_with_its_first_plan() -> None:
    plain = {"plan": "mb=1", "seconds": [0.2], "peak": 40 * 2**30, "bytes_out": 0, "bytes_in": 0, "copying": 0,
             "exposed": 0}  # fmt: skip
    moved = plain | {"plan": "mb=1,offload=activations:3", "seconds": [0.201], "peak": 36 * 2**30, "copying": 0.02,
                     "bytes_out": 5e8, "bytes_in": 5e8, "timeline": "…"}  # fmt: skip
    assert offload.row(moved, plain, link=5e10)[1:5] == ["36.00", "-10.0%", "201.0", "+0.5%"]
    assert offload.row(moved, plain, link=5e10)[-1] == "100%" and offload.row(plain, plain, link=5e10)[-1] == "–"
    assert "activations:3" in offload._timeline([plain, moved])[1]
