"""The loop as a whole: equal to plain PyTorch, exact to resume, every kind of model and data, what it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import phalanx
from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.data.batches import open_data
from phalanx.errors import ConfigError
from phalanx.model import reference
from phalanx.model.zoo.zoo import resolve
from phalanx.params.lr_schedule import lr_factor
from phalanx.prepare.initial_weights import open_weights
from phalanx.state import checkpoint
from phalanx.training.trainer import Trainer
from tests.run_helpers import HALF, SHORT, NoDecay, padded_samples, records, short_config, short_run

LLAMA, GPT2 = "phalanx-demo", "gpt2"


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
        pytest.param(LLAMA, "mb=3", marks=pytest.mark.long),
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


def test_an_optimizer_of_the_users_own_is_taken_as_a_class_and_by_its_path(tmp_path: Path):
    options = {"steps": 2, "lr": 1e-3, "clip": None, "lr_schedule": "constant", "export": False}
    by_class = short_run(LLAMA, "synthetic:8", tmp_path / "a", optimizer_class=NoDecay, **options)
    by_path = short_run(LLAMA, "synthetic:8", tmp_path / "b", optimizer="tests.run_helpers.NoDecay", **options)
    assert by_class.losses == by_path.losses
    written = tmp_path / "a" / "config.yaml"
    assert RunConfig.load(written, optimizer="tests.run_helpers.NoDecay").to_yaml() == written.read_text()
    with pytest.raises(ConfigError, match=r"'tests.run_helpers.NoDecay' in a file would import .*\n.*name it yourself"):
        RunConfig.load(written)
    initial, _ = open_weights(LLAMA, resolve(LLAMA, tiny=True), seed=0)
    moved = by_class.module().get_parameter("model.norm.weight") - initial.read("model.norm.weight")
    # Each of its two steps moves every weight by the rate, one way or the other.
    assert torch.minimum(moved.abs(), (moved.abs() - 2e-3).abs()).max() < 1e-6 < moved.abs().max()


@pytest.mark.parametrize("model", [LLAMA, GPT2])
def test_a_tiny_model_overfits(model: str, tmp_path: Path):
    result = short_run(model, "synthetic:4", tmp_path, steps=40, lr=1e-2, export=False)
    assert result.losses[-1] < 0.4 * result.losses[0]
    assert result.loss == result.losses[-1] and result.steps == 40


def test_bfloat16_keeps_float32_masters_of_which_the_parameters_are_copies(tmp_path: Path):
    options = short_config(tmp_path, dtype="bfloat16", steps=20, lr=1e-2, freeze=("*norm*",), **HALF)
    trainer = Trainer(LLAMA, "synthetic:4", options)
    result = trainer.fit()
    parameters = trainer.loop.session.state.parameters
    masters, values = {name: weight.exact for name, weight in parameters.trained.items()}, parameters.values
    assert set(masters) == set(trainer.loop.run.trainable) < set(values)
    assert all(value.dtype == torch.bfloat16 for value in values.values())
    assert all(master.dtype == torch.float32 for master in masters.values())
    assert all(torch.equal(values[name], master.bfloat16()) for name, master in masters.items())
    assert any(not torch.equal(values[name].float(), master) for name, master in masters.items())
    assert result.losses[-1] < result.losses[0]
    stored = checkpoint.open(result.checkpoint)
    assert (
        stored.dtype("master/model.embed_tokens.weight")
        == stored.dtype("optimizer/exp_avg/model.embed_tokens.weight")
        == "float32"
    )
    assert stored.dtype("model/model.norm.weight") == "bfloat16"


def test_bfloat16_without_masters_keeps_everything_in_bfloat16(tmp_path: Path):
    options = short_config(tmp_path, dtype="bfloat16", master_weights=False, steps=10, lr=1e-2, **HALF)
    trainer = Trainer(LLAMA, "synthetic:4", options)
    result = trainer.fit()
    state = trainer.loop.session.state
    assert all(weight.exact is weight.copy for weight in state.parameters.weights.values())
    moments = [tensor for slot, _, tensor in state.optimizer.tensors() if "exp_avg" in slot]
    assert moments and all(t.dtype == torch.bfloat16 for t in moments)
    assert result.losses[-1] < result.losses[0]


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
    tiny = resolve(LLAMA, tiny=True).config
    options = {**SHORT, "tiny": False, "steps": 2, "lr": 1e-2, "export": False}
    by_config = phalanx.train(tiny, "synthetic:8", out=tmp_path / "a", **options)
    module = by_config.module()
    assert isinstance(module, transformers.LlamaForCausalLM)
    before = module.lm_head.weight.clone()
    by_module = phalanx.train(module, "synthetic:8", out=tmp_path / "b", **options)
    assert by_module.module() is module and not torch.equal(module.lm_head.weight, before)
    assert by_module.losses[0] < by_config.losses[0]


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


def test_packed_documents_and_the_standard_library_train(tmp_path: Path):
    result = short_run(LLAMA, "stdlib", tmp_path, documents=True, steps=2)
    assert len(result.losses) == 2
    assert (result.export / "tokenizer.json").is_file()
