"""Phalanx beside what its users would pick instead: DDP, FSDP2, torch.distributed.pipelining, and, where they are
installed, Accelerate, DeepSpeed, torchtitan and Megatron-core.

    python benchmarks/peers.py [--gpu] [--link 1gbit] [--samples 1 --tokens 1024] [--models llama] [--only DDP]
        [--plans pp=2,mb=4] [--quick] [--out FILE]

All train the same model on the same batch with the same precision, clipping and AdamW, dropout 0. Every setting of
every peer is tried for a moment; its fastest then meets the fastest of our plans in alternating rounds. A peer that is
not installed or cannot run is reported with its error. Peers are never dependencies: install them beside Phalanx in an
environment that you throw away (pip install accelerate deepspeed torchtitan megatron-core) and run this with its
Python.

--link puts every rank on a node of its own in a lab whose nodes are joined at that rate (root, ip and tc are needed),
and trains on fewer, longer sequences. --samples and --tokens choose the batch: with one sequence per step nobody can
split the batch, and a pipeline without slices has nothing to fill it with.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
from compare_setting import Setting, Size
from peer_cases import CPU_SIZES, GPU_SIZES, LINK_SIZES, OURS, TINY_SIZES, TITLES, entrants
from peer_rounds import Rounds, versions
from peer_workers import Entrant
from peers_page import HEADERS, rows

from phalanx.errors import PhalanxError
from phalanx.lab.run import Lab


def main() -> None:
    options = _options()
    sizes = _sizes(options)
    results: list[dict[str, Any]] = []
    with _lab(options) as lab:
        about = _about(options, lab, sizes)
        for shape in options.models or list(sizes):
            for found in _of_model(lab, shape, sizes, options):
                results = [result for result in results if result["model"] != shape] + [found]
                if options.out:  # after each peer, so that a run that is cut short has not run for nothing
                    report.write(Path(options.out), "peers", about, results)
    print(report.table(HEADERS, [row for result in results for row in rows(result)]))


def _sizes(options: argparse.Namespace) -> dict[str, Size]:
    usual = TINY_SIZES if options.quick else GPU_SIZES if options.gpu else LINK_SIZES if options.link else CPU_SIZES
    asked = {name: value for name in ("samples", "tokens") if (value := getattr(options, name))}
    return {shape: replace(size, **asked) for shape, size in usual.items()}


def _of_model(lab: Lab, shape: str, sizes: Mapping[str, Size], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known of one model, again after each peer."""
    size = sizes[shape]
    setting = Setting(shape, size, "bfloat16" if options.gpu else "float32", masters=True)
    asked = [e for e in entrants(lab.spec.ranks, size.samples, options.plans) if e.peer == OURS or _wanted(e, options)]
    with ExitStack() as stack:
        rounds = stack.enter_context(Rounds(lab, setting, rounds=options.rounds, steps=options.steps, say=_say))
        known: dict[str, Any] = {"model": shape, "title": TITLES[shape], "ranks": lab.spec.ranks, "size": asdict(size)}
        known["ours"] = rounds.choose_ours([e for e in asked if e.peer == OURS])
        known["peers"] = []
        for peer in dict.fromkeys(e.peer for e in asked if e.peer != OURS):
            known["peers"].append(rounds.meet(peer, [e for e in asked if e.peer == peer]))
            known["ours"] = rounds.ours()
            yield known


def _lab(options: argparse.Namespace) -> Lab:
    if options.gpu and options.link:
        raise SystemExit("--gpu and --link cannot be combined: ranks that share a GPU are on one node")
    if options.gpu:
        return Lab(f"ranks={options.ranks},gpu_share={100 // options.ranks}%")
    if options.link:
        return Lab(f"nodes={options.ranks},ranks_per_node=1,link={options.link},device=cpu:1thread")
    return Lab(f"ranks={options.ranks},device=cpu:1thread")


def _about(options: argparse.Namespace, lab: Lab, sizes: Mapping[str, Size]) -> dict[str, Any]:
    if options.link and lab.effective.link is None:
        raise SystemExit(f"--link {options.link}: {'; '.join(lab.notes)}")
    return {
        "lab": lab.describe(), "link": options.link, "dtype": "bfloat16" if options.gpu else "float32",
        "ranks": options.ranks, "rounds": options.rounds, "steps": options.steps, "quick": options.quick,
        "samples": options.samples, "tokens": options.tokens, "plans": options.plans,
        "only": options.only,
        "load": os.getloadavg()[0], "cores": os.cpu_count(), "versions": versions(),
    }  # fmt: skip


def _wanted(entrant: Entrant, options: argparse.Namespace) -> bool:
    name = f"{entrant.peer}, {entrant.variant}".lower()
    return not options.only or any(word.lower() in name for word in options.only)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="ranks that share one GPU (bfloat16), instead of CPU ranks")
    parser.add_argument("--link", help="CPU ranks on nodes joined at this rate, for example 1gbit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, help="sequences per step, instead of the usual number")
    parser.add_argument("--tokens", type=int, help="of a sequence, instead of the usual number")
    parser.add_argument("--models", action="append", choices=list(CPU_SIZES), help="default: all")
    parser.add_argument("--only", action="append", help="peers with settings whose name contains this; may be repeated")
    parser.add_argument("--plans", action="append", help="of ours, instead of the usual ones; may be repeated")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1, help="per round")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that everything runs")
    parser.add_argument("--out", help="write the results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except PhalanxError as error:
        raise SystemExit(str(error)) from None
