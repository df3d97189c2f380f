"""On a GPU, compiled: every architecture equals the plain model, ranks that share it too, and half precision trains.

Skipped where there is none. The compiler, the attention kernels and NCCL behave otherwise there than anything on a CPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from phalanx.lab import gpu, owned
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.ops.choice import Kind, choose
from phalanx.model.ops.kernels import Chunked
from phalanx.verification.case import Case
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case
from tests.parity.architectures import ARCHITECTURES
from tests.run_helpers import losses, records, short_run

DEVICE = "cuda"
GPT2, LLAMA = "gpt2-xl", "meta-llama/Llama-3.2-1B"
ALWAYS = (GPT2, LLAMA, "openai/whisper-small", "google-t5/t5-small", "mistralai/Mixtral-8x7B-v0.1")
PLANS = [
    "pp=2,mb=4,schedule=zb-h1", "pp=2,mb=4,schedule=zb-v", "pp=2,tp=2,mb=2", "tp=2,overlap=oases,sequence=yes",
    "dp=2,zero=3,mb=2", "pp=2,mb=2,slices=5-3-1",
    "pp=2,mb=4,offload=activations+optimizer-step", "dp=2,zero=2,mb=2,offload=optimizer",
    "tp=2,mb=2,recompute=light,offload=activations", "dp=2,zero=3,mb=2,offload=parameters",
    "pp=2,mb=4,schedule=block-major,recompute=block,offload=activations+parameters+optimizer-step",
]  # fmt: skip
OFFLOADS = [
    "mb=2,offload=activations", "mb=2,offload=optimizer", "mb=2,offload=optimizer-step",
    "mb=2,slices=3-2,recompute=light,offload=activations:1+optimizer:0.5", "mb=2,offload=parameters",
    "mb=2,offload=optimizer:0.5+optimizer-step:0.5", "mb=2,offload=parameters+optimizer:0.4+optimizer-step:0.6",
    "mb=4,schedule=block-major,recompute=block,offload=activations+parameters+optimizer-step",
    "mb=4,schedule=block-major,recompute=block,offload=activations+parameters+optimizer:0.4+optimizer-step:0.6",
]  # fmt: skip
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def _captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(tmp_path_factory.mktemp("captures")))
        yield


@pytest.fixture(scope="module")
def plain() -> Iterator[PlainProcess]:
    with PlainProcess() as process:
        yield process


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Four ranks that share the GPU, of which a case uses as many as its plan has."""
    with gpu.shared_gpu(owned.new_name(), 25) as shared, pytest.MonkeyPatch.context() as patch:
        for name, value in shared.items():
            patch.setenv(name, value)
        with WorkerPool(4, device=DEVICE, environment=lambda rank: gpu.rank_variables(rank, "lo")) as ranks:
            yield ranks


KINDS = [
    Kind(causal=True, windowed=False, segments=False, of_queries=False, bias=0, capped=False, dropped=True),
    Kind(causal=True, windowed=True, segments=True, of_queries=True, bias=0, capped=True, dropped=False),
    Kind(causal=False, windowed=False, segments=True, of_queries=False, bias=2, capped=False, dropped=True),
    Kind(causal=True, windowed=False, segments=False, of_queries=False, bias=1, capped=False, dropped=False),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dim", [64, 96])
def test_attention_of_every_kind_has_a_fast_kernel_that_is_right(dim: int, kind: Kind, dtype: torch.dtype) -> None:
    q = torch.randn(1, 4, 80, dim, device=DEVICE, dtype=dtype)
    spec = kind.example(80, q.device, dtype, dim**-0.5)
    assert not isinstance(choose(q, q[:, :2], q[:, :2], spec), Chunked)  # compared with it before it is taken


def require_exact(case: Case, plain: PlainProcess, pool: WorkerPool | None = None) -> None:
    report = verify_case(case, plain, pool)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else (pytest.mark.long,)) for name in ARCHITECTURES]
)
def test_every_architecture_compiled_is_exact(name: str, plain: PlainProcess) -> None:
    case = Case(name, "mb=2", tiny=True, dtype="float32", dropout=0.1, compile="inductor", device=DEVICE)
    require_exact(case, plain)


@pytest.mark.parametrize("plan", OFFLOADS)
def test_what_moves_to_the_host_and_back_is_exact(plan: str, plain: PlainProcess) -> None:
    """Copies run on streams of their own there, into pinned memory."""
    require_exact(Case(LLAMA, plan, tiny=True, dtype="float32", dropout=0.1, steps=3, device=DEVICE), plain)


@pytest.mark.parametrize("name", [GPT2, LLAMA])
@pytest.mark.parametrize(("plan", "compiled"), [*((plan, "off") for plan in PLANS), (PLANS[0], "inductor")])
def test_ranks_that_share_the_gpu_are_exact(
    name: str, plan: str, compiled: str, plain: PlainProcess, pool: WorkerPool
) -> None:
    """Mostly uncompiled: small segments take minutes to compile and nothing to run."""
    require_exact(
        Case(name, plan, tiny=True, dtype="float32", dropout=0.1, compile=compiled, device=DEVICE), plain, pool
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_with_an_odd_vocabulary_trains_like_float32(dtype: str, tmp_path: Path) -> None:
    """Such products are padded by the compiler."""
    config = GPT2Config(vocab_size=50257, n_embd=256, n_layer=2, n_head=4, n_positions=256)
    runs = {}
    for precision in ("float32", dtype):
        short_run(
            config, "synthetic:64", tmp_path / precision, steps=3, batch_size=8, seq_len=256, dtype=precision,
            device=DEVICE, plan="mb=2", export=False, tiny=False,
        )  # fmt: skip
        runs[precision] = losses(tmp_path / precision)
    assert sorted(runs[dtype]) == [1, 2, 3]
    assert runs[dtype] == pytest.approx(runs["float32"], rel=0.01)


def test_without_a_plan_and_with_little_memory_one_is_searched_that_fits(tmp_path: Path) -> None:
    """A graph is judged where it will run, and the first step holds as much as any other."""
    config = LlamaConfig(vocab_size=1024, hidden_size=512, intermediate_size=2048, num_hidden_layers=8,
                         num_attention_heads=8, max_position_embeddings=1024)  # fmt: skip
    options = {"dtype": "bfloat16", "device": DEVICE, "export": False, "compile": "off", "seq_len": 1024,
               "batch_size": 32, "tiny": False}  # fmt: skip
    short_run(config, "synthetic:32", tmp_path / "a", **options)
    needed = records(tmp_path / "a", "memory")[0]["predicted_bytes"]
    allowed = int(0.8 * needed)
    short_run(config, "synthetic:32", tmp_path / "b", memory=str(allowed), **options)
    plan, memory = records(tmp_path / "b", "plan")[-1], records(tmp_path / "b", "memory")[-1]
    assert memory["predicted_bytes"] <= allowed and "a step predicted on" in plan["reason"]
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-3)


def test_ranks_that_share_the_gpu_choose_a_plan_by_themselves(tmp_path: Path) -> None:
    train = ["train", "--model", LLAMA, "--tiny", "--data", "synthetic:8", "--steps", "3", "--compile", "off"]
    options = ["--dtype", "bfloat16", "--no-export", "--progress", "off", "--out", str(tmp_path / "a")]
    phalanx = [sys.executable, "-m", "phalanx"]
    subprocess.run([*phalanx, "lab", "ranks=2,gpu_share=50%", "--", *phalanx, *train, *options], check=True)
    (plan,) = records(tmp_path / "a", "plan")
    assert "unsearched" not in plan and "a step predicted on" in plan["reason"]
