"""Memory, predicted and measured: the peak of a step on one GPU for models × batches × recompute × precision × offload.

    python benchmarks/memory.py [--models meta-llama/Llama-3.2-1B …] [--plans recompute=light …] [--steps 6]
    python benchmarks/memory.py --again FILE … --out FILE

Each case is predicted from what is compiled and the shapes of the batch, before anything lies on the device; then it
trains, and the allocator tells what was held at most. Both are of tensors: what libraries and the allocator keep for
themselves stands apart (reserved). Seconds are the median of the steps after the first two. `--again` predicts cases
anew that were measured before, beside what was measured then: that needs no GPU, and shows what a change of the
prediction does.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report

PLANS = (
    "mb=1", "mb=2", "mb=1,recompute=light", "mb=1,recompute=unit", "mb=1,recompute=block", "mb=1,offload=activations",
    "mb=1,offload=optimizer", "mb=2,recompute=light,offload=activations+optimizer", "mb=2,offload=optimizer-step",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """fields: of the model's configuration, to be changed."""

    model: str
    batch: int
    tokens: int
    fields: tuple[tuple[str, Any], ...] = ()


LARGE = "meta-llama/Meta-Llama-3-8B"
SETTINGS = (
    Setting("meta-llama/Llama-3.2-1B", 8, 2048, (("num_hidden_layers", 8),)),
    Setting("gpt2-medium", 16, 1024, (("n_layer", 12),)),
    Setting("bert-base-cased", 32, 512),
    Setting("google/flan-t5-base", 16, 512),
)
PRECISIONS = ("bfloat16, masters", "bfloat16", "float32")


@dataclass(frozen=True)
class Case:
    setting: Setting
    plan: str
    precision: str


def main() -> None:
    options = _options()
    if options.device == "cuda" and not options.again:
        _require_gpu()
    results: list[dict[str, Any]] = []
    setting = {name: value for name, value in vars(options).items() if name not in ("out", "plot", "again")}
    if options.again:
        setting["measured_on"] = json.loads(Path(options.again[0]).read_text())["machine"]
    for result in _again(options.again) if options.again else _measured(options):
        results.append(result)
        print(row(result), file=sys.stderr, flush=True)
        report.publish(options, "memory", setting, results, [_panel(results)])
    print(report.table(HEADERS, [row(r) for r in results]))
    print(summary(results))


def _options() -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument(
        "--models", nargs="+", default=[own.model for own in SETTINGS], help="those of the table, or any other"
    )
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, help="default: all with the first plan, then the first"
    )
    parser.add_argument("--batch", type=int, help="samples (default: as the table has it, else 4)")
    parser.add_argument("--tokens", type=int, help="of a sample (default: as the table has it, else 4096)")
    parser.add_argument("--fields", nargs="*", default=(), metavar="NAME=N", help="of the configuration, to be changed")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--again", nargs="+", metavar="FILE", help="results of earlier runs, to be predicted anew")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny models, predictions alone")
    return parser.parse_args()


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "memory needs a CUDA device, and none can be used; --device cpu shows predictions of tiny models"
        )


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Those of one precision and model beside each other: they share what is compiled."""
    known = {own.model: own for own in SETTINGS}
    given = tuple((name, int(value)) for name, value in (text.split("=") for text in options.fields))
    for model in options.models:
        own = known.get(model, Setting(model, 4, 4096))
        samples, tokens = options.batch or own.batch, options.tokens or own.tokens
        setting = replace(own, batch=samples, tokens=tokens, fields=own.fields + given)
        for precision in options.precisions or PRECISIONS:
            whole = options.precisions is not None or precision == PRECISIONS[0]
            yield from (Case(setting, plan, precision) for plan in (options.plans if whole else options.plans[:1]))


def _measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in _cases(options):
        yield asdict(case) | _attempt(case, options)


def _again(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    from phalanx.model.ops.operators import as_on_gpu

    for old in (result for file in files for result in json.loads(Path(file).read_text())["results"]):
        own = old["setting"]
        setting = Setting(own["model"], own["batch"], own["tokens"], tuple((k, v) for k, v in own["fields"]))
        with as_on_gpu():
            predicted = predict(Case(setting, old["plan"], old["precision"]))
        yield old | {"predicted": predicted.device, "on_host": predicted.host}


def predict(case: Case) -> Any:
    """As the segments of a GPU would be compiled, without one."""
    import torch
    from one_rank import captured_model

    from phalanx import tasks
    from phalanx.config import RunConfig
    from phalanx.engine.compiled import Compiled
    from phalanx.engine.memory import rank_memory
    from phalanx.engine.step import micro_batches
    from phalanx.plan.complete import complete

    own, dtype = case.setting, case.precision.split(",")[0]
    spec, captured = captured_model(own.model, dtype, **dict(own.fields))
    batch = tasks.get(spec.task).synthetic(spec.config, batch=own.batch, tokens=own.tokens, seed=0)
    plan = complete(case.plan, world=1, batch_size=own.batch, costs=[1.0] * len(captured.blocks.blocks)).plan
    options = _precision(case) | {"batch_size": own.batch, "device": "cpu", "compile": "inductor"}
    compiled = Compiled(
        captured, RunConfig(**options), plan, rank=0, device=torch.device("cpu"), trainable=captured.trainable,
        buffers=captured.buffers,
    )  # fmt: skip
    return rank_memory(compiled, micro_batches(compiled.training.feeder, plan, batch, 0))


def _precision(case: Case) -> dict[str, Any]:
    """As options of a run."""
    dtype = case.precision.split(",")[0]
    return {"dtype": dtype} | ({} if dtype == "float32" else {"master_weights": case.precision.endswith("masters")})


def _attempt(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    from phalanx.errors import PhalanxError

    try:
        return measure(case, options.device, options.steps)
    except (PhalanxError, RuntimeError) as error:
        return {"error": str(error).splitlines()[0]}
    finally:
        _give_back(options.device)


def measure(case: Case, device: str, steps: int) -> dict[str, Any]:
    import torch
    from one_rank import captured_model, on_device, open_session

    from phalanx import tasks
    from phalanx.engine.memory import RankMemory, rank_memory
    from phalanx.engine.step import micro_batches
    from phalanx.plan.complete import complete

    own, dtype = case.setting, case.precision.split(",")[0]
    spec, captured = captured_model(
        own.model, dtype, tiny=device == "cpu", **({} if device == "cpu" else dict(own.fields))
    )
    samples, tokens = (own.batch, own.tokens) if device == "cuda" else (4, 32)
    batch = tasks.get(spec.task).synthetic(spec.config, batch=samples, tokens=tokens, seed=0)
    costs = [1.0] * len(captured.blocks.blocks)
    plan = complete(case.plan, world=1, batch_size=samples, costs=costs).plan
    predicted = RankMemory({}, {})

    def look(compiled: Any, _: object) -> Any:
        nonlocal predicted
        predicted = rank_memory(compiled, micro_batches(compiled.training.feeder, compiled.plan, batch, 0))
        return compiled

    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    session = open_session(captured, plan, device, look=look, batch_size=samples, **_precision(case))
    fed = on_device(batch, device)
    held = sum(tensor.nbytes for tensor in fed.values())  # the batch itself, which a run would feed from the host
    seconds = _seconds(session, fed, device, steps)
    result = {"predicted": predicted.device, "on_host": predicted.host, "seconds": seconds}
    if device == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        result |= {"measured_bytes": peak - before - held, "reserved_bytes": reserved}
    session.close()
    return result


def timed_session(options: Any, plan: str, given: dict[str, Any]) -> tuple[Any, Any, list[float]]:
    """A session under a plan, the batch it was stepped with, and the seconds of these steps. options: model, batch,
    tokens, steps and device; given: other options of the run."""
    from one_rank import captured_model, on_device, open_session

    from phalanx import tasks
    from phalanx.plan.complete import complete

    spec, captured = captured_model(options.model, given["dtype"], tiny=options.device == "cpu")
    samples, tokens = (options.batch, options.tokens) if options.device == "cuda" else (4, 32)
    batch = tasks.get(spec.task).synthetic(spec.config, batch=samples, tokens=tokens, seed=0)
    text = complete(plan, world=1, batch_size=samples, costs=[1.0] * len(captured.blocks.blocks)).plan
    session = open_session(captured, text, options.device, batch_size=samples, **given)
    fed = on_device(batch, options.device)
    return session, fed, _seconds(session, fed, options.device, options.steps)


def _seconds(session: Any, batch: Any, device: str, steps: int) -> list[float]:
    """Of the steps after the first two, which compile and fill caches."""
    import torch

    seconds: list[float] = []
    for number in range(steps):
        if number == 2 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        session.step(batch, 0, 1e-4).read()
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def _give_back(device: str) -> None:
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


HEADERS = [
    "model",
    "batch",
    "precision",
    "plan",
    "predicted GiB",
    "measured GiB",
    "error",
    "reserved",
    "ms/step",
    "on host",
]


def row(r: dict[str, Any]) -> list[str]:
    own = r["setting"]
    layers = dict(own["fields"]).get("num_hidden_layers") if own["model"] == LARGE else None
    known = [
        own["model"] + (f", {layers} layers" if layers else ""),
        f"{own['batch']} × {own['tokens']}",
        r["precision"],
        r["plan"],
    ]
    if "error" in r:
        return [*known, r["error"], "", "", "", "", ""]
    predicted, seconds = sum(r["predicted"].values()), statistics.median(r["seconds"])
    measured = (
        [_gib(r["measured_bytes"]), f"{error_of(r):+.2%}", _gib(r["reserved_bytes"])]
        if "measured_bytes" in r
        else ["–"] * 3
    )
    return [*known, _gib(predicted), *measured, f"{seconds * 1e3:.1f}", _gib(sum(r["on_host"].values()))]


def error_of(r: dict[str, Any]) -> float:
    """How far the prediction is from what was measured, as a share of it."""
    return sum(r["predicted"].values()) / r["measured_bytes"] - 1


def summary(results: Sequence[dict[str, Any]]) -> str:
    errors = [abs(error_of(r)) for r in results if "measured_bytes" in r]
    failed = sum("error" in r for r in results)
    if not errors:
        return f"{len(results)} cases, {failed} failed, nothing measured"
    return f"{len(errors)} cases: mean error {statistics.mean(errors):.2%}, worst {max(errors):.2%}; {failed} failed"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _panel(results: Sequence[dict[str, Any]]) -> plot.Panel:
    good = [r for r in results if "measured_bytes" in r]
    names = [f"{r['setting']['model']} {r['plan']}" for r in good]
    points = {
        "predicted": [
            plot.Point.of(n, report.summary([sum(r["predicted"].values())])) for n, r in zip(names, good, strict=True)
        ],
        "measured": [plot.Point.of(n, report.summary([r["measured_bytes"]])) for n, r in zip(names, good, strict=True)],
    }
    return plot.Panel("Peak memory of a step", "", "bytes", points)


if __name__ == "__main__":
    main()
