"""Loss spikes are not learned from; the largest batch that fits; snapshots of memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.engine.step import Outcome
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.context import RankContext
from phalanx.observe import memory_snapshot as snapshots
from phalanx.observe.runlog import read_log
from phalanx.observe.story import story
from phalanx.training.reporting import Reporter, StepFacts
from phalanx.training.spikes import spike_limit
from tests.run_helpers import losses, records, short_run


def test_the_limit_is_a_multiple_of_the_median_of_earlier_losses_and_needs_some():
    recent = [(step, float(step)) for step in range(1, 12)]
    assert spike_limit(recent[:8], 9, 2.0) is None, "seven losses are known of earlier steps than the one before"
    assert spike_limit(recent[:8], 10, 2.0) == 2.0 * 4.5
    assert spike_limit(recent[:9], 10, 2.0) == 2.0 * 4.5, "whether the one before was read by then or not"


class Sudden:
    """Samples of a module, one batch of which is far from the others."""

    def __init__(self, spike: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [(torch.randn(3, generator=generator), torch.tensor(1.0)) for _ in range(60)]
        if spike is not None:
            self.rows[4 * (spike - 1)] = (torch.full((3,), 50.0), torch.tensor(-500.0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(("x", "y"), self.rows[index]))


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(x)[:, 0], y)


OPTIONS = {"tiny": False, "steps": 14, "shuffle": False, "spike_factor": 20.0, "checkpoint_every": 5, "lr": 1e-3}


def test_a_spike_is_skipped_and_said_and_a_resumed_run_skips_the_same(tmp_path: Path):
    data = Sudden(spike=12)
    model = Linear()
    result = short_run(model, data, tmp_path / "whole", **OPTIONS)
    (spike,) = [record for record in records(tmp_path / "whole", "step") if record.get("spike")]
    assert spike["step"] == 12 and spike["skipped"] and result.skipped == 1
    first = {**OPTIONS, "steps": 10, "lr_steps": 14}
    with pytest.raises(ConfigError, match=r"spike_factor: was 20\.0, now 30\.0"):
        short_run(Linear(), data, tmp_path / "parts", **first)
        short_run(Linear(), data, tmp_path / "parts", **{**first, "steps": 14, "spike_factor": 30.0}, resume="auto")
    short_run(Linear(), data, tmp_path / "parts", **{**first, "steps": 14}, resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_run_goes_back_before_a_spike_and_passes_its_batches_over(tmp_path: Path):
    data, options = Sudden(spike=12), {**OPTIONS, "on_spike": "rollback", "lr_schedule": "constant"}
    result = short_run(Linear(), data, tmp_path / "a", **options)
    assert result.steps == 14
    seen = [(record["step"], record["samples"]) for record in records(tmp_path / "a", "step")]
    assert seen[11:13] == [(12, 48), (11, 52)], "from step 10 on, without the samples of the steps 11 and 12"
    without = Sudden(spike=None)
    without.rows = data.rows[:40] + data.rows[48:] + data.rows[:8]
    plain = short_run(Linear(), without, tmp_path / "b", **{**OPTIONS, "lr_schedule": "constant"})
    assert result.losses == plain.losses[10:], "as if those samples had never been"
    short_run(Linear(), data, tmp_path / "a", **{**options, "steps": 15}, resume="auto")
    assert records(tmp_path / "a", "step")[-1]["samples"] == 15 * 4 + 8, "also when the run goes on"


def test_a_spike_before_the_first_checkpoint_is_skipped_and_forgotten(tmp_path: Path):
    options = {**OPTIONS, "on_spike": "rollback", "steps": 13, "checkpoint_every": 11}
    result = short_run(Linear(), Sudden(spike=10), tmp_path, **options)
    assert result.skipped == 1 and not records(tmp_path, "rollback")


@pytest.mark.parametrize("spike, left_out", [(10, "5 batches"), (11, "2 batches")])
def test_a_spike_that_is_told_of_a_step_late_is_not_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spike: int, left_out: str
):
    def step_on_a_gpu(reporter: Reporter, facts: StepFacts, outcome: Outcome) -> None:
        reporter.flush()
        reporter._waiting = facts, outcome

    monkeypatch.setattr(Reporter, "step", step_on_a_gpu)
    short_run(Linear(), Sudden(spike), tmp_path, **{**OPTIONS, "on_spike": "rollback", "steps": 12})
    (back,) = records(tmp_path, "rollback")
    assert back["message"].endswith(f"going back to step-{(spike - 1) // 5 * 5:08}, and leaving {left_out} out")


def test_a_run_that_spikes_again_and_again_ends(tmp_path: Path):
    data = Sudden(spike=None)
    for step in (12, 13, 14, 15):
        data.rows[4 * (step - 1)] = (torch.full((3,), 50.0), torch.tensor(-500.0))
    options = {**OPTIONS, "on_spike": "rollback", "checkpoint_every": 1}
    with pytest.raises(PhalanxError, match=r"going back to step-00000011(.|\n)*4th time(.|\n)*lower lr"):
        short_run(Linear(), data, tmp_path, **options)
    told = list(story(read_log(tmp_path / "log-rank0.jsonl")))
    assert [line.partition("  ")[2] for line in told if "that would be" not in line and "going back" in line] == [
        f"the loss of step {step} is a spike: going back to step-000000{step - 1}, and leaving 1 batch out"
        for step in (12, 12, 12, 12)
    ]
    assert "failed: the loss of step" in told[-1] and "that would be for the 4th time" in told[-1]


def test_going_back_needs_a_limit_and_checkpoints(tmp_path: Path):
    for left_out in ({"spike_factor": None}, {"checkpoint_every": 0}):
        with pytest.raises(ConfigError, match=r"on_spike = 'rollback' needs to know(.|\n)*set spike_factor"):
            short_run(Linear(), Sudden(None), tmp_path, **{**OPTIONS, "on_spike": "rollback", **left_out})


def test_ranks_of_a_launcher_cannot_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("phalanx.training.trainer.join", lambda *given, **named: RankContext.alone())
    with pytest.raises(
        ConfigError, match=r"'rollback' begins anew from a checkpoint, which ranks of a launcher cannot"
    ):
        short_run(Linear(), Sudden(None), tmp_path, **{**OPTIONS, "on_spike": "rollback"})


def test_without_a_limit_the_same_loss_is_learned_from(tmp_path: Path):
    result = short_run(Linear(), Sudden(spike=12), tmp_path, **{**OPTIONS, "spike_factor": None})
    assert result.skipped == 0


def test_inspect_says_which_batch_fits(capsys: pytest.CaptureFixture[str]):
    from phalanx.cli.main import main

    command = [
        "phalanx",
        "inspect",
        "gpt2",
        "--seq-len",
        "128",
        "--batch-size",
        "8",
        "--plan",
        "dp=2",
        "--largest-batch",
        "--memory",
    ]
    found = _output(capsys, [*command, "4GiB"], main)
    assert "largest batch that fits: --batch-size " in found and "(2 × 1 × " in found
    assert "no batch fits: the smallest, of 2, needs" in _output(capsys, [*command, "1GiB"], main)
    assert "does nothing without memory" in _output(capsys, ["phalanx", "inspect", "gpt2", "--largest-batch"], main)


def _output(capsys: pytest.CaptureFixture[str], arguments: list[str], main: Any) -> str:
    before, sys.argv = sys.argv, arguments
    try:
        main()
    except SystemExit:
        pass
    finally:
        sys.argv = before
    said = capsys.readouterr()
    return said.out + said.err


def test_the_snapshot_of_a_step_is_written_even_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[Any] = []
    fake = SimpleNamespace(
        _record_memory_history=lambda *args, **options: said.append(options),
        _dump_snapshot=lambda path: said.append(path),
    )
    monkeypatch.setattr(snapshots, "_allocator", lambda: fake)
    with snapshots.memory_snapshot(1, 2, tmp_path / "a"):
        assert not said
    with pytest.raises(RuntimeError), snapshots.memory_snapshot(2, 2, tmp_path / "a"):
        raise RuntimeError("out of memory")
    assert said == [{"max_entries": 200_000}, str(tmp_path / "a"), {"enabled": None}]


def test_there_is_no_snapshot_of_main_memory(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"memory_snapshot = 1: there is none of cpu(.|\n)*leave it out"):
        short_run("phalanx-demo", "synthetic", tmp_path, memory_snapshot=1, device="cpu")
