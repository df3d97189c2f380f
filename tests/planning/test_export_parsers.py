"""Plans in the words of other frameworks, read by those frameworks' own parsers, where they are installed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.plan.plan import Plan
from tests.planning.test_export import exported, words_of

PLANS = [
    "dp=4,mb=2,stages=10",
    "dp=4,mb=2,zero=1,stages=10",
    "dp=4,mb=2,zero=2,stages=10",
    "dp=4,mb=2,zero=3,recompute=block,stages=10",
    "dp=4,mb=2,zero=3,zero_degree=2,stages=10",
    "tp=2,dp=2,mb=4,sequence=yes,stages=10",
    "pp=2,tp=2,dp=2,mb=4,zero=1,recompute=light,stages=5-5",
    "pp=4,dp=2,mb=8,stages=2-3-3-2",
]


@pytest.mark.parametrize("text", PLANS)
def test_deepspeed_reads_its_configuration(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    parser: Any = pytest.importorskip("deepspeed.runtime.config")
    plan = Plan.parse(text)
    monkeypatch.setattr(parser.dist, "get_rank", lambda: 0)
    config = json.JSONDecoder().raw_decode(exported("deepspeed", text).text)[0]
    read = parser.DeepSpeedConfig(config, mpu=_Replicas(plan.dp))
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (64, plan.mb)
    assert read.train_micro_batch_size_per_gpu == 64 // (plan.dp * plan.mb)
    assert read.zero_config.stage == plan.zero and read.bfloat16_config.enabled
    assert read.zero_config.zero_hpz_partition_size == ((plan.zero == 3 and plan.zero_degree) or 1)
    assert read.tensor_parallel_config.autotp_size == (plan.tp if plan.tp > 1 else 0)


@dataclasses.dataclass
class _Replicas:
    """What DeepSpeed asks of whoever made the groups of ranks."""

    dp: int

    def get_data_parallel_world_size(self) -> int:
        return self.dp


@pytest.mark.parametrize("text", PLANS)
def test_accelerate_reads_its_configuration(text: str, tmp_path: Path) -> None:
    launch: Any = pytest.importorskip("accelerate.commands.launch")
    (tmp_path / "plan.yaml").write_text(exported("accelerate", text).text, "utf-8")
    given = launch.launch_command_parser().parse_args(["--config_file", str(tmp_path / "plan.yaml"), "train.py"])
    read, _, _ = launch._validate_launch_command(given)
    plan = Plan.parse(text)
    assert read.num_processes == plan.world and read.mixed_precision == "bf16"
    assert read.use_megatron_lm is (plan.pp > 1 or plan.tp > 1)
    assert read.use_fsdp is (not read.use_megatron_lm and plan.zero >= 2)
    if read.use_megatron_lm:
        assert (read.megatron_lm_tp_degree, read.megatron_lm_pp_degree) == (plan.tp, plan.pp)


@pytest.mark.parametrize("text", PLANS)
def test_torchtitan_reads_its_arguments(text: str) -> None:
    tyro: Any = pytest.importorskip("tyro")
    configs: Any = pytest.importorskip("torchtitan.config")

    sections = {"training": configs.TrainingConfig, "parallelism": configs.ParallelismConfig}
    fields = [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in sections.items()]
    *words, checkpointing = words_of("torchtitan", text)
    read = tyro.cli(dataclasses.make_dataclass("Settings", fields), args=words)
    plan = Plan.parse(text)
    assert read.parallelism.tensor_parallel_degree == plan.tp and read.training.global_batch_size == 64
    assert read.parallelism.pipeline_parallel_degree == plan.pp
    assert read.parallelism.data_parallel_shard_degree * read.parallelism.data_parallel_replicate_degree == plan.dp
    assert checkpointing in {f"activation-checkpoint:{mode}" for mode in ("none", "full", "selective")}


@pytest.mark.parametrize("text", PLANS)
def test_megatron_reads_its_arguments(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.parse(text)
    monkeypatch.setenv("WORLD_SIZE", str(plan.world))
    monkeypatch.setenv("RANK", "0")
    if plan.tp > 1:  # as its validator wants it
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    arguments: Any = _megatron(monkeypatch)
    model = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --max-position-embeddings 2048 --lr 1e-4"
    model += " --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 100"
    monkeypatch.setattr(sys, "argv", ["train.py", *model.split(), *words_of("megatron", text)])
    read = arguments.validate_args(arguments.parse_args())
    assert read.data_parallel_size == plan.dp and read.global_batch_size == 64
    assert (read.tensor_model_parallel_size, read.pipeline_model_parallel_size) == (plan.tp, plan.pp)


def _megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a checkout of Megatron-LM, which no package holds; it asks for the device that it would run on."""
    pytest.importorskip("megatron.core")
    if not torch.cuda.is_available():
        device = SimpleNamespace(major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return pytest.importorskip("megatron.training.arguments")
