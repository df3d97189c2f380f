"""Optimus-Megatron's interface: its document's examples run, plans come from the planner, and what is done is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.compat.optimus_megatron import (
    DatasetProfiler,
    DynamicStrategySelector,
    HardwareProfiler,
    ModelProfiler,
    ParallelismManager,
    as_measured,
    setup_model_and_optimizer,
)  # fmt: skip
from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.plan.plan import Plan
from tests.compat.jobs import gpt2
from tests.own_loop.jobs import Net, numbers

CLUSTER = "1x8 A100"


def manager(**given: Any) -> ParallelismManager:
    known: dict[str, Any] = {"model": "gpt2", "batch_size": 64, "cluster": CLUSTER}
    return ParallelismManager(**(known | given))


def test_the_documents_training_loop() -> None:
    dataset = [{"input_ids": list(range(64))}] * 100
    found = manager(dataset=dataset, enable_dynamic_adaptation=True, window=3)
    strategy = found.initialize()
    assert strategy.plan.world == 8 and strategy.others and "of a step" in strategy.why
    predicted = found.selector.estimate(strategy.plan) if found.selector else None
    assert predicted is not None
    metrics = {
        "throughput": 64 / predicted.step_seconds, "convergence_rate": 0.1,
        "communication_overhead": predicted.exposed * predicted.step_seconds, "load_imbalance": 0.0,
    }  # fmt: skip
    records = [found.step(metrics) for _ in range(3)]
    assert [each.why for each in records[:2]] == ["1 of 3 steps are measured", "2 of 3 steps are measured"]
    assert records[2].action == "keep" and "no plan is 5% faster" in records[2].why
    assert found.cleanup() == records


def test_slow_links_lead_to_another_plan_and_it_is_said_that_nothing_was_changed() -> None:
    found = manager(enable_dynamic_adaptation=True, window=1)
    selector = cast(DynamicStrategySelector, found.selector)
    before = found.initialize()
    predicted = selector.estimate(before.plan)
    # Communication takes a thousand times as long as it should.
    waited = 1000 * predicted.exposed * predicted.step_seconds
    seconds = predicted.step_seconds * (1 - predicted.exposed) + waited
    record = found.step({"throughput": 64 / seconds, "communication_overhead": waited})
    assert record.action == "advised" and record.plan != before.plan.full_text
    assert "Nothing was changed: this loop is not a session of ours" in record.why
    assert found.strategy is before
    seen = as_measured(selector.hardware.cluster, predicted, seconds, waited)
    assert seen.nodes[0].link == pytest.approx(selector.hardware.cluster.nodes[0].link / 1000)
    assert selector.select(seen).plan.full_text == record.plan
    assert selector.select(seen).step_seconds < selector.estimate(before.plan, seen).step_seconds


@pytest.mark.long
def test_a_plan_that_the_manager_chose_is_proven_as_any_other(lent_plain_process: None) -> None:
    found = ParallelismManager(model=gpt2(), batch_size=8, cluster="1x2 A100")
    report = phalanx.verify(gpt2(), found.initialize().plan)
    assert report.ok, report


class Changing:
    """A session that can change its plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def change(self, plan: Plan) -> None:
        self.plan = plan


def test_a_session_that_can_change_its_plan_is_changed() -> None:
    start = cast(DynamicStrategySelector, manager().selector).select(fixed={"tp": 8}).plan
    session = Changing(start)
    found = manager(enable_dynamic_adaptation=True, window=1, session=session)
    assert found.initialize().plan == start
    record = found.step({"throughput": 64 / cast(Any, found.selector).estimate(start).step_seconds})
    assert record.action == "changed" and session.plan.full_text == record.plan != start.full_text
    assert found.strategy is not None and found.strategy.plan == session.plan


def test_the_second_set_of_signatures() -> None:
    profiler, hardware, waiting = ModelProfiler("gpt2", seq_len=128), HardwareProfiler(CLUSTER), ParallelismManager()
    selector = DynamicStrategySelector(
        "gpt2", model_profiler=profiler, hardware_profiler=hardware, parallelism_manager=waiting
    )
    assert waiting.selector is selector and waiting.initialize().plan.world == 8
    assert "plan " in waiting.status()


def test_profiles_are_plain_data(tmp_path: Path) -> None:
    hardware = HardwareProfiler(CLUSTER).profile()
    assert hardware["num_devices"] == 8 and hardware["interconnect"] == ["nvlink"] and hardware["devices"] == ["A100"]
    here = HardwareProfiler().profile()
    assert here["num_devices"] >= 1 and all(rate > 0 for rate in here["flops_per_second"])
    profiler = ModelProfiler("gpt2", seq_len=128)
    model = profiler.profile()
    assert model["num_parameters"] == 124_439_808 and model["num_layers"] == 12
    assert len(profiler.layers_for_tensor_parallelism()) == 12 and profiler.layers_for_pipeline_cuts()
    data = DatasetProfiler([{"input_ids": [1, 2, 3]}, {"input_ids": [1] * 7}], batch_size=2).profile()
    assert data["num_samples"] == 2 and data["max_length"] == 7 and data["batches_per_epoch"] == 1
    assert DatasetProfiler([(torch.ones(5), 1)]).profile()["max_length"] == 5
    assert json.dumps([hardware, model, data])


def test_plans_are_handed_over_to_other_frameworks(tmp_path: Path) -> None:
    found = manager()
    found.initialize()
    config = found.deepspeed_config()
    assert config["train_batch_size"] == 64 and "stage" in config["zero_optimization"]
    assert "--pipeline-model-parallel-size" in found.megatron_arguments()
    assert isinstance(found.cannot_express("deepspeed"), tuple)
    found.step({"throughput": 10.0})
    history = json.loads(found.export_history(tmp_path / "history.json").read_text("utf-8"))
    assert history[0]["action"] == "keep" and history[0]["metrics"] == {"throughput": 10.0}


class Learns(Net):
    """Returns its loss, as a model provider's does."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.cross_entropy(super().forward(x)[0], target)


def learns() -> Learns:
    torch.manual_seed(0)
    return Learns().double()


def is_bias(name: str, tensor: Tensor) -> bool:
    return name.endswith(".bias")


def is_head(name: str, tensor: Tensor) -> bool:
    return name.startswith("head.")


def test_setup_model_and_optimizer_has_megatrons_groups() -> None:
    (session,), optimizer, schedule = setup_model_and_optimizer(
        learns, None, no_wd_decay_cond=is_bias, scale_lr_cond=is_head, lr_mult=3.0, example=numbers(0), lr=1e-2,
        lr_lambda=lambda step: 1 / (1 + step), dtype="float64", device="cpu",
    )  # fmt: skip
    assert (report := phalanx.verify(session, data=[numbers(0)])).ok, report
    model = learns()
    named = dict(model.named_parameters())

    def chosen(bias: bool, head: bool) -> list[nn.Parameter]:
        return [p for name, p in named.items() if name.endswith(".bias") is bias and name.startswith("head.") is head]

    rest = chosen(False, False)
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
            {"params": chosen(True, True), "weight_decay": 0.0, "lr": 3e-2},
            {"params": chosen(True, False), "weight_decay": 0.0},
            {"params": chosen(False, True), "weight_decay": 0.1, "lr": 3e-2},
        ],
        lr=1e-2, betas=(0.9, 0.95),
    )  # fmt: skip
    beside = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
    for step in range(3):
        x, target = numbers(step)
        plain.zero_grad()
        loss = model(x, target)
        loss.backward()
        plain.step()
        beside.step()
        assert float(session.forward_backward((x, target))) == pytest.approx(float(loss.detach()), rel=1e-9)
        optimizer.step()
        session.zero_grad()
        schedule.step()
    for name, value in session.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-9, atol=1e-12)


def initialized(**given: Any) -> ParallelismManager:
    found = manager(**given)
    found.initialize()
    return found


@pytest.mark.parametrize(
    ("does", "kind", "message", "hint"),
    [
        (lambda: ParallelismManager().initialize(), ConfigError, "no model to plan for", "ParallelismManager(model=…)"),
        (lambda: manager().step({}), ConfigError, "there is no plan yet", "call initialize()"),
        (lambda: manager().status(), ConfigError, "there is no plan yet", "call initialize()"),
        (lambda: manager(window=0), ConfigError, "window = 0 is below 1", "number of steps"),
        (lambda: manager(cluster="8 Z9000").initialize(), ConfigError, "no device 'Z9000' is known", "did you mean"),
        (lambda: initialized().step({"troughput": 1.0}), ConfigError, "'troughput' is unknown", "did you mean"),
        (lambda: initialized().step({"memory": cast(Any, "big")}), ConfigError, "'big' is not a number", "number"),
        (lambda: initialized().step({"throughput": 0.0}), ConfigError, "is not above zero", "samples per second"),
        (lambda: DatasetProfiler(iter([1])).profile(), DataError, "no length or no numbered samples", "__len__"),
        (lambda: DatasetProfiler([]).profile(), DataError, "the dataset is empty", "with samples"),
        (lambda: ModelProfiler(nn.Linear(2, 2)).facts, ConfigError, "nothing is known of the inputs", "HuggingFace"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly(does: Any, kind: type[PhalanxError], message: str, hint: str) -> None:
    with pytest.raises(kind) as error:
        does()
    assert message in str(error.value)
    assert hint in str(error.value)
