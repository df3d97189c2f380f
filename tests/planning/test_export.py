"""Plans in the words of other frameworks, and what these cannot say."""

from __future__ import annotations

import json

import pytest
import yaml

from phalanx.cli.main import main
from phalanx.plan.plan import Plan
from phalanx.planning.export import FRAMEWORKS, Exported, Job, export


def exported(framework: str, plan: str, batch: int = 64, layers: int = 8, dtype: str = "bfloat16") -> Exported:
    chosen = Plan.parse(plan)
    return export(framework, Job(chosen, batch, 2048, layers, 2 * (chosen.world // 2,), dtype))


def words_of(framework: str, plan: str, batch: int = 64) -> list[str]:
    return exported(framework, plan, batch).text.replace("\\\n", " ").split()


def test_megatron_gets_its_arguments() -> None:
    text, cannot = exported("megatron", "pp=2,tp=4,dp=2,mb=8,sequence=yes,zero=1,stages=5-5")
    for word in (
        "--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 2", "--micro-batch-size 4",
        "--global-batch-size 64", "--sequence-parallel", "--use-distributed-optimizer",
    ):  # fmt: skip
        assert word in text
    assert not cannot


@pytest.mark.parametrize(
    "framework, plan, lost",
    [
        ("megatron", "pp=2,mb=8,schedule=zb-h1,stages=5-5", "schedule=zb-h1"),
        ("megatron", "pp=4,mb=8,stages=2-4-3-1", "stages=2-4-3-1"),
        ("megatron", "dp=2,recompute=block*2+light*6,stages=10", "recompute=light of 6 layers beside 2"),
        ("megatron", "dp=2,slices=4,stages=10", "token slices"),
        ("deepspeed", "pp=2,dp=2,mb=4,zero=2,stages=5-5", "zero=2 beside a pipeline"),
        ("torchtitan", "dp=2,zero=1,stages=10", "zero=1: its FSDP shards parameters"),
        ("torchtitan", "pp=2,mb=4,schedule=eager-1f1b,stages=5-5", "schedule=eager-1f1b"),
        ("accelerate", "tp=2,dp=2,zero=3,stages=10", "zero=3 beside tensor parallelism"),
        ("accelerate", "dp=2,mb=3,stages=10", "micro-batches of different sizes"),
    ],
)
def test_what_a_framework_cannot_say_is_named(framework: str, plan: str, lost: str) -> None:
    assert any(lost in own for own in exported(framework, plan).cannot)


def test_uneven_ends_are_said_to_megatron() -> None:
    text = exported("megatron", "pp=4,mb=8,stages=2-4-4-2", layers=10).text
    assert "--decoder-first-pipeline-num-layers 1" in text and "--decoder-last-pipeline-num-layers 1" in text


def test_files_are_what_their_formats_read() -> None:
    text = exported("deepspeed", "dp=4,mb=4,zero=3,stages=10").text
    config, _, launch = text.rpartition("\n\n")
    read = json.loads(config)
    assert read["train_batch_size"] == 4 * read["train_micro_batch_size_per_gpu"] * read["gradient_accumulation_steps"]
    assert read["zero_optimization"]["stage"] == 3 and launch.startswith("deepspeed --num_nodes 2 --num_gpus 2")
    titan = words_of("torchtitan", "pp=2,tp=2,dp=4,mb=8,zero=3,zero_degree=2,recompute=block,stages=5-5")
    said = dict(zip(titan[:-1:2], titan[1::2], strict=True))
    degrees = [said[f"--parallelism.data_parallel_{kind}_degree"] for kind in ("shard", "replicate")]
    assert degrees == ["2", "2"] and titan[-1] == "activation-checkpoint:full"
    assert said["--parallelism.pipeline_parallel_schedule"] == "1F1B" and said["--training.local_batch_size"] == "16"
    sharded = yaml.safe_load(exported("accelerate", "dp=4,zero=3,recompute=block,stages=10").text)
    assert sharded["fsdp_config"] == {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_activation_checkpointing": True}
    split = yaml.safe_load(exported("accelerate", "pp=2,tp=2,mb=8,sequence=yes,stages=5-5").text)
    assert split["megatron_lm_config"]["megatron_lm_sequence_parallelism"] is True


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_command_prints_it(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt2", "--cluster", "4 A100", "--export", framework]) == 0
    assert capsys.readouterr().out


def test_an_unknown_framework_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt2", "--cluster", "4 A100", "--export", "horovod"]) == 2
    assert "option export = 'horovod' is not one of megatron, deepspeed" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_lies_on_the_host_is_lost_and_said(framework: str) -> None:
    _, cannot = exported(framework, "dp=2,offload=optimizer:0.75,stages=10")
    assert "offload=optimizer:0.75" in cannot


@pytest.mark.parametrize(
    ("framework", "bfloat16", "float16", "float32"),
    [
        ("megatron", "--bf16", "--fp16", ""), ("deepspeed", '"bf16"', '"fp16"', ""),
        ("torchtitan", "mixed_precision_param bfloat16", "", "mixed_precision_param float32"),
        ("accelerate", "mixed_precision: bf16", "mixed_precision: fp16", "mixed_precision: no"),
    ],
)  # fmt: skip
def test_the_precision_is_that_which_was_planned_for(framework: str, bfloat16: str, float16: str, float32: str) -> None:
    words = {"bfloat16": bfloat16, "float16": float16, "float32": float32}
    for dtype, word in words.items():
        text, cannot = exported(framework, "dp=2,stages=10", dtype=dtype)
        lacks = framework == "torchtitan" and dtype == "float16"
        assert word in text and (f"dtype={dtype}" in cannot) == lacks
        assert lacks or not any(other and other in text for other in words.values() if other != word)
    assert "dtype=float64" in exported(framework, "dp=2,stages=10", dtype="float64").cannot


def test_nodes_of_several_sizes_are_named_in_a_hostfile() -> None:
    text, cannot = export("deepspeed", Job(Plan(dp=10, stages=(10,)), 80, 2048, 8, (4, 4, 2)))
    assert "deepspeed --hostfile HOSTFILE train.py" in text
    assert any("slots=4, slots=4, slots=2" in lost for lost in cannot)
