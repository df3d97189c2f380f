"""What splitting tensors costs a rank besides communication: segments, exchanges and their bookkeeping.

    python benchmarks/tp_dispatch.py [--rounds 20] [--out docs/results/tp_dispatch.json]

One rank's step under tp=2 with nothing sent, against a step of an unsplit model whose layers are as large as what that
rank holds: half the heads, half the inner width, half the vocabulary. Both compute the same products on one CPU thread,
in turn; what is compared is the processor time of that thread, which waiting and other processes do not change.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report
import torch
from contest import quartiles
from overlap_silence import silent
from torch import Tensor

from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.launch.crew import Crew
from phalanx.launch.seat import Seat
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.zoo import zoo
from phalanx.plan.complete import complete
from phalanx.runtime.flat import Piece
from phalanx.runtime.rank import Rank

HEADERS = ["layers", "width", "tokens", "tp=1 ms", "tp=2 ms", "tp=2 / tp=1 (quartiles)", "instructions"]
LR, WARM_UP, HEAD = 0.0, 3, 64


@dataclass(frozen=True)
class Shape:
    """layers x width of the whole model; `samples` of `tokens` tokens are one batch."""

    layers: int
    width: int
    samples: int
    tokens: int
    vocabulary: int = 1024

    def capture(self, parts: int) -> tuple[Captured, dict[str, Tensor]]:
        """The model whose layers hold one of `parts` parts of each tensor, and a batch for it."""
        from transformers import LlamaConfig

        heads = self.width // HEAD // parts
        config = LlamaConfig(
            hidden_size=self.width, intermediate_size=self.width * 4 // parts, num_hidden_layers=self.layers,
            num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD, vocab_size=self.vocabulary // parts,
            max_position_embeddings=self.tokens, tie_word_embeddings=False,
        )  # fmt: skip
        spec = zoo.resolve(config, task="causal-lm")
        task = tasks.get(spec.task)
        batch = task.synthetic(spec.config, batch=self.samples, tokens=self.tokens, seed=0)
        return capture(spec, task.inputs(spec.config), dtype=torch.float32, dropout=0.0, check=False), batch


RESULTS = Path(__file__).parent.parent / "docs" / "results"
INTRO = """# What splitting tensors costs besides communication

One rank's step under `tp=2` with nothing sent, against a step of an unsplit model whose layers are as large as what
that rank holds: half the heads, half the inner width, half the vocabulary. Both compute the same products on one CPU
thread, in turn. The difference is what segments, exchanges and their bookkeeping cost, and what the split embedding and
loss compute on top; times are processor times of that thread.
"""
SHAPES = (Shape(4, 256, 4, 64), Shape(4, 256, 8, 128), Shape(4, 512, 8, 128))


def main() -> None:
    options = _options()
    results: list[dict[str, Any]] = []
    with Crew(2, threads_per_rank=1, device="cpu", environment=lambda _: {"GLOO_SOCKET_IFNAME": "lo"}) as crew:
        for shape in SHAPES:
            results.append({"shape": asdict(shape), **crew.run(compare, shape, options.rounds)[0]})
            print(report.table(HEADERS, rows(results[-1:])), flush=True)
    report.publish(options, "tp_dispatch", {"rounds": options.rounds}, results, _panels(results))


def compare(seat: Seat, shape: Shape, rounds: int) -> dict[str, Any]:
    """The job of one rank; the second one is there because groups of two need it."""
    split = _rank(seat, shape, "tp=2", 1)
    whole = _rank(Seat.alone(), shape, "tp=1", 2)
    seconds: dict[str, list[float]] = {"tp=1": [], "tp=2": []}
    for number in range(WARM_UP + rounds):
        for name, (rank, step) in {"tp=2": split, "tp=1": whole}.items():
            with silent(rank) if name == "tp=2" else nullcontext():
                took = _processor_seconds(step)
            if number >= WARM_UP:
                seconds[name].append(took)
    split[0].close()
    whole[0].close()
    ratios = [a / b for a, b in zip(seconds["tp=2"], seconds["tp=1"], strict=True)]
    return {
        "seconds": {name: quartiles(values) for name, values in seconds.items()}, "ratio": quartiles(ratios),
        "instructions": {"tp=1": len(whole[0].step.program), "tp=2": len(split[0].step.program)},
    }  # fmt: skip


def _rank(seat: Seat, shape: Shape, text: str, parts: int) -> tuple[Rank, Callable[[], object]]:
    captured, batch = shape.capture(parts)

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        value = torch.empty(piece.stop - piece.start)
        return value.fill_(1.0) if len(captured.shapes[name]) == 1 else value.normal_(0, 0.02)

    config = RunConfig.create(batch_size=shape.samples, optimizer="sgd")
    costs = captured.blocks.flops(captured.dims(batch))
    plan = complete(text, world=seat.world, batch_size=shape.samples, costs=costs).plan
    rank = Rank(
        captured, config, plan, seat=seat, trainable=captured.trainable, read=read, buffers=dict(captured.buffers)
    )
    return rank, lambda: rank.step(batch, 0, LR).read()


def _processor_seconds(step: Callable[[], object]) -> float:
    begin = time.thread_time()
    step()
    return time.thread_time() - begin


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One for each shape, as tables show them."""
    found: list[list[str]] = []
    for result in results:
        shape, seconds, ratio = result["shape"], result["seconds"], result["ratio"]
        found.append([
            str(shape["layers"]), str(shape["width"]), f"{shape['samples']} × {shape['tokens']}",
            *(f"{seconds[name]['median'] * 1e3:.1f}" for name in ("tp=1", "tp=2")),
            f"{ratio['median']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})",
            f"{result['instructions']['tp=1']} and {result['instructions']['tp=2']}",
        ])  # fmt: skip
    return found


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result file."""
    data = json.loads((folder / "tp_dispatch.json").read_text())
    machine = data["machine"]
    command = f"python benchmarks/tp_dispatch.py --rounds {data['setting']['rounds']}"
    where = f"{machine['processor']} (torch {machine['torch']}), {machine['date']}"
    lines = [f"`{command}` on {where}. Data: [tp_dispatch.json](tp_dispatch.json).", report.busy(machine), ""]
    return "\n".join([INTRO, *lines, report.markdown(HEADERS, rows(data["results"])), ""])


def _panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    points = [
        plot.Point.of(f"{r['shape']['width']} wide, {r['shape']['samples'] * r['shape']['tokens']} tokens", r["ratio"])
        for r in results
    ]
    title = "Processor time of a rank's step, communication excluded"
    return [plot.Panel(title, "", "tp=2 / tp=1", {"measured": points}, level=1.0)]


def _options() -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each (default: 20)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
