"""Files that somebody prepared: nothing in them is run, nothing outside of their folder is read, and whatever is wrong
with them is one of our errors, found quickly. Stores are in tests/launch/test_store.py."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from phalanx.config import RunConfig
from phalanx.errors import ConfigError, ModelError
from phalanx.model.weights.weights import SafetensorsWeights
from phalanx.state.dcp import DcpWeights, is_dcp


class Bomb:
    """What unpickling runs."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def model() -> nn.Module:
    return nn.Linear(3, 2)


def dcp_folder(folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save(model().state_dict(), checkpoint_id=folder, no_dist=True)
    return folder


def bomb(mark: Path) -> bytes:
    return pickle.dumps(Bomb(mark))


def hidden_bomb(mark: Path) -> bytes:
    """Deep inside what is a good index otherwise."""
    folder = dcp_folder(mark.parent / "good")
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = {"weight": Bomb(mark)}
    return pickle.dumps(index)


@pytest.mark.parametrize("made", [bomb, hidden_bomb])
def test_a_pickle_in_an_index_of_torchs_is_not_run(tmp_path: Path, made: Callable[[Path], bytes]):
    mark, folder = tmp_path / "ran", dcp_folder(tmp_path / "dcp")
    (folder / ".metadata").write_bytes(made(mark))
    try:
        assert DcpWeights(folder, model()).names() == ("weight", "bias")  # the rest of the index may be good
    except ModelError as error:
        assert "cannot be read: it holds a mkdir where an index has Metadata" in str(error)
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_not_looked_at(tmp_path: Path):
    save_file(model().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / ".metadata").write_bytes(bomb(tmp_path / "ran"))
    assert not is_dcp(tmp_path) and not (tmp_path / "ran").exists()


def test_an_index_of_torchs_that_leads_out_of_its_folder_is_refused(tmp_path: Path):
    folder = dcp_folder(tmp_path / "dcp")
    index = pickle.loads((folder / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ModelError, match=r"names '\.\./secret', which is not a file of this folder"):
        DcpWeights(folder, model())


def test_a_chunk_of_torchs_that_is_a_pickle_is_not_run(tmp_path: Path):
    folder = dcp_folder(tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    file.write_bytes(bomb(tmp_path / "ran").ljust(file.stat().st_size, b"\0"))
    with pytest.raises(ModelError, match="holds no usable values of weight"):
        DcpWeights(folder, model()).read("weight")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "", "\0"])
def test_an_index_of_weights_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(model().state_dict(), tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ModelError, match=r"names files outside of its folder: .*\n.*do not use this folder"):
        SafetensorsWeights(folder, model())


@pytest.mark.parametrize("name", ["os.system", "evil.Boom", "torch.optim.evil.Boom", "torch.hub.load", "evil.sub.Boom"])
def test_an_optimizer_in_a_file_is_not_imported(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(f"optimizer: {name}\n")
    with pytest.raises(ConfigError, match=rf"option optimizer = '{name}' in a file would import .*\n.*--optimizer "):
        RunConfig.load(file)
    assert not (tmp_path / "ran").exists() and "evil" not in sys.modules
    assert RunConfig.load(file, optimizer=name).optimizer == name


def test_an_optimizer_of_torchs_may_stand_in_a_file(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("optimizer: torch.optim.Adagrad\n")
    assert RunConfig.load(tmp_path / "run.yaml").optimizer == "torch.optim.Adagrad"


def test_fuzzed_pickles_run_nothing(tmp_path: Path):
    """Every pickle is a program: here are some that are made of the opcodes of real ones."""
    folder, source, mark = dcp_folder(tmp_path / "dcp"), random.Random(3), tmp_path / "ran"
    good, loaded = (folder / ".metadata").read_bytes(), bomb(mark)
    for _ in range(1000):
        at = source.randrange(len(good))
        (folder / ".metadata").write_bytes(good[:at] + loaded[source.randrange(4) :] + good[at:])
        with contextlib.suppress(ModelError):
            DcpWeights(folder, model())
    assert not mark.exists()
