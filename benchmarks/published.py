"""How well steps that others measured are predicted: calibrated on some models, judged on others.

    python benchmarks/published.py FILE.csv [--out docs/results/published.json]

Runs are grouped by who published them and whether they took one node or several. The models of a group are halved: what
software reaches of a device is fitted to one half (of few runs, starting from a fit to that half of all groups on the
device) and judged on the other, both ways, so that no shape is on both sides. Of every group: the mean error of step
times, the rank correlation within sweeps (runs of one model, batch and cluster), how much slower the plan predicted
best (and the best of three) is than the best measured, and how often running out of memory was told rightly.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import plot
import report
from layer_times import far_below, layer_of, layer_times

from phalanx.planning.calibrate import fit, fit_memory, step_seconds
from phalanx.planning.cost import MEETING, Software
from phalanx.planning.estimate import estimate
from phalanx.planning.runs import Run, read_runs

MOST = 160  # runs of a group that are fitted to
FEW = 40  # of every group, for the fit that those with fewer begin with
Judged = tuple[Run, Software]
Told = tuple[float, float, Run]  # seconds that were predicted and measured


def main(arguments: list[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("file", type=Path, help="a table of runs; its columns are those of `phalanx calibrate`")
    options = parser.parse_args(arguments)
    runs, left_out = read_runs(options.file)
    for reason, count in left_out.most_common():
        print(f"left out {count:4}: {reason}")
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.device, group_name(run)].append(run)
    rows = [row for device in sorted({run.device for run in runs}) for row in judge_device(device, groups)]
    print(f"\n{'':52}  runs  error   rank   top 1  top 3  memory told rightly")
    for row in rows:
        print(_line(row))
    setting = {"runs": len(runs), "left_out": dict(left_out.most_common())}
    report.publish(options, "published", setting, rows, panels(rows))


def panels(rows: Sequence[dict[str, Any]]) -> list[plot.Panel]:
    told = [(f"{row['device']}: {row['group']}", 100 * row["error"]) for row in rows if row["error"] is not None]
    points = [plot.Point(name, error, error, error) for name, error in told]
    return [plot.Panel("Step times that others published", "published by", "mean error, %", {"told": points})]


def group_name(run: Run) -> str:
    """Who published it, whether it took one node, and what its products are computed in."""
    nodes = "one node" if run.cluster.num_nodes == 1 else "several nodes"
    return f"{re.split(r'[@ ]', run.source)[0]}, {nodes}" + (f", {run.bits} bits" if run.bits < 16 else "")


def judge_device(device: str, groups: dict[tuple[str, str], list[Run]]) -> list[dict[str, Any]]:
    own = {name: runs for (on, name), runs in groups.items() if on == device}
    judged: dict[str, list[Judged]] = defaultdict(list)
    for half in (0, 1):
        seen = {name: [run for run in runs if is_seen(run, runs, half)] for name, runs in own.items()}
        # Few runs of a group say how its program differs from what everybody's on this device say; many say all.
        few = [run for runs in seen.values() for run in some(runs, FEW)]
        common = fit(few) if few else None
        for name, runs in own.items():
            software = common or Software()
            if timed(seen[name]):
                software = fit(some(seen[name], MOST), common if len(timed(seen[name])) < FEW else None)
                software = fit_memory(seen[name], software)
            judged[name] += [(run, software) for run in runs if not is_seen(run, runs, half)]
    return [{"device": device, "group": name, **figures(pairs)} for name, pairs in sorted(judged.items())]


def is_seen(run: Run, group: Sequence[Run], half: int) -> bool:
    models = sorted({other.model for other in group})
    return models.index(run.model) % 2 == half


def timed(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.seconds is not None]


def some(runs: Sequence[Run], most: int) -> list[Run]:
    """As many, spread over all of them."""
    own = timed(runs)
    return own[:: max(1, len(own) // most)]


def figures(judged: Sequence[Judged]) -> dict[str, Any]:
    told = [(step_seconds(run, software), run.seconds, run) for run, software in judged if run.seconds is not None]
    both = [(predicted, took) for predicted, took, _ in told]
    whole = sweeps_of(told)
    many = [[(predicted, took) for predicted, took, _ in sweep] for sweep in whole]
    memory = [(fits(run, software), run.seconds is not None) for run, software in judged]
    decided = any(not ran for _, ran in memory)
    return {
        "runs": len(both),
        "error": mean(abs(told / took - 1) for told, took in both) if both else None,
        "bias": mean(told / took - 1 for told, took in both) if both else None,
        "sweeps": len(many),
        "rank_correlation": mean(map(rank_correlation, many)) if many else None,
        "top_1_regret": mean(regret(sweep, 1) for sweep in many) if many else None,
        "top_3_regret": mean(regret(sweep, 3) for sweep in many) if many else None,
        "memory_runs": len(memory) if decided else 0,
        "memory_right": mean(told == ran for told, ran in memory) if decided else None,
    } | odd_layers([run for run, _ in judged], whole)


def sweeps_of(told: Sequence[Told]) -> list[list[Told]]:
    """Five or more runs of one model, batch and cluster."""
    found: dict[object, list[Told]] = defaultdict(list)
    for each in told:
        run = each[2]
        found[run.source, run.model, run.cluster.world, run.batch, run.work.tokens].append(each)
    return [sweep for sweep in found.values() if len(sweep) >= 5]


def odd_layers(runs: Sequence[Run], sweeps: Sequence[Sequence[Told]]) -> dict[str, Any]:
    """What layers whose times lie far below their neighbours' have to do with choosing; nothing where there are none.

    with, without: regrets of the sweeps whose best plan has such a layer, and of the others. left_out: of all sweeps,
    without the runs that have one."""
    times = layer_times(runs)
    odd = far_below(times)
    if not odd or not sweeps:
        return {}
    is_odd = [layer_of(min(sweep, key=lambda own: own[1])[2]) in odd for sweep in sweeps]
    kept = [[own for own in sweep if layer_of(own[2]) not in odd] for sweep in sweeps]
    parts = {
        "with": [sweep for sweep, own in zip(sweeps, is_odd, strict=True) if own],
        "without": [sweep for sweep, own in zip(sweeps, is_odd, strict=True) if not own],
        "left_out": [sweep for sweep in kept if sweep],
    }
    shown = [{**layer._asdict(), "share": share, "seconds": times[layer]} for layer, share in sorted(odd.items())]
    return {
        "odd_layers": {
            "of": len(times), "layers": shown, "best": sum(is_odd), "exponent": MEETING,
            **{name: _regrets(part) for name, part in parts.items()},
        }
    }  # fmt: skip


def _regrets(sweeps: Sequence[Sequence[Told]]) -> dict[str, float | None]:
    pairs = [[(predicted, took) for predicted, took, _ in sweep] for sweep in sweeps]
    return {f"top_{count}_regret": mean(regret(sweep, count) for sweep in pairs) if pairs else None for count in (1, 3)}


def fits(run: Run, software: Software) -> bool:
    return estimate(run.work, run.plan, run.cluster, software, run.batch).fits


def rank_correlation(sweep: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    told, took = (np.argsort(np.argsort(column)) for column in zip(*sweep, strict=True))
    return float(np.corrcoef(told, took)[0, 1])


def regret(sweep: Sequence[tuple[float, float]], choices: int) -> float:
    """How much slower the best of the plans that are told to be best is than the best of all."""
    chosen = sorted(sweep)[:choices]
    return min(took for _, took in chosen) / min(took for _, took in sweep) - 1


def _line(row: dict[str, Any]) -> str:
    def text(name: str, form: str) -> str:
        return format(row[name], form) if row[name] is not None else "-"

    name = f"{row['device']}: {row['group']}"
    memory = f"{text('memory_right', '.1%')} of {row['memory_runs']}" if row["memory_runs"] else "-"
    return (
        f"{name[:52]:52}  {row['runs']:4}  {text('error', '6.1%')}  {text('rank_correlation', '5.2f')}  "
        f"{text('top_1_regret', '6.1%')}  {text('top_3_regret', '6.1%')}  {memory}"
    )


if __name__ == "__main__":
    main()
