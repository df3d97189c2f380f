"""What a layer takes in runs that others measured, and which of these times lie far below their neighbours.

Steps of models that differ in their number of layers alone tell what one layer adds to a micro-batch; a layer of one
width, `tp` and number of samples then has one time. No formula of sizes tells a time that drops below those of fewer
and of more samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from phalanx.planning.runs import Run

FAR = 0.75  # of what half and twice the samples take, in the geometric mean: less is far below


class Layer(NamedTuple):
    width: int
    tp: int
    samples: int


def layer_of(run: Run) -> Layer:
    work, plan = run.work, run.plan
    width = round(work.block(work.layers[0]).crossing / work.width / work.tokens)
    return Layer(width, plan.tp, run.batch // (plan.dp * plan.mb))


def layer_times(runs: Sequence[Run]) -> dict[Layer, float]:
    """Seconds, the middle one of all cases of a layer in which models of several depths were measured."""
    cases: dict[tuple[Layer, int, int, int, int], dict[int, float]] = defaultdict(dict)
    for run in runs:
        if run.seconds is not None:
            case = (layer_of(run), run.plan.pp, run.plan.dp, run.plan.mb, run.cluster.world)
            cases[case][len(run.work.layers)] = run.seconds
    found: dict[Layer, list[float]] = defaultdict(list)
    for (layer, pp, _, mb, _), by_depth in cases.items():
        if len(by_depth) > 1:
            slope = float(np.polyfit(list(by_depth), list(by_depth.values()), 1)[0])
            found[layer].append(slope * pp / (mb + pp - 1))
    return {layer: median(times) for layer, times in found.items()}


def far_below(times: Mapping[Layer, float]) -> dict[Layer, float]:
    """Layers whose times do, with the share of what their neighbours say."""
    shares: dict[Layer, float] = {}
    for layer, seconds in times.items():
        around = [times.get(layer._replace(samples=count)) for count in (layer.samples // 2, 2 * layer.samples)]
        if layer.samples % 2 == 0 and None not in around:
            shares[layer] = seconds / math.sqrt(math.prod(own for own in around if own is not None))
    return {layer: share for layer, share in shares.items() if share < FAR}
