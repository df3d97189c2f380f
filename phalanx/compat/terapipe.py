"""TeraPipe's benchmark: a model of the GPT-3 family as a pipeline over slices of the sequence.

    python -m phalanx.compat.terapipe N_NODES N_GPUS MODEL_PARALLEL_SIZE PIPELINE_PARALLEL_SIZE MODEL N_SLICES N_STEPS

with the seven arguments of `mpirun_pipemegatron.sh`, in its order, and `--mixed-precision`; `--verify` compares the
same model and plan with plain PyTorch instead. On one node it starts its
ranks itself; on several, start it on each rank with mpirun, srun or torchrun.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GPT2Config

from phalanx.config import RunConfig
from phalanx.errors import ConfigError, PhalanxError, nearest
from phalanx.training.trainer import Trainer
from phalanx.verification.report import Report
from phalanx.verification.verify import verify


@dataclass(frozen=True)
class ModelConfig:
    """tokens: of a sample, of which a step has batch_size."""

    layers: int
    hidden: int
    heads: int
    tokens: int = 2048
    batch_size: int = 1
    vocabulary: int = 50257

    def configuration(self) -> GPT2Config:
        return GPT2Config(
            n_layer=self.layers, n_embd=self.hidden, n_head=self.heads, n_positions=self.tokens,
            vocab_size=self.vocabulary, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip


MODEL_CONFIGS = {
    "test": ModelConfig(4, 64, 4, tokens=128, vocabulary=256),
    "gpt3-1b": ModelConfig(24, 2048, 16),
    "gpt3-13b": ModelConfig(40, 5120, 40),
    "gpt3-44b": ModelConfig(96, 6144, 48),
    "gpt3-175b": ModelConfig(96, 12288, 96),
}


class Timed:
    """A callback: the seconds of every step, printed and kept."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.seconds.append(record["step_seconds"])
        print(f"step {record['step']}  {record['step_seconds']:.4f} s  loss {record['loss']:.4f}", flush=True)

    def mean(self) -> str:
        later = self.seconds[1:] or self.seconds  # the first one also compiles
        return f"mean {sum(later) / len(later):.4f} s per step, without the first"


def plan_of(
    n_nodes: int, n_gpus: int, model_parallel_size: int, pipeline_parallel_size: int, model: str, n_slices: int,
    n_steps: int,
) -> tuple[ModelConfig, str]:  # fmt: skip
    """The model and the plan that the seven arguments say."""
    sizes = (n_nodes, n_gpus, model_parallel_size, pipeline_parallel_size, n_slices, n_steps)
    if min(sizes) < 1:
        raise ConfigError(f"terapipe: one of {', '.join(map(str, sizes))} is below 1", "give numbers of 1 or more")
    if n_nodes * n_gpus != model_parallel_size * pipeline_parallel_size:
        raise ConfigError(
            f"terapipe: {n_nodes} nodes × {n_gpus} GPUs are not {model_parallel_size} model-parallel × "
            f"{pipeline_parallel_size} pipeline-parallel",
            "N_NODES × N_GPUS must be MODEL_PARALLEL_SIZE × PIPELINE_PARALLEL_SIZE",
        )
    if model not in MODEL_CONFIGS:
        raise ConfigError(f"terapipe: model {model!r} is unknown", nearest(model, MODEL_CONFIGS))
    chosen = MODEL_CONFIGS[model]
    plan = f"pp={pipeline_parallel_size},tp={model_parallel_size},mb={chosen.batch_size}"
    return chosen, plan + (f",slices={n_slices}" if n_slices > 1 else "")


def benchmark(*arguments: Any, mixed_precision: bool = False, device: str = "auto") -> Timed:
    """The seconds of each step, as far as this process hears of them. arguments: those of `plan_of`."""
    (chosen, plan), timed = plan_of(*arguments), Timed()
    with tempfile.TemporaryDirectory(prefix="phalanx-terapipe-") as out:
        config = RunConfig.create(
            plan=plan, steps=arguments[-1], batch_size=chosen.batch_size,
            seq_len=chosen.tokens, dtype="float16" if mixed_precision else "float32", out=f"{out}/run", export=False,
            progress="off", device=device,
        )  # fmt: skip
        Trainer(chosen.configuration(), "synthetic", config, callbacks=[timed]).fit()
    return timed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m phalanx.compat.terapipe", description="TeraPipe's benchmark.")
    for name in ("n_nodes", "n_gpus", "model_parallel_size", "pipeline_parallel_size"):
        parser.add_argument(name, type=int)
    parser.add_argument("model", help=", ".join(MODEL_CONFIGS))
    parser.add_argument("n_slices", type=int)
    parser.add_argument("n_steps", type=int)
    parser.add_argument("--mixed-precision", action="store_true", help="float16 with float32 masters")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--verify", action="store_true", help="compare with plain PyTorch in float64, instead")
    given = vars(parser.parse_args(arguments))
    checks, options = given.pop("verify"), {name: given.pop(name) for name in ("mixed_precision", "device")}
    try:
        if checks:
            return _verified(*plan_of(*given.values()), **options)
        timed = benchmark(*given.values(), **options)
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if timed.seconds:
        print(timed.mean())
    return 0


def _verified(model: ModelConfig, plan: str, mixed_precision: bool, device: str) -> int:
    if mixed_precision:
        raise ConfigError("terapipe: --verify compares in float64", "leave --mixed-precision out")
    return told(verify(model.configuration(), plan, tokens=model.tokens, device=device))


def told(report: Report) -> int:
    """Says what was found; the exit code."""
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
