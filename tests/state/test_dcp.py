from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from phalanx.errors import ModelError
from phalanx.state.dcp import DcpWeights, is_dcp
from phalanx.state.layout import Box, boxes_of_range
from tests import tiny_models


class Small(nn.Module):
    def __init__(self, width: int = 4, layers: int = 2, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 7, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        if tie:
            self.head.weight = self.embed.weight


def save(folder: Path, state: dict[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that no process group is there
        dcp.save(state, checkpoint_id=folder)
    return folder


def assert_same(weights: DcpWeights, model: nn.Module) -> None:
    assert weights.names() == tuple(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        assert weights.shape(name) == tuple(parameter.shape)
        assert torch.equal(weights.read(name), parameter), name
        boxes = boxes_of_range(tuple(parameter.shape), 1, parameter.numel())
        assert torch.equal(weights.read_flat(name, boxes), parameter.reshape(-1)[1:]), name


WRAPPED: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, object]]]] = {
    "as it is": ("", lambda state: dict(state)),
    "beside an optimizer": ("", lambda state: {**state, "optimizer": {"step": torch.ones(3)}, "epoch": 3}),
    "under model": ("model.", lambda state: {"model": state, "optim": {"lr": 0.1, "layers.0": torch.ones(2)}}),
    "under state_dict, module": ("state_dict.module.", lambda state: {"state_dict": {"module": state}}),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_a_folder_gives_the_values_that_were_saved_however_they_were_wrapped(tmp_path: Path, how: str) -> None:
    model = Small()
    prefix, wrap = WRAPPED[how]
    folder = save(tmp_path / "dcp", wrap(model.state_dict()))
    weights = DcpWeights(folder, Small())
    assert is_dcp(folder) and not is_dcp(tmp_path)
    assert weights.prefix == prefix
    assert_same(weights, model)
    assert weights.buffer_names() == ("scale",) and weights.read("scale").item() == 2.0


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_whose_own_names_look_wrapped_is_found(tmp_path: Path, architecture: str) -> None:
    model = tiny_models.build(architecture)
    meta = tiny_models.build_meta(architecture)
    assert_same(DcpWeights(save(tmp_path / "plain", dict(model.state_dict())), meta), model)
    wrapped = DcpWeights(save(tmp_path / "wrapped", {"model": model.state_dict()}), meta)
    assert wrapped.prefix == "model."
    assert_same(wrapped, model)


def test_a_box_is_read_from_the_chunks_that_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as three ranks would have written it: uneven rows of one tensor in three files' worth of chunks."""
    values = torch.arange(70.0).view(10, 7)
    weights = DcpWeights(save(tmp_path, {"weight": values}), linear(7, 10))
    cuts = [0, 2, 7, 10]
    chunks = [values[a:b].clone() for a, b in itertools.pairwise(cuts)]
    parts = {f"part{i}": chunk for i, chunk in enumerate(chunks)}
    pieces = DcpWeights(save(tmp_path / "parts", {**parts, "weight": values}), linear(7, 10))
    storage = pieces._reader.storage_data
    for i, start in enumerate(cuts[:-1]):
        index = type(next(iter(storage)))("weight", (start, 0))
        found = next(info for key, info in storage.items() if key.fqn == f"part{i}")
        storage[index] = found
    pieces._stored["weight"] = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), torch.Size((10, 7)),
        [
            ChunkStorageMetadata(torch.Size((a, 0)), torch.Size((b - a, 7)))
            for a, b in itertools.pairwise(cuts)
        ],
    )  # fmt: skip
    loaded: list[int] = []
    load = torch.load

    def counting(*arguments: object, **options: object) -> Tensor:
        tensor = load(*arguments, **options)  # type: ignore[arg-type]
        loaded.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "load", counting)
    box = Box((1, 2), (3, 4))
    assert torch.equal(pieces.read("weight", box), values[box.slices()])
    assert loaded == [14, 35], "the third chunk is not read"
    assert torch.equal(weights.read("weight", box), values[box.slices()])


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def test_a_tied_parameter_is_taken_from_whichever_name_is_stored(tmp_path: Path) -> None:
    model = Small(tie=True)
    assert_same(DcpWeights(save(tmp_path / "both", dict(model.state_dict())), Small(tie=True)), model)
    alias_only = {name: value for name, value in model.state_dict().items() if name != "embed.weight"}
    assert_same(DcpWeights(save(tmp_path / "alias", alias_only), Small(tie=True)), model)


MISTAKES: dict[str, tuple[Callable[[Path], Path], nn.Module, str]] = {
    "missing": (
        lambda p: save(p, dict(Small(layers=1).state_dict())), Small(),
        r"lacks 2 of the parameters of Small: layers\.1\.weight, layers\.1\.bias\n.*it holds .*give the model and task",
    ),
    "another model": (
        lambda p: save(p, {"model": {"other": torch.ones(2)}}), Small(), r"lacks 6 of .*\n.*it holds model\.other;",
    ),
    "nothing": (lambda p: save(p, {"epoch": 1}), Small(), r"lacks 6 of .*\n.*it holds no tensors"),
    "unexpected": (
        lambda p: save(p, {"model": Small(layers=3).state_dict()}), Small(),
        r"holds 2 tensors that Small does not have: layers\.2\.weight, layers\.2\.bias\n.*give the config\.json",
    ),
    "other shapes": (
        lambda p: save(p, dict(Small(width=5).state_dict())), Small(),
        r"other shapes than the model: embed\.weight: stored \[7, 5\], model \[7, 4\]",
    ),
    "untied": (
        lambda p: save(p, dict(Small().state_dict())), Small(tie=True),
        r"different values for embed\.weight and head\.weight, which this model ties\n.*tie_word_embeddings",
    ),
    "unfinished": (lambda p: p, Small(), r"has no \.metadata file.*\n.*has finished"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_folder_that_does_not_fit_is_refused_in_words(tmp_path: Path, mistake: str) -> None:
    make, model, said = MISTAKES[mistake]
    with pytest.raises(ModelError, match=said):
        DcpWeights(make(tmp_path), model)


def test_a_damaged_folder_is_refused_in_words(tmp_path: Path) -> None:
    folder = save(tmp_path, dict(Small().state_dict()))
    weights = DcpWeights(folder, Small())
    for file in folder.glob("*.distcp"):
        file.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"holds no usable values of embed\.weight: .*\n.*damaged"):
        weights.read("embed.weight")
    (folder / ".metadata").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"\.metadata cannot be read: .*\n.*damaged"):
        DcpWeights(folder, Small())
