"""The answer of `phalanx plan` as one HTML page that needs nothing else: plans side by side, where their seconds and
bytes go, the sentences about them, and the simulated step of the best one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from phalanx.observe.format import bytes_text, number_text, seconds_text
from phalanx.observe.program_files import svg
from phalanx.predict.timeline import Timeline

_COLOURS = ("#4878a8", "#86bbd8", "#d1603d", "#8d6a9f", "#e8b44f", "#5b9279", "#3d405b", "#cccccc", "#b0a990")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1280px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; color: #666; font-weight: 500; }
td, th { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
.number { text-align: right; white-space: nowrap; } code { font-size: 13px; overflow-wrap: anywhere; }
.bar { display: flex; height: 16px; min-width: 220px; background: #f2f2f2; } .bar span { display: block; }
.key { display: inline-block; width: 10px; height: 10px; margin: 0 .3rem 0 .9rem; } .too-much { color: #b3261e; }
figure { margin: 1rem 0; overflow-x: auto; } figcaption { color: #666; }
"""


def plan_page(data: Mapping[str, Any], timeline: Timeline, shown: str) -> str:
    """data: what `phalanx plan --json` prints. timeline: of the best plan. shown: what of it, in words."""
    plans = [*data["plans"], *data["compared"]]
    size, best = number_text(data["num_parameters"]), data["plans"][0]
    title = f"{data['model']} on {data['cluster']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{size} parameters, {data['batch_size']} samples of {data['seq_len']} tokens. "
        f"The best plan: <code>{escape(best['plan'])}</code></p>",
        _plans(plans),
        "<h2>Where a step goes</h2>",
        _bars(plans, [own["parts_seconds"] for own in plans], seconds_text),
        "<h2>What the fullest device holds</h2>",
        _bars(plans, [_fullest(own) for own in plans], bytes_text),
        "<h2>Why</h2><ul>",
        *(f"<li>{escape(text)}</li>" for text in _sentences(data)),
        "</ul>",
        "<h2>A step of the best plan, simulated</h2>",
        f"<figure>{svg({best['short']: timeline})}<figcaption>{escape(shown)}; what "
        "replicas exchange is not drawn. Hover over a bar for its instruction.</figcaption></figure>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>\n"])


def _plans(plans: Sequence[Mapping[str, Any]]) -> str:
    titles = ("plan", "tokens/s", "MFU", "step", "bubble", "exposed", "memory of budget", "why not")
    rows = [f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"]
    for own in plans:
        held, budget = sum(_fullest(own).values()), own["budget_bytes"][own["fullest"]]
        numbers = (number_text(own["tokens_per_second"]), f"{own['mfu']:.1%}", seconds_text(own["step_seconds"]),
                   f"{own['bubble']:.1%}", f"{own['exposed_communication']:.1%}")  # fmt: skip
        full = f"{bytes_text(held)} of {bytes_text(budget)}"
        cells = [f"<td><code>{escape(own['short'])}</code>{_on(own, plans)}</td>"]
        cells += [f'<td class="number">{text}</td>' for text in numbers]
        cells.append(
            f'<td class="number{"" if own["fits"] else " too-much"}">{full}</td><td>{escape(own["lost"])}</td>'
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _on(own: Mapping[str, Any], plans: Sequence[Mapping[str, Any]]) -> str:
    """The devices that a plan is for, where these are not the same for all."""
    return f" on {escape(own['on'])}" if len({other["on"] for other in plans}) > 1 else ""


def _fullest(own: Mapping[str, Any]) -> Mapping[str, float]:
    return own["memory_bytes"][own["fullest"]]


def _bars(plans: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, float]], text: Any) -> str:
    """One bar for each plan, all on the scale of the longest."""
    longest = max(sum(own.values()) for own in parts)
    colours = dict(zip(parts[0], _COLOURS, strict=False))
    rows: list[str] = []
    for own, sizes in zip(plans, parts, strict=True):
        spans = "".join(
            f'<span style="width:{100 * size / longest:.2f}%;background:{colours[name]}" '
            f'title="{escape(name)}: {text(size)}"></span>'
            for name, size in sizes.items()
        )
        total = text(sum(sizes.values()))
        rows.append(f'<tr><td><code>{escape(own["short"])}</code></td><td style="width:55%"><div class="bar">{spans}'
                    f'</div></td><td class="number">{total}</td></tr>')  # fmt: skip
    used = [name for name in colours if any(own.get(name, 0) for own in parts)]
    keys = "".join(f'<span class="key" style="background:{colours[name]}"></span>{escape(name)}' for name in used)
    return f"<table>{''.join(rows)}</table><p>{keys}</p>"


def _sentences(data: Mapping[str, Any]) -> list[str]:
    helps = [f"{help['what']}: {help['speedup']:.2f}×" for help in data["helps"]]
    out = [f"The best plan {data['left_out']}."] if data["left_out"] else []
    found = [*out, f"What limits it: {data['limits']}.", f"Pipeline or tensor: {data['pipeline_or_tensor']}."]
    found += [f"The same batch with {', '.join(helps)} of the speed."] if helps else []
    found += [f"Slices: {data['slices']}."] if data["slices"] else []
    found += [f"D{data['data']['says'].removeprefix('d')}."] if "data" in data else []
    known, tried = data["candidates"]["known"], data["candidates"]["worked_out"]
    return [*found, f"{known} candidates were looked at, {tried} worked out; rates are {data['rates']}."]
