"""`phalanx plan`: the best plans for a model on a cluster that need not be here, and why; `phalanx estimate`: what one
given plan takes there.

A zoo model needs neither torch nor a device: its facts are shipped, and rates follow from the published figures of
known devices. What programs reach of these can be fitted to runs (`phalanx calibrate`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.models import (
    DTYPES,
    TOKENS,
    MasterWeights,
    capture_model,
    choose_dims,
    find_facts,
    patiently,
    require_precision,
)
from phalanx.cli.plan_data import OnBroken, TextKey, read_data, require_data
from phalanx.errors import ConfigError, PhalanxError, nearest
from phalanx.written import plan_text, read_mapping

if TYPE_CHECKING:
    from phalanx.cli.plan_data import Looked
    from phalanx.plan.plan import Plan
    from phalanx.planning.cluster import Cluster
    from phalanx.planning.cost import Software
    from phalanx.planning.data_use import DataUse
    from phalanx.planning.estimate import Estimate
    from phalanx.planning.rates import Rates
    from phalanx.planning.search import Found
    from phalanx.planning.work import ModelWork
    from phalanx.predict.split_facts import SplitFacts
    from phalanx.profile.store import Row

SAMPLES_PER_DEVICE = 8

Model = Annotated[str, typer.Option(help="zoo name, HuggingFace folder or cached hub id")]
ClusterText = Annotated[
    str, typer.Option("--cluster", help='"8x8 H100, network 400Gb/s", a .yaml or .json file, or lab:nodes=2,link=1gbit')
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help=f"samples of the global batch (default: {SAMPLES_PER_DEVICE} for each device)")
]
BatchSizes = Annotated[
    str | None,
    typer.Option(
        metavar="N|N-M",
        help=f"samples of the global batch, or the best between two (default: {SAMPLES_PER_DEVICE} for each device)",
    ),
]
SeqLen = Annotated[
    int | None, typer.Option(min=1, help=f"tokens per sample (default: {TOKENS}, or as many as the model takes)")
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="what is trained on, or a file of `phalanx profile --data … --out`: what padding and repeated samples "
        "waste is counted (repeatable)"
    ),
]
Task = Annotated[str | None, typer.Option(help="what the model learns (default: from the model)")]
Dtype = Annotated[str, typer.Option(metavar="|".join(DTYPES), help="precision of training")]
Tiny = Annotated[bool, typer.Option("--tiny", help="shrink the model to test size")]
Calibration = Annotated[
    Path | None, typer.Option(help="what programs reach of a device, as `phalanx calibrate` wrote it")
]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="rates of the device: a file of `phalanx profile --out`, or none for published figures (default: what "
        "`phalanx profile` measured here of such devices)"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)
    app.command("estimate")(estimate)


def plan(
    model: Model,
    cluster: ClusterText,
    batch_size: BatchSizes = None,
    seq_len: SeqLen = None,
    data: Data = None,
    text_key: TextKey = None,
    on_broken: OnBroken = None,
    given: Annotated[
        str, typer.Option("--plan", help="what is decided already, for example tp=8,zero=1; the rest is searched")
    ] = "",
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="P1 [P2 …]", help="plans to lay beside the best one (repeatable)", show_default=False),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True, show_default=False)] = None,
    task: Task = None,
    dtype: Dtype = DTYPES[0],
    master_weights: MasterWeights = True,
    tiny: Tiny = False,
    calibration: Calibration = None,
    profile: Profile = None,
    out: Annotated[Path | None, typer.Option(help="write the best plan to this .json file")] = None,
    export: Annotated[
        str | None,
        typer.Option(help="print the best plan, alone, for megatron, deepspeed, torchtitan or accelerate"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="write the answer to this page, with the simulated step of the best plan")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan for a model on a cluster: how fast it is, what it needs, why others lost."""
    from phalanx.cli.plan_data import Range, best_batch, read_range
    from phalanx.planning.search import search

    if export is not None:
        _require_framework(export)
    if more and not compare:
        raise ConfigError(
            f"plan {' '.join(more)!r} stands by itself", "give it to --plan as one word or in quotes, or to --compare"
        )
    between = read_range(batch_size)
    case = _case(model, cluster, between and between.last, seq_len, data, task, dtype, tiny, calibration, profile,
                 master_weights, {"text_key": text_key, "on_broken": on_broken})  # fmt: skip
    case.fixed = _fixed(given)
    best, case.looked = best_batch(
        between or Range(case.batch, case.batch), case.data,
        lambda batch: search(case.work, case.cluster, case.software, batch, case.fixed),
    )  # fmt: skip
    case.batch, found = best.batch, best.found
    beside = [_estimate(case, text) for text in (*(compare or ()), *(more or ()))]
    from phalanx.cli import plan_report

    if html is not None:
        _write_page(html, case, found, beside, quiet=as_json or export is not None)
    if export is not None:
        _export(case, export, found.plans[0].plan)
    elif as_json:
        typer.echo(json.dumps(plan_report.as_data(case, found, beside), indent=2, ensure_ascii=False))
    else:
        plan_report.print_answer(case, found, beside)
    if out is not None:
        _write(out, found.plans[0].plan, quiet=as_json or export is not None)


def estimate(
    model: Model,
    cluster: ClusterText,
    given: Annotated[str, typer.Option("--plan", help="the plan, as text or a .json or .yaml file")],
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    data: Data = None,
    text_key: TextKey = None,
    on_broken: OnBroken = None,
    task: Task = None,
    dtype: Dtype = DTYPES[0],
    master_weights: MasterWeights = True,
    tiny: Tiny = False,
    calibration: Calibration = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show what a plan takes on a cluster: where a step's time goes, and the memory of every stage."""
    from phalanx.cli import plan_report

    case = _case(model, cluster, batch_size, seq_len, data, task, dtype, tiny, calibration, profile, master_weights,
                 {"text_key": text_key, "on_broken": on_broken})  # fmt: skip
    own = _estimate(case, given)
    if as_json:
        typer.echo(json.dumps(plan_report.shown_data(case, own), indent=2, ensure_ascii=False))
    else:
        plan_report.print_estimate(case, own)


class Case:
    """What is planned for: a model's work, a cluster, what software reaches there, and the batch. looked: the batches
    among which it was chosen."""

    def __init__(
        self, work: ModelWork, cluster: Cluster, software: Software, batch: int, data: DataUse | None = None
    ) -> None:
        self.work, self.cluster, self.software, self.batch, self.data = work, cluster, software, batch, data
        self.fixed: dict[str, Any] = {}  # fields of a plan that are given
        self.looked: list[Looked] = []


def _case(
    model: str, cluster: str, batch_size: int | None, seq_len: int | None, data: list[str] | None, task: str | None,
    dtype: str, tiny: bool, calibration: Path | None, profile: Path | None, master_weights: bool,
    reading: Mapping[str, Any],
) -> Case:  # fmt: skip
    """reading: options that say how data is read."""
    from phalanx.planning.rates import on_cluster
    from phalanx.predict.work_of_facts import work_of_facts

    require_precision(dtype, master_weights)
    machines = _cluster(cluster)
    require_data(data, reading)
    used = read_data(data, seq_len, {"model": model, "task": task, **reading}) if data else None
    seq_len = used.tokens if used is not None else seq_len
    facts = find_facts(model, task, dtype, tiny, live=False)
    batch = batch_size or SAMPLES_PER_DEVICE * machines.world
    if batch_size is None and used is not None and used.samples is not None:
        batch = min(batch, used.samples)

    def describe(chosen: Plan) -> SplitFacts:
        from phalanx.engine.describe import describe

        with patiently(f"reading and describing the graph of {facts.name}"):
            return describe(capture_model(model, task, facts.dtype, tiny)[1], chosen, facts.dtype)

    from phalanx.model.facts.facts import load

    is_shipped = load(facts.name) == facts
    work = work_of_facts(facts, choose_dims(facts, 1, seq_len), None if is_shipped else describe, master_weights)
    software = _software(calibration, machines)
    if (found := _profile_of(profile, machines, dtype)) is not None:
        path, rows, rates = found
        machines, software = on_cluster(machines, software, rates)
        work = _timed(path, rows, work, machines, dtype)
    return Case(work, machines, software, batch, used)


def _timed(path: Path, every: list[Row], work: ModelWork, cluster: Cluster, dtype: str) -> ModelWork:
    """With the seconds of its blocks, where a profile has them of this model and length on the cluster's device."""
    from phalanx.planning.rates import is_of
    from phalanx.predict.from_profile import block_times
    from phalanx.profile.store import matching

    wanted = cluster.nodes[0].device
    rows = matching(every, model=work.name, dtype=dtype, tokens=work.tokens)
    own = [row for row in rows if is_of(str(row.key.get("device")), wanted)]
    # Of measurements beside several numbers of other ranks, those of as many as the cluster's nodes have devices.
    counts = {ranks for row in own if isinstance(ranks := row.key.get("ranks"), int)}
    nearest_count = min(counts, key=lambda ranks: (abs(ranks - cluster.per_node), ranks), default=0)
    times = block_times([(r.kind, r.key, r.value) for r in own if r.key.get("ranks") == nearest_count])
    if times:
        typer.echo(f"blocks as measured ({path}): {', '.join(times)}", err=True)
    return work.timed(times)


def _profile_of(given: Path | None, cluster: Cluster, dtype: str) -> tuple[Path, list[Row], Rates] | None:
    """Rows of a file that is given, which must be about the cluster's devices, or of what was measured here, where it
    is about them."""
    from phalanx.profile.store import profiles_path, read_profile, rows_here

    if given is not None and str(given) == "none":
        return None
    if given is not None:
        rows = read_profile(given)
        return given, rows, _given_rates(given, rows, cluster, dtype)
    path, rows = profiles_path(), rows_here()
    rates = _rates(rows, cluster, dtype)
    if rates is None:
        return None
    typer.echo(f"rates as measured here ({path}); --profile none for published ones", err=True)
    return path, rows, rates


def _rates(rows: list[Row], cluster: Cluster, dtype: str) -> Rates | None:
    """Of the cluster's devices, beside as many ranks as were measured; None where they are of several kinds."""
    from phalanx.planning.rates import is_of
    from phalanx.profile.store import rates_from

    if len({kind.device.name for kind in cluster.nodes}) > 1:
        return None
    wanted = cluster.nodes[0].device
    own = {(str(row.key.get("device")), row.key.get("ranks")) for row in rows if row.key.get("dtype") == dtype}
    fitting = [(device, ranks) for device, ranks in own if isinstance(ranks, int) and is_of(device, wanted)]
    most_first = sorted(fitting, key=lambda key: -key[1])
    every = (rates_from(rows, device, dtype, ranks) for device, ranks in most_first)
    return next((rates for rates in every if rates is not None), None)


def _given_rates(path: Path, rows: list[Row], cluster: Cluster, dtype: str) -> Rates:
    """A ConfigError where the file is about other devices, or says too little."""
    from phalanx.planning.rates import is_of

    rates = _rates(rows, cluster, dtype)
    if rates is not None:
        return rates
    kinds, wanted = {kind.device.name for kind in cluster.nodes}, cluster.nodes[0].device
    keys = {(str(row.key.get("device")), str(row.key.get("dtype"))) for row in rows}
    if len(kinds) == 1 and any(is_of(device, wanted) and own == dtype for device, own in keys):
        message = f"option profile = '{path}' lacks products or memory of {wanted.name}"
        raise ConfigError(message, "measure anew with `phalanx profile --out FILE`")
    about = ", ".join(sorted({f"{device} in {own}" for device, own in keys if own in DTYPES})) or "nothing"
    message = f"option profile = '{path}' is about {about}, and the cluster has {', '.join(sorted(kinds))} in {dtype}"
    raise ConfigError(message, "measure on that device (phalanx profile --dtype … --out FILE), or leave it out")


def _cluster(text: str) -> Cluster:
    from phalanx.planning.cluster import Cluster

    if text.startswith("lab:"):
        from phalanx.lab.spec import LabSpec

        return LabSpec.read(text.removeprefix("lab:")).cluster
    if not text.endswith((".yaml", ".yml", ".json")):
        return Cluster.read(text)
    try:
        return Cluster.take(read_mapping(Path(text)))
    except PhalanxError as error:
        raise ConfigError(f"cluster: {text}: {error.message.removeprefix('cluster: ')}", error.hint) from None


def _software(path: Path | None, cluster: Cluster) -> Software:
    from phalanx.planning.calibrate import read_software
    from phalanx.planning.cost import Software

    if path is None:
        return Software()
    try:
        return read_software(read_mapping(path), cluster.nodes[0].device.name)
    except PhalanxError as error:
        raise ConfigError(f"option calibration = '{path}': {error.message}", error.hint) from None


def _fixed(text: str) -> dict[str, Any]:
    from phalanx.plan import fields
    from phalanx.plan.rules import require_searchable

    given = fields.read(plan_text(text))
    require_searchable(given)
    return given


def _estimate(case: Case, text: str) -> Estimate:
    from phalanx.plan.complete import complete
    from phalanx.planning.degrees import require_heads
    from phalanx.planning.estimate import estimate

    costs = [work.products + work.attention for work in map(case.work.block, range(len(case.work.blocks)))]
    chosen = complete(plan_text(text), world=case.cluster.world, batch_size=case.batch, costs=costs).plan
    require_heads(case.work, chosen)
    return estimate(case.work, chosen, case.cluster, case.software, case.batch)


def _require_framework(name: str) -> None:
    from phalanx.planning.export import FRAMEWORKS

    if name not in FRAMEWORKS:
        message = f"option export = {name!r} is not one of {', '.join(FRAMEWORKS)}"
        raise ConfigError(message, nearest(name, FRAMEWORKS))


def _export(case: Case, framework: str, plan: Plan) -> None:
    """The text to stdout, what it lacks to stderr."""
    from phalanx.planning.export import Job, export

    work, cluster = case.work, case.cluster
    job = Job(plan, case.batch, work.tokens, len(work.layers), cluster.num_nodes, cluster.per_node)
    exported = export(framework, job)
    typer.echo(exported.text)
    for lost in exported.cannot:
        typer.echo(f"{framework} cannot express: {lost}", err=True)


def _write_page(path: Path, case: Case, found: Found, beside: list[Estimate], quiet: bool) -> None:
    from phalanx.cli.plan_report import as_data
    from phalanx.observe.plan_page import plan_page
    from phalanx.predict.sketch import shown_plan, sketch

    best = found.plans[0]
    timeline = sketch(case.work, best, case.cluster, case.software)
    shown = shown_plan(best.plan).mb, best.plan.mb
    _write_text("html", path, plan_page(as_data(case, found, beside), timeline, shown))
    if not quiet:
        typer.echo(f"page written to {path}")


def _write_text(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"option {option} = '{path}' cannot be written: {error.strerror}"
        raise ConfigError(message, "name a file in a folder that exists and may be written to") from error


def _write(path: Path, plan: Plan, quiet: bool) -> None:
    _write_text("out", path, plan.to_json() + "\n")
    if not quiet:
        typer.echo(f"plan written to {path}: train with --plan {path}")
