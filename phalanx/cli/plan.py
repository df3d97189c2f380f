"""`phalanx plan`: the best plans for a model on a cluster that need not be here, and why; `phalanx estimate`: what one
given plan takes there.

A zoo model needs neither torch nor a device: its facts are shipped, and rates follow from the published figures of
known devices. What programs reach of these can be fitted to runs (`phalanx calibrate`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.models import (
    DTYPES,
    OPTIMIZER,
    TOKENS,
    Lora,
    MasterWeights,
    Optimizer,
    OptimizerOptions,
    choose_dims,
    describer,
    find_facts,
    read_update,
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
    from phalanx.planning.explain import Help
    from phalanx.planning.rates import Rates
    from phalanx.planning.search import Found
    from phalanx.planning.work import ModelWork
    from phalanx.predict.update import Update
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
    objective: Annotated[
        str, typer.Option(metavar="time|cost", help="what is least: a step's time, or its cost by the cluster's prices")
    ] = "time",
    more: Annotated[list[str] | None, typer.Argument(hidden=True, show_default=False)] = None,
    task: Task = None,
    lora: Lora = None,
    dtype: Dtype = DTYPES[0],
    master_weights: MasterWeights = True,
    optimizer: Optimizer = OPTIMIZER,
    optimizer_options: OptimizerOptions = None,
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
    update = read_update(dtype, master_weights, optimizer, optimizer_options)
    case = _case(model, cluster, between and between.last, seq_len, data, task, lora, dtype, tiny, calibration, profile,
                 update, {"text_key": text_key, "on_broken": on_broken})  # fmt: skip
    case.fixed, case.objective = _fixed(given), objective
    best, case.looked = best_batch(
        between or Range(case.batch, case.batch), case.data,
        lambda batch: search(case.work, case.cluster, case.software, batch, case.fixed, objective=objective), objective,
    )  # fmt: skip
    case.batch, found = best.batch, best.found
    beside = [_estimate(case, text) for text in (*(compare or ()), *(more or ()))]
    from phalanx.cli import plan_report

    if html is not None:
        _write_page(html, case, found, beside, quiet=as_json or export is not None)
    if export is not None:
        _export(case, export, found.plans[0], dtype)
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
    lora: Lora = None,
    dtype: Dtype = DTYPES[0],
    master_weights: MasterWeights = True,
    optimizer: Optimizer = OPTIMIZER,
    optimizer_options: OptimizerOptions = None,
    tiny: Tiny = False,
    calibration: Calibration = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show what a plan takes on a cluster: where a step's time goes, and the memory of every stage."""
    from phalanx.cli import plan_report

    update = read_update(dtype, master_weights, optimizer, optimizer_options)
    case = _case(model, cluster, batch_size, seq_len, data, task, lora, dtype, tiny, calibration, profile, update,
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
        self, work: ModelWork, cluster: Cluster, software: Software, batch: int, data: DataUse | None = None,
        is_calibrated: bool = False,
    ) -> None:  # fmt: skip
        self.work, self.cluster, self.software, self.batch, self.data = work, cluster, software, batch, data
        self.is_calibrated = is_calibrated
        self.fixed: dict[str, Any] = {}  # fields of a plan that are given
        self.objective = "time"
        self.helps: list[Help] | None = None  # changes of the cluster, once they are looked at
        self.looked: list[Looked] = []


def _case(
    model: str, cluster: str, batch_size: int | None, seq_len: int | None, data: list[str] | None, task: str | None,
    lora: str | None, dtype: str, tiny: bool, calibration: Path | None, profile: Path | None, update: Update,
    reading: Mapping[str, Any],
) -> Case:  # fmt: skip
    """reading: options that say how data is read."""
    from phalanx.planning.precision import in_precision
    from phalanx.planning.rates import on_cluster
    from phalanx.predict.work_of_facts import work_of_facts
    from phalanx.profile.store import matching

    machines = in_precision(_cluster(cluster), dtype)
    require_data(data, reading)
    used = read_data(data, seq_len, {"model": model, "task": task, **reading}) if data else None
    seq_len = used.tokens if used is not None else seq_len
    facts = find_facts(model, task, dtype, tiny, live=False, lora=lora)
    batch = batch_size or SAMPLES_PER_DEVICE * machines.world
    if batch_size is None and used is not None and used.samples is not None:
        batch = min(batch, used.samples)

    describe = describer(facts, model, task, tiny, lora)
    from phalanx.model.facts.facts import load

    is_shipped = load(facts.name, facts.dtype) == facts
    work = work_of_facts(facts, choose_dims(facts, 1, seq_len), None if is_shipped else describe, update)
    software = _software(calibration, machines)
    if (found := _profile_of(profile, machines, dtype)) is not None:
        path, rows, rates = found
        machines, software = on_cluster(machines, software, rates)
        if not lora:  # measured as all of it is trained
            work = _timed(path, matching(rows, device=rates.device), work, machines, dtype)
    return Case(work, machines, software, batch, used, is_calibrated=calibration is not None)


def _timed(path: Path, every: Iterable[Row], work: ModelWork, cluster: Cluster, dtype: str) -> ModelWork:
    """With the seconds of its blocks, where a profile has them of this model and length. every: of the very device
    whose rates are planned with. What runs measured in passing does not count."""
    from phalanx.predict.from_profile import block_times
    from phalanx.profile.store import matching, of_newest_graphs

    own = list(matching(every, model=work.name, dtype=dtype, tokens=work.tokens, by="profile"))
    # Of measurements beside several numbers of other ranks, those of as many as the cluster's nodes have devices.
    counts = {ranks for row in own if isinstance(ranks := row.key.get("ranks"), int)}
    nearest_count = _nearest(counts, cluster.per_node)
    found = of_newest_graphs([row for row in own if row.key.get("ranks") == nearest_count])
    times = block_times([(row.kind, row.key, row.value) for row in found])
    if times:
        typer.echo(f"blocks as measured ({path}): {', '.join(times)}", err=True)
    return work.measured(times)


def _nearest(counts: Iterable[int], wanted: int) -> int:
    return min(counts, key=lambda ranks: (abs(ranks - wanted), ranks), default=0)


def _profile_of(given: Path | None, cluster: Cluster, dtype: str) -> tuple[Path, list[Row], Rates] | None:
    """Rows of a file that is given, which must be about the cluster's devices, or of what was measured here, where it
    is about them: those of one version of torch, here of the one that is here."""
    from phalanx.profile.store import matching, of_one_version, profiles_path, read_profile, rows_here, torch_version

    if given is not None and str(given) == "none":
        return None
    if given is not None:
        rows, version = of_one_version(read_profile(given))
        if rows and version != torch_version():
            typer.echo(f"rates as measured with torch {version} ({given})", err=True)
        return given, rows, _given_rates(given, rows, cluster, dtype)
    path, rows = profiles_path(), list(matching(rows_here(), torch=torch_version()))
    rates = _rates(rows, cluster, dtype)
    if rates is None:
        return None
    typer.echo(f"rates as measured here ({path}); --profile none for published ones", err=True)
    return path, rows, rates


def _rates(rows: list[Row], cluster: Cluster, dtype: str) -> Rates | None:
    """Of the cluster's devices, beside as many ranks as its nodes have, or the nearest number that was measured, each
    on a device of its own; None where they are of several kinds. What runs measured in passing does not count, and of
    several such devices the one that was measured last does."""
    from phalanx.planning.rates import Spread, is_of
    from phalanx.profile.store import far_from, matching, rates_from, spread_of

    if len({kind.device.name for kind in cluster.nodes}) > 1:
        return None
    wanted, careful = cluster.nodes[0].device, list(matching(rows, by="profile"))
    own = {(str(row.key.get("device")), spread_of(row)) for row in matching(careful, dtype=dtype, nodes=1)}
    fitting = [(name, spread) for name, spread in own if spread and is_of(name, wanted)]
    whole = [(name, spread.ranks) for name, spread in fitting if spread.ranks == spread.devices]
    last = {name: max(row.made for row in matching(careful, device=name)) for name, _ in whole}
    found: dict[int, Rates] = {}
    for name, ranks in sorted(whole, key=lambda own: (last[own[0]], own)):
        far = far_from(careful, name, Spread(ranks, ranks, cluster.num_nodes), "")
        if (rates := rates_from(careful, name, dtype, Spread(ranks, ranks), far)) is not None:
            found[ranks] = rates
    return found.get(_nearest(found, cluster.per_node))


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


def _export(case: Case, framework: str, best: Estimate, dtype: str) -> None:
    """The text to stdout, what it lacks to stderr."""
    from phalanx.planning.export import Job, export

    work = case.work
    job = Job(best.plan, case.batch, work.tokens, len(work.layers), best.cluster.slots, dtype)
    exported = export(framework, job)
    typer.echo(exported.text)
    for lost in exported.cannot:
        typer.echo(f"{framework} cannot express: {lost}", err=True)


def _write_page(path: Path, case: Case, found: Found, beside: list[Estimate], quiet: bool) -> None:
    from phalanx.cli.plan_report import as_data
    from phalanx.observe.plan_page import plan_page
    from phalanx.predict.sketch import shown_words, sketch

    best = found.plans[0]
    timeline = sketch(case.work, best, case.software)
    _write_text("html", path, plan_page(as_data(case, found, beside), timeline, shown_words(best.plan)))
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
