"""The originals' interfaces: their documents' own examples run on ranks, and are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.compat import oases_benchmark, terapipe
from phalanx.compat.oases import BenchmarkLM
from phalanx.compat.optimus_prime import Optimus_p
from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model import reference
from phalanx.profile import hardware
from phalanx.profile.store import Store
from tests.compat import jobs
from tests.compat.jobs import LR, SAMPLES, STEPS, gpt2, texts


def require_equal(found: dict[str, Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


def plain_optimus_prime() -> tuple[list[float], nn.Module]:
    model = gpt2()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    losses: list[float] = []
    for step in range(STEPS):
        batch = torch.stack(texts()[step * SAMPLES : (step + 1) * SAMPLES])
        optimizer.zero_grad()
        with reference.default_dtype(torch.float64), reference.Widen():
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        ({}, "1f1b"),
        pytest.param({"pp_size": 2}, "gpipe", marks=pytest.mark.long),
        pytest.param({"pp_size": 2, "dp_size": 2}, "1f1b", marks=pytest.mark.long),
        pytest.param({"pp_size": 2, "tp_size": 2, "activation_ckpt": True}, "gpipe", marks=pytest.mark.long),
        pytest.param({"pp_size": 2, "swap_opt_in_fwdbwd": True}, "1f1b", marks=pytest.mark.long),
        pytest.param(
            {"pp_size": 2, "swap_opt_in_fwdbwd": True, "swap_model_in_optstep": True}, "gpipe", marks=pytest.mark.long
        ),
    ],
)
def test_optimus_primes_example_is_exact(pool: WorkerPool, tmp_path: Path, sizes: dict[str, Any], mode: str) -> None:
    world = 2 * sizes.get("dp_size", 1) * sizes.get("tp_size", 1)
    found = pool.run(jobs.optimus_prime, sizes, mode, tmp_path if not sizes else None, world=world)
    losses, model = plain_optimus_prime()
    assert found[0][2] == [True, False] and found[-1][2] == [False, True]
    torch.testing.assert_close(found[-1][0], losses, rtol=1e-9, atol=1e-12)
    require_equal(found[0][1], model)


@pytest.mark.parametrize(
    ("schedule", "tp", "dp"),
    [
        ("oases", 1, 1),
        pytest.param("oases", 2, 1, marks=pytest.mark.long),
        pytest.param("default_checkpoint", 2, 1, marks=pytest.mark.long),
        pytest.param("optim_comm_checkpoint", 2, 1, marks=pytest.mark.long),
        pytest.param("overlap_checkpoint", 2, 2, marks=pytest.mark.long),
    ],
)
def test_oases_sample_usage_is_exact(pool: WorkerPool, schedule: str, tp: int, dp: int) -> None:
    if tp * dp == 1:
        found = [jobs.oases(RankContext.alone(), schedule, tp, dp)]
    else:
        found = pool.run(jobs.oases, schedule, tp, dp, world=tp * dp)
    losses, model = jobs.plain_oases(found[0][1][0])
    assert all(rank[0] == found[0][0] for rank in found)
    torch.testing.assert_close(found[0][0], losses, rtol=1e-9, atol=1e-12)
    require_equal(found[0][1][1], model)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"swap_model_in_optstep": True}, "needs swap_opt_in_fwdbwd = True", "set both"),
        ({"swap_opt_in_fwdbwd": True}, "needs to make the optimizer itself", "optimizer=torch.optim.Adam"),
        ({"lr": 0.1}, "optimizer and lr do nothing without swap_opt_in_fwdbwd", "assign optimus_p.optimizer"),
        ({"pp_size": 0}, "Optimus_p: pp_size = 0 is below 1", "1 or more"),
        ({"pp_size": 2}, "needs 2 ranks, and this process was started alone", "torchrun"),
        ({"model": nn.Linear(2, 2)}, "nothing is known of the inputs of Linear", "example=…"),
    ],
)
def test_an_optimus_p_that_cannot_be_says_why(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        Optimus_p(**{"model": gpt2(), "num_mb": 2, **options})
    assert hint in info.value.hint


def test_what_optimus_p_is_given_wrong_is_said() -> None:
    optimus_p = Optimus_p(gpt2(), 2, dtype="float64", context=RankContext.alone())
    with pytest.raises(ConfigError, match="there is no loss yet"):
        optimus_p.get_loss()
    with pytest.raises(ConfigError, match="the first stage was given no data"):
        optimus_p.run(None, None)
    with pytest.raises(ConfigError, match="mode = 'zero-bubble' is unknown") as info:
        optimus_p.run(None, None, mode="zero-bubble")  # pyright: ignore[reportArgumentType]
    assert "gpipe or 1f1b" in info.value.hint


def test_a_benchmark_model_that_cannot_be_says_why() -> None:
    with pytest.raises(ConfigError, match="schedule = 'oasis' is unknown") as info:
        BenchmarkLM(schedule="oasis")
    assert "did you mean 'oases'" in info.value.hint
    with pytest.raises(ConfigError, match="h = 30 is not a multiple of n = 4 heads"):
        BenchmarkLM(h=30, n=4)


OASES = "overlap --num_l 2 --h 32 --n 4 --vocabulary 64 --seq_len 16 --batch_size 4 --steps 2 --device cpu"


def test_oases_planner_reads_the_profile_that_its_benchmark_wrote(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "answer", _measured_at_once)
    path = str(tmp_path / "profile_res.json")
    assert oases_benchmark.main(["profile", "--profile_path", path, "--device", "cpu"]) == 0
    assert f"written to {path}" in capsys.readouterr().out
    assert oases_benchmark.main([*OASES.split(), "--auto_plan", "--profile_path", path]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["step", "step", "plan", "mean"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--schedule optim_comm_checkpoint", ["step", "step", "mean"]),
        ("--auto_plan --schedule oases", ["step", "step", "plan", "mean"]),
    ],
)
def test_oases_benchmark_measures_a_schedule(
    options: str, expected: list[str], capsys: pytest.CaptureFixture[str], lent_ranks: list[int]
) -> None:
    assert oases_benchmark.main([*OASES.split(), *options.split(), "--tp", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == expected and lent_ranks == [2]
    assert all("overlap=oases" in line for line in said if line.startswith("plan"))


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_oases_benchmark_verifies_a_schedule(
    tp: int, capsys: pytest.CaptureFixture[str], lent_plain_process: None
) -> None:
    assert oases_benchmark.main([*OASES.split(), "--schedule", "oases", "--tp", str(tp), "--verify"]) == 0
    said = capsys.readouterr().out
    assert ("overlap=oases" if tp > 1 else "recompute=") in said and said.splitlines()[-1].startswith("  exact (")


def _measured_at_once(*given: Any) -> float:
    return 1e9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--schedule oasis", "schedule = 'oasis' is unknown\n  → did you mean 'oases'?"),
        ("--auto_plan --schedule oasis", "schedule = 'oasis' is unknown"),
        ("--h 30", "h = 30 is not a multiple of n = 4 heads"),
        ("--num_l 0", "one of num_l = 0"),
        ("--profile_path none.json", "--profile_path does nothing without --auto_plan"),
        ("--auto_plan --verify", "--verify compares a schedule, and --auto_plan searches for one"),
        ("--auto_plan --profile_path none.json", "profile none.json cannot be read"),
        ("--auto_plan --profile_path {empty}", "holds nothing of CPU"),
    ],
)
def test_an_oases_benchmark_that_cannot_be_run_says_why(
    options: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Store(tmp_path / "store").export(tmp_path / "empty.json", [])
    assert oases_benchmark.main([*OASES.split(), *options.format(empty=tmp_path / "empty.json").split()]) == 2
    assert message in capsys.readouterr().err


def test_terapipes_benchmark_takes_its_seven_arguments(
    capsys: pytest.CaptureFixture[str], lent_ranks: list[int]
) -> None:
    assert terapipe.main(["1", "2", "1", "2", "test", "8", "3", "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said[:3]] == [["step", "1"], ["step", "2"], ["step", "3"]]
    assert said[-1].startswith("mean ") and lent_ranks == [2]


@pytest.mark.parametrize(
    "sizes", ["1 1 1 1 test 4", pytest.param("1 4 2 2 test 8", marks=pytest.mark.long)]
)  # fmt: skip
def test_terapipes_benchmark_verifies_its_plan(
    sizes: str, capsys: pytest.CaptureFixture[str], lent_plain_process: None
) -> None:
    assert terapipe.main([*sizes.split(), "1", "--device", "cpu", "--verify"]) == 0
    said = capsys.readouterr().out
    assert f"slices={sizes.split()[-1]}" in said and said.splitlines()[-1].startswith("  exact (")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("1 1 1 1 test 8 3 --verify --mixed-precision", "--verify compares in float64"),
        ("1 2 2 2 test 8 3", "1 nodes × 2 GPUs are not 2 model-parallel × 2 pipeline-parallel"),
        ("1 1 1 1 tset 8 3", "model 'tset' is unknown\n  → did you mean 'test'?"),
        ("1 1 1 1 test 0 3", "is below 1"),
    ],
)
def test_a_benchmark_that_cannot_be_run_says_why(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terapipe.main(arguments.split()) == 2
    assert message in capsys.readouterr().err
