"""What people meet in their first hour: mistakes found at once, weights where they are, runs that go on as promised."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from phalanx.config import RunConfig
from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.model.zoo.zoo import resolve
from phalanx.prepare.early import require_usable
from phalanx.prepare.initial_weights import open_weights
from phalanx.state import checkpoint
from phalanx.state.lock import RunLock
from tests.run_helpers import losses, records, short_run

MODEL, DATA = "phalanx-demo", "synthetic:8"


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


@pytest.fixture
def started_without_torch(tmp_path: Path) -> Any:
    """`phalanx train` with these options, as long as it does not import torch: (exit code, what it said)."""
    code = "import sys; sys.modules['torch'] = None; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"

    def start(*options: str) -> tuple[int, str]:
        line = [sys.executable, "-c", code, "train", "--model=gpt2", "--tiny", "--data=stdlib", "--plan=pp=2", *options]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        return done.returncode, done.stderr

    return start


def test_what_files_show_is_found_before_torch_is_imported(started_without_torch: Any, tmp_path: Path):
    earlier = tmp_path / "earlier"
    checkpoint.save(earlier / "checkpoints", 2, [("x", torch.ones(1))], {}, keep=1)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    weights = tmp_path / "model" / "model.safetensors"
    save_file({"x": torch.ones(100)}, weights)
    weights.write_bytes(weights.read_bytes()[:-7])
    for options, message in {
        ("--out=file",): "option out = 'file' is a file",
        ("--out=file/run",): f"option out = 'file/run' lies below {tmp_path / 'file'}, which is a file",
        ("--out=model",): "option out = 'model' is the folder of a model",
        (f"--out={earlier}",): f"the run folder {earlier} already holds checkpoints, the newest step-00000002",
        ("--data=nothere.txt",): "data 'nothere.txt' does not exist",
        ("--model=gtp2",): "unknown model 'gtp2': neither a zoo name, nor a folder, nor a hub id in the local cache",
        ("--model=file",): "'file' is a file, not a model folder",
        ("--model=model",): "model/model.safetensors is damaged: it has ",
    }.items():
        returned, said = started_without_torch(*options)
        assert returned == 2 and said.startswith(f"error: {message}"), (options, said)
    weights.write_bytes(b"no safetensors at all")
    assert "model.safetensors is damaged: it is not safetensors" in started_without_torch("--model=model")[1]
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001.safetensors"}}')
    assert "names model-00001.safetensors, which is not there" in started_without_torch("--model=model")[1]


def test_of_joined_ranks_only_the_first_tells_what_all_of_them_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = RunConfig(out=str(tmp_path), data=("nowhere",))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DataError, match="data 'nowhere' does not exist"):
        require_usable(MODEL, "nowhere", None, config)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        require_usable(MODEL, "nowhere", None, config)


def test_a_run_in_a_folder_in_which_another_trains_is_refused_before_anything_is_started(tmp_path: Path):
    for resume in ("never", "auto"):
        config = RunConfig(out=str(tmp_path), data=(DATA,), resume=resume)
        with RunLock(tmp_path), pytest.raises(ConfigError, match=f"{tmp_path} is in use by process"):
            require_usable(MODEL, DATA, None, config)
        require_usable(MODEL, DATA, None, config)


def test_a_machine_that_comes_back_to_a_run_may_find_what_that_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    survives, ends = (RunConfig(out=str(tmp_path), data=(DATA,), on_loss=how) for how in ("regrow", "stop"))
    with pytest.raises(SystemExit):
        require_usable(MODEL, DATA, None, survives)  # nobody trains there
    with RunLock(tmp_path):
        require_usable(MODEL, DATA, None, survives)
        with pytest.raises(SystemExit):
            require_usable(MODEL, DATA, None, ends)


def test_weights_without_the_tokenizer_they_were_trained_with_are_refused_for_text(tmp_path: Path):
    folder = tmp_path / "model"
    small_llama().save_pretrained(folder)
    with pytest.raises(
        DataError, match="model holds weights, but not the tokenizer that they were trained with"
    ) as info:
        short_run(folder, "stdlib", tmp_path / "run", tiny=False)
    assert "--tokenizer" in info.value.hint
    for name, options in {"asked": {"tokenizer": "bytes"}, "fresh": {"init": "fresh"}}.items():
        short_run(folder, "stdlib", tmp_path / name, tiny=False, steps=1, export=False, **options)
    origins = [records(tmp_path / name, "start")[0]["header"]["weights"] for name in ("asked", "fresh")]
    assert origins == [f"from {folder}", "FRESH, from seed 0: as asked for (init=fresh)"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on this machine, with nothing in it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_zoo_name_stands_for_the_weights_of_the_hub_where_they_are_on_this_machine(hub: Path):
    name = "meta-llama/Llama-3.2-1B"
    spec = resolve(name)
    _, origin = open_weights(name, resolve(name, tiny=True), 0)
    assert spec.folder is None and origin == "FRESH, from seed 0: a shrunken model has none"

    snapshot = hub / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "abc"
    (hub / "models--meta-llama--Llama-3.2-1B" / "refs").mkdir(parents=True)
    (hub / "models--meta-llama--Llama-3.2-1B" / "refs" / "main").write_text("abc")
    model = small_llama()
    model.save_pretrained(snapshot)
    spec = resolve(name)
    weights, origin = open_weights(name, spec, 0)
    assert spec.folder == snapshot and origin == f"from {snapshot}"
    assert torch.equal(weights.read("model.norm.weight"), model.model.norm.weight)
    assert open_weights(name, spec, 0, "fresh")[1].startswith("FRESH, from seed 0: as asked for")


def test_fresh_weights_say_why_they_are_fresh(hub: Path, tmp_path: Path):
    small_llama().config.save_pretrained(tmp_path / "model")
    told = {
        MODEL: f"none of '{MODEL}' are on this machine (hf download {MODEL} fetches them where the hub has them)",
        str(tmp_path / "model"): f"{tmp_path / 'model'} holds none",
    }
    for model, why in told.items():
        assert open_weights(model, resolve(model), 3)[1] == f"FRESH, from seed 3: {why}"
    config = small_llama().config
    assert open_weights(config, resolve(config), 3)[1].endswith("a configuration or factory has none")


class Adapted(nn.Module):
    """A layer with another one beside it, as adapters have them."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.beside = inner, nn.Linear(inner.in_features, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.beside(x)


def samples() -> list[dict[str, Tensor]]:
    ids = torch.arange(24) % 7
    return [{"input_ids": ids.roll(i), "labels": ids.roll(i)} for i in range(8)]


def test_a_module_with_other_layers_than_its_class_is_exported_as_weights_alone_and_said_to_be(tmp_path: Path):
    model = small_llama()
    model.model.layers[0].mlp.up_proj = Adapted(model.model.layers[0].mlp.up_proj)  # pyright: ignore
    with pytest.warns(UserWarning, match="layers of this LlamaForCausalLM are not those of its configuration"):
        result = short_run(model, samples(), tmp_path, tiny=False, seq_len=24, steps=1)
    assert [file.name for file in result.export.iterdir()] == ["model.safetensors"]
    stored = load_file(result.export / "model.safetensors")
    twin = small_llama()
    twin.model.layers[0].mlp.up_proj = Adapted(twin.model.layers[0].mlp.up_proj)  # pyright: ignore
    twin.load_state_dict(stored, strict=False)
    assert torch.equal(twin.model.layers[0].mlp.up_proj.beside.weight, model.model.layers[0].mlp.up_proj.beside.weight)  # pyright: ignore


def test_a_module_as_its_class_makes_it_is_exported_whole_and_nothing_is_said(tmp_path: Path):
    model = small_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = short_run(model, samples(), tmp_path, tiny=False, seq_len=24, steps=1)
    again = AutoModelForCausalLM.from_pretrained(result.export)
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)


def rates(folder: Path) -> dict[int, float]:
    return {record["step"]: record["lr"] for record in records(folder, "step")}


def test_a_run_in_parts_with_the_same_lr_steps_is_the_run_in_one_piece(tmp_path: Path):
    options = {"lr": 1e-2, "lr_steps": 6, "export": False}
    short_run(MODEL, DATA, tmp_path / "whole", steps=8, **options)
    short_run(MODEL, DATA, tmp_path / "parts", steps=3, **options)
    short_run(MODEL, DATA, tmp_path / "parts", steps=8, resume="auto", **options)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    found = rates(tmp_path / "parts")
    assert found == rates(tmp_path / "whole") and found[6] == found[7] == found[8] == pytest.approx(1e-3)
    assert "learning rate" not in records(tmp_path / "parts", "start")[-1]["header"]["weights"]


def test_with_more_steps_the_learning_rate_follows_the_new_length_and_that_is_said(tmp_path: Path):
    options = {"lr": 1e-2, "export": False}
    short_run(MODEL, DATA, tmp_path / "whole", steps=6, **options)
    short_run(MODEL, DATA, tmp_path / "parts", steps=3, **options)
    short_run(MODEL, DATA, tmp_path / "parts", steps=6, resume="auto", **options)
    whole, parts = rates(tmp_path / "whole"), rates(tmp_path / "parts")
    assert [parts[step] for step in (4, 5, 6)] == [whole[step] for step in (4, 5, 6)] and parts[3] < whole[3]
    told = records(tmp_path / "parts", "start")[-1]["header"]["weights"]
    now = f"{whole[4]:.2e} at step 4, where it was 1.00e-03"
    assert told.endswith(f"the run was to have 3 steps then; its learning rate follows the new length from here: {now}")


def test_data_that_is_called_the_same_but_is_not_is_told_from_options_that_changed(tmp_path: Path):
    file = tmp_path / "words.txt"
    file.write_text("one two three " * 100)
    short_run(MODEL, file, tmp_path / "run", steps=1, export=False)
    file.write_text("six two three " * 100)
    with pytest.raises(ConfigError, match=r"something changed:\s+data: still called '.*words\.txt.*', but its first"):
        short_run(MODEL, file, tmp_path / "run", steps=2, resume="auto")


def test_conversations_that_are_cut_are_counted(tmp_path: Path):
    turns = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so" * n}] for n in (1, 30, 40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    with pytest.warns(UserWarning, match=r"2 of the 3 records of .*chat.jsonl.* are longer than 48 tokens and cut off"):
        short_run(MODEL, tmp_path / "chat.jsonl", tmp_path / "run", seq_len=48, batch_size=1, steps=1, export=False)


def test_a_callback_that_fails_is_told_with_its_line(tmp_path: Path):
    class Watch:
        def on_step(self, record: Any) -> None:
            raise KeyError("nothing")

    with pytest.raises(
        PhalanxError, match=r"callback Watch.on_step failed at .*test_first_hour.py:\d+: KeyError: "
    ) as info:
        short_run(MODEL, DATA, tmp_path, callbacks=[Watch()])
    assert "mend the callback" in info.value.hint
