"""The page docs/results/slices.md, from what `slices.py` measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
from slices import ALL_FIRST, EAGER, HEADERS, PLANNED, WHOLE, rows, speed_up

RESULTS = Path(__file__).parent.parent / "docs" / "results"
FILES = (
    "slices_2x8192_gpu.json", "slices_gpu.json", "slices_more_gpu.json", "slices_8x8192_gpu.json",
    "slices_cost_gpu.json", "slices.json",
)  # fmt: skip
FASTER, COST, AIM, CLOSE = 2.0, 1.25, 1.15, 0.1  # targets
INTRO = """# Token slices: steps, memory and cost

A pipeline of equal stages; sequences are micro-batches of one sequence each. `whole` is 1F1B without slices, numbers
are so many equal slices, `planned` is the best of the planner's slicings and the equal ones by simulation, `gpipe` runs
the same slices with all forwards before all backwards. Before anything else the ranks measure slices of an embedding, a
layer and a head, all at the same time; a model with four numbers is fitted to each, and the simulation knows only that,
how long transfers and the update take, and how much ranks slow each other while they compute, communicate and wait
for messages, as on the page of [our own runs](own_runs.md). A measured step is what a training loop sees, on the
slowest rank, as a median with lowest and highest; plans of a case run in turn. Speed-ups are over `whole`; errors are
relative to what was measured. Peak memory is a step's own (activations, gradients, messages) on the rank that needs
most, without weights; the simulated one is known before anything runs, from the graph: what is kept, what the slice at
work needs, gradients and messages.
"""
OF_EAGER = "`eager` runs the same slices with more of them under way (`schedule=eager-1f1b`).\n"


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result files that there are."""
    files = [folder / name for name in FILES]
    found = {file.name: json.loads(file.read_text()) for file in files if file.exists()}
    kinds = {step["slices"] for data in found.values() for result in data["results"] for step in result["steps"]}
    of_eager = [OF_EAGER] if EAGER in kinds else []
    return "\n".join([INTRO, *of_eager, *(_section(data, name) for name, data in found.items())])


def _section(data: dict[str, Any], file: str) -> str:
    shape, source = data["setting"]["shape"], _source(data, file)
    pipelines = [result for result in data["results"] if result["pp"] > 1]
    lines = _pipelines(data, source, pipelines) if pipelines else []
    for result in (result for result in data["results"] if result["pp"] == 1):
        lines += ["## What slicing costs without a pipeline", "", source, ""]
        lines += [_cost(result, shape["alone"], shape["compile"]), ""]
    return "\n".join(lines)


def _source(data: dict[str, Any], file: str) -> str:
    machine, setting = data["machine"], data["setting"]
    only = "".join(f" --only {name}" for name in setting["only"] or ())
    command = f"python benchmarks/slices.py{' --gpu' if machine['gpus'] else ''}{only} --rounds {setting['rounds']}"
    where = " and ".join(machine["gpus"]) or machine["processor"]
    return f"`{command}` on {where} (torch {machine['torch']}), {machine['date']}. Data: [{file}]({file})."


def _pipelines(data: dict[str, Any], source: str, pipelines: Sequence[Mapping[str, Any]]) -> list[str]:
    shape = data["setting"]["shape"]
    asked = _asked(data["setting"]["only"], pipelines)
    lines = [f"## {shape['name']}{f': {asked}' if asked else ''}", "", source, ""]
    lines += [
        f"{_llama(shape['size'])}, {shape['dtype']}, not compiled. {report.busy(data['machine'])}{_late(data)}",
        "",
    ]
    lines += [report.markdown(HEADERS, [row for result in pipelines for row in rows(result)]), ""]
    lines += [f"{_closeness(pipelines)} {_predicted(data['setting'])}".rstrip(), ""]
    lines += [sentence for result in pipelines for sentence in sentences(result)]
    lines += _missing(_wanted(shape["cases"], data["setting"]["only"] if asked else None), pipelines)
    return [*lines, "", *([] if "predicted_from" in data["setting"] else [_profile(data["setting"]["profile"]), ""])]


def _closeness(pipelines: Sequence[Mapping[str, Any]]) -> str:
    steps = [step for result in pipelines for step in result["steps"]]
    errors = [step["simulated"] / step["seconds"]["median"] - 1 for step in steps]
    close, worst = sum(abs(error) <= CLOSE for error in errors), max(errors, key=abs)
    mean = statistics.fmean(map(abs, errors))
    return f"{close} of {len(errors)} steps within 10 %: mean error {mean:.1%}, worst {worst:+.1%}."


def _predicted(setting: Mapping[str, Any]) -> str:
    """Of runs from before ranks measured what they do to each other."""
    file = setting.get("predicted_from")
    if file is None:
        return ""
    where = f"the profile in [{file}]({file}), taken on another machine of the kind"
    return f"Predictions were made later, from {where}; `planned` was chosen by earlier ones."


def _late(data: Mapping[str, Any]) -> str:
    """Of runs from before memory was simulated."""
    known = data["setting"].get("memory_simulated") == "afterwards"
    return " Memory was simulated after the run, from its plans and its profile." if known else ""


def _asked(only: Sequence[str] | None, pipelines: Sequence[Mapping[str, Any]]) -> str:
    """The names of the cases, where single ones were asked for."""
    single = bool(only) and all(any(map(str.isdigit, name)) for name in only or ())
    return ", ".join(map(_name, pipelines)) if single else ""


def _name(result: Mapping[str, Any]) -> str:
    return f"{result['sequences']} × {result['tokens']} tokens"


def _wanted(cases: Sequence[Sequence[int]], only: Sequence[str] | None) -> list[Sequence[int]]:
    return [case for case in cases if only is None or f"{case[0]}x{case[1]}" in only]


def _missing(cases: Sequence[Sequence[int]], pipelines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the run had no time for."""
    measured = {(result["sequences"], result["tokens"]) for result in pipelines}
    left = [f"{number} × {tokens}" for number, tokens in cases if (number, tokens) not in measured]
    return [f"- Not in this run: {', '.join(left)} tokens."] if left else []


def sentences(result: Mapping[str, Any]) -> list[str]:
    """What a case says about the targets."""
    steps = {step["slices"]: step for step in result["steps"]}
    best = max((name for name in steps if name.isdigit()), key=lambda name: speed_up(result, steps[name]))
    planned, uniform = speed_up(result, steps[PLANNED]), speed_up(result, steps[best])
    name = _name(result)
    text = f"- {name}: planned {planned:.2f}×, best uniform ({best} slices) {uniform:.2f}×"
    if planned < uniform and steps[PLANNED]["seconds"]["low"] <= steps[best]["seconds"]["high"]:
        text += " (their spreads overlap)"
    if result["sequences"] == 1:
        text += f"; the target is {FASTER:.0f}× over no slices"
    if EAGER in steps:
        text += f"; the planned slices with more under way {speed_up(result, steps[EAGER]):.2f}×"
    if ALL_FIRST in steps:
        text += f", all forwards first {speed_up(result, steps[ALL_FIRST]):.2f}×"
    found = [f"{text}."]
    if ALL_FIRST in steps:
        found.append(f"- {name}: {memory_sentence(steps)}")
    return found


def memory_sentence(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """Activations in GPipe order over those in 1F1B order, beside what the bound predicts."""
    last = steps[ALL_FIRST]
    own = next(
        step for name, step in steps.items() if name not in (EAGER, ALL_FIRST) and _slices(step) == _slices(last)
    )
    bounds = [all_held / held for all_held, held in zip(last["held"], own["held"])]
    text = f"GPipe order holds {last['held'][0]} slices on the first stage, 1F1B {own['held'][0]}"
    if last["memory"][0]["peak"] is None:
        return f"{text}; a factor of {bounds[0]:.2f}."
    measured = [_activations(a) / _activations(b) for a, b in zip(last["memory"], own["memory"])]
    factors = [f"{m:.2f}× (bound {b:.2f}×)" for m, b in zip(measured, bounds)]
    each = [_shares(a, b, *held) for a, b, *held in zip(last["memory"], own["memory"], last["held"], own["held"])]
    held, rest = (", ".join(f"{nbytes / 2**30:.2f}" for nbytes in nbytess) for nbytess in zip(*each))
    apart = f"so a held slice takes {held} GiB, beside {rest} GiB for the slice at work, which both orders need"
    return f"{text}; activations by stage: {', '.join(factors)}; {apart}.{_third(steps, each)}"


def _third(steps: Mapping[str, Mapping[str, Any]], each: Sequence[tuple[float, float]]) -> str:
    """Whether memory goes by the slices held: what two orders say of a third, beside what that takes."""
    if EAGER not in steps or (measured := steps[EAGER]["memory"])[0]["peak"] is None:
        return ""
    expected = [held * share + rest for held, (share, rest) in zip(steps[EAGER]["held"], each)]
    pairs = [f"{e / 2**30:.2f} ({_activations(m) / 2**30:.2f})" for e, m in zip(expected, measured)]
    held = ", ".join(map(str, steps[EAGER]["held"]))
    return f" `eager` holds {held}, which makes {', '.join(pairs)} GiB expected (measured)."


def _shares(first: Mapping[str, int], second: Mapping[str, int], held: int, held_second: int) -> tuple[float, float]:
    """Bytes of a held slice, and of what does not depend on how many are held, from two peaks."""
    each = (_activations(first) - _activations(second)) / (held - held_second)
    return each, _activations(first) - held * each


def _slices(step: Mapping[str, Any]) -> str:
    return step["plan"].partition("slices=")[2].partition(",")[0]


def _activations(memory: Mapping[str, int]) -> int:
    return memory["peak"] - memory["before"] - memory["gradients"]


def _profile(profile: Mapping[str, Any]) -> str:
    layer = profile["fits"]["layer"]
    return (
        f"A slice of a layer, forward and backward: {layer['start'] * 1e3:.2f} ms + {layer['per_token'] * 1e6:.2f} µs "
        f"per token + {layer['per_pair'] * 1e12:.1f} ps per pair of tokens that attend to each other, and never less "
        f"than {layer['smallest']:.0f} tokens take; {layer['error']:.1%} off what was measured (root mean square), at "
        f"most {abs(layer['worst_error']):.1%}."
    )


def _llama(size: Mapping[str, Any]) -> str:
    return f"Llama of {size['layers']} layers, width {size['width']}"


def _compiled(mode: str) -> str:
    return "not compiled" if mode == "off" else f"compiled by {mode}"


def _cost(result: Mapping[str, Any], size: Mapping[str, Any], mode: str) -> str:
    steps: Sequence[Mapping[str, Any]] = result["steps"]
    table = [
        [step["slices"], f"{step['seconds']['median'] * 1e3:.1f}", f"{_ratio(result, step):.2f}×"] for step in steps
    ]
    about = (
        f"One rank with its device to itself. {_llama(size)}, one sequence of {result['tokens']} tokens, "
        f"{_compiled(mode)}. The target for 8 slices is {COST} times the step without, the aim {AIM}."
    )
    return "\n".join([about, "", report.markdown(["slices", "measured ms", f"over {WHOLE}"], table)])


def _ratio(result: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    return 1 / speed_up(result, step)
