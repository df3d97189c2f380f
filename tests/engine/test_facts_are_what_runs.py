"""A process without torch compiles a plan from facts; real ranks execute exactly that: the same instructions, which
write values of the same bytes and drop them at the same place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from phalanx.engine.describe import describe
from phalanx.errors import PlanError
from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.complete import complete
from phalanx.plan.plan import SCHEDULES, Plan
from phalanx.plan.rules import OVERLAPS
from phalanx.predict.split_facts import write_all
from tests import captured
from tests.engine.facts_record import differences, on_rank, without_torch

Model = tuple[str, dict[str, Any]]


def check(model: Model, text: str, pool: WorkerPool, tokens: int) -> None:
    """The samples are as many as make equal micro-batches of two samples a part."""
    name, overrides = model
    plan = Plan.parse(text)
    part = 2 * plan.multiple
    samples = part * plan.mb * plan.dp
    case = captured.named(name, samples=samples, tokens=tokens, **overrides)
    costs = case.blocks.flops(case.captured.dims(case.batch))
    chosen = complete(text, world=plan.world, batch_size=samples, costs=costs).plan
    described = describe(case.captured, chosen, "float64", device="cpu")
    facts = write_all([described], [block.name for block in case.blocks.blocks])
    dims = case.captured.dims(case.batch) | {"batch": part}
    said = without_torch(facts, chosen, dims)
    for rank, there in enumerate(pool.run(on_rank, name, overrides, chosen.text, samples, tokens, world=chosen.world)):
        own = said[rank // (chosen.dp * chosen.tp)]
        peers = [(name.split(">")[0].split("<")[0], writes, frees) for name, writes, frees in there]
        alike = [(name.split(">")[0].split("<")[0], writes, frees) for name, writes, frees in own]
        found = list(differences(alike, peers, same_sizes=rank % chosen.tp == 0))
        assert not found, "\n".join([f"rank {rank} of {chosen.text}", *found])


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        (captured.WHISPER, "pp=2,tp=2,slices=2,mb=2"),
        pytest.param(captured.T5, "pp=2,slices=2,mb=2", marks=pytest.mark.long),
        (captured.LLAMA, "tp=2,dp=2,zero=3,sequence=yes,overlap=oases,mb=2,offload=activations+optimizer-step:0.5"),
        (
            captured.LLAMA,
            "mb=2,schedule=block-major,offload=activations:1+parameters:1+optimizer:0.5+optimizer-step:0.4",
        ),
        pytest.param(captured.MIXTRAL, "tp=4,degrees=2:4,mb=2", marks=pytest.mark.long),
        pytest.param(captured.T5, "pp=2,tp=2,sequence=yes,schedule=zb-h1,mb=4", marks=pytest.mark.long),
    ],
)
def test_ranks_do_what_facts_say(name: str, plan: str, pool: WorkerPool) -> None:
    check((name, {}), plan, pool, tokens=9)


@st.composite
def models(draw: st.DrawFn) -> Model:
    layers, heads = draw(st.integers(2, 3)), draw(st.sampled_from([2, 4]))
    kinds: dict[str, dict[str, Any]] = {
        captured.GPT2: {"n_layer": layers, "n_head": heads},
        captured.LLAMA: {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2},
        captured.MIXTRAL: {"num_hidden_layers": layers},
        captured.T5: {"num_layers": layers, "num_decoder_layers": draw(st.integers(1, 2))},
        captured.WHISPER: {"decoder_layers": layers},
    }
    name = draw(st.sampled_from(sorted(kinds)))
    return name, kinds[name]


@st.composite
def plans(draw: st.DrawFn) -> str:
    """Every axis of a plan, on at most four ranks; what cannot stand together is left out."""
    pp, dp, tp = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]))
    words = [f"pp={pp},dp={dp},tp={tp},mb={draw(st.integers(1, 4))}"]
    axes = {
        "schedule": st.sampled_from(SCHEDULES), "recompute": st.just("yes"), "slices": st.sampled_from(["2", "3-1"]),
        "zero": st.sampled_from("123"), "sequence": st.just("yes"), "overlap": st.sampled_from(sorted(OVERLAPS)),
        "degrees": st.sampled_from(["2:1", "1:2", "1:1"]), "pairs": st.just("yes"), "save": st.just("input"),
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(axes)), max_size=3, unique=True)):
        words.append(f"{name}={draw(axes[name])}")
    text = ",".join(words)
    try:
        Plan.parse(text)
    except PlanError:
        assume(False)
    return text


def random_case(examples: int):
    return settings(
        max_examples=examples, deadline=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip


def _check_random(model: Model, text: str, pool: WorkerPool, tokens: int) -> None:
    try:
        check(model, text, pool, tokens)
    except PlanError:
        assume(False)  # the model cannot be cut so: too few blocks, heads, or units


@random_case(1)
@given(models(), plans(), st.sampled_from([8, 11]))
def test_ranks_do_what_facts_say_of_random_models_and_plans(pool: WorkerPool, model: Model, text: str, tokens: int):
    _check_random(model, text, pool, tokens)


@pytest.mark.long
@random_case(40)
@given(models(), plans(), st.sampled_from([8, 11]))
def test_ranks_do_what_facts_say_of_many_random_models_and_plans(
    pool: WorkerPool, model: Model, text: str, tokens: int
) -> None:
    _check_random(model, text, pool, tokens)
