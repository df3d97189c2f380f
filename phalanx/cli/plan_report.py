"""What `phalanx plan` and `phalanx estimate` print: plans side by side, sentences about them, and the same as data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.cli.models import PIPED_WIDTH
from phalanx.observe.format import bytes_text, number_text, seconds_text
from phalanx.planning.data_use import WORTH_SAYING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from phalanx.cli.plan import Case
    from phalanx.planning.data_use import DataUse
    from phalanx.planning.estimate import Estimate
    from phalanx.planning.explain import Help
    from phalanx.planning.search import Found


def print_answer(case: Case, found: Found, beside: Sequence[Estimate]) -> None:
    from phalanx.planning.explain import (
        pipeline_or_tensor,
        slice_sentence,
        what_is_left_out,
        what_limits,
        why_lost,
    )

    best, console = found.plans[0], _console()
    _say(console, _title(case))
    console.print(_plan_table([*found.plans, *beside], best, case.data))
    _say_batches(console, case)
    _say(console, f"\nthe best: {best.plan.shown}")
    if best.plan.pp > 1:
        _say(console, f"stages: {'-'.join(map(str, best.plan.stages))} blocks")
    if out := what_is_left_out(case.cluster, found, case.objective):
        _say(console, out)
    for other in (*found.plans[1:], *beside):
        _say(console, f"  {other.plan.shown}{_on(case, other)}\n      {why_lost(best, other, case.objective)}")
    _say(console, f"\nlimits: {what_limits(best)}")
    useful = [f"{help.what}: {help.speedup:.2f}×" for help in _helps(case, found)]
    _say(console, f"would help: {'; '.join(useful) or 'nothing of nodes, memory, network and links, for this batch'}")
    _say(console, f"pipeline or tensor: {pipeline_or_tensor(case.work, case.cluster, case.software, best)}")
    if case.work.causal:
        _say(console, f"slices: {slice_sentence(case.cluster, case.software)}")
    _say(console, f"\n{found.tried} of {found.known} candidates worked out; rates are {_rates(case)}")


def _helps(case: Case, found: Found) -> list[Help]:
    from phalanx.planning.explain import what_helps

    if case.helps is None:
        case.helps = what_helps(case.work, case.cluster, case.software, found, case.fixed, case.objective)
    return case.helps


def _say_batches(console: Console, case: Case) -> None:
    """What data and batch sizes make of it, where these were asked for."""
    if case.data is not None:
        _say(console, f"\n{data_sentence(case)}")
    if len(case.looked) > 1:
        best, word = max(own.rate for own in case.looked), {"cost": "cheapest"}.get(case.objective, "fastest")
        rows = ", ".join(f"{own.batch}: {own.rate / best - 1:+.1%}" for own in case.looked if own.batch != case.batch)
        _say(
            console,
            f"batch: {case.batch} samples, of those looked at the {word} through the data; others {rows} (what a "
            "batch's size does to the loss is not weighed)",
        )


def data_sentence(case: Case) -> str:
    """What of the work is data."""
    data, batch = case.data, case.batch
    assert data is not None
    there = "a stream" if data.samples is None else f"{data.samples:,} samples"
    words = f"data: {data.name}, {there}; {data.padding:.1%} of the tokens of a batch are padding"
    if data.cut:
        words += f", {data.cut:.1%} of the data's are cut off"
    if data.best_tokens and data.best_padding + data.best_cut < data.padding + data.cut - WORTH_SAYING:
        words += f"; --seq-len {data.best_tokens} would waste least ({data.best_padding:.1%} and {data.best_cut:.1%})"
    if (steps := data.steps(batch)) is not None:
        repeated = data.repeated(batch)
        again = f", the last of which sees {repeated:,} samples again" if repeated else ", all of them full"
        words += f"; an epoch is {steps:,} step{'s' * (steps > 1)}{again}"
    return f"{words}: {data.useful(batch):.1%} of what is computed is new data"


def print_estimate(case: Case, own: Estimate) -> None:
    from phalanx.planning.explain import what_limits

    console = _console()
    _say(console, _title(case))
    console.print(_plan_table([own], own, case.data))
    console.print(_parts_table(own))
    console.print(_memory_table(own))
    _say(console, f"limits: {what_limits(own)}")
    if own.plan.offload:
        _say(console, f"on the host: {_hosted(own)} for each device of place {own.fullest_host}")
    if own.lacks > 0:
        _say(console, f"does not fit: {bytes_text(own.lacks)} too much at place {own.fullest} of the pipeline")
    if own.lacks_on_host > 0:
        _say(console, f"does not fit: {bytes_text(own.lacks_on_host)} of main memory are missing for each device there")
    _say_batches(console, case)
    _say(console, f"rates are {_rates(case)}")


def shown_data(case: Case, own: Estimate) -> dict[str, Any]:
    """What `print_estimate` shows."""
    return _shown(case, own) | _data_of_batches(case)


def as_data(case: Case, found: Found, beside: Sequence[Estimate]) -> dict[str, Any]:
    """Everything that is shown, for programs."""
    from phalanx.planning.explain import (
        pipeline_or_tensor,
        slice_sentence,
        what_is_left_out,
        what_limits,
        why_lost,
    )

    best, objective = found.plans[0], case.objective
    lost = [why_lost(best, own, objective) if own is not best else "" for own in (*found.plans, *beside)]
    shown = [_shown(case, own) | {"lost": why} for own, why in zip((*found.plans, *beside), lost, strict=True)]
    return {
        "model": case.work.name,
        "cluster": str(case.cluster),
        "batch_size": case.batch,
        "seq_len": case.work.tokens,
        "objective": objective,
        "plans": shown[: len(found.plans)],
        "compared": shown[len(found.plans) :],
        "left_out": what_is_left_out(case.cluster, found, objective),
        "limits": what_limits(best),
        "helps": [help._asdict() for help in _helps(case, found)],
        "pipeline_or_tensor": pipeline_or_tensor(case.work, case.cluster, case.software, best),
        "slices": slice_sentence(case.cluster, case.software) if case.work.causal else "",
        "num_parameters": case.work.num_parameters,
        "rates": _rates(case),
        "candidates": {"known": found.known, "worked_out": found.tried},
    } | _data_of_batches(case)


def _shown(case: Case, own: Estimate) -> dict[str, Any]:
    if case.data is None:
        return estimate_data(own)
    return estimate_data(own) | {"useful_tokens_per_second": own.tokens_per_second * case.data.useful(own.batch)}


def _data_of_batches(case: Case) -> dict[str, Any]:
    """What was asked for beside plans: data, a range of batches."""
    data, found = case.data, dict[str, Any]()
    if data is not None:
        useful = data.useful(case.batch)
        found["data"] = asdict(data) | {"steps": data.steps(case.batch), "useful": useful, "says": data_sentence(case)}
    if len(case.looked) > 1:
        rate = f"useful_tokens_per_{'dollar' if case.objective == 'cost' else 'second'}"
        found["batches"] = [
            {"batch_size": own.batch, rate: own.rate, "plan": own.found.plans[0].plan.full_text} for own in case.looked
        ]
    return found


def estimate_data(own: Estimate) -> dict[str, Any]:
    return {
        "plan": own.plan.full_text,
        "short": _short(own),
        "on": on_text(own),
        "step_seconds": own.step_seconds,
        "tokens_per_second": own.tokens_per_second,
        "mfu": own.mfu,
        "bubble": own.bubble,
        "exposed_communication": own.exposed,
        "parts_seconds": own.parts,
        "memory_bytes": [{name: round(size) for name, size in place.items()} for place in own.memory],
        "budget_bytes": [round(size) for size in own.budget],
        "fullest": own.fullest,
        "host_bytes": [round(size) for size in own.on_host],
        "host_budget_bytes": [round(size) for size in own.host_budget],
        "fits": own.fits,
    } | ({"dollars_per_million_tokens": own.dollars_per_million_tokens} if own.price else {})


def _title(case: Case) -> str:
    size = number_text(case.work.num_parameters)
    return f"{case.work.name} ({size} parameters) on {case.cluster}, {case.batch} samples of {case.work.tokens} tokens"


_MEASURED = {"flops": "products", "bandwidth": "memory", "host": "the host", "link": "links", "network": "the network"}


def _rates(case: Case) -> str:
    """Where the seconds come from."""
    kinds = {kind.device.name: kind.device for kind in case.cluster.nodes}
    shares = "calibrated shares" if case.is_calibrated else "assumed shares (`phalanx calibrate` fits them)"
    source = next((own.flops.source for own in kinds.values() if own.flops.known == "measured"), None)
    if source is not None:
        measured = [
            what
            for name, what in _MEASURED.items()
            if any(getattr(own, name).source == source for own in kinds.values())
        ]
        rest = f"what was not measured is as published or given, times {shares}"
        return f"{source}: {', '.join(measured)} of {', '.join(kinds)}; {rest}"
    if case.is_calibrated:
        return "calibrated"
    known = sorted({figure.known for device in kinds.values() for figure in device.figures.values()})
    return f"{' and '.join(known)} figures of {', '.join(kinds)} times {shares}"


def _plan_table(plans: Sequence[Estimate], best: Estimate, data: DataUse | None = None) -> Table:
    priced = any(own.price for own in plans)
    titles = [
        "tokens/s",
        *(["useful/s"] if data is not None else []),
        "MFU",
        "step",
        "bubble",
        "exposed",
        "memory",
        *(["$/Mtoken"] if priced else []),
    ]
    is_part = any(own.cluster != best.cluster for own in plans)
    table = _table(("", "plan", *(["on"] if is_part else [])), titles)
    for number, own in enumerate(plans):
        full = f"{bytes_text(own.peak_bytes)} of {bytes_text(own.budget[own.fullest])}"
        full += f", host {_hosted(own)}" if own.lacks_on_host > 0 else ""
        cells = [number_text(own.tokens_per_second)]
        cells += [number_text(own.tokens_per_second * data.useful(own.batch))] if data is not None else []
        cells += [f"{own.mfu:.1%}", seconds_text(own.step_seconds)]
        cells += [f"{own.bubble:.1%}", f"{own.exposed:.1%}", full if own.fits else f"{full}: too much"]
        cells += [f"{own.dollars_per_million_tokens:.3f}"] if priced else []
        on = [on_text(own)] if is_part else []
        table.add_row("best" if own is best and len(plans) > 1 else str(number + 1), _short(own), *on, *cells)
    return table


def on_text(own: Estimate) -> str:
    """The devices that a plan is for."""
    return " + ".join(map(str, own.cluster.nodes))


def _on(case: Case, own: Estimate) -> str:
    return f" on {on_text(own)}" if own.cluster != case.cluster else ""


def _hosted(own: Estimate) -> str:
    return f"{bytes_text(own.on_host[own.fullest_host])} of {bytes_text(own.host_budget[own.fullest_host])}"


def _short(own: Estimate) -> str:
    """A plan without what is long: which layers compute again is told by counts."""
    from dataclasses import replace

    words = replace(own.plan, recompute=(), stages=()).text or "mb=1"
    counts = {rung: own.plan.policies.count(rung) for rung in dict.fromkeys(own.plan.policies)}
    if len(own.plan.policies) == 1:
        return words if own.plan.policies == ("none",) else f"{words},recompute={own.plan.policies[0]}"
    return f"{words},recompute: " + " ".join(f"{rung} {count}" for rung, count in counts.items())


def _parts_table(own: Estimate) -> Table:
    table = _table(("a step's time",), ("seconds", "share"))
    for part, seconds in own.parts.items():
        table.add_row(part, f"{seconds:.4g}", f"{seconds / own.step_seconds:.1%}")
    return table


def _memory_table(own: Estimate) -> Table:
    names = list(own.memory[0])
    table = _table(("place",), (*names, "all", "budget"))
    shown = range(len(own.memory)) if len(own.memory) <= 8 else sorted({0, 1, own.fullest, len(own.memory) - 1})
    for place in shown:
        held = own.memory[place]
        cells = [bytes_text(held[name]) for name in names]
        table.add_row(str(place), *cells, bytes_text(sum(held.values())), bytes_text(own.budget[place]))
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in left:
        table.add_column(title, overflow="fold")
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table
