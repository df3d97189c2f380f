"""Overlapped tensor parallelism: Oases' published speed-ups on 32 RTX 3090 beside what planning predicts.

    python benchmarks/oases_published.py [--page docs/results/oases_published.md]

Nothing is run. Published are the speed-ups over Megatron-LM of seven widths on two clusters, with and without NVLink;
not published with them are layers, samples and the network, for which stand here the layers, heads and tokens of the
example in its README, eight samples for each replica, and 100 Gbit/s. Tensors are split over the fewest devices that
hold the model. Steps are those of `phalanx estimate` with the shares that are assumed for any device.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import Estimate, estimate
from phalanx.planning.work import ModelWork, Shape, transformer

WIDTHS = (1024, 2048, 3072, 4096, 6144, 8192, 12288)
PUBLISHED = {  # times faster than Megatron-LM, by width
    "NVLink": (1.06, 1.62, 1.45, 1.39, 1.59, 1.63, 1.58),
    "PCIe": (1.53, 1.95, 1.78, 1.73, 1.67, 1.71, 1.81),
}
CLUSTERS = {
    "NVLink": "8x4 RTX 3090, nvlink 56GB/s, network 100Gb/s",
    "PCIe": "8x4 RTX 3090, nvlink 12GB/s, network 100Gb/s",
}
MODES = ("default_checkpoint", "optim_comm_checkpoint", "overlap_checkpoint", "oases")
BASE = MODES[0]  # as Megatron-LM computes
LAYERS, HEAD, TOKENS, SAMPLES, VOCABULARY = 24, 64, 1024, 8, 50304


class Row(NamedTuple):
    """steps: seconds of each mode."""

    links: str
    width: int
    plan: Plan
    steps: dict[str, float]
    published: float

    def speed_up(self, mode: str) -> float:
        return self.steps[BASE] / self.steps[mode]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, help="write the table to this page")
    options = parser.parse_args(arguments)
    text = page()
    print(text)
    if options.page is not None:
        options.page.write_text(text, encoding="utf-8")


def row(links: str, width: int) -> Row:
    model, cluster = shape_of(width), Cluster.read(CLUSTERS[links])
    steps: dict[str, float] = {}
    chosen = split(model, cluster)
    for mode in MODES:
        steps[mode] = _estimate(model, chosen, cluster, mode).step_seconds
    return Row(links, width, chosen, steps, PUBLISHED[links][WIDTHS.index(width)])


def shape_of(width: int) -> ModelWork:
    shape = Shape(LAYERS, width, width // HEAD, width // HEAD, 4 * width, VOCABULARY, TOKENS, attention="unfused")
    return transformer(f"oases-h{width}", shape)


def split(model: ModelWork, cluster: Cluster) -> Plan:
    """Over the fewest devices that hold it, at least two; over all of them where none do."""
    for tp in (2, 4, 8, 16):
        plan = Plan(tp=tp, dp=cluster.world // tp)
        if _estimate(model, plan, cluster, BASE).fits:
            return plan
    return Plan(tp=cluster.world)


def _estimate(model: ModelWork, plan: Plan, cluster: Cluster, mode: str) -> Estimate:
    whole = Plan(tp=plan.tp, dp=plan.dp, overlap=mode, stages=(len(model.blocks),))
    return estimate(model, whole, cluster, Software(), SAMPLES * plan.dp)


def page() -> str:
    rows = [row(links, width) for links in CLUSTERS for width in WIDTHS]
    lines = [
        "# Oases' experiment, predicted",
        "",
        "Speed-ups over `default_checkpoint`, which computes as Megatron-LM does, beside what was published for Oases",
        "on 32 RTX 3090. Nothing here was run; what was not published with these figures is assumed, as the first",
        "lines of `benchmarks/oases_published.py` say: 24 layers, heads of 64, 1024 tokens, 8 samples a replica. What",
        "planning assumes of any device was not fitted to them.",
        "",
        f"| links | width | split | {' | '.join(f'`{mode}`' for mode in MODES[1:])} | Oases, published |",
        f"|---|---|---|{'---|' * (len(MODES) - 1)}---|",
    ]
    for own in rows:
        told = " | ".join(f"{own.speed_up(mode):.2f}×" for mode in MODES[1:])
        mesh = f"tp={own.plan.tp}, dp={own.plan.dp}"
        lines.append(f"| {own.links} | {own.width} | {mesh} | {told} | {own.published:.2f}× |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
