"""`phalanx inspect`: the table, its numbers, and what is said about options that cannot act."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import inspect, models
from phalanx.cli.main import main
from phalanx.model.facts.facts import load
from phalanx.model.zoo import zoo_table
from phalanx.predict.update import Update

LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"


def _data(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_equal_layers_are_one_row_with_totals_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", LLAMA_70B]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "meta-llama/Llama-3.3-70B-Instruct causal-lm, bfloat16, batch 1, tokens 2048",
        "block units parameters forward FLOPs saved crosses to the next block",
        "embedding 1.1G 0 16.0 KiB [1, 2048, 8192] bfloat16, 32.0 MiB",
        lines[3],
        lines[4],
        "parameters 70,553,706,496",
        "training FLOPs per token 425.1G forward and backward",
        lines[7],
        "weights 131.4 GiB bfloat16",
        "gradients 262.8 GiB float32",
        "optimizer state 788.5 GiB AdamW: float32 master weights and two moments",
    ]
    assert lines[3].startswith("model.layers.0 … 79 ×80 self_attn, feed-forward 855.7M 3.6T ")
    assert lines[3].endswith(" [1, 2048, 8192] bfloat16, 32.0 MiB")
    assert lines[4].startswith("head 1.1G 4.3T ")
    assert lines[7].startswith("saved for the backward pass ") and lines[7].endswith(" one batch, nothing recomputed")


def test_a_tied_parameter_is_counted_once_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "gpt2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "parameters 124,439,808 transformer.wte.weight is used by embedding, head" in shown


def test_json_holds_every_block_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    data = _data(capsys, "gpt2", "--batch-size", "4", "--seq-len", "256")
    assert (data["model"], data["task"], data["dtype"]) == ("gpt2", "causal-lm", "bfloat16")
    assert data["dims"] == {"batch": 4, "tokens": 256}
    assert [block["name"] for block in data["blocks"]][::13] == ["embedding", "head"]
    assert sum(block["forward_flops"] for block in data["blocks"]) == data["totals"]["forward_flops"]
    assert data["totals"]["training_flops"] == 3 * data["totals"]["forward_flops"]
    assert data["totals"]["training_flops_per_token"] == data["totals"]["training_flops"] // 1024
    for block in data["blocks"]:
        assert sum(unit["forward_flops"] for unit in block["units"]) == block["forward_flops"]
    [crossing] = data["blocks"][3]["crossing"]
    assert crossing == {
        "name": "transformer.h.2:0", "shape": [4, 256, 768], "dtype": "bfloat16", "bytes": 4 * 256 * 768 * 2
    }  # fmt: skip


def test_tokens_default_to_what_the_model_can_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert _data(capsys, "gpt2")["dims"]["tokens"] == 1024
    assert _data(capsys, "meta-llama/Llama-3.2-1B")["dims"]["tokens"] == 2048
    assert _data(capsys, "t5-small", "--seq-len", "512")["dims"] == {"batch": 1, "source": 512, "tokens": 512}
    assert _data(capsys, "vit-base", "--batch-size", "2")["dims"] == {"batch": 2}


def test_memory_follows_the_precision() -> None:
    facts = load("gpt2")
    assert facts is not None
    count, dims = facts.num_parameters, {"batch": 1, "tokens": 8}
    for dtype, sizes in {"bfloat16": (2, 4, 12), "float32": (4, 4, 8), "float64": (8, 8, 16)}.items():
        sums = inspect.totals(replace(facts, dtype=dtype), dims)
        names = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
        assert [sums[name] for name in names] == [size * count for size in sizes]
    assert inspect.totals(facts, dims, Update(master_weights=False))["optimizer_bytes"] == 4 * count


def test_memory_without_master_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert _data(capsys, "gpt2", "--no-master-weights")["totals"]["optimizer_bytes"] == 4 * 124_439_808
    held = _data(capsys, "gpt2", "--no-master-weights", "--plan", "mb=1")["memory"]["ranks"][0]
    assert held["masters"] == 0 and held["moments"] == 4 * 124_439_808


def test_blocks_of_different_lists_are_named_in_full() -> None:
    facts = load("gpt2")
    assert facts is not None
    embedding, first, second, *_, head = facts.blocks
    assert models.run_name([head]) == "head"
    assert models.run_name([first, second]) == "transformer.h.0 … 1  ×2"
    assert models.run_name([embedding, head]) == "embedding … head  ×2"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["gtp2"], "unknown model 'gtp2'", "hf download"),
        (
            ["gpt2", "--dtype", "bf16"],
            "dtype = 'bf16' is not one of bfloat16, float16, float32, float64",
            "bfloat16",
        ),
        (["gpt2", "--seq-len", "1025"], "seq_len = 1025 is more than 'gpt2' has positions for", "between 1 and 1024"),
        (["vit-base", "--seq-len", "8"], "seq_len = 8 does nothing: the inputs of 'google/vit", "leave seq_len out"),
        (["gpt2", "--task", "causal"], "unknown task 'causal'; did you mean 'causal-lm'", ""),
        (["gpt2", "--task", "masked-lm"], "'gpt2' (model type 'gpt2') cannot be trained for 'masked-lm'", "choose one"),
        (["gpt2", "--batch-size", "0"], "--batch-size", "phalanx inspect --help"),
    ],
)
def test_a_mistake_is_named_with_the_next_step(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _error(capsys, *arguments)
    assert message in shown and hint in shown


@pytest.mark.parametrize(
    "options", [{"tiny": True}, {"live": True}, {"dtype": "float64"}, {"task": "text-classification"}]
)
def test_shipped_facts_are_not_used_where_they_are_about_something_else(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Captures(Exception):
        pass

    def capture(*_: Any, **__: Any) -> None:
        raise Captures

    monkeypatch.setattr("phalanx.model.capture.capture", capture)
    asked = {"task": None, "dtype": "bfloat16", "tiny": False, "live": False}
    assert models.find_facts("gpt2", **asked) == load("gpt2")
    with pytest.raises(Captures):
        models.find_facts("gpt2", **(asked | options))


def test_a_folder_goes_before_the_zoo_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "no-such-type"}')
    monkeypatch.chdir(tmp_path)
    assert "cannot read 'gpt2/config.json'" in _error(capsys, "gpt2")


def test_a_model_that_is_not_shipped_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    data = _data(capsys, "phalanx-demo", "--tiny", "--dtype", "float32", "--seq-len", "16")
    assert (data["model"], data["dtype"], data["notes"]) == ("phalanx-demo-tiny", "float32", [])
    names = [block["name"] for block in data["blocks"]]
    assert names == ["embedding", *[f"model.layers.{i}" for i in range(4)], "head"]
    assert data["totals"]["saved_bytes"] > 0


def _run(*arguments: str, **environment: str) -> tuple[str, float, int]:
    """Output, seconds and the most memory used (bytes) of a `phalanx inspect` in a process of its own.

    Linux only: what getrusage calls the peak begins with that of the process which started it.
    """
    code = (
        "import sys; from phalanx.cli.main import main; assert main(sys.argv[1:]) == 0;"
        "[peak] = [line for line in open('/proc/self/status') if line.startswith('VmHWM')];"
        "print('torch' in sys.modules, peak.split()[1])"
    )
    begin = time.perf_counter()
    line = [sys.executable, "-c", code, "inspect", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    kilobytes = int(done.stdout.split()[-1])
    return done.stdout, time.perf_counter() - begin, kilobytes * 1024


def test_a_70b_model_is_shown_at_once_without_torch() -> None:
    shown, seconds, memory = _run(LLAMA_70B)
    assert "70,553,706,496" in shown and shown.split()[-2] == "False"
    assert seconds < 20 and memory < 2**28


@pytest.mark.long
def test_a_70b_model_is_captured_within_20_seconds_and_3_gib(tmp_path: Path) -> None:
    shown, seconds, memory = _run(LLAMA_70B, "--live", PHALANX_CACHE=str(tmp_path))
    assert "70,553,706,496" in shown and "model.layers.0 … 79  ×80" in shown
    assert seconds < 20 and memory < 3 * 2**30


@pytest.mark.long
def test_live_shows_what_is_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert _data(capsys, "phalanx-demo", "--live") == _data(capsys, "phalanx-demo")


def test_without_a_model_the_zoo_is_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["inspect"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == zoo_table.names()
    assert "gpt2 124.4M causal-lm" in [" ".join(line.split()) for line in shown]
    assert main(["inspect", "--json"]) == 0
    listed = {row["model"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(listed) == zoo_table.names()
    assert listed["gpt2"] == {"model": "gpt2", "parameters": 124_439_808, "task": "causal-lm"}


def test_with_a_plan_it_shows_what_ranks_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "gpt2", "--batch-size", "8", "--seq-len", "128", "--plan", "pp=2,zero=1,dp=2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(i for i, line in enumerate(lines) if line[:3] == ["rank", "peak", "parameters"])
    assert [line[0] for line in lines[header + 1 :]] == ["0", "2"]
    data = _data(capsys, "gpt2", "--batch-size", "8", "--seq-len", "128", "--plan", "dp=2", "--memory", "80GiB")
    (first, second), fit = data["memory"]["ranks"], data["memory"]["fit"]
    assert first == second and first["moments"] == 2 * first["masters"] and fit[0].startswith("fits: ")
    assert "does nothing without a plan" in _error(capsys, "gpt2", "--memory", "80GiB")


def test_the_model_may_be_named_as_with_other_verbs(capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", "--model", "gpt2"]) == 0
    named = capsys.readouterr().out
    assert main(["inspect", "gpt2"]) == 0 and capsys.readouterr().out == named
    assert "two models are named: gpt2 and llama" in _error(capsys, "gpt2", "--model", "llama")
