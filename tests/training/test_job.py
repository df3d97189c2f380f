"""A job handed to ranks in other processes, and what comes back: values for the module, calls of the callbacks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.config import RunConfig
from phalanx.errors import CaptureError, ConfigError
from phalanx.training.job import pack, unpack
from phalanx.training.loop import Job

OPTIONS = {"batch_size": 4, "steps": 2, "lr": 1e-2, "progress": "off", "dtype": "float64", "export": False}


class Tied(nn.Module):
    """A weight under two names, one that is not trained, and buffers, one of which is never saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)
        self.register_buffer("offset", torch.arange(3.0))
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.factor + self.offset))
        return x.square().mean()


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(3, generator=torch.Generator().manual_seed(index))}


def job_of(model: Any, data: Any = None) -> Job:
    return Job(model, Points() if data is None else data, None, RunConfig())


def test_a_module_survives_with_its_ties_and_buffers() -> None:
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pack(job_of(module)) as payload:
        copy = unpack(payload).model
    assert isinstance(copy, Tied) and copy is not module
    assert copy.layers[1].weight is copy.layers[0].weight
    assert isinstance(copy.layers[0].weight, nn.Parameter) and not copy.layers[1].bias.requires_grad
    assert copy.factor.item() == 0.5
    for one in (copy, module):
        assert one.state_dict().keys() == before.keys()
        assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())


def test_values_travel_beside_the_job_and_leave_nothing_behind() -> None:
    module = nn.Linear(1000, 100)
    with pack(job_of(module)) as payload:
        assert payload.values is not None and payload.values.stat().st_size > 400_000
        assert len(payload.job) < 20_000
        folder = payload.values.parent
    assert not folder.exists()


def test_a_model_by_name_needs_no_values() -> None:
    with pack(job_of("gpt2", "stdlib")) as payload:
        assert payload.values is None and unpack(payload) == job_of("gpt2", "stdlib")


@pytest.mark.usefixtures("lent_ranks")
def test_a_dataset_that_cannot_be_handed_over_is_refused(tmp_path: Path) -> None:
    class Local(Points):
        pass

    with pytest.raises(ConfigError, match=r"cannot be handed to other processes: .*Local") as info:
        phalanx.train(Tied(), Local(), out=tmp_path, plan="dp=2", **OPTIONS)
    assert "at the top level of a module" in info.value.hint and "ranks=1" in info.value.hint


def test_a_module_whose_weights_are_computed_from_others_is_refused() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="Linear' cannot be handed to other processes") as info, pack(job_of(module)):
        pass
    assert "ranks=1" in info.value.hint


def test_a_hook_that_other_processes_would_not_have_is_refused() -> None:
    module = Tied()
    module.layers[0].bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(CaptureError, match=r"'layers\.0\.bias' of 'Tied' has a hook"), pack(job_of(module)):
        pass


@pytest.mark.usefixtures("lent_ranks")
def test_two_ranks_fill_the_callers_module_and_call_back_in_its_process(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    class Watch:
        def on_start(self, trainer: phalanx.Trainer) -> None:
            calls.append((f"start in {trainer.folder.name}", os.getpid()))

        def on_step(self, record: dict[str, Any]) -> None:
            calls.append((f"step {record['step']}", os.getpid()))

        def on_checkpoint(self, path: Path) -> None:
            calls.append((path.name, os.getpid()))

        def on_end(self, result: phalanx.Result) -> None:
            calls.append((f"end at {result.steps}", os.getpid()))

    torch.manual_seed(0)
    module, alone = Tied().double(), Tied().double()
    alone.load_state_dict(module.state_dict())
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    result = phalanx.train(module, Points(), out=tmp_path / "two", plan="dp=2", callbacks=[Watch()], **OPTIONS)
    assert calls == [
        (what, os.getpid()) for what in ("start in two", "step 1", "step 2", "step-00000002", "end at 2")
    ]  # fmt: skip
    assert result.module() is module
    changed = {name for name, parameter in module.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"layers.0.weight", "layers.0.bias"}
    plain = phalanx.train(alone, Points(), out=tmp_path / "one", **OPTIONS)
    assert result.losses == pytest.approx(plain.losses, rel=1e-12)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), parameter, rtol=0, atol=1e-12)
