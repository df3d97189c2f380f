"""The zoo: names, tasks, folders, the cache, and what is said when a model is not found."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, GPT2Config, PretrainedConfig

from phalanx.errors import ConfigError, ModelError
from phalanx.model.zoo import zoo_table
from phalanx.model.zoo.zoo import build, resolve

# One zoo name for each architecture.
ENTRIES = [entry for name in reversed(zoo_table.names()) if (entry := zoo_table.lookup(name))]
ARCHITECTURES = {entry.model_type: entry.name for entry in ENTRIES}


def _message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


def test_the_table_is_read_without_torch_or_transformers() -> None:
    code = (
        "import sys, phalanx.model.zoo.zoo_table as zoo; assert zoo.lookup('gpt2') and zoo.names();"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


@given(st.sampled_from(zoo_table.names()), st.randoms(use_true_random=False))
def test_a_name_is_found_in_any_case_and_by_its_last_part(name: str, random) -> None:
    mixed = "".join(random.choice((letter.lower(), letter.upper())) for letter in name)
    for spelling in (name, mixed, mixed.rsplit("/", 1)[-1]):
        entry = zoo_table.lookup(spelling)
        assert entry is not None and entry.name == name


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("opt-13.7b", "facebook/opt-13b"),
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("openai-community/gpt2", "gpt2"),
    ],
)
def test_natural_short_names_are_aliases(alias: str, name: str) -> None:
    assert resolve(alias).name == name


def test_a_foreign_owner_of_a_zoo_name_is_not_the_zoo_model() -> None:
    assert zoo_table.lookup("somebody/gpt2") is None
    assert zoo_table.lookup("./gpt2") is None


@pytest.mark.parametrize(
    ("config", "task"),
    [
        (GPT2Config(), "causal-lm"),
        (BertConfig(), "masked-lm"),
        (BertConfig(is_decoder=True), "causal-lm"),
        (BertConfig(architectures=["BertForSequenceClassification"]), "text-classification"),
        (BertConfig(architectures=["BertModel"]), "masked-lm"),
    ],
)
def test_a_config_names_its_task_by_class_or_by_model_type(config: PretrainedConfig, task: str) -> None:
    assert resolve(config).task == task


@pytest.mark.parametrize("name", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_the_config_of_a_resolved_model_resolves_to_the_same_task(name: str) -> None:
    spec = resolve(name)
    assert spec.config is not None and resolve(spec.config).task == spec.task


def test_resolving_a_config_leaves_it_alone() -> None:
    config = GPT2Config()
    resolve(config, overrides={"n_layer": 3})
    resolve(config)
    assert config.n_layer == 12 and config.architectures is None


def test_another_task_changes_the_head() -> None:
    spec = resolve("bert-base-cased", task="text-classification", tiny=True)
    assert type(build(spec)).__name__ == "BertForSequenceClassification"


def test_a_task_without_a_class_is_refused_with_the_tasks_there_are() -> None:
    with pytest.raises(ModelError) as error:
        resolve("gpt2", task="speech-to-text")
    assert "'gpt2' (model type 'gpt2') cannot be trained for 'speech-to-text'" in _message(error)
    assert "it has: causal-lm, text-classification" in _message(error)


def test_an_unknown_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        resolve("gpt2", task="causal")
    assert "unknown task 'causal'; did you mean 'causal-lm'" in _message(error)


def test_an_architecture_without_any_training_class_is_refused() -> None:
    class StrangeConfig(PretrainedConfig):
        model_type = "strange"

    with pytest.raises(ModelError) as error:
        resolve(StrangeConfig())
    assert "no class to train 'strange'" in _message(error) and "hand it over" in _message(error)


def _write_folder(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, **fields}))
    return folder


def test_a_folder_is_read_with_its_class_and_kept_for_its_weights(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path / "mine", architectures=["GPT2ForSequenceClassification"])
    for given_as in (folder, str(folder)):
        spec = resolve(given_as)
        assert (spec.name, spec.task, spec.folder) == ("mine", "text-classification", folder)
        assert spec.config is not None and spec.config.n_layer == 2
    assert resolve(folder, tiny=True).folder is None, "its weights do not fit a shrunk model"


def test_a_folder_here_wins_over_the_zoo_as_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_folder(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2").folder == Path("gpt2")


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        resolve(tmp_path)
    assert f"folder {str(tmp_path)!r} holds no config.json" in _message(error)


def test_a_folder_of_adapters_is_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError) as error:
        resolve(tmp_path)
    assert "holds adapters, not a model" in _message(error) and "train with merge_lora" in _message(error)


def test_a_file_instead_of_a_folder_is_refused_with_its_folder(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path / "mine")
    with pytest.raises(ModelError) as error:
        resolve(folder / "config.json")
    assert "is a file, not a model folder" in _message(error) and f"give the folder: {str(folder)!r}" in _message(error)


@pytest.mark.parametrize("text", ["{", '{"model_type": "not-a-model"}', "{}"])
def test_an_unreadable_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as error:
        resolve(tmp_path)
    assert f"cannot read {str(tmp_path / 'config.json')!r}: " in _message(error)


def test_a_configuration_with_code_of_its_own_is_refused_without_asking(tmp_path: Path) -> None:
    _write_folder(tmp_path, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    with pytest.raises(ModelError) as error:
        resolve(tmp_path)
    assert "cannot read" in _message(error) and "without code of its own" in _message(error)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def _write_cached(cache: Path, repository: str) -> Path:
    root = cache / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    return _write_folder(root / "snapshots" / ("0" * 40))


def test_a_cached_hub_id_is_found_without_the_network(cache: Path) -> None:
    snapshot = _write_cached(cache, "somebody/some-model")
    spec = resolve("somebody/some-model")
    assert (spec.name, spec.task, spec.folder) == ("somebody/some-model", "causal-lm", snapshot)


@pytest.mark.parametrize("name", ["EleutherAI/gpt-j-6b", "gpt-j-6b"])
def test_a_zoo_name_stands_for_the_files_of_the_cache_where_they_are_there(cache: Path, name: str) -> None:
    assert resolve(name).folder is None
    snapshot = _write_cached(cache, "EleutherAI/gpt-j-6b")
    spec = resolve(name)
    assert (spec.name, spec.task, spec.folder) == ("EleutherAI/gpt-j-6b", "causal-lm", snapshot)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1C", "gpt2-xxl", "./no/such/folder"])
def test_an_unknown_model_is_refused_with_names_and_without_the_network(cache: Path, name: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve(name)
    assert f"unknown model {name!r}" in _message(error) and "nothing is fetched" in _message(error)
    assert "phalanx inspect lists the zoo" in _message(error)


def test_an_unknown_model_suggests_the_nearest_name(cache: Path) -> None:
    with pytest.raises(ModelError) as error:
        resolve("meta-llama/Llama-3.2-1C")
    assert "did you mean 'meta-llama/Llama-3.2-1B'" in _message(error)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError) as error:
        resolve(7)  # type: ignore[arg-type]
    assert "an object of type int is not a model" in _message(error)
    assert "a zoo name, a HuggingFace folder" in _message(error)
