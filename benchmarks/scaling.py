"""Scaling: start-up time and its parts against the model's depth; step time against ranks and sequence length.

    python benchmarks/scaling.py [--quick] [--out docs/results/scaling.json] [--plot scaling.png]

Start-up is that of an ordinary run in a fresh process, with an empty cache (cold) and once more (cached), for a Llama
of small width and growing depth. Steps are those of 1 and 2 CPU ranks that compute, and of up to 8 ranks whose
computation is a timed wait while everything else is real; all of them run in turn, one step each per round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import scaling_page
from compare_setting import Setting, Size
from scaling_ranks import Training, run_in_turn, slowest

from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.complete import complete
from phalanx.program.instructions import Op

START = Path(__file__).parent / "scaling_start.py"
COMPUTED = Size(layers=6, width=256, vocabulary=2048, samples=8, tokens=128)
TIMED = Size(layers=15, width=128, vocabulary=512, samples=16, tokens=16)
TOKENS_PER_STEP = 2048  # where lengths are compared
WAITS = {Op.F: 2e-3, Op.B: 2e-3, Op.W: 2e-3, Op.BW: 4e-3}  # of a layer
ENDS = (0.25, 0.75)  # the same of the embedding and of head and loss, as parts of a layer's


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    layers: tuple[int, ...] = (2, 4, 8, 16, 32)
    starts: int = 2  # per depth and cache
    ranks: tuple[int, ...] = (2, 4, 8)
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    rounds: int = 8


FULL = Extent()
QUICK = Extent(layers=(2, 4), starts=1, ranks=(2,), lengths=(64, 128), rounds=2)


def main() -> None:
    options = _options()
    extent = QUICK if options.quick else FULL
    about = {"extent": asdict(extent), "computed": asdict(COMPUTED), "timed": asdict(TIMED), "quick": options.quick}
    results: list[dict[str, Any]] = []
    for found in (_start_ups(extent), _computed(extent), _timed(extent)):
        results += found
        if options.out:  # after each, so that a run that is cut short has not run for nothing
            report.write(Path(options.out), "scaling", about, results)
    print("\n\n".join(report.table(headers, rows) for headers, rows in scaling_page.tables(results).values()))
    report.publish(options, "scaling", about, results, scaling_page.panels(results))


def _start_ups(extent: Extent) -> Iterator[dict[str, Any]]:
    """The depths in turn, so that drift of the machine hits all alike."""
    _python("-c", "import phalanx.training.trainer")  # reads the files of the libraries once, for all
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for _ in range(extent.starts):
        for layers in extent.layers:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "cached"):
                    parts = json.loads(_python(str(START), str(layers), PHALANX_CACHE=cache).splitlines()[-1])
                    found.setdefault((layers, state), []).append(parts)
                    _say(f"start-up with {layers} layers, {state}")
    for (layers, state), runs in found.items():
        parts = {name: _both([run[name] for run in runs]) for name in runs[0]}
        yield {"kind": "start-up", "layers": layers, "cache": state, "parts": parts}


def _both(seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    wall, worked = zip(*seconds, strict=True)
    return {"seconds": report.summary(wall), "processor_seconds": report.summary(worked)}


def _python(*arguments: str, **variables: str) -> str:
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"python {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def _computed(extent: Extent) -> Iterator[dict[str, Any]]:
    """1 and 2 ranks that compute, and one rank with samples of several lengths."""
    longest = Setting("llama", replace(COMPUTED, tokens=max(extent.lengths)), "float32", masters=True)
    captured = longest.capture()
    setting = replace(longest, size=COMPUTED)
    costs = captured.blocks.flops(captured.dims(setting.batch()))
    ranks = [_training(text, setting, costs, None) for text in ("mb=4", "pp=2,mb=4", "dp=2,mb=2")]
    sizes = [replace(COMPUTED, samples=TOKENS_PER_STEP // tokens, tokens=tokens) for tokens in extent.lengths]
    lengths = [_training("mb=1", replace(setting, size=size), costs, None, f"{size.tokens} tokens") for size in sizes]
    seconds = _steps(2, [*ranks, *lengths], extent.rounds, captured)
    for one in ranks:
        yield {"kind": "ranks", "timed": False, **_about(one, seconds)}
    for one in lengths:
        yield {"kind": "tokens", "tokens": one.setting.size.tokens, **_about(one, seconds)}


def _timed(extent: Extent) -> Iterator[dict[str, Any]]:
    """More ranks than there are cores: they wait instead of computing."""
    setting = Setting("llama", TIMED, "float32", masters=True)
    first, last = ENDS
    waits = {op: (first * s, *(s,) * TIMED.layers, last * s) for op, s in WAITS.items()}
    texts = [f"mb={TIMED.samples}"]
    texts += [f"pp={n},mb={TIMED.samples}" for n in extent.ranks]
    texts += [f"dp={n},mb={TIMED.samples // n}" for n in extent.ranks]
    trainings = [_training(text, setting, waits[Op.F], waits) for text in texts]
    seconds = _steps(max(extent.ranks), trainings, extent.rounds, setting.capture())
    for one in trainings:
        yield {"kind": "ranks", "timed": True, **_about(one, seconds)}


def _training(text: str, setting: Setting, costs: Sequence[float], waits: Any, name: str = "") -> Training:
    world = int(text.partition("=")[2].partition(",")[0]) if text[:2] != "mb" else 1
    plan = complete(text, world=world, batch_size=setting.size.samples, costs=costs).plan
    return Training(name or text, setting, plan, waits)


def _steps(world: int, trainings: Sequence[Training], rounds: int, captured: Any) -> Mapping[str, list[float]]:
    with WorkerPool(world, threads_per_rank=1, device="cpu") as pool:
        found = pool.run(run_in_turn, trainings, rounds, captured)
    _say(f"{rounds} rounds on up to {world} ranks")
    return {training.name: slowest(found, training.name) for training in trainings}


def _about(training: Training, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    plan, size = training.plan, training.setting.size
    return {
        "ranks": plan.world, "pp": plan.pp, "dp": plan.dp, "mb": plan.mb, "samples": size.samples,
        "seconds": report.summary(seconds[training.name]),
    }  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="few depths, ranks, lengths and rounds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
