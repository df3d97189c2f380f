from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import RunConfig, cache_folder
from phalanx.errors import ConfigError
from phalanx.written import parse_steps


def refusal(**options: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RunConfig.create(**options)
    return caught.value


def test_defaults_are_valid_and_mean_one_epoch():
    config = RunConfig()
    assert (config.steps, config.epochs) == (None, 1.0)
    assert config.data == ("stdlib",)


def test_steps_alone_leave_epochs_unset():
    assert RunConfig(steps=5).epochs is None


def test_a_config_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        RunConfig().lr = 1.0  # pyright: ignore


def test_every_option_has_a_description_and_a_group():
    for name, field in RunConfig.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict) and field.json_schema_extra["group"], name


def test_an_unknown_option_suggests_the_nearest():
    error = refusal(seq_lenn=3)
    assert error.message == "unknown option 'seq_lenn'"
    assert "'seq_len'" in error.hint


def test_the_constructor_itself_raises_our_error():
    with pytest.raises(ConfigError, match="batch_size = 0 must be greater than or equal to 1"):
        RunConfig(batch_size=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "option seq_len = 0 must be greater than or equal to 1"),
        ({"seq_len": "many"}, "option seq_len = 'many' must be a valid integer"),
        ({"steps": 1.5}, "option steps = 1.5 must be a valid integer"),
        ({"steps": True}, "option steps = True must not be true or false"),
        ({"epochs": 0}, "option epochs = 0 must be greater than 0"),
        ({"lr": float("nan")}, "option lr = nan must be a finite number"),
        ({"lr": -1}, "option lr = -1 must be greater than 0"),
        ({"dropout": 1}, "option dropout = 1 must be less than 1"),
        ({"min_lr_ratio": 2}, "option min_lr_ratio = 2 must be less than or equal to 1"),
        ({"clip": 0}, "option clip = 0 must be greater than 0"),
        ({"seed": -1}, "option seed = -1 must be greater than or equal to 0"),
        ({"keep_checkpoints": 0}, "option keep_checkpoints = 0 must be greater than or equal to 1"),
        ({"model": ""}, "option model = '' must have at least 1 character"),
        ({"shuffle": "maybe"}, "option shuffle = 'maybe' must be a valid boolean"),
        ({"betas": (0.9,)}, "option betas = (0.9,) lacks a value"),
        ({"betas": (0.9, 1.0)}, "option betas = (0.9, 1.0) is out of range"),
        ({"data": 3}, "option data = 3 must be a valid tuple"),
        ({"data": ()}, "option data is empty"),
        ({"data": (3,)}, "option data.0 = 3 must be a valid string"),
        ({"optimizer_options": 3}, "option optimizer_options = 3 must be a valid dictionary"),
        ({"optimizer_options": {"k": {}}}, "option optimizer_options.k = {} must be a number, a text"),
        ({"optimizer": "adam"}, "option optimizer = 'adam' is unknown"),
        ({"lr_schedule": "cosin"}, "option lr_schedule = 'cosin' is not one of cosine, linear, constant"),
        ({"device": "tpu"}, "option device = 'tpu' is not one of auto, cpu, cuda"),
        ({"mirror_every": "-1"}, "option mirror_every = '-1' must be greater than or equal to 0"),
        ({"mirror_every": "nevr"}, "option mirror_every = 'nevr' is neither a number nor one of auto, never"),
        ({"profile_steps": "3"}, "option profile_steps = '3' is not of the form A:B"),
        ({"profile_steps": "5:3"}, "option profile_steps = '5:3' is not of the form A:B"),
        ({"steps": 3, "epochs": 1}, "options steps = 3 and epochs = 1.0 exclude each other"),
        ({"steps": 3, "warmup_steps": 4}, "option warmup_steps = 4 is longer than the run, steps = 3"),
        ({"optimizer": "sgd", "eps": 1e-6}, "option eps = 1e-06 does nothing with optimizer = 'sgd'"),
        ({"optimizer": "sgd", "betas": (0, 0)}, "option betas = (0.0, 0.0) does nothing with optimizer = 'sgd'"),
        ({"lr_schedule": "constant", "min_lr_ratio": 0}, "does nothing with lr_schedule = 'constant'"),
        ({"master_weights": False}, "option master_weights = False does nothing with dtype = 'float32'"),
    ],
)
def test_a_bad_value_is_refused_by_name_value_and_limit(options: dict[str, object], message: str):
    error = refusal(**options)
    assert message in error.message
    assert error.hint, "every refusal says what to do next"


def test_several_mistakes_are_reported_together():
    message = refusal(seq_len=0, batchsize=2).message
    assert message.startswith("2 options are wrong:")
    assert "option seq_len = 0" in message and "did you mean 'batch_size'" in message


def test_a_bad_choice_suggests_the_nearest():
    assert "did you mean 'cosine'?" in refusal(lr_schedule="cosin").hint
    assert "did you mean 'adamw'?" in refusal(optimizer="adam").hint


def test_a_dotted_path_is_an_optimizer():
    assert RunConfig(optimizer="torch.optim.Adagrad").optimizer == "torch.optim.Adagrad"


def test_texts_from_the_command_line_become_values():
    config = RunConfig.create(seq_len="64", lr="1e-3", shuffle="false", clip="none", betas=("0.8", "0.9"))
    assert (config.seq_len, config.lr, config.shuffle, config.clip, config.betas) == (64, 1e-3, False, None, (0.8, 0.9))


def test_optimizer_options_keep_their_kinds():
    given_options = {"momentum": "9e-1", "nesterov": "True", "steps": 3, "name": "x", "weights": [1, 2]}
    config = RunConfig.create(optimizer="sgd", optimizer_options=given_options)
    assert config.optimizer_options == given_options | {"momentum": 0.9, "nesterov": True, "weights": (1.0, 2.0)}


def test_paths_and_single_texts_are_accepted(tmp_path: Path):
    config = RunConfig.create(data=tmp_path, out=tmp_path / "run", eval_data=[tmp_path, "synthetic"], freeze="embed*")
    assert config.data == (str(tmp_path),)
    assert config.out == str(tmp_path / "run")
    assert config.eval_data == (str(tmp_path), "synthetic")
    assert config.freeze == ("embed*",)


def test_override_replaces_options_and_checks_them():
    base = RunConfig(steps=100, lr=1e-2)
    assert base.override(lr=1e-3) == RunConfig(steps=100, lr=1e-3)
    with pytest.raises(ConfigError, match="unknown option 'lrr'"):
        base.override(lrr=1)


def test_override_with_steps_drops_epochs_and_back():
    assert RunConfig(epochs=3).override(steps=7).epochs is None
    assert RunConfig(steps=7).override(epochs=3).steps is None


def test_override_with_both_lengths_is_refused():
    with pytest.raises(ConfigError, match="exclude each other"):
        RunConfig().override(steps=3, epochs=1)


def configs() -> st.SearchStrategy[RunConfig]:
    text = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=12)
    return st.builds(
        RunConfig,
        model=text,
        data=st.lists(text, min_size=1, max_size=3).map(tuple),
        task=st.none() | text.filter(lambda task: task.lower() != "none"),
        steps=st.integers(1, 10**6),
        lr=st.floats(1e-12, 10),
        clip=st.none() | st.floats(1e-9, 1e9),
        seed=st.integers(0, 2**63 - 1),
        optimizer_options=st.dictionaries(text, st.booleans() | st.integers() | st.floats(-1e9, 1e9), max_size=3),
        dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    )


@given(configs())
def test_yaml_holds_everything(config: RunConfig):
    assert RunConfig.create(**yaml.safe_load(config.to_yaml())) == config


def test_save_and_load_give_the_same_config(tmp_path: Path):
    config = RunConfig(model="gpt2", steps=3, betas=(0.8, 0.9), freeze=("a.*", "b"))
    config.save(tmp_path / "config.yaml")
    assert RunConfig.load(tmp_path / "config.yaml") == config


def test_json_files_and_unusual_yaml_numbers_load(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps({"steps": 4, "data": ["x"]}))
    (tmp_path / "b.yaml").write_text("lr: 1e-3\nclip: none\n")
    (tmp_path / "c.yaml").write_text("")
    assert RunConfig.load(tmp_path / "a.json") == RunConfig(steps=4, data=("x",))
    assert RunConfig.load(tmp_path / "b.yaml") == RunConfig(lr=1e-3, clip=None)
    assert RunConfig.load(tmp_path / "c.yaml") == RunConfig()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "missing.yaml: cannot be read: No such file or directory"),
        ("broken.yaml", "a: [1", "broken.yaml: is neither YAML nor JSON"),
        ("broken.json", "{", "broken.json: is neither YAML nor JSON"),
        ("list.yaml", "- 1\n", "list.yaml: holds a list, not options"),
        ("typo.yaml", "lrr: 1\n", "typo.yaml: unknown option 'lrr'"),
        ("number.yaml", "3: 1\n", "number.yaml: unknown option '3'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str | None, message: str):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(tmp_path / name)
    assert message in caught.value.message
    assert caught.value.hint


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_step_range_reads_back(first: int, more: int):
    assert parse_steps(f"{first}:{first + more}") == (first, first + more)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("PHALANX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "phalanx"
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
