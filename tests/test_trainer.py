"""The loop as a whole: equal to plain PyTorch, exact to resume, every kind of model and data, what it leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import phalanx
from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.data import open_data
from phalanx.errors import PhalanxError
from phalanx.model import reference
from phalanx.model.zoo import resolve
from phalanx.prepare import open_weights
from phalanx.runtime.schedule import lr_factor
from phalanx.state import checkpoint
from phalanx.trainer import Trainer
from tests.run_helpers import SHORT, losses, padded_samples, records, shared_cache, short_run

LLAMA, GPT2 = "phalanx-demo", "gpt2"


@pytest.fixture(autouse=True, scope="module")
def _captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(shared_cache(tmp_path_factory)))
        yield


EXACT = {
    "dtype": "float64", "dropout": 0.0, "steps": 5, "batch_size": 8, "lr": 1e-2, "warmup_steps": 2, "clip": 0.5,
    "weight_decay": 0.2, "seed": 3, "export": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Tensor]]:
    return padded_samples(24, vocabulary=90)


@pytest.fixture(scope="module")
def by_hand(samples: list[dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Parameters and losses of five steps written out in plain PyTorch on the plain HuggingFace model."""

    def run(name: str, make: Any, trained: Any = lambda name: True) -> tuple[dict[str, Tensor], list[float]]:
        spec = resolve(name, tiny=True)
        model = reference.plain(spec, torch.float64, 0.0)
        weights, _ = open_weights(name, spec, EXACT["seed"])
        parameters = dict(model.named_parameters())
        for key, parameter in parameters.items():
            parameter.data.copy_(weights.read(key))
            parameter.requires_grad_(trained(key))
        optimizer = make([p for p in parameters.values() if p.requires_grad])
        task = tasks.get("causal-lm")
        batches = open_data(
            samples, task=task, config=spec.config, tokenizer=None, tokens=16, seed=3,
            cache=tmp_path_factory.mktemp("data"),
        )  # fmt: skip
        found = []
        for step in range(1, 6):
            batch = batches.batch(8 * (step - 1), 8)
            keys = torch.zeros(8, dtype=torch.int64)
            with reference.injected(model, keys, (), torch.float64):
                loss = reference.loss(model, task.reference_inputs(batch))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            factor = lr_factor(step, total=5, warmup=2, shape="cosine", min_ratio=0.1)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * factor
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return {key: p.detach().clone() for key, p in parameters.items()}, found

    return run


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.2},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)


def require_equal(result: Any, expected: tuple[dict[str, Tensor], list[float]]) -> None:
    parameters, by_hand_losses = expected
    assert result.losses == pytest.approx(by_hand_losses, rel=1e-10)
    ours = dict(result.module().named_parameters())
    assert set(ours) == set(parameters)
    for name, parameter in parameters.items():
        torch.testing.assert_close(ours[name].detach(), parameter, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (LLAMA, ""),
        (LLAMA, "mb=3"),
        (LLAMA, "mb=3,schedule=zb-h1"),
        (GPT2, "mb=3,schedule=gpipe,recompute=yes"),
    ],
)
def test_training_equals_plain_pytorch(model: str, plan: str, by_hand: Any, samples: Any, tmp_path: Path):
    result = short_run(model, samples, tmp_path, plan=plan, **EXACT)
    require_equal(result, by_hand(model, adamw))


def test_frozen_parameters_stay_and_the_others_train_as_in_plain_pytorch(by_hand: Any, samples: Any, tmp_path: Path):
    result = short_run(LLAMA, samples, tmp_path, freeze=("*mlp*", "lm_head*"), **EXACT)
    require_equal(result, by_hand(LLAMA, adamw, lambda name: "mlp" not in name and "embed_tokens" not in name))


def test_sgd_with_momentum_equals_plain_pytorch(by_hand: Any, samples: Any, tmp_path: Path):
    options = {**EXACT, "weight_decay": 0.0, "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}
    result = short_run(LLAMA, samples, tmp_path, **options)
    require_equal(result, by_hand(LLAMA, lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=False)))


def test_an_optimizer_of_the_users_own_is_taken_as_a_class_and_by_its_path(samples: Any, tmp_path: Path):
    options = {**EXACT, "clip": None, "weight_decay": RunConfig().weight_decay}
    by_class = short_run(LLAMA, samples, tmp_path / "a", optimizer_class=torch.optim.Adagrad, **options)
    by_path = short_run(LLAMA, samples, tmp_path / "b", optimizer="torch.optim.Adagrad", **options)
    assert by_class.losses == by_path.losses and by_class.losses[-1] < by_class.losses[0]
    assert RunConfig.load(tmp_path / "a" / "config.yaml").optimizer == "torch.optim.adagrad.Adagrad"


@pytest.mark.parametrize("model", [LLAMA, GPT2])
def test_a_tiny_model_overfits(model: str, tmp_path: Path):
    result = short_run(model, "synthetic:4", tmp_path, steps=40, lr=1e-2, dropout=0.0, export=False)
    assert result.losses[-1] < 0.3 * result.losses[0]
    assert result.loss == result.losses[-1] and result.steps == 40


def test_bfloat16_keeps_float32_masters_of_which_the_parameters_are_copies(tmp_path: Path):
    trainer = Trainer(LLAMA, "synthetic:4", config(tmp_path, dtype="bfloat16", steps=20, lr=1e-2, freeze=("*norm*",)))
    result = trainer.fit()
    masters, values = trainer.rank.parameters.masters, trainer.rank.parameters.values
    assert set(masters) == set(trainer.run.trainable) < set(values)
    assert all(value.dtype == torch.bfloat16 for value in values.values())
    assert all(master.dtype == torch.float32 for master in masters.values())
    assert all(torch.equal(values[name], master.bfloat16()) for name, master in masters.items())
    assert any(not torch.equal(values[name].float(), master) for name, master in masters.items())
    assert result.losses[-1] < result.losses[0]
    stored = checkpoint.open(result.checkpoint)
    assert stored.dtype("master/model.embed_tokens.weight") == stored.dtype(
        "optimizer/exp_avg/model.embed_tokens.weight"
    ) == "float32"
    assert stored.dtype("model/model.norm.weight") == "bfloat16"


def test_bfloat16_without_masters_keeps_everything_in_bfloat16(tmp_path: Path):
    trainer = Trainer(LLAMA, "synthetic:4", config(tmp_path, dtype="bfloat16", master_weights=False, steps=10, lr=1e-2))
    result = trainer.fit()
    assert trainer.rank.parameters.masters == {}
    moments = [t for name, t in trainer.rank.optimizer.tensors() if "exp_avg" in name]
    assert moments and all(t.dtype == torch.bfloat16 for t in moments)
    assert result.losses[-1] < result.losses[0]


def config(out: Path, **options: Any) -> RunConfig:
    return RunConfig.create(**{**SHORT, "out": out, **options})


class Crash:
    """Ends a run as a crash would, after this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] == self.step:
            raise RuntimeError("power cut")


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "mb=3", "dropout": 0.2},
        {"dtype": "bfloat16"},
        {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
        {"optimizer": "torch.optim.NAdam"},
    ],
    ids=lambda options: ",".join(map(str, options.values())),
)
def test_a_resumed_run_repeats_the_losses_bit_for_bit(options: dict[str, Any], tmp_path: Path):
    # 7 samples in batches of 4: every batch ends inside an epoch.
    options = {**options, "steps": 7, "lr": 1e-2, "checkpoint_every": 2, "warmup_steps": 2}
    whole = short_run(GPT2, "synthetic:7", tmp_path / "whole", **options)
    with pytest.raises(PhalanxError, match="Crash.on_step failed: RuntimeError: power cut"):
        short_run(GPT2, "synthetic:7", tmp_path / "cut", callbacks=[Crash(5)], **options)
    rest = short_run(GPT2, "synthetic:7", tmp_path / "cut", resume="auto", **options)
    assert rest.losses == whole.losses[4:]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    ours, expected = rest.module().state_dict(), whole.module().state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_checkpoint_can_be_named_and_the_run_extended(tmp_path: Path):
    options = {"lr_schedule": "constant", "export": False}
    first = short_run(LLAMA, "synthetic:8", tmp_path / "a", steps=2, **options)
    more = short_run(LLAMA, "synthetic:8", tmp_path / "b", steps=4, resume=str(first.checkpoint), **options)
    whole = short_run(LLAMA, "synthetic:8", tmp_path / "c", steps=4, **options)
    assert first.losses + more.losses == whole.losses
    assert more.steps == 4 and records(tmp_path / "b", "start")[0]["first_step"] == 2


def test_a_finished_run_that_is_resumed_trains_nothing_and_exports_again(tmp_path: Path):
    first = short_run(LLAMA, "synthetic:8", tmp_path)
    again = short_run(LLAMA, "synthetic:8", tmp_path, resume="auto")
    assert again.losses == () and again.loss == first.loss and again.export == first.export


def test_resume_auto_starts_afresh_where_there_is_nothing(tmp_path: Path):
    assert len(short_run(LLAMA, "synthetic:8", tmp_path, resume="auto").losses) == 3


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.offset = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x).squeeze(-1) + self.offset, y)


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum().sin()}


OWN = {"batch_size": 8, "steps": 30, "lr": 1e-2, "progress": "off"}


def test_a_module_of_the_users_own_is_trained_on_its_own_dataset_and_gets_its_values(tmp_path: Path):
    module = Regression()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    result = phalanx.train(module, Points(), out=tmp_path, **OWN)
    assert result.losses[-1] < result.losses[0]
    assert result.module() is module
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(before) - {"offset"}
    from safetensors.torch import load_file

    stored = load_file(result.export / "model.safetensors")
    assert all(torch.equal(stored[name], p) for name, p in module.state_dict().items())


def test_a_factory_is_initialised_from_the_seed_and_collate_makes_its_batches(tmp_path: Path):
    def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([item[name] for item in items]) for name in ("x", "y")}

    runs = [phalanx.train(Regression, Points(), collate=collate, out=tmp_path / str(i), **OWN) for i in range(2)]
    assert runs[0].losses == runs[1].losses
    assert isinstance(runs[0].module(), Regression)


def test_a_configuration_and_a_huggingface_module_are_models_too(tmp_path: Path):
    tiny = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    options = {"seq_len": 8, "batch_size": 4, "steps": 2, "progress": "off", "lr": 1e-2}
    by_config = phalanx.train(tiny, "synthetic:8", out=tmp_path / "a", **options)
    assert isinstance(by_config.module(), transformers.LlamaForCausalLM)
    module = transformers.LlamaForCausalLM(tiny)
    module.load_state_dict({k: v for k, v in by_config.module().state_dict().items()})
    phalanx.train(module, "synthetic:8", out=tmp_path / "b", **options)
    assert not torch.equal(module.lm_head.weight, by_config.module().lm_head.weight)


def test_the_export_is_loaded_by_transformers_with_identical_logits_and_trained_on(tmp_path: Path):
    result = short_run(GPT2, "synthetic:8", tmp_path / "run")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(result.export, attn_implementation="eager").eval()
    ids = torch.arange(12)[None] % 50
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, result.module()(ids).logits)
    assert loaded.config.use_cache
    further = phalanx.train(str(result.export), "synthetic:8", out=tmp_path / "more", **{**SHORT, "tiny": False})
    assert records(tmp_path / "more", "start")[0]["header"]["weights"] == f"from {result.export}"
    assert further.losses[0] < result.losses[0]


def test_the_run_folder_holds_config_plan_log_checkpoints_export_and_trace(tmp_path: Path):
    options = {"plan": "mb=2", "checkpoint_every": 1, "keep_checkpoints": 2, "profile_steps": "2:3", "steps": 4}
    result = short_run(LLAMA, "synthetic:8", tmp_path, **options)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.yaml", "plan.json", "log-rank0.jsonl", "checkpoints", "export", "trace-steps-2-3.json",
    }  # fmt: skip
    assert RunConfig.load(tmp_path / "config.yaml") == config(
        tmp_path, model=LLAMA, data="synthetic:8", **options
    )
    assert json.loads((tmp_path / "plan.json").read_text())["mb"] == 2
    assert [path.name for path in checkpoint.find(tmp_path / "checkpoints")] == ["step-00000004", "step-00000003"]
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000004"
    assert [record["kind"] for record in records(tmp_path, "start") + records(tmp_path, "finish")] == ["start", "finish"]
    steps = records(tmp_path, "step")
    assert [record["loss"] for record in steps] == list(result.losses)
    assert steps[-1]["samples"] == 16 and steps[-1]["tokens"] == 64 and steps[0]["flops_per_second"] > 0


def test_the_header_says_what_was_derived_and_why(tmp_path: Path):
    short_run(LLAMA, "synthetic:10", tmp_path, steps=None, epochs=1.5, plan="mb=3", freeze=("*norm*",), export=False)
    header = records(tmp_path, "start")[0]["header"]
    assert header["steps"] == "4 (1.5 epochs of 10 samples in batches of 4)"
    assert header["plan"].startswith("mb=3: 3 × 1 to 2 of the 4 samples, schedule 1f1b")
    assert header["weights"] == "initialised from seed 0"
    assert "decay 0.1 on 29 matrices of 29 tensors" in header["optimizer"]
    assert header["device"].startswith("cpu (")


def test_evaluation_is_forward_only_without_dropout_and_always_on_the_same_samples(tmp_path: Path):
    seen: list[dict[str, Any]] = []

    class Watch:
        def on_evaluate(self, record: dict[str, Any]) -> None:
            seen.append(record)

    def run(out: str, **options: Any) -> Any:
        common = {"eval_data": "synthetic:6", "eval_samples": 5, "steps": 4, "dropout": 0.5, "lr": 1e-9}
        return short_run(GPT2, "synthetic:8", tmp_path / out, export=False, **{**common, **options})

    often = run("often", eval_every=2, callbacks=[Watch()])
    assert [(r["step"], r["eval_samples"]) for r in seen] == [(2, 5), (4, 5)]
    # The rate is so small that nothing is learned: equal values mean equal samples and no dropout.
    assert seen[0]["eval_loss"] == pytest.approx(seen[1]["eval_loss"], rel=1e-5)
    assert [r.get("eval_loss") for r in records(tmp_path / "often", "step")] == [
        None, seen[0]["eval_loss"], None, seen[1]["eval_loss"],
    ]  # fmt: skip
    at_the_end = run("end")
    assert at_the_end.eval_loss == often.eval_loss and at_the_end.losses == often.losses


def test_callbacks_are_called_at_their_moments(tmp_path: Path):
    calls: list[str] = []

    class All:
        def on_start(self, trainer: Trainer) -> None:
            calls.append(f"start at {trainer.snapshot.step}")

        def on_step(self, record: dict[str, Any]) -> None:
            calls.append(f"step {record['step']}")

        def on_checkpoint(self, path: Path) -> None:
            calls.append(path.name)

        def on_end(self, result: Any) -> None:
            calls.append(f"end at {result.steps}")

    short_run(LLAMA, "synthetic:8", tmp_path, steps=2, callbacks=[All()])
    assert calls == ["start at 0", "step 1", "step 2", "step-00000002", "end at 2"]


class Poison:
    """Makes a parameter infinite before these consecutive steps, and whole again after them."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_start(self, trainer: Trainer) -> None:
        self.weight = trainer.rank.parameters.values["model.norm.weight"]

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] + 1 == self.steps[0]:
            self.good = self.weight.clone()
            self.weight.fill_(math.inf)
        if record["step"] == self.steps[-1]:
            self.weight.copy_(self.good)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_with_non_finite_gradients_is_skipped_and_counted(optimizer: str, tmp_path: Path):
    trainer = Trainer(LLAMA, "synthetic:8", config(tmp_path, steps=4, optimizer=optimizer), callbacks=[Poison(2, 3)])
    result = trainer.fit()
    assert result.skipped == 2
    steps = records(tmp_path, "step")
    assert [bool(record.get("skipped")) for record in steps] == [False, True, True, False]
    assert all(torch.isfinite(value).all() for value in trainer.rank.parameters.values.values())
    assert math.isfinite(result.loss)


def test_too_many_non_finite_steps_in_a_row_stop_the_run(tmp_path: Path):
    with pytest.raises(PhalanxError, match=r"gradients of 2 steps in a row were not finite, the last at step 3") as info:
        short_run(LLAMA, "synthetic:8", tmp_path, steps=9, max_nonfinite=1, callbacks=[Poison(2, 3, 4)])
    assert "lower lr" in info.value.hint
    assert records(tmp_path, "error")[0]["message"].startswith("the gradients of 2 steps")


def test_packed_documents_and_the_standard_library_train(tmp_path: Path):
    result = short_run(LLAMA, "stdlib", tmp_path, documents=True, steps=2)
    assert len(result.losses) == 2
    assert (result.export / "tokenizer.json").is_file()
