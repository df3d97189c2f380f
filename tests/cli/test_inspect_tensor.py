"""`phalanx inspect --tp`: what is shown of a split model, for people and for programs, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache

import pytest

from phalanx.cli import inspect, inspect_tensor
from phalanx.cli.main import main
from phalanx.cli.models import patiently

GPT2 = ("inspect", "gpt2", "--tiny", "--dtype", "float32", "--seq-len", "16")


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """The model is captured and measured once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "find_facts", cache(inspect.find_facts))
        patch.setattr(inspect_tensor, "capture_model", cache(inspect_tensor.capture_model))
        yield


def test_it_shows_splits_wholes_collectives_and_what_a_rank_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, "--tp", "3"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "gpt2-tiny causal-lm, float32, batch 1, tokens 16; tp=3"
    assert any(line.startswith("transformer.h.0 … 3 ×4 attn: heads 2, 1, 1 columns in 3 sections: ") for line in lines)
    assert any(line.startswith("embedding vocabulary: ") for line in lines)
    assert "sent between tensor-parallel ranks, for each block and micro-batch" in lines
    assert any(line.startswith("feed-forward backward all-reduce over 3 ranks") for line in lines)
    assert lines[-1].startswith("matrix FLOPs that are split 100.00% of ") and "the busiest rank" in lines[-1]
    assert lines[-2].startswith("parameters per rank ") and " to " in lines[-2]


def test_a_unit_that_is_not_split_shows_that_ranks_have_other_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, "--tp", "2", "--degrees", "2:1", "--sequence"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "batch 2, tokens 16; tp=2,degrees=2:1,sequence=yes" in lines[0]  # as few samples as there must be
    assert any("whole; ranks have other samples mlp.c_fc.bias, mlp.c_fc.weight" in line for line in lines)
    assert any("forward reduce-scatter over 2 ranks" in line for line in lines)


def test_what_ranks_do_alike_is_listed_once_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, "--tp", "5", "--replicate"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "multiplied alike by several ranks" in lines
    said = [line for line in lines if line.startswith("transformer.h.*.attn.c_attn.weight ×4 ")]
    assert said == ["transformer.h.*.attn.c_attn.weight ×4 4 heads cannot be divided between 5 ranks"]


def test_json_holds_the_report_beside_the_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, "--tp", "2", "--batch-size", "3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    tensor = data["tensor"]
    assert data["dims"] == {"batch": 3, "tokens": 16} and tensor["plan"] == "tp=2"
    assert tensor["share"] == pytest.approx(1.0) and tensor["flops"] == data["totals"]["forward_flops"]
    assert tensor["parameters"] == data["totals"]["parameters"] and len(tensor["parameters_per_rank"]) == 2
    assert [name for block in tensor["blocks"] for name in block["names"]] == [b["name"] for b in data["blocks"]]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--tp", "5"), "transformer.h.0 attends with 4 heads, which 5 ranks cannot split", "use tp=4 or less"),
        (("--tp", "0"), "plan: tp=0", "1 or more"),
        (("--degrees", "2"), "degrees=2 does nothing with tp=1", "use tp=2 or more"),
        (("--sequence",), "sequence=yes does nothing with tp=1", "use tp=2 or more"),
        (("--replicate",), "replicate=yes does nothing with tp=1", "use tp=2 or more"),
        (("--tp", "4", "--degrees", "3"), "degree 3 for all layers, which does not divide tp=4", "use 1, 2 or 4"),
        (("--tp", "2", "--degrees", "2:2:2"), "is for 3 units, and layer 0 of the model has 2", "2 degrees"),
        (("--tp", "2", "--degrees", "x"), "'x' is not the degrees of a layer", "4:4*2+2:1*6"),
        (("--tp=2", "--degrees=1", "--batch-size=3"), "between 2 groups of ranks, and there are 3", "--batch-size 2"),
    ],
)
def test_a_split_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str, hint: str
) -> None:
    assert main([*GPT2, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and hint in shown.err.partition("→")[2]


def test_without_tp_a_zoo_model_still_needs_no_torch() -> None:
    code = "import sys; from phalanx.cli.main import main; main(['inspect', 'gpt2']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_only_what_takes_long_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    with patiently("quick work", seconds=60):
        pass
    with patiently("slow work", seconds=0.01):
        time.sleep(0.3)
    assert capsys.readouterr().err == "slow work …\n"
