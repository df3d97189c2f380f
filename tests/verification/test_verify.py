"""`verify` as a user calls it: that it can fail, what it says, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import OPTConfig

import phalanx
from phalanx.cli.main import main
from phalanx.engine.engine import Engine
from phalanx.engine.gradients import Sum
from phalanx.engine.reductions import StepRun
from phalanx.errors import ConfigError, PlanError, VerifyError
from phalanx.model.zoo.configure import layer_drop
from phalanx.model.zoo.zoo import build, resolve
from phalanx.params.optimizer import Optimizer
from phalanx.program.instructions import Op, Program
from phalanx.verification.case import Case, Start, Training
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.plan_side import prepare
from phalanx.verification.verify import verify_case
from tests import children


class Net(nn.Module):
    """A module of somebody's own, with dropout and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.drop(torch.tanh(self.inner(torch.tanh(self.inner(x)))))
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


class Failing(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        raise RuntimeError("this module never works")


BATCHES = tuple({"x": torch.ones(n, 6) / n, "labels": torch.arange(n) % 3} for n in (5, 4))


def test_a_module_of_ones_own_is_verified_on_batches_of_ones_own(plain_process: PlainProcess) -> None:
    report = verify_case(Case(Net(), "mb=2,schedule=zb-h1", data=BATCHES), plain_process)
    assert report.ok, f"\n{report}"


def test_an_error_in_the_runtime_is_found_and_named(
    plain_process: PlainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Sum.add

    def wrong(self: Sum, gradients: dict[str, torch.Tensor]) -> None:
        add(self, {name: gradient * (1 + 1e-6) for name, gradient in gradients.items()})

    monkeypatch.setattr(Sum, "add", wrong)
    report = verify_case(Case(Net(), data=BATCHES, steps=1), plain_process)
    assert not report.ok
    assert any("gradient" in failure and "1.00e-06" in failure for failure in report.failures)


def test_a_backward_that_was_left_out_is_found(plain_process: PlainProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Engine.run

    def forgetful(self: Engine, program: Program, step: StepRun, until: Op | None = None) -> None:
        run(self, tuple(it for it in program if (it.op, it.micro_batch) != (Op.BW, 1)), step, until)

    monkeypatch.setattr(Engine, "run", forgetful)
    report = verify_case(Case(Net(), "mb=2", data=BATCHES, steps=1), plain_process)
    facts = {fact.name: fact for fact in report.facts}
    instructions = facts["instructions"]
    assert instructions.implied[0]["BW"] == 2 * instructions.measured[0]["BW"] > 0
    assert any(failure.startswith("instructions: the plan implies") for failure in report.failures)
    assert any("gradient" in failure for failure in report.failures)


def test_what_the_plain_model_says_when_it_fails_is_shown(plain_process: PlainProcess) -> None:
    _, _, start = prepare(Case(Net(), data=BATCHES))
    with pytest.raises(VerifyError, match=r"the plain model failed:\n(.|\n)*this module never works"):
        plain_process.run(Case(Failing(), data=BATCHES), start, ())


def test_a_model_that_cannot_be_handed_over_is_refused(plain_process: PlainProcess) -> None:
    class Local(Net):
        pass

    with pytest.raises(VerifyError, match="cannot be handed to the plain process"):
        verify_case(Case(Local(), data=BATCHES, steps=1), plain_process)


def test_a_folder_with_nothing_but_a_configuration_begins_from_the_seed(tmp_path: Path) -> None:
    config = resolve("gpt2", tiny=True).config
    assert config is not None
    config.save_pretrained(tmp_path)
    _, captured, start = prepare(Case(tmp_path))
    assert start.given.keys() == captured.shapes.keys() and not start.loads


def test_of_a_folder_with_weights_nothing_is_handed_from_one_side_to_the_other(tmp_path: Path) -> None:
    model: Any = build(resolve("gpt2", tiny=True))
    model.save_pretrained(tmp_path)
    _, _, start = prepare(Case(tmp_path))
    assert not start.given and start.loads


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner.layerdrop = 0.2


def test_layers_that_both_sides_never_skip_are_named() -> None:
    _, _, start = prepare(Case(Dropping(), data=BATCHES))
    assert start.notes == ("inner.layerdrop = 0.2 is 0 on both sides, as in training: whole layers are never skipped",)
    assert layer_drop(OPTConfig(layerdrop=0.1)) == {"layerdrop": 0.1} and not layer_drop(OPTConfig())


def test_a_limit_that_no_gradient_reaches_is_named(plain_process: PlainProcess) -> None:
    report = verify_case(Case(Net(), data=BATCHES, steps=1, training=Training(clip=1e3)), plain_process)
    assert report.ok and report.notes == ("no gradient was longer than clip = 1000, so clipping was never compared",)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"verify: unknown option 'tny'(.|\n)*did you mean 'tiny'"):
        phalanx.verify("gpt2", "mb=2", tny=True)


SCRIPT = """
import torch
from torch import nn

import phalanx

class Early(nn.Linear):
    def forward(self, x, y):
        return nn.functional.mse_loss(super().forward(x), y)

if {condition}:
    class Late(Early):
        pass

    batch = {{"x": torch.ones(4, 6), "y": torch.zeros(4, 3)}}
    print(phalanx.verify({module}(6, 3), data=[batch], steps=1).ok, "is what the report says")
"""


@pytest.mark.parametrize(
    ("module", "condition", "message"),
    [
        pytest.param("Early", '__name__ == "__main__"', "True is what the report says", id="guarded"),
        pytest.param(
            "Late", '__name__ == "__main__"', "a process that loads script.py afresh does not find 'Late' in it",
            id="class under the guard", marks=pytest.mark.long,
        ),
        pytest.param(
            "Early", "True", "exit code 1; what it wrote is above\n  → it loads the script that calls phalanx.verify",
            id="no guard", marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_script_verifies_its_own_module(module: str, condition: str, message: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(module=module, condition=condition))
    environment = children.environment(OMP_NUM_THREADS="1")
    done = children.run([sys.executable, str(script)], env=environment)
    assert message in done.stdout + done.stderr, done.stderr


def test_a_plain_process_that_was_killed_is_named_as_such() -> None:
    with PlainProcess() as process:
        process._process.kill()
        process._process.join()
        with pytest.raises(VerifyError, match=r"was ended by SIGKILL(.|\n)*enough memory for a second model"):
            process.run(Case(Net(), data=BATCHES), Start({}, False), ())


@pytest.mark.usefixtures("lent_plain_process")
def test_a_module_of_unknown_task_needs_batches() -> None:
    with pytest.raises(VerifyError, match=r"cannot make batches for 'Net'(.|\n)*data=\[…\]"):
        phalanx.verify(Net())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, r"dtype 'bfloat16' has no tolerance(.|\n)*float64, float32"),
        ({"batch": 1}, "batch=1 is too small"),
        ({"tokens": 4}, "tokens=4 is too small"),
        ({"steps": 0}, "steps=0 is too small"),
        ({"compile": "fast"}, r"compile 'fast' is unknown(.|\n)*auto, off, aot_eager, inductor"),
        ({"device": "tpu"}, r"device 'tpu' is unknown(.|\n)*auto, cpu, cuda"),
        ({"data": ({"x": torch.ones(2)},), "padding": True}, "padding and documents shape synthetic batches only"),
    ],
)
def test_settings_without_meaning_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Case("gpt2", **options)  # pyright: ignore


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(plain_process: PlainProcess) -> None:
    with pytest.raises(ConfigError, match="no CUDA device can be used"):
        verify_case(Case(Net(), data=BATCHES, device="cuda"), plain_process)


@pytest.mark.usefixtures("lent_plain_process")
def test_a_plan_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown schedule 'gpip'"):
        phalanx.verify(Net(), "schedule=gpip", data=BATCHES)


@pytest.mark.parametrize(
    ("plan", "batch", "samples"),
    [
        ("", None, (5, 4)),
        ("mb=4", 4, (4, 4)),
        ("mb=4", 5, (5, 4)),
        ("pp=2", 4, (4, 4)),
        ("tp=2,overlap=oases", 8, (8, 6)),
        ("tp=2,overlap=oases", 2, (2, 2)),
        ("dp=2,tp=2,degrees=1", 12, (12, 8)),
        ("dp=2,tp=2,degrees=1", None, (32, 28)),
    ],
)
def test_both_steps_have_samples_that_the_plan_can_divide(
    plan: str, batch: int | None, samples: tuple[int, int]
) -> None:
    case = Case("gpt2", plan, batch=batch)
    assert (case.num_samples, case.fewest_samples) == samples


@pytest.mark.usefixtures("lent_plain_process")
def test_more_tokens_than_the_model_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "gpt2", "--tiny", "--seq-len", "500"]) == 2
    message = capsys.readouterr().err
    assert "500 tokens is longer than the model takes" in message and "set tokens to 128 or less" in message


@pytest.mark.usefixtures("lent_plain_process")
def test_what_goes_wrong_on_the_way_does_not_look_like_a_wrong_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise IndexError("something nobody thought of")

    monkeypatch.setattr("phalanx.verification.verify.prepare", broken)
    assert main(["verify", "--model", "gpt2", "--tiny"]) == 2
    assert "something nobody thought of" in capsys.readouterr().err


@pytest.mark.usefixtures("lent_plain_process")
def test_the_plan_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schedule": "gpip"}')
    with pytest.raises(PlanError, match="unknown schedule 'gpip'"):
        phalanx.verify(Net(), str(tmp_path / "plan.json"), data=BATCHES)


def test_the_command_prints_a_report_and_tells_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--model", "gpt2", "--tiny", "--steps", "1", "--plan", "mb=2"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["ok"] is True


@pytest.mark.usefixtures("lent_plain_process")
def test_the_command_fails_when_the_sides_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Optimizer, "_divisor", lambda *arguments: torch.tensor(2.0))
    assert main(["verify", "--model", "gpt2", "--tiny", "--steps", "1"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out
