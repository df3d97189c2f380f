"""What planning makes of facts: every zoo model can be planned, and its bytes are those of its programs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from phalanx.model.facts.facts import fewest_heads, load
from phalanx.model.zoo import zoo_table
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import estimate
from phalanx.planning.search import search
from phalanx.planning.work import ModelWork
from phalanx.predict.from_facts import Device, shipped
from phalanx.predict.predict import predict
from phalanx.predict.work_of_facts import work_of_facts
from phalanx.program.compile import compile_plan

BLOCK_MAJOR = "schedule=block-major,recompute=block,offload="


def work_of(name: str, tokens: int | None = None) -> ModelWork:
    facts = load(name)
    assert facts is not None
    length = min(tokens or 512, facts.max_tokens or 512)
    return work_of_facts(facts, {dim: 1 if dim == "batch" else length for dim in facts.dims})


@pytest.mark.parametrize("name", zoo_table.names())
def test_every_zoo_model_has_its_parameters_and_arithmetic_in_its_work(name: str) -> None:
    facts, work = load(name), work_of(name)
    assert facts is not None
    tied = sum(work.block(block).tied for block in range(len(work.blocks)))
    assert sum(work.block(block).parameters for block in range(len(work.blocks))) - tied == facts.num_parameters
    dims = {dim: 1 if dim == "batch" else min(512, facts.max_tokens or 512) for dim in facts.dims}
    assert work.flops == pytest.approx(facts.flops(dims), rel=1e-6)
    assert work.layers and fewest_heads(name) > 0


@pytest.mark.parametrize("name", ["gpt2", "google-t5/t5-small", "openai/whisper-small", "google/gemma-3-1b-it"])
def test_models_of_every_kind_are_planned(name: str) -> None:
    found = search(work_of(name), Cluster.read("2x2 A100"), Software(), 16).plans
    assert found[0].fits and found[0].plan.world == 4


@pytest.mark.parametrize(
    "name, plan, within",
    [
        ("gpt2", "pp=4,mb=8", 0.1),
        ("gpt2", "mb=1", 0.02),
        ("gpt2", "mb=1,recompute=block", 0.1),
        ("gpt2", "pp=4,mb=1", 0.1),
        ("meta-llama/Llama-3.2-1B", "mb=1", 0.02),
        ("meta-llama/Llama-3.2-1B", "mb=1,recompute=light", 0.02),
        ("gpt2", "pp=2,dp=2,mb=4,zero=1", 0.1),
        ("gpt2", "pp=2,dp=2,mb=4,zero=3", 0.1),
        ("gpt2", "pp=4,mb=8,recompute=block", 0.16),
        ("gpt2", "pp=4,mb=8,schedule=zb-h1", 0.3),
        ("gpt2", "pp=2,v=2,mb=8,schedule=interleaved", 0.1),
        ("gpt2", "pp=2,mb=4,schedule=zb-v", 0.3),
        ("gpt2", "pp=4,mb=2,slices=4", 0.2),
        ("gpt2", "mb=2,offload=optimizer", 0.1),
        ("gpt2", "mb=2,offload=activations", 0.2),
        ("gpt2", f"mb=8,{BLOCK_MAJOR}activations+parameters+optimizer-step", 0.15),
        ("gpt2", f"mb=4,{BLOCK_MAJOR}parameters", 0.15),
        ("gpt2-xl", f"mb=16,{BLOCK_MAJOR}activations+parameters", 0.15),
        ("meta-llama/Meta-Llama-3-8B", f"mb=16,{BLOCK_MAJOR}activations+parameters+optimizer-step", 0.15),
        ("meta-llama/Meta-Llama-3-8B", f"mb=4,{BLOCK_MAJOR}parameters+optimizer-step", 0.15),
        ("meta-llama/Llama-3.3-70B-Instruct", f"mb=8,{BLOCK_MAJOR}activations+parameters+optimizer-step", 0.15),
        ("meta-llama/Llama-3.3-70B-Instruct", "pp=8,mb=8", 0.06),
        ("meta-llama/Llama-3.3-70B-Instruct", "pp=8,tp=8,mb=2", 0.15),
        ("meta-llama/Llama-3.3-70B-Instruct", "pp=8,tp=8,mb=1", 0.15),
        ("meta-llama/Llama-3.3-70B-Instruct", "pp=8,tp=8,mb=2,recompute=unit", 0.2),
    ],
)
def test_bytes_are_hardly_less_than_those_of_the_program_and_little_more(name: str, plan: str, within: float) -> None:
    facts, batch = load(name), 16
    assert facts is not None
    exact = predict(facts, plan, None, batch, {"batch": batch, "tokens": 1024}, Device())
    chosen = exact.completed.plan
    cluster = Cluster.read(f"{chosen.world} H100")
    told = estimate(work_of(name, 1024), chosen, cluster, Software(), batch)
    for place in (0, chosen.pp - 1):
        is_there = sum(exact.timeline.memory[exact.compiled.mesh.rank(place, 0)].values())
        assert 0.95 <= sum(told.memory[place].values()) / is_there <= 1 + within


@pytest.mark.parametrize(
    "name, cluster, batch, fixed",
    [
        ("gpt2", "4 A100", 16, {"tp": 1}),
        ("gpt2", "4 A100", 16, {"pp": 4}),
        ("gpt2", "4x1 A100, network 1GB/s", 8, {"pp": 2, "dp": 2}),
        ("meta-llama/Llama-3.3-70B-Instruct", "4x8 H200", 8, {"tp": 8}),
        ("meta-llama/Llama-3.3-70B-Instruct", "4x8 H200", 16, {"pp": 8}),
    ],
)
def test_what_is_found_is_a_plan_that_is_compiled_and_checked(
    name: str, cluster: str, batch: int, fixed: dict[str, int]
) -> None:
    """Without slices: what is shipped of a model does not say how they split it."""
    facts = load(name)
    assert facts is not None
    best = search(replace(work_of(name), causal=False), Cluster.read(cluster), Software(), batch, fixed).plans[0].plan
    described = shipped(facts, best)
    assert described is not None, best.text
    compiled = compile_plan(best, described.compiled)
    assert len(compiled.programs) == best.pp
    assert replace(best) == type(best).from_json(best.to_json())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_planning_a_zoo_model_needs_no_torch(dtype: str) -> None:
    code = (
        "import sys; from phalanx.cli.main import main; main(['plan', '--model', 'gpt2', '--cluster', '4 H100', "
        f"'--dtype', '{dtype}', '--json']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
