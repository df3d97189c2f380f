"""How long training pauses when a plan changes while it runs, against the size of the state that moves.

    python benchmarks/migrate.py [--gpu] [--quick] [--repeats 7] [--out migrate.json]

Four CPU ranks, or with `--gpu` four that share one GPU and compile their segments, go to and fro between two plans.
Beside the pause stands what the same bytes between the same ranks take when nothing is packed, checked or placed (all
at once, measured in turn with the pauses), and what the way through a checkpoint on disk takes in processes that are
there already: a stop and a new start would add those of a start. The first change to a plan also makes its functions;
that is shown by itself, with the first step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report
from compare_setting import Setting, Size
from migrate_ranks import Case, Measured, measure
from shared_gpu import pool_of

from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.format import bytes_text
from phalanx.plan.complete import complete

RESULTS = Path(__file__).parent.parent / "docs" / "results"
LAYERS, WORLD = 6, 4
CHANGES = (("pp=4,mb=4", "dp=4,zero=1"), ("tp=4", "pp=2,dp=2,mb=2"), ("pp=4,mb=4", "pp=4,mb=2,schedule=gpipe"))
_PARTS = ("prepare", "connect", "move", "arrive")


@dataclass(frozen=True)
class Kind:
    """Ranks of one sort. allowed: seconds of a pause beside those of its bytes."""

    name: str
    widths: tuple[int, ...]
    tokens: int
    dtype: str
    device: str
    compile: str
    allowed: float


CPU = Kind("four CPU ranks", (128, 512, 1024), 16, "float32", "cpu", "off", 0.15)
GPU = Kind("four ranks that share one GPU", (512, 1024, 2048), 512, "bfloat16", "cuda", "inductor", 1.5)
HEADERS = ["from", "to", "state", "moved", "pause s", "prepare", "connect", "move", "arrive", "plain bytes s",
           "pause - plain", "next step s", "through files s", "first change and step s"]  # fmt: skip

INTRO = """# The pause of a change of plan

How long training stands still when its plan changes, for plans that were used before and a change that was made ready
for while the old plan trained. Parameters that are kept whole while the rest of the state is in
shards may still be on their way when a run trains on; here the pause ends when they have arrived. What the next step
takes longer than usual is shown beside it. *Plain bytes* is what as many bytes between the same ranks take all at once,
measured in turn with the pauses; what more is allowed stands above each table. *Through files* is a checkpoint saved
under one plan and loaded under the other in the same processes; to stop and start them again would come on top. The
last column is the first change to a plan with its first step, which makes its functions. On the GPU the run was ended
before its widest model.

Why the next step takes longer on CPU ranks with much state: it is the first to use memory that the old plan did not
need, and the system fills each page with zeros before it is used. Looked at for `pp=4,mb=4` → `dp=4,zero=1` at 906 MiB:
a rank grows from 1.7 to 2.4 GiB in that step (its gradients are those of the whole model now, 302 MiB instead of 75,
besides what reductions work in) and spends 1.1 s in the system instead of 0.3 s; four ranks on two cores wait twice
that. Of all samples of a profiler 44 % were in the kernel's `clear_page`, 6 % in the step after it; nothing is compiled
or read. Where less is new there is less of it: 0.1 s more in the system for `tp=4` → `pp=2,dp=2,mb=2`. Every first step
under such a plan takes that, also of a run that begins with it. torch's allocator on ARM (mimalloc) gives memory back
a tenth of a second after it was let go of, so it is the same when a plan comes back. `MIMALLOC_PURGE_DELAY=-1` keeps
it: a step after a change to a plan that was used before then spends 0.2 s in the system, as any other does, and a rank
goes up to 3.5 GiB and stays there, where it went up to 2.8. That is left to whoever has the memory."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="of each change; the median counts")
    parser.add_argument("--gpu", action="store_true", help="four ranks that share one GPU, instead of CPU ranks")
    parser.add_argument("--quick", action="store_true", help="the smallest model and one repeat")
    options = parser.parse_args(arguments)
    kind = GPU if options.gpu else CPU
    widths, repeats = (kind.widths[:1], 1) if options.quick else (kind.widths, options.repeats)
    results: list[dict[str, Any]] = []
    setting = {"ranks": kind.name, "allowed": kind.allowed, "world": WORLD, "layers": LAYERS, "repeats": repeats}
    with pool_of(WORLD, kind.device) as pool, tempfile.TemporaryDirectory() as folder:
        for width in widths:
            for old, new in CHANGES:
                results.append(_measured(pool, kind, width, old, new, repeats, Path(folder)))
                print(row(results[-1]), file=sys.stderr, flush=True)
                report.publish(options, "migrate", setting, results, panels(results, kind.name))
    print(report.table(HEADERS, [row(result) for result in results]))


def _measured(
    pool: WorkerPool, kind: Kind, width: int, old: str, new: str, repeats: int, folder: Path
) -> dict[str, Any]:  # fmt: skip
    size = Size(layers=LAYERS, width=width, vocabulary=4 * width, samples=8, tokens=kind.tokens)
    setting = Setting("llama", size, kind.dtype, masters=True)
    captured = setting.capture()
    costs = captured.blocks.flops(captured.dims(setting.batch()))
    plans = [complete(text, world=WORLD, batch_size=size.samples, costs=costs).plan for text in (old, new)]
    found: list[Measured] = pool.run(
        measure, Case(setting, captured, *plans, repeats, folder, kind.device, kind.compile)
    )
    pairs = [slow - plain for slow, plain in zip(_slowest(found, "pauses"), _slowest(found, "plain"), strict=True)]
    return {
        "old": old, "new": new, "width": width, "state_bytes": sum(each.state_bytes for each in found),
        "bytes": found[0].bytes, "first": max(each.first for each in found),
        **{name: report.summary(_slowest(found, name)) for name in ("pauses", "plain", "through_files")},
        "beside": report.summary(pairs),
        "parts": {name: report.summary([max(each.parts[name][i] for each in found) for i in range(repeats)])
                  for name in found[0].parts},
    }  # fmt: skip


def _slowest(found: Sequence[Measured], name: str) -> list[float]:
    return [max(times) for times in zip(*(getattr(each, name) for each in found), strict=True)]


def row(result: Mapping[str, Any]) -> list[str]:
    parts = [f"{result['parts'].get(name, {}).get('median', 0.0):.3f}" for name in _PARTS]
    plain, beside, through = (f"{result[name]['median']:.3f}" for name in ("plain", "beside", "through_files"))
    following = f"{result['parts'].get('next step', {}).get('median', 0.0):+.3f}"
    sizes = [bytes_text(result[name]) for name in ("state_bytes", "bytes")]
    pause = f"{result['pauses']['median']:.3f}"
    return [
        result["old"],
        result["new"],
        *sizes,
        pause,
        *parts,
        plain,
        beside,
        following,
        through,
        f"{result['first']:.2f}",
    ]


def page(folder: Path = RESULTS) -> str:
    sections = [_section(path) for path in sorted(folder.glob("migrate*.json"))]
    return "\n".join([INTRO, *sections, ""])


def _section(path: Path) -> str:
    data = json.loads(path.read_text(encoding="utf-8"))
    machine, setting = data["machine"], data["setting"]
    gpu = setting["ranks"] == GPU.name
    on = f"one {machine['gpus'][0]}, torch {machine['torch']}" if gpu else f"torch {machine['torch']}"
    lines = [
        "",
        f"## On {setting['ranks']}",
        "",
        f"`python benchmarks/migrate.py{' --gpu' * gpu}` ({on}), {machine['date']}, {setting['layers']} layers, "
        f"medians of {setting['repeats']}. {report.busy(machine)} At most {setting['allowed']} s beside the bytes are "
        f"asked. Data: [{path.name}]({path.name}).",
        "",
        report.markdown(HEADERS, [row(result) for result in data["results"]]),
    ]
    return "\n".join(lines)


def panels(results: Sequence[Mapping[str, Any]], ranks: str) -> list[plot.Panel]:
    found: dict[str, list[plot.Point]] = {"pause": [], "plain bytes": [], "through files": []}
    for each in results:
        name = f"{each['old']} → {each['new']}, {bytes_text(each['state_bytes'])}"
        for kind, key in zip(found, ("pauses", "plain", "through_files"), strict=True):
            found[kind].append(plot.Point.of(name, each[key]))
    return [plot.Panel(f"a change of plan on {ranks}", "change and size of the state", "seconds", found)]


if __name__ == "__main__":
    main()
