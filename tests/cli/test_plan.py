"""`phalanx plan`, `phalanx estimate` and `phalanx calibrate`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from phalanx.cli import inspect, program
from phalanx.cli import plan as plan_verbs
from phalanx.cli.main import main
from phalanx.config import RunConfig
from phalanx.plan.plan import Plan
from phalanx.planning.runs import COLUMNS
from phalanx.profile.data import DataProfile, to_rows
from phalanx.profile.store import Row, Store

GPT2 = ("--model", "gpt2", "--seq-len", "512")
PARAMETERS = 124_439_808


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_answer_names_plans_reasons_limits_and_what_helps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    text = shown(capsys, "plan", *GPT2, "--cluster", "2x4 A100", "--batch-size", "64", "--out", str(out))
    assert text.startswith("gpt2 (124.4M parameters) on 2x4 A100, 64 samples of 512 tokens")
    for word in ("tokens/s", "MFU", "bubble", "exposed", "memory", "best", "slower:", "limits: ", "would help: "):
        assert word in text
    assert "pipeline or tensor: over the 4 devices of a node" in text
    assert "published figures of A100 times assumed shares" in text
    plan = Plan.from_json(out.read_text("utf-8"))
    assert plan.world == 8 and sum(plan.stages) == 14


def test_json_holds_all_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", *GPT2, "--cluster", "4 A100, price 2", "--batch-size", "32", "--compare", "pp=4", "--json")
    data = json.loads(shown(capsys, *arguments))
    best = data["plans"][0]
    assert {"plan", "step_seconds", "tokens_per_second", "mfu", "bubble", "memory_bytes", "fits"} <= set(best)
    assert best["step_seconds"] == pytest.approx(sum(best["parts_seconds"].values()))
    assert best["dollars_per_million_tokens"] == pytest.approx(8 / 3600 / best["tokens_per_second"] * 1e6)
    assert all(own["step_seconds"] >= best["step_seconds"] for own in data["plans"])
    assert "pp=4" in data["compared"][0]["plan"] and "slower" in data["compared"][0]["lost"]
    assert {"limits", "helps", "pipeline_or_tensor", "slices", "rates", "candidates", "num_parameters"} <= set(data)


def test_plans_are_compared_side_by_side_with_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    compared = ("plan", *GPT2, "--cluster", "4 A100", "--batch-size", "32", "--compare", "pp=4", "dp=2,tp=2")
    text = shown(capsys, *compared)
    table, _, lines = text.partition("the best: ")
    for plan in ("pp=4,mb=16", "dp=2,tp=2"):
        assert plan in table and plan in lines
    assert len(json.loads(shown(capsys, *compared, "--json"))["compared"]) == 2
    assert "would help: a second node: " in text
    error = refused(capsys, "plan", *GPT2, "--cluster", "4 A100", "dp=2,tp=2")
    assert "plan 'dp=2,tp=2' stands by itself → give it to --plan as one word or in quotes, or to --compare" in error


def test_a_page_holds_the_answer_and_the_simulated_step_and_needs_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    arguments = ("plan", *GPT2, "--cluster", "4 A100", "--batch-size", "32", "--plan", "pp=2", "--html", str(page))
    assert f"page written to {page}" in shown(capsys, *arguments)
    text = page.read_text("utf-8")
    assert text.startswith("<!doctype html>") and text.endswith("</body></html>\n")
    for word in (
        "gpt2 on 1x4 A100",
        "Where a step goes",
        "tokens/s",
        "What limits it",
        "Pipeline or tensor",
        "Slices:",
    ):
        assert word in text
    assert "One pipeline, 4 of" in text or "One pipeline, 8 of" in text
    assert "<svg" in text and "rank 1" in text and "<title>F0.0" in text
    assert "<script" not in text and "src=" not in text and "href=" not in text


def test_what_is_given_of_a_plan_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(shown(capsys, "plan", *GPT2, "--cluster", "4 A100", "--plan", "pp=2,zero=1", "--json"))
    assert all(Plan.parse(own["plan"]).pp == 2 and Plan.parse(own["plan"]).zero == 1 for own in data["plans"])


def test_without_master_weights_state_and_update_are_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    """AdamW keeps 12 bytes of a parameter with a master, and 4 in bfloat16 alone: everywhere the same."""
    case = ("estimate", *GPT2, "--cluster", "1 A100", "--batch-size", "8", "--plan", "mb=2", "--json")
    wide, narrow = (json.loads(shown(capsys, *case, *more)) for more in ((), ("--no-master-weights",)))
    (more,), (less,) = wide["memory_bytes"], narrow["memory_bytes"]
    assert (more["optimizer"], less["optimizer"]) == (12 * PARAMETERS, 4 * PARAMETERS)
    assert narrow["parts_seconds"]["optimizer"] == pytest.approx(16 / 32 * wide["parts_seconds"]["optimizer"])
    searched = ("plan", *case[1:], "--no-master-weights")
    assert json.loads(shown(capsys, *searched))["plans"][0]["memory_bytes"] == [less]


@pytest.mark.parametrize(
    ("options", "state", "moved"),
    [
        (("--dtype", "float16"), 12, 32), (("--dtype", "float16", "--no-master-weights"), 4, 16),
        (("--optimizer", "sgd"), 4, 16), (("--optimizer", "sgd", "--optimizer-options", "momentum=0.9"), 8, 24),
        (("--optimizer", "torch.optim.Adagrad", "--no-master-weights"), 2, 12),
    ],
)  # fmt: skip
def test_state_and_update_are_those_of_the_optimizer_and_precision(
    options: tuple[str, ...], state: int, moved: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """moved: bytes of a parameter that its update reads and writes; 32 with AdamW and masters."""
    case = ("estimate", *GPT2, "--cluster", "1 A100", "--batch-size", "8", "--plan", "mb=2", "--json")
    usual, own = (json.loads(shown(capsys, *case, *more)) for more in ((), options))
    (held,) = own["memory_bytes"]
    assert held["optimizer"] == state * PARAMETERS and held["weights"] == 2 * PARAMETERS
    assert own["parts_seconds"]["optimizer"] == pytest.approx(moved / 32 * usual["parts_seconds"]["optimizer"])
    searched = json.loads(shown(capsys, "plan", *case[1:], *options))
    assert searched["plans"][0]["memory_bytes"] == [held]
    inspected = json.loads(shown(capsys, "inspect", "gpt2", *options, "--batch-size", "2", "--plan", "mb=2", "--json"))
    assert inspected["totals"]["optimizer_bytes"] == state * PARAMETERS
    (rank,) = inspected["memory"]["ranks"]
    assert rank["masters"] + rank["moments"] == state * PARAMETERS
    assert "inputs" in shown(capsys, "program", *GPT2, *options, "--plan", "mb=2")


def test_less_state_leaves_room_for_a_plan_that_would_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("plan", "--model", "meta-llama/Meta-Llama-3-8B", "--cluster", "1 A100, host 1GB", "--batch-size", "1",
            "--seq-len", "512")  # fmt: skip
    assert "does not fit" in refused(capsys, *case)
    assert "the best:" in shown(capsys, *case, "--optimizer", "sgd", "--no-master-weights")


VERBS = [
    ("plan", *GPT2, "--cluster", "1 A100"), ("estimate", *GPT2, "--cluster", "1 A100", "--plan", "mb=1"),
    ("program", *GPT2), ("inspect", "gpt2"),
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("muon",), "optimizer = 'muon' cannot be foreseen: its state and update depend on the shapes", "with adamw"),
        (("adam",), "option optimizer = 'adam' is unknown", "did you mean 'adamw'"),
        (("mine.Adan",), "'mine.Adan' cannot be foreseen: what it keeps of a parameter", "torch.optim.Adagrad"),
        (("sgd", "--optimizer-options", "nesterov=true"), "nesterov changes neither memory nor time", "momentum would"),
        (("sgd", "--optimizer-options", "momentum"), "'momentum' is not of the form NAME=VALUE", "momentum=0.9"),
        (("torch.optim.ASGD", "--optimizer-options", "t0=1"), "t0 changes neither memory nor time", "leave it out"),
    ],
)
def test_an_optimizer_that_cannot_be_foreseen_is_refused(
    verb: tuple[str, ...], options: tuple[str, ...], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *verb, "--optimizer", *options)
    assert message in said and hint in said


def test_options_are_called_and_explained_as_those_of_train() -> None:
    app = typer.Typer()
    for module in (plan_verbs, program, inspect):
        module.register(app)
    group: Any = typer.main.get_command(app)
    for verb, *_ in VERBS:
        says = {own.name: own for own in group.commands[verb].params}
        for name in (
            "optimizer",
            "optimizer_options",
            "master_weights",
            "dtype",
            *(["lora"] if "lora" in says else []),
        ):
            assert says[name].help == RunConfig.model_fields[name].description
            assert f"--{name.replace('_', '-')}" in says[name].opts


@pytest.mark.parametrize("verb", VERBS[:-1])
def test_adapters_are_read_as_train_reads_them(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *verb, "--tiny", "--lora", "rank=4")
    assert "option lora: 'rank=4' is no setting of adapters" in said and "write r=16" in said


@pytest.mark.long
def test_adapters_alone_are_planned_to_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "gpt2", "--tiny", "--seq-len", "128", "--batch-size", "8", "--plan", "mb=2")
    on = ("--cluster", "1 A100", "--json")
    usual, own = (json.loads(shown(capsys, "estimate", *case, *on, *more)) for more in ((), ("--lora", "r=4")))
    (more,), (less,) = usual["memory_bytes"], own["memory_bytes"]
    assert less["optimizer"] < more["optimizer"] / 4 and less["gradients"] < more["gradients"] / 4
    assert less["weights"] > more["weights"] and own["parts_seconds"]["optimizer"] < usual["parts_seconds"]["optimizer"]
    assert json.loads(shown(capsys, "plan", *case, *on, "--lora", "r=4"))["plans"][0]["memory_bytes"] == [less]
    assert "moments" in shown(capsys, "program", *case, "--lora", "r=4")


@pytest.mark.parametrize("verb", VERBS)
def test_no_master_weights_where_there_are_none_is_refused(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *verb, "--dtype", "float32", "--no-master-weights")
    assert "master_weights = False does nothing with dtype = float32" in said and "--dtype bfloat16 or float16" in said


def test_devices_that_are_left_out_are_named_with_what_that_brings(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("plan", *GPT2, "--cluster", "16x1 H100, network 1Gb/s, price 2", "--batch-size", "16")
    text = " ".join(shown(capsys, *slow).split())
    assert "leaves out 15 of the 16 H100: " in text and "× as fast as the best plan for all 16 devices (" in text
    assert " on " in text.partition("the best: ")[0] and "16x1 H100" in text
    data = json.loads(shown(capsys, *slow, "--objective", "cost", "--json"))
    assert data["objective"] == "cost" and "× cheaper, and " in data["left_out"]
    all_of_them = next(own for own in data["plans"] if own["on"] == "16x1 H100")
    assert data["plans"][0]["on"] == "1x1 H100" and "% dearer: " in all_of_them["lost"]
    best = data["plans"][0]
    assert best["dollars_per_million_tokens"] == pytest.approx(2 / 3600 / best["tokens_per_second"] * 1e6)


def test_a_range_of_batches_is_judged_by_cost_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("plan", *GPT2, "--cluster", "4 A100, price 2", "--batch-size", "32-64", "--objective", "cost")
    assert "of those looked at the cheapest through the data" in " ".join(shown(capsys, *plan).split())
    found = json.loads(shown(capsys, *plan, "--json"))
    rates = [own["useful_tokens_per_dollar"] for own in found["batches"]]
    assert 1e6 / found["plans"][0]["dollars_per_million_tokens"] == pytest.approx(max(rates))


def test_a_lab_is_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    lab = "lab:nodes=2,ranks_per_node=2,link=1gbit"
    data = json.loads(shown(capsys, "plan", "--model", "phalanx-demo", "--cluster", lab, "--json"))
    assert data["cluster"] == "2x2 CPU network 0.125GB/s"


def test_layers_may_be_replicas_beside_a_vocabulary_that_ranks_share(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--model", "gpt2", "--cluster", "8 T4", "--batch-size", "32", "--seq-len", "1024")
    best = next(line for line in shown(capsys, "plan", *case).splitlines() if line.startswith("the best:"))
    assert "dp=4,tp=2" in best and "degrees=1" in best
    given = shown(capsys, "plan", *case, "--plan", "tp=4,degrees=2:4")
    assert "degrees=2:4" in next(line for line in given.splitlines() if line.startswith("the best:"))


def test_an_estimate_says_where_time_and_memory_go(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "estimate", *GPT2, "--cluster", "4 A100", "--plan", "pp=4,mb=8")
    for word in ("a step's time", "computation", "bubble", "place", "weights", "activations", "limits:"):
        assert word in text
    huge = ("estimate", "--model", "gpt3-175b", "--cluster", "8 A100", "--plan", "pp=8")
    assert "does not fit: " in shown(capsys, *huge)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--cluster", "8x8 H101"), "cluster: no device 'H101' is known"),
        (("--cluster", "nowhere.yaml"), "cluster: nowhere.yaml: cannot be read: No such file or directory"),
        (("--cluster", "3 A100", "--plan", "tp=2"), "no plan with tp=2 divides 3 devices and a batch of 24 samples"),
        (("--cluster", "8 A100", "--batch-size", "2", "--plan", "dp=8"), "no plan with dp=8 divides 8 devices"),
        (("--cluster", "4 A100", "--plan", "mb=5", "--batch-size", "12"), "a batch of 15 samples can be cut so"),
        (("--cluster", "4 A100", "--compare", "pp=3"), "plan: pp=3 does not divide the number of ranks: there are 4"),
        (("--cluster", "4 A100", "--profile", "no.json"), "profile no.json cannot be read: No such file"),
        (("--cluster", "4 A100", "--export", "megatrn"), "option export = 'megatrn' is not one of megatron"),
        (("--cluster", "4 A100", "--plan", "recompute=block"), "recompute is what the search decides"),
        (("--cluster", "4 A100", "--plan", "tp=2,degrees=1*6+2*6"), "degrees of each layer is what the search decides"),
        (("--cluster", "4 A100", "--plan", "tp=2,degrees=1:1:1"), "is for 3 units, and layer 0 of the model has 2"),
        (("--cluster", "4 A100", "--plan", "degrees=3:1"), "no plan with degrees=3:1 divides 4 devices"),
        (("--cluster", "4 A100", "--plan", "schedule=interleaved,v=9,pp=2"), "no plan with schedule=interleaved"),
        (("--cluster", "4 A100", "--compare", "dp=2,tp=2,degrees=4"), "degree 4 for all layers, which does not divide"),
        (("--cluster", "64 A100", "--compare", "tp=64"), "gpt2 attends with 12 heads, which 64 ranks cannot split"),
        (("--cluster", "1 A100", "--plan", "zero=1"), "plan: zero=1 does nothing with dp=1"),
        (("--cluster", "4 A100", "--objective", "cost"), "objective = cost needs what devices cost, and the cluster"),
        (("--cluster", "4 A100", "--objective", "money"), "option objective = 'money' is not one of time, cost"),
        (("--cluster", "4 A100", "--dtype", "int8"), "option dtype = 'int8' is not one of"),
        (("--cluster", "4 A100", "--calibration", "no.json"), "option calibration = 'no.json': cannot be read"),
        (("--cluster", "4 A100", "--out", "no/plan.json"), "option out = 'no/plan.json' cannot be written"),
        (("--cluster", "4 A100", "--html", "no/plan.html"), "option html = 'no/plan.html' cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    error = refused(capsys, "plan", *GPT2, *arguments)
    assert message in error and "→" in error


def test_a_batch_without_a_sample_for_every_replica_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "plan", *GPT2, "--cluster", "1024x8 A100", "--batch-size", "1")
    assert "a batch of 1 samples is too small for 8192 devices: every replica needs a sample" in error
    assert "→ use a batch of 128 samples or more" in error  # 8 in a pipeline of 14 blocks, 8 share 12 heads
    error = refused(capsys, "plan", *GPT2, "--cluster", "64x8 A100", "--batch-size", "7")
    assert "→ use a batch of 8 samples or more, or fewer devices" in error
    assert "best" in shown(capsys, "plan", *GPT2, "--cluster", "64x8 A100", "--batch-size", "8", "--plan", "pp=8")


def test_a_model_that_fits_nowhere_says_what_it_lacks_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "plan", "--model", "meta-llama/Llama-3.1-405B", "--cluster", "8 H100")
    assert "meta-llama/Llama-3.1-405B does not fit on 1x8 H100: the leanest plan (tp=8" in error
    assert "lacks" in error and "optimizer" in error
    assert "; main memory is missing, too: with dp=2,tp=4" in error and "assumed where a cluster does not say" in error
    assert "GiB of main memory or more, 8 times the nodes or devices with" in error


def test_the_leanest_plan_has_room_on_its_hosts_and_what_hosts_lack_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("plan", "--model", "meta-llama/Meta-Llama-3-8B", "--cluster")
    error = refused(capsys, *plan, "1 RTX 4090, host 64GB")
    assert "offload=" not in error.partition("main memory is missing, too: ")[0]  # what lies there has no room
    assert "GiB of its host, of 59.6" in error and "assumed" not in error and "→ use nodes with" in error
    assert "best" in shown(capsys, *plan, "1 RTX 4090, host 256GB")
    error = refused(capsys, *plan, "1 RTX 4090, memory 6GB, host 256GB")
    assert "the leanest plan (mb=8,schedule=block-major" in error and "main memory is missing" not in error


def test_an_estimate_says_what_a_host_holds_and_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("--model", "meta-llama/Meta-Llama-3-8B", "--plan", "offload=optimizer", "--batch-size", "1")
    text = shown(capsys, "estimate", *plan, "--cluster", "1 H100, host 16GB")
    assert "on the host: 89.7 GiB of 14.9 GiB for each device of place 0" in text
    assert "does not fit: 74.8 GiB of main memory are missing for each device there" in text
    data = json.loads(shown(capsys, "estimate", *plan, "--cluster", "1 H100, host 256GB", "--json"))
    assert data["fits"] and data["host_bytes"][0] < data["host_budget_bytes"][0] == 256e9


def padded(path: Path, *, tokens: int = 512) -> str:
    """A profile of 1,000 samples, half of them full and half of a quarter."""
    found = DataProfile(1000, (tokens // 4,) * 8 + (tokens,) * 8, tokens, has_padding=True)
    Store(path.parent / "unused.sqlite").export(path, to_rows(found, "chat.jsonl"))
    return str(path)


def test_a_range_of_batches_is_judged_by_how_fast_it_gets_through_the_data(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = padded(tmp_path / "data.json")
    plan = ("plan", "--model", "gpt2", "--cluster", "4 A100", "--data", data, "--batch-size", "128-512")
    text = shown(capsys, *plan)
    assert "useful/s" in text and ", 500 samples of 512 tokens" in text
    words = " ".join(text.split())
    assert "1,000 samples; 37.5% of the tokens of a batch are padding" in words
    assert "an epoch is 2 steps, all of them full: 62.5% of what is computed is new data" in words
    assert "batch: 500 samples, of those looked at the fastest through the data; others 128: -" in words
    assert "what a batch's size does to the loss is not weighed" in words
    found = json.loads(shown(capsys, *plan, "--json"))
    assert found["batch_size"] == 500 and [own["batch_size"] for own in found["batches"]] == [128, 250, 256, 500, 512]
    best = found["plans"][0]
    assert best["useful_tokens_per_second"] == pytest.approx(0.625 * best["tokens_per_second"])
    assert found["data"]["useful"] == 0.625 and found["data"]["steps"] == 2


def test_a_batch_that_the_data_does_not_fill_is_told_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = padded(tmp_path / "data.json", tokens=1024)
    plan = ("plan", "--model", "gpt2", "--cluster", "4 A100", "--data", data)
    words = " ".join(shown(capsys, *plan, "--batch-size", "300").split())
    assert "an epoch is 4 steps, the last of which sees 200 samples again" in words
    assert "--seq-len 256 would waste least" not in words  # cutting would lose more than padding
    assert ", 32 samples of 512 tokens" in shown(capsys, *plan, "--seq-len", "512")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--batch-size", "many"), "option batch_size = 'many' is neither a number of samples nor a range of them"),
        (("--batch-size", "0"), "option batch_size = '0' is neither a number"),
        (("--batch-size", "64-8"), "option batch_size = '64-8' is a range that ends before it begins → write 8-64"),
        (("--seq-len", "1024"), "option seq_len = 1024: 'DATA' is about samples that were cut at 512 tokens"),
        (("--data", "nowhere.json"), "nowhere.json"),
    ],
)
def test_ranges_and_data_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    data = padded(tmp_path / "data.json")
    given = () if "--data" in arguments else ("--data", data)
    error = refused(capsys, "plan", "--model", "gpt2", "--cluster", "4 A100", *given, *arguments)
    assert message.replace("DATA", data) in error and "→" in error


def test_an_estimate_says_what_of_its_batch_is_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = padded(tmp_path / "data.json")
    given = ("estimate", "--model", "gpt2", "--cluster", "4 A100", "--plan", "dp=4", "--data", data)
    text = shown(capsys, *given, "--batch-size", "300")
    assert "useful/s" in text and ", 300 samples of 512 tokens" in text
    words = " ".join(text.split())
    assert "1,000 samples; 37.5% of the tokens of a batch are padding" in words
    assert "an epoch is 4 steps, the last of which sees 200 samples again: 52.1% of what is computed" in words
    found = json.loads(shown(capsys, *given, "--batch-size", "500", "--json"))
    assert found["useful_tokens_per_second"] == pytest.approx(0.625 * found["tokens_per_second"])
    assert found["data"]["useful"] == 0.625 and found["data"]["steps"] == 2
    without = shown(capsys, *given[:-2])
    assert "useful/s" not in without and "padding" not in without


def test_an_estimate_asks_for_no_more_samples_than_the_data_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = tmp_path / "few.json"
    Store(tmp_path / "unused.sqlite").export(few, to_rows(DataProfile(12, (512,), 512, has_padding=True), "few.jsonl"))
    given = ("estimate", "--model", "gpt2", "--cluster", "4 A100", "--plan", "dp=4", "--data", str(few))
    assert ", 12 samples of 512 tokens" in shown(capsys, *given)
    error = refused(capsys, *given, "--seq-len", "1024")
    assert f"option seq_len = 1024: '{few}' is about samples that were cut at 512 tokens" in error and "→" in error


def test_a_profile_of_devices_is_no_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    Store(tmp_path / "unused.sqlite").export(path, [Row("memory", {"device": "A100", "size": 8}, 1e12, "today")])
    for verb in (("plan",), ("estimate", "--plan", "dp=4")):
        error = refused(capsys, *verb, *GPT2, "--cluster", "4 A100", "--data", str(path))
        assert "is a profile of devices, not of data" in error and "phalanx profile --data DATA --out FILE" in error


def run_row(**given: object) -> str:
    row = {
        "source": "here", "model": "m1", "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192,
        "vocab": 51200, "seq_len": 1024, "gpu": "A100-80GB", "n_gpus": 8, "gpus_per_node": 8, "tp": 1, "pp": 1, "cp": 1,
        "dp": 8, "micro_batch": 4, "global_batch": 64, "recompute": "none", "dtype": "bf16", "measured_iter_s": 0.6,
    } | given  # fmt: skip
    return ",".join(str(row.get(name, "")) for name in COLUMNS)


def test_a_calibration_is_written_with_its_residuals_and_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs, out = tmp_path / "runs.csv", tmp_path / "fitted.json"
    rows = [run_row(), run_row(micro_batch=8, measured_iter_s=0.58), run_row(tp=2, dp=4, measured_iter_s=0.65)]
    skipped = [run_row(cp=2), run_row(dtype="fp8"), run_row(gpu="Z80")]
    runs.write_text("\n".join([",".join(COLUMNS), *rows, *skipped]) + "\n", encoding="utf-8")
    text = shown(capsys, "calibrate", str(runs), "--out", str(out))
    assert "A100: 3 runs, mean error" in text
    assert "left out 1: context or expert parallelism" in text and "left out 1: products in 8 bits, which" in text
    section = json.loads(out.read_text("utf-8"))["devices"]["A100"]
    assert section["residuals"]["here"]["runs"] == 3 and section["mean_error"] < 0.1
    plan = ("plan", *GPT2, "--cluster", "4 A100", "--calibration", str(out))
    assert "rates are calibrated" in shown(capsys, *plan)
    error = refused(capsys, "plan", *GPT2, "--cluster", "4 H100", "--calibration", str(out))
    assert "is about A100, and the cluster has H100" in error


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,b\n1,2\n", "has no column 'source'"),
        (",".join(COLUMNS) + "\n" + run_row() + "\n", "holds 1 timed runs that say enough, and a fit needs 3"),
    ],
)
def test_a_table_of_too_little_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text(text, encoding="utf-8")
    assert message in refused(capsys, "calibrate", str(runs), "--out", str(tmp_path / "out.json"))


@pytest.mark.parametrize(
    "content, message",
    [
        ("{}", "holds no `devices`"),
        ('{"devices": {"A100": {}}}', "devices: A100 has no `software`"),
        ('{"devices": {"A100": {"software": {"speed": 1}}}}', "devices: A100: unknown share 'speed'"),
        ('{"devices": {"A100": {"software": {"memory": 0}}}}', "devices: A100: memory = 0 is no rate above 0"),
        ('{"devices": {"A100": {"software": {"link": -1}}}}', "devices: A100: link = -1 is not a number of 0 or more"),
    ],
)
def test_a_calibration_that_is_not_one_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content, encoding="utf-8")
    assert message in refused(capsys, "plan", *GPT2, "--cluster", "4 A100", "--calibration", str(path))
