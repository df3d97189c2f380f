"""In which order fewer ranks try plans: rank 0 finds it between steps, the others hear of it, and it ends no run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import PlanError, StoreError
from phalanx.observe.story import loss_words
from phalanx.plan.complete import complete, usable_ranks
from phalanx.plan.periods import Period
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.fewer import Known, Order, in_order
from phalanx.planning.work import Shape, transformer
from phalanx.prepare.here import RankDevice
from phalanx.training.standby import Standby, said_of

MODEL = transformer("model", Shape(14, 1024, 16, 16, 4096, 32000, 1024))
COSTS = [1.0] * len(MODEL.blocks)
BATCH = 32
SLOW = Known(MODEL, Cluster.read("8x1 A100, network 1Gb/s"), Software(), BATCH, "by what a test says")


class Store(dict[str, str]):
    """As a job's store, for one process."""

    def set(self, key: str, text: str) -> None:
        self[key] = text

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    get: Any = dict[str, str].__getitem__


def plan_of(text: str, world: int, slot: int | None = None) -> Plan:
    return complete(text, world=usable_ranks(text, world), batch_size=BATCH, costs=COSTS, slot=slot).plan


def standby(rank: int, plan: Plan, store: Store, given: str = "", known: Any = SLOW, **config: Any) -> Standby:
    """known: what is known, or what is raised where it is asked for."""
    context = SimpleNamespace(rank=rank, world=plan.world, store=store, node=rank, device="cpu")
    options = SimpleNamespace(**{"deterministic": False, "memory_bytes": None, "dtype": "float32", **config})
    period = Period(1, 0, given, BATCH, None)
    slot = 1 if options.deterministic else None

    def completed(_: Period, text: str, world: int) -> Plan:
        return plan_of(text, world, slot)

    ready: Any = SimpleNamespace(
        context=context, config=options, changes=SimpleNamespace(period=period), completed=completed,
        session=SimpleNamespace(plan=plan), run=None,
    )  # fmt: skip
    own = Standby(ready)

    def ask(predictor: Any) -> Known:
        if isinstance(known, Exception):
            raise known
        return known

    own._known = ask
    return own


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are not made here, nor is the machine asked what it has."""
    monkeypatch.setattr("phalanx.training.standby._made_for", lambda *_: iter(()))
    monkeypatch.setattr(RankDevice, "of", lambda context, _: RankDevice(context.node, "CPU", str(context.rank), 1, 1.0))


def told(pieces: Iterator[Any]) -> list[Any]:
    return [piece for piece in pieces if piece is not None]


def all_announced(store: Store, plan: Plan) -> None:
    for rank in range(plan.world):
        store.set(f"device of rank {rank}", "there")


def test_rank_0_finds_orders_for_one_and_two_fewer_and_all_others_take_them() -> None:
    whole, store = plan_of("pp=8,mb=32", 8), Store()
    first, other = standby(0, whole, store), standby(5, whole, store)
    mine, theirs = first.made_ahead(whole, None), other.made_ahead(whole, None)
    assert next(mine) is None and next(theirs) is None  # not everyone has said what there is
    all_announced(store, whole)
    seven, six = told(mine)
    assert (seven["ranks"], six["ranks"]) == (7, 6)
    assert seven["plan"].startswith("pp=") and "a step, " in seven["chosen"] and "what a test says" in seven["chosen"]
    assert told(theirs) == []
    for left in (7, 6):
        assert first.order(whole, left) == other.order(whole, left) and first.order(whole, left).seconds
        assert Plan.parse(first.order(whole, left).plans[0]).dp == 1
    with pytest.raises(StopIteration):
        next(theirs)


@pytest.mark.parametrize("error", [PlanError("the model has no blocks"), KeyError("no such thing")])
def test_where_nothing_can_be_judged_plans_are_tried_as_ever_and_the_reason_is_said(error: Exception) -> None:
    whole, store = plan_of("pp=4,mb=32", 4), Store()
    own = standby(0, whole, store, known=error)
    all_announced(store, whole)
    three, two = told(own.made_ahead(whole, None))
    why = "the model has no blocks" if isinstance(error, PlanError) else "KeyError: 'no such thing'"
    assert three["chosen"] == two["chosen"] == f"not by its seconds: {why}"
    assert own.order(whole, 3).plans == in_order(whole, 3)
    assert said_of(own.order(whole, 3), plan_of("dp=3", 3)) == {"chosen": f"not by its seconds: {why}"}


def test_a_loss_before_plans_were_judged_tries_them_as_ever() -> None:
    whole = plan_of("pp=4,mb=32", 4)
    order = standby(2, whole, Store()).order(whole, 3)
    assert order.plans == in_order(whole, 3) and order.why_not == "no plan was judged yet"
    assert standby(0, whole, Store()).order(whole, 4) == Order([whole.full_text])


def judged(whole: Plan, left: int, given: str = "", known: Any = SLOW, **config: Any) -> Order:
    store = Store()
    own = standby(0, whole, store, given, known, **config)
    all_announced(store, whole)
    told(own.made_ahead(whole, None))
    return own.order(whole, left)


def test_what_the_user_gave_stays_where_another_plan_keeps_it() -> None:
    """ZeRO needs replicas, which are slow over these links: only where the search chose it may it go."""
    whole = plan_of("dp=4,zero=1,mb=2", 4)
    free, bound = judged(whole, 3), judged(whole, 3, given="dp=4,zero=1")
    assert Plan.parse(free.plans[0]).zero == 0
    assert Plan.parse(bound.plans[0]).zero == 1 and Plan.parse(bound.plans[0]).dp == 3


def test_a_deterministic_run_keeps_its_bits_first() -> None:
    """Another tensor degree rounds otherwise: it comes after all that does not, also where less memory is needed."""
    whole = plan_of("pp=2,tp=2,mb=32", 4, slot=1)
    order = judged(whole, 3, deterministic=True)
    kept = [",tp=2" in text for text in order.plans]
    assert kept[0] and kept == sorted(kept, reverse=True) and any("recompute" in text for text in order.plans)
    early = standby(0, whole, Store(), deterministic=True).order(whole, 3)
    assert ",tp=2" in early.plans[0] and ",tp=1" in in_order(whole, 3)[0]


def test_a_store_that_does_not_answer_ends_no_run() -> None:
    """Who is lost with it is met in the next step; until then plans are tried as ever."""

    class Gone(Store):
        def check(self, keys: list[str]) -> bool:
            raise StoreError("the store of the job does not answer")

        set = get = check  # type: ignore[assignment]

    whole = plan_of("pp=4,mb=32", 4)
    for rank in (0, 1):
        own = standby(rank, whole, Gone())
        pieces = own.made_ahead(whole, None)
        assert [next(pieces), next(pieces)] == [None, None]
        assert own.order(whole, 3).plans == in_order(whole, 3)


ORDER = Order(
    ["a"], {"pp=3,dp=1,tp=1,mb=4,stages=5-5-6": 0.41, "pp=1,dp=3,tp=1,mb=2,stages=16": 0.55}, "by a test"
)  # fmt: skip
PIPELINE, REPLICAS = (Plan.parse(text) for text in ORDER.seconds)


@pytest.mark.parametrize(("order", "plan", "words"), [
    (ORDER, PIPELINE, "predicted 410ms a step, dp=3,mb=2 550ms, by a test"),
    (ORDER, REPLICAS, "predicted 550ms a step, pp=3,mb=4 410ms, which could not be had, by a test"),
    (ORDER, Plan(pp=2), "none of those that were judged could be had, the first pp=3,mb=4, by a test"),
    (Order(["a"], {REPLICAS.full_text: 0.5}, "by a test"), REPLICAS, "predicted 500ms a step, by a test"),
    (Order(["a"], {PIPELINE.full_text: 0.505, REPLICAS.full_text: 0.5}, "by a test"), PIPELINE,
     "predicted 505ms a step, dp=3,mb=2 500ms, which moves more or keeps less of what was given, by a test"),
])  # fmt: skip
def test_the_choice_is_told_with_its_reason(order: Order, plan: Plan, words: str) -> None:
    by_text = Order(order.plans, {Plan.parse(text).full_text: own for text, own in order.seconds.items()}, order.by)
    said = said_of(by_text, plan)
    assert said["chosen"] == words
    assert said["predicted"][0]["step_seconds"] == next(iter(order.seconds.values()))
    assert said_of(Order(**json.loads(json.dumps(asdict(by_text)))), plan) == said


def test_the_story_of_a_loss_says_why_it_is_this_plan() -> None:
    record = {
        "lost": ["rank 1 was killed"], "ranks": 3, "how": "shrink", "step": 7, "plan": "pp=3", "source": "copies",
        "repeated": 0, "bytes": 0, "seconds": 1.0,
    }  # fmt: skip
    plain = loss_words(record)
    assert "with plan pp=3: state from copies" in plain
    words = loss_words(record | {"chosen": "predicted 410ms a step, dp=3 550ms", "bits": ["tp"]})
    assert "with plan pp=3 (predicted 410ms a step, dp=3 550ms): state from" in words
    assert words.endswith(
        "after it was noticed; tp changed, so bits may differ from here on, within verify's tolerance"
    )
