"""Writes docs/results/peers.md from what `peers.py` measured: python benchmarks/peers_page.py"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from compare import verdict
from peer_cases import OURS, TITLES, entrants

RESULTS = Path(__file__).parent.parent / "docs" / "results"
_ON_GPU = ("peers_gpu_llama.json", "peers_gpu_llama_more.json", "peers_gpu_gpt2.json", "peers_gpu_gpt2_more.json")
# The runs that each section is made of.
SECTIONS = (_ON_GPU, ("peers.json",), ("peers_link.json",), ("peers_long.json", "peers_long_gpt2.json"))
HEADERS = ["model", "who", "fastest setting", "tokens/s", "peak GiB", "our speed / theirs (quartiles)", "ours is"]
LEVEL = 0.98  # what we aim at, at least, with every peer
INTRO = """# Phalanx beside its peers

What users would pick instead trains the same model on the same batch, on the same ranks, with the same precision,
clipping to the global gradient norm and AdamW, dropout 0. Embedding and head are not tied, because torch's pipelines
cannot share a weight. Every setting named below was tried for a moment, and the fastest of each peer met the fastest of
our plans in alternating rounds, each side in processes of its own; losses were checked to agree first. Ratios are
formed within rounds: median and quartiles, above 1 we are faster. *faster* and *slower* mean that both quartiles say
so. Peak memory is that of the rank that needs most: on GPUs what was allocated there, on CPUs all of its process,
libraries included.
"""
AGAIN = "Our row stands before the peers of each run; a peer that failed and was met again is shown as it went then."
OWN_WEIGHTS = "builds a model of the same shape with weights of its own, so that losses could not be compared"


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result files that there are."""
    sections = [[folder / name for name in names if (folder / name).exists()] for names in SECTIONS]
    found = [{file.name: json.loads(file.read_text()) for file in files} for files in sections if files]
    return "\n".join([INTRO, *map(_section, found)])


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Ours first, then one for each peer of one model."""
    tokens = result["size"]["samples"] * result["size"]["tokens"]
    ours, model = result["ours"], result["title"]
    speed = f"{tokens / ours['seconds']['median']:,.0f}" if "seconds" in ours else ""
    found = [[model, "**Phalanx**", ours["plan"], speed, _gib(ours), "", ""]]
    for peer in result["peers"]:
        if "error" in peer:
            found.append([model, peer["peer"], "", "", "", "", f"cannot run: {_short(peer['error'])}"])
            continue
        speed, ratio = f"{tokens / peer['seconds']['median']:,.0f}", peer["ratio"]
        found.append([model, peer["peer"], peer["variant"], speed, _gib(peer), _spread(ratio), verdict(ratio)])
    return found


def behind(result: Mapping[str, Any]) -> list[str]:
    """Where we do not reach what we aim at, and by how much."""
    return [
        f"{result['title']}, {peer['peer']} ({peer['variant']}): we are {1 - peer['ratio']['median']:.0%} behind"
        + ("" if peer["ratio"]["high"] < 1 else ", within the spread") + "."
        for peer in result["peers"]
        if "ratio" in peer and peer["ratio"]["median"] < LEVEL
    ]  # fmt: skip


def settled(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of several runs: a peer that failed and was met again in a later one is shown as it went there."""

    def met_later(number: int, peer: Mapping[str, Any]) -> bool:
        return any(
            later["model"] == results[number]["model"] and peer["peer"] in [other["peer"] for other in later["peers"]]
            for later in results[number + 1 :]
        )

    return [
        {**result, "peers": [peer for peer in result["peers"] if "error" not in peer or not met_later(number, peer)]}
        for number, result in enumerate(results)
    ]


def _section(runs: Mapping[str, Mapping[str, Any]]) -> str:
    results = settled([result for data in runs.values() for result in data["results"]])
    table = [row for result in results for row in rows(result)]
    lines = [f"## {_title(next(iter(runs.values())))}", ""]
    lines += [text for file, data in runs.items() for text in (_how(file, data), "")]
    lines += [*([AGAIN, ""] if len(runs) > 1 else []), _row(HEADERS), _row(["---"] * len(HEADERS))]
    lines += [*map(_row, table), "", "Where we are behind:" if any(map(behind, results)) else "Nowhere behind.", ""]
    lines += [f"- {text}" for result in results for text in behind(result)]
    own = sorted({peer["peer"] for result in results for peer in result["peers"] if peer.get("own_weights")})
    lines += ["", *(f"{', '.join(own)} {OWN_WEIGHTS}." for _ in own[:1]), "What was tried, in seconds per step:", ""]
    lines += [f"- {text}" for result in results for text in _tried(result)]
    return "\n".join([*lines, ""])


def _title(data: Mapping[str, Any]) -> str:
    setting = data["setting"]
    if data["machine"]["gpus"]:
        return f"{setting['ranks']} ranks that share one GPU"
    batch = ", one sequence per step" if all(result["size"]["samples"] == 1 for result in data["results"]) else ""
    return f"{setting['ranks']} CPU ranks" + (f", nodes joined at {setting['link']}" if setting["link"] else "") + batch


def _how(file: str, data: Mapping[str, Any]) -> str:
    machine, setting = data["machine"], data["setting"]
    option = " --gpu" if machine["gpus"] else f" --link {setting['link']}" if setting["link"] else ""
    option += "".join(f" --{name} {setting[name]}" for name in ("samples", "tokens") if setting.get(name))
    option += _left_out(data["results"], setting.get("only"))
    option += "".join(f" --plans {plan}" for plan in setting.get("plans") or ())
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    sizes = "; ".join(
        f"{result['title']}: {size['layers']} layers of width {size['width']}, vocabulary {size['vocabulary']}, "
        f"{size['samples']} × {size['tokens']} tokens per step"
        for result in data["results"]
        for size in [result["size"]]
    )
    return (
        f"`python benchmarks/peers.py{option} --rounds {setting['rounds']} --steps {setting['steps']}` on "
        f"{(machine['gpus'] or ['one CPU thread per rank'])[0]}, {machine['date']}, torch {machine['torch']}, "
        f"{versions or 'no other peers installed'}, {setting['dtype']}. Data: [{file}]({file}). {sizes}. Processes "
        f"ready to run on {setting['cores']} cores: {setting['load']:.1f} at the start{_later(data['results'])}."
    )


def _left_out(results: Sequence[Mapping[str, Any]], only: Sequence[str] | None) -> str:
    """The options that chose models and peers, where not all took part. only: as it was given, where that is known."""
    models, peers = [result["model"] for result in results], only or [peer["peer"] for peer in results[0]["peers"]]
    everyone = {entrant.peer for entrant in entrants(2, 2)} - {OURS}
    chosen = "" if set(models) == set(TITLES) else "".join(f" --models {model}" for model in models)
    return chosen + ("" if set(peers) == everyone else "".join(f' --only "{peer}"' for peer in peers))


def _later(results: Sequence[Mapping[str, Any]]) -> str:
    """Other work that began in the meantime."""
    loads = [peer["load"] for result in results for peer in result["peers"] if "load" in peer]
    return (
        f", {min(loads):.1f} to {max(loads):.1f} after the rounds with each peer, the ranks included" if loads else ""
    )


def _tried(result: Mapping[str, Any]) -> list[str]:
    groups = [("Phalanx", result["ours"]["tried"]), *((peer["peer"], peer["tried"]) for peer in result["peers"])]
    return [
        f"{result['title']}, {name}: "
        + "; ".join(f"{one['variant']} {_outcome(one)}" for one in tried)
        for name, tried in groups
        if tried
    ]  # fmt: skip


def _outcome(one: Mapping[str, Any]) -> str:
    return f"{one['seconds']:.2f}" if "seconds" in one else f"({_short(one['error'])})"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _gib(known: Mapping[str, Any]) -> str:
    return f"{known['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in known else ""


def _short(error: str, most: int = 110) -> str:
    text = error.replace("|", "/")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    (RESULTS / "peers.md").write_text(page(), encoding="utf-8")
