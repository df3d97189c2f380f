"""`plan=auto`: what a run chooses by itself, what it says of it, and when it keeps to the simple plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import phalanx
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.engine.work import work_of_graph
from phalanx.errors import ConfigError, PlanError
from phalanx.launch.context import RankContext
from phalanx.plan.plan import Plan
from phalanx.planning.search import search
from phalanx.prepare.auto import Choice, Subject, choose, measure_together, whole_model, work_of
from phalanx.prepare.did_not_fit import DoesNotFit
from phalanx.prepare.here import RankDevice, announce, cluster_here, cluster_of, known_device, measure_here
from phalanx.profile.model import Size
from phalanx.profile.model import Subject as Measured
from phalanx.profile.segments import PARTS
from phalanx.profile.store import Store, profiles_path
from phalanx.training.job import Job
from phalanx.training.trials import STEPS, attempt_here, with_fastest
from tests.captured import LLAMA, named
from tests.greedy import Greedy
from tests.run_helpers import NoDecay, losses, records, short_run

MODEL, DATA = "phalanx-demo", "synthetic:8"


# What may be written.


def test_words_that_stand_for_a_plan() -> None:
    assert RunConfig().searches_plan and RunConfig().given_plan == ""
    simple = RunConfig.create(plan="simple")
    assert not simple.searches_plan and simple.plan == simple.given_plan == ""
    partly = RunConfig.create(plan="auto,tp=2,zero=0")
    assert partly.searches_plan and partly.given_plan == "tp=2,zero=0"
    assert not RunConfig.create(plan="mb=2").searches_plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto,tp=2,degrees=1*2+2*2", "degrees of each layer is what the search decides"),
        ("auto,stages=2-2", "stages is what the search decides"),
        ("auto,tpp=2", "tpp"),
        ("autos", "'autos' is not name=value"),
    ],
)
def test_what_may_not_stand_beside_auto_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        RunConfig.create(plan=text)
    assert caught.value.hint


def test_a_loop_of_ones_own_has_no_search() -> None:
    example = {"input_ids": torch.zeros(2, 4, dtype=torch.int64)}
    with pytest.raises(ConfigError, match="a loop of your own has no search") as caught:
        phalanx.open(MODEL, example=example, plan="auto", tiny=True)
    assert "phalanx plan --out" in caught.value.hint


# The devices that are here.


def gpu(node: int, index: int, name: str = "NVIDIA H100 80GB HBM3", memory: float = 79e9) -> RankDevice:
    return RankDevice(node, name, f"{node}/cuda:{index}", int(memory), 0)


def test_gpus_are_known_by_the_names_that_torch_gives_them() -> None:
    names = {
        "NVIDIA A100-SXM4-40GB": (42e9, "A100-40"), "NVIDIA A100-SXM4-80GB": (85e9, "A100"), "Tesla T4": (15e9, "T4"),
        "NVIDIA GeForce RTX 4090": (25e9, "RTX 4090"), "NVIDIA H200": (150e9, "H200"), "NVIDIA L4": (24e9, "L4"),
        "Tesla V100-SXM2-16GB": (17e9, "V100-16"), "NVIDIA GH200 480GB": (100e9, "GH200"),
    }  # fmt: skip
    assert {known_device(name, memory, "bfloat16").name for name, (memory, _) in names.items()} == {
        own for _, own in names.values()
    }
    slow, fast = (known_device("NVIDIA H200", 150e9, dtype).flops.value for dtype in ("float32", "bfloat16"))
    assert slow < fast / 10
    other = known_device("Graphics 9000", 8e9, "bfloat16")
    assert other.name == "Graphics 9000" and other.flops.known == "assumed"


def test_nodes_that_are_alike_are_one_kind() -> None:
    cluster = cluster_of([gpu(node, index) for node in range(2) for index in range(4)], "bfloat16")
    assert str(cluster.nodes[0]) == "2x4 H100" and cluster.nodes[0].memory == 79e9 and len(cluster.nodes) == 1
    mixed = cluster_of([gpu(0, 0), gpu(0, 1), gpu(1, 0, "Tesla T4", 15e9)], "bfloat16")
    assert [str(kind) for kind in mixed.nodes] == ["1x2 H100", "1x1 T4"]


def test_ranks_that_share_a_device_share_what_it_offers() -> None:
    alone, shared = (cluster_of([gpu(0, 0)] * ranks, "bfloat16").nodes[0] for ranks in (1, 4))
    assert shared.device.flops.value == alone.device.flops.value / 4 and shared.memory == alone.memory / 4
    cpus = cluster_of([RankDevice(0, "CPU", f"0/{rank}", 8 * 2**30, 8) for rank in range(4)], "float32").nodes[0]
    assert cpus.memory == 2 * 2**30 and cpus.device.flops.value == pytest.approx(2 * 0.05e12)
    asked = cluster_of([RankDevice(0, "CPU", f"0/{rank}", 2**30, 8) for rank in range(4)], "float32", is_shared=False)
    assert asked.nodes[0].memory == 2**30


def test_the_network_is_as_the_environment_says_and_a_word_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lab says it; by what a node usually has, one would plan for 10 Gbit/s whatever its links are."""
    nodes = [RankDevice(node, "CPU", f"{node}/{node}", 2**33, 2) for node in range(2)]
    assert cluster_of(nodes, "float32").nodes[0].network == 1.25e9
    assert cluster_of(nodes, "float32", network=1.25e8).nodes[0].network == 1.25e8
    monkeypatch.setenv("PHALANX_NETWORK", "1Gb/s")
    assert cluster_here(RankContext.alone(), None, "float32").nodes[0].network == 1.25e8
    monkeypatch.setenv("PHALANX_NETWORK", "fast")
    with pytest.raises(ConfigError, match="environment variable PHALANX_NETWORK: 'fast' is not a rate") as caught:
        announce(RankContext.alone(), None)
    assert "400Gb/s" in caught.value.hint


# What a graph asks for.


def test_a_graph_asks_for_what_it_computes_and_holds() -> None:
    case = named(MODEL)
    captured, count = case.captured, len(case.captured.blocks.blocks)
    compiled = Compiled(
        captured, RunConfig.create(dtype="float64", batch_size=3), Plan(stages=(count,)), rank=0,
        device=torch.device("cpu"), trainable=captured.trainable, buffers=captured.buffers,
    )  # fmt: skip
    work = work_of_graph(MODEL, compiled, case.batch, heads=2)
    own = [work.block(number) for number in range(count)]
    flops = captured.blocks.flops({**captured.dims(case.batch), "batch": 1})
    assert [block.products + block.attention for block in own] == pytest.approx(flops)
    assert sum(block.parameters - block.tied for block in own) == work.num_parameters == sum(
        parameter.numel() for parameter in case.model.parameters())  # fmt: skip
    assert work.trained == 1 and work.state_width == 16 and work.heads == 2 and work.tokens == 9
    (layer,) = {work.blocks[number] for number in captured.blocks.layers}
    kept = work.classes[layer].kept
    assert kept["none"].alone > kept["light"].alone > kept["unit"].alone > kept["block"].alone > 0
    assert "light" not in work_of_graph(MODEL, compiled, case.batch, light=False).classes[layer].kept


def test_layers_of_which_some_are_frozen_are_all_planned_for_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of one graph, and were measured as if all of it were trained."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    case, store = named(MODEL), Store(profiles_path())
    spec, batch = subject().spec, subject().batches.batch
    measured = Measured(spec, case.captured, "float64", torch.device("cpu"), 2, lambda count: batch(0, count))
    for template in measured.first_blocks():
        for part in PARTS:
            store.put(f"block {part}", measured.key(template, Size(1, 1)), 3.0 if part == "together" else 1.0)
    first = case.captured.blocks.blocks[case.captured.blocks.layers[0]]
    learning = tuple(name for name in case.captured.trainable if name not in first.names("parameter"))
    own = subject(trainable=learning)
    work = work_of(own, whole_model(own, torch.device("cpu")), ranks=2)
    assert all(block.times for block in work.classes)
    assert {block.learns: block.times[1][0].weight for block in work.classes if block.is_layer} == {0.0: 0.0, 1.0: 2.0}


# Runs.


def test_one_rank_keeps_everything_while_that_fits(tmp_path: Path) -> None:
    short_run(MODEL, DATA, tmp_path, steps=1)
    (record,) = records(tmp_path, "plan")
    assert record["chosen"] == "auto" and "one device, and all that the backward needs fits" in record["reason"]
    assert records(tmp_path, "start")[0]["header"]["chosen"] == record["reason"]
    assert Plan.from_json((tmp_path / "plan.json").read_text()).mb == 1


def test_one_rank_with_little_memory_takes_a_plan_that_fits_and_trains_the_same(tmp_path: Path) -> None:
    short_run(MODEL, DATA, tmp_path / "a", plan="simple")
    assert not records(tmp_path / "a", "plan")
    needed = records(tmp_path / "a", "memory")[0]["predicted_bytes"]
    short_run(MODEL, DATA, tmp_path / "b", memory=f"{int(0.85 * needed)}")
    (record,), (memory,) = records(tmp_path / "b", "plan"), records(tmp_path / "b", "memory")
    assert memory["predicted_bytes"] <= 0.85 * needed and "keeping everything would need" in record["reason"]
    assert record["planned_step_seconds"] > 0 and record["plan"]
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


def test_several_ranks_run_what_the_search_finds(tmp_path: Path, lent_ranks: list[int]) -> None:
    short_run(MODEL, DATA, tmp_path / "a", plan="simple")
    short_run(MODEL, DATA, tmp_path / "b", ranks=2)
    assert lent_ranks == [2]
    (record,) = records(tmp_path / "b", "plan")
    by = "a step predicted on 1x2 CPU, by measured rates and measured blocks"
    assert by in record["reason"] and "; simple pp=2" in record["reason"]
    best, others = record["planned_step_seconds"], record["runners_up"]
    assert others and all(own["step_seconds"] >= 0.99 * best for own in others)
    assert Plan.parse(record["plan"]) == Plan.from_json((tmp_path / "b" / "plan.json").read_text())
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


@pytest.mark.parametrize("options", [{"ranks": 2}, {"memory": "12MiB", "batch_size": 64}])
def test_a_run_measures_what_was_not_measured_here_and_plans_by_it_and_the_next_finds_it(
    tmp_path: Path, lent_ranks: list[int], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Several ranks together, and one that has to search since it lacks memory."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    kept: list[Any] = []
    for name in ("first", "second"):
        short_run(MODEL, DATA, tmp_path / name, **options)
        kept.append(Store(profiles_path()).rows())
        assert "by measured rates" in records(tmp_path / name, "plan")[-1]["reason"]
    assert kept[0] == kept[1] and {row.key.get("by", "run") for row in kept[0]} == {"run"}


def test_that_devices_are_measured_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    said: list[str] = []
    for _ in range(2):
        measure_here(RankContext.alone(), "float32", said.append)
    assert said == ["measuring what the devices here reach (4 measurements), to plan by it"]


def test_a_run_whose_store_cannot_be_written_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "file"))
    said: list[str] = []
    measure_here(RankContext.alone(), "float32", said.append)
    assert not said


# What is not searched.


class Keys(dict[str, str]):
    """As a job's store, for one process."""

    def set(self, key: str, text: str) -> None:
        self[key] = text

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def subject(**changes: Any) -> Subject:
    case = named(MODEL)
    spec = SimpleNamespace(name=MODEL, task="causal-lm", factory=None, config=SimpleNamespace(num_attention_heads=2))
    batches = SimpleNamespace(batch=lambda first, count: {n: t[:count] for n, t in case.batch.items()})
    config = RunConfig.create(dtype="float64", batch_size=4)
    plain: Any = {"spec": spec, "captured": case.captured, "trainable": case.captured.trainable, "batches": batches}
    return Subject(**{**plain, "config": config, "simple": Plan(pp=2, mb=4, stages=(3, 3)), **changes})


def context(store: Keys, rank: int = 0) -> Any:
    for number in range(2):
        device = RankDevice(0, "CPU", f"0/{number}", 2**33, 2)
        store.set(f"device of rank {number}", json.dumps(vars(device)))
    return SimpleNamespace(world=2, rank=rank, store=store, device="cpu", node=0)


def test_every_rank_takes_what_rank_0_chose() -> None:
    store = Keys()
    first = choose(subject(), context(store))
    store.get = store.__getitem__  # type: ignore[method-assign]
    assert choose(subject(), context(store, rank=1)) == first != Choice(subject().simple, "")
    assert first.plan.world == 2 and first.record["runners_up"]


def test_a_graph_is_judged_with_its_buffers_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary frequencies that stay on the host cannot be multiplied by positions on a GPU."""
    monkeypatch.setattr("phalanx.prepare.auto.Compiled", lambda *given, **named: SimpleNamespace(**named))
    rotary = named(LLAMA).captured
    found = whole_model(subject(captured=rotary), torch.device("meta"))
    assert rotary.buffers and {buffer.device.type for buffer in found.buffers.values()} == {"meta"}


def test_no_plan_is_chosen_that_cannot_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose halves or groups of ranks would not all get samples."""

    def searched(*arguments: Any, **named: Any) -> Any:
        found = search(*arguments, **named)
        two = replace(found.plans[0], plan=Plan(tp=2, degrees=((1,),), stages=(6,)))
        return replace(found, plans=(two, *found.plans))

    monkeypatch.setattr("phalanx.prepare.auto.search", searched)
    assert choose(subject(eval_samples=6), context(Keys())).plan.degrees
    assert not choose(subject(eval_samples=7), context(Keys())).plan.degrees


def test_what_cannot_be_judged_gets_the_simple_plan_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(name="mine", factory=lambda: None, config=None)
    whole = Plan(pp=2, stages=(3, 3))
    found = choose(subject(spec=own, simple=whole), context(Keys()))
    assert found.plan == whole and "whether samples depend on each other is not known" in found.reason

    def fails(*arguments: Any, **named: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr("phalanx.prepare.auto.search", fails)
    found = choose(subject(), context(Keys()))
    assert found.plan == subject().simple and found.record["unsearched"] == "KeyError: 'no such thing'"


def test_blocks_that_cannot_be_measured_end_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: Any) -> None:
        assert given[3]  # sizes that rank 0 asks for
        raise RuntimeError("of a kernel of the user's own")

    monkeypatch.setattr("phalanx.prepare.auto.measure_blocks", fails)
    measure_together(subject(), context(Keys()))
    assert "could not be measured: RuntimeError: of a kernel of the user's own" in capsys.readouterr().err


def test_a_language_model_may_be_cut_into_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spied(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments[0].causal)
        return search(*arguments, **named)

    monkeypatch.setattr("phalanx.prepare.auto.search", spied)
    choose(subject(), context(Keys()))
    other = SimpleNamespace(name=MODEL, task="masked-lm", factory=None, config=SimpleNamespace(num_attention_heads=2))
    choose(subject(spec=other), context(Keys()))
    assert set(seen[:1]) == {True} and seen[-1] is False


def test_an_optimizer_that_looks_at_whole_tensors_leaves_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spied(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments[4])
        return search(*arguments, **named)

    monkeypatch.setattr("phalanx.prepare.auto.search", spied)
    chosen = choose(subject(optimizer_class=torch.optim.Adafactor), context(Keys()))
    assert chosen.plan.zero == 0 and chosen.plan.tp == 1 and seen[0] == {"zero": 0, "tp": 1, "offload": ()}
    seen.clear()
    choose(
        replace(subject(), spec=SimpleNamespace(name="mine", task="custom", factory=None, config=None)),
        context(Keys()),
    )  # type: ignore[arg-type]
    assert seen[0] == {"tp": 1}


# Plans that are tried out.


def tried(plan: Plan, folder: Path, seconds: list[float], runners_up: list[dict[str, Any]]) -> None:
    """What a trial leaves behind."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(plan.to_json())
    log: list[dict[str, Any]] = [{"kind": "plan", "runners_up": runners_up}]
    log += [{"kind": "step", "step_seconds": own} for own in seconds]
    (folder / "log-rank0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))


def test_the_fastest_of_the_best_plans_is_kept_with_its_figures(tmp_path: Path) -> None:
    job = Job(MODEL, DATA, None, RunConfig.create(measure_top=3, batch_size=8, out=tmp_path))
    rows = [{"plan": "dp=2", "fits": True}, {"plan": "pp=4", "fits": False}, {"plan": "tp=2", "fits": True}]
    times = {Plan(pp=2): [9.0, 3.0, 2.0], Plan(dp=2): [8.0, 1.0, 1.5]}
    given: list[RunConfig] = []

    def run(trial: Job) -> None:
        given.append(trial.config)
        plan = Plan(pp=2) if trial.config.searches_plan else Plan.parse(trial.config.plan)
        if plan not in times:
            raise PlanError("cannot be split")
        tried(plan, Path(trial.config.out), times[plan], rows)

    found = with_fastest(job, partial(attempt_here, run))
    assert [own.steps for own in given] == [STEPS] * 3 and not any(own.export for own in given)
    assert not any(Path(own.out).exists() for own in given)
    assert found.config.export and found.config.out == str(tmp_path)
    assert Plan.parse(found.config.plan) == Plan(dp=2) and found.config.measure_top is None
    assert found.choice is not None and found.choice.how == "measured"
    assert found.choice.reason == "dp=2: 1.0s a step measured, pp=2 2.0s; tp=2 failed: cannot be split"
    assert [own["measured_step_seconds"] for own in found.choice.record["measured"]] == [2.0, 1.0]


def test_one_rank_tries_numbers_of_micro_batches(tmp_path: Path) -> None:
    job = Job(MODEL, DATA, None, RunConfig.create(measure_top=9, batch_size=4, out=tmp_path))
    seen: list[int] = []

    def run(trial: Job) -> None:
        plan = Plan(stages=(6,)) if trial.config.searches_plan else Plan.parse(trial.config.plan)
        seen.append(plan.mb)
        tried(plan, Path(trial.config.out), [1.0, 1.0 / plan.mb], [])

    assert Plan.parse(with_fastest(job, partial(attempt_here, run)).config.plan).mb == 4 and seen == [1, 2, 4]


def test_measuring_is_refused_where_it_would_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="measure_top = 3 does nothing with plan = 'mb=2'") as caught:
        RunConfig.create(plan="mb=2", measure_top=3)
    assert "plan=auto" in caught.value.hint
    with pytest.raises(ConfigError, match="does nothing with plan = 'simple'"):
        RunConfig.create(plan="simple", measure_top=3)
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="measure_top = 2: ranks of a launcher that may be lost run one job"):
        short_run(MODEL, DATA, tmp_path, measure_top=2, on_loss="shrink")


@pytest.mark.long
def test_a_run_that_was_tried_out_trains_as_if_it_had_not(tmp_path: Path) -> None:
    short_run(MODEL, DATA, tmp_path / "a", plan="simple")
    short_run(MODEL, DATA, tmp_path / "b", measure_top=2)
    (record,) = records(tmp_path / "b", "plan")
    assert record["chosen"] == "measured" and len(record["measured"]) == 2
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


# Plans that do not fit after all.


def greedy(monkeypatch: pytest.MonkeyPatch, folder: Path, when: str, times: int) -> None:
    monkeypatch.setenv("TEST_GREEDY", f"{folder},{when},{times}")


@pytest.mark.parametrize("when", ["state", "step"])
def test_on_several_ranks_a_plan_for_which_one_of_them_lacks_memory_gives_way_to_another(
    tmp_path: Path, lent_ranks: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], when: str
) -> None:
    short_run(MODEL, DATA, tmp_path / "a", plan="simple", optimizer_class=NoDecay)
    greedy(monkeypatch, tmp_path, when, 1)
    short_run(MODEL, DATA, tmp_path / "b", ranks=2, optimizer_class=Greedy, progress="plain")
    record = records(tmp_path / "b", "plan")[-1]
    (first,) = record["did_not_fit"]
    assert Plan.parse(record["plan"]) != Plan.parse(first) and record["reason"].endswith(f"; {first} did not fit")
    said = capfd.readouterr().out
    assert f"plan {first} did not fit, and gives way to one that needs less: " in said and "were predicted" in said
    found = {each["step"]: each["loss"] for each in records(tmp_path / "b", "step")}
    assert found == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


def test_one_rank_that_lacks_memory_in_its_first_step_takes_a_plan_that_needs_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy(monkeypatch, tmp_path, "step", 1)
    short_run(MODEL, DATA, tmp_path / "a", optimizer_class=Greedy, memory="1GiB")
    first, second = records(tmp_path / "a", "memory")
    record = records(tmp_path / "a", "plan")[-1]
    assert second["predicted_bytes"] <= 0.95 * first["predicted_bytes"]
    assert record["did_not_fit"] == ["mb=1"] and record["reason"].endswith("; mb=1 did not fit")


def test_where_no_plan_needs_less_the_last_one_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy(monkeypatch, tmp_path, "step", 9)
    with pytest.raises(DoesNotFit, match=r"a micro-batch of .* does not fit .*finds no plan that needs less"):
        short_run(MODEL, DATA, tmp_path / "a", optimizer_class=Greedy, memory="1GiB", batch_size=1)


def test_a_plan_that_was_given_does_not_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy(monkeypatch, tmp_path, "step", 1)
    with pytest.raises(DoesNotFit, match=r"a micro-batch of 2 samples .* does not fit"):
        short_run(MODEL, DATA, tmp_path / "a", optimizer_class=Greedy, plan="mb=2")
