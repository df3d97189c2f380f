"""The process that `scaling.py` starts anew for every point: a short training run of a Llama of some depth, timed.

It is an ordinary run of the trainer; its functions are timed from outside, so that nothing is measured that a user's
run would not do. Prints one JSON object: the wall and processor seconds of each part.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

STEPS = 5
SAMPLES, TOKENS = 4, 64
Part = tuple[float, float]  # wall and processor seconds


class Clock:
    """Seconds of functions by name, those of functions that they call included."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.steps: list[Part] = []
        self._step_began = (0.0, 0.0)

    def watch(self, module: Any, function: str) -> None:
        inner: Callable[..., Any] = getattr(module, function)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = now()
            try:
                return inner(*arguments, **options)
            finally:
                self.parts[function] = _add(self.parts.get(function, (0.0, 0.0)), since(began))

        setattr(module, function, timed)

    def on_start(self, trainer: Any) -> None:
        self._step_began = now()

    def on_step(self, record: dict[str, Any]) -> None:
        self.steps.append(since(self._step_began))
        self._step_began = now()


def now() -> Part:
    return time.perf_counter(), time.process_time()


def since(began: Part) -> Part:
    wall, worked = now()
    return wall - began[0], worked - began[1]


def _add(a: Part, b: Part, sign: int = 1) -> Part:
    return a[0] + sign * b[0], a[1] + sign * b[1]


def measure(layers: int) -> dict[str, Part]:
    began = now()
    import phalanx.prepare.read_model
    import phalanx.training.ready
    import phalanx.training.trainer

    imported = since(began)
    clock = Clock()
    for name in ("capture", "prove"):
        clock.watch(phalanx.prepare.read_model, name)
    for name in ("prepare", "open_weights", "load_buffers", "open_member"):
        clock.watch(phalanx.training.ready, name)
    with tempfile.TemporaryDirectory() as folder:
        phalanx.training.trainer.train(
            _model(layers), "synthetic", callbacks=[clock], task="causal-lm", steps=STEPS, batch_size=SAMPLES,
            seq_len=TOKENS, dropout=0.0, out=folder, export=False, progress="off", device="cpu",
        )  # fmt: skip
    return {"import": imported, **split(clock.parts), **_steps(clock.steps)}


def split(parts: dict[str, Part]) -> dict[str, Part]:
    """Each second counted once: what a function calls is taken from it."""
    weights = _add(_add(parts["open_weights"], parts["load_buffers"]), parts["open_member"])
    rest = _add(_add(parts["prepare"], parts["capture"], -1), parts["prove"], -1)
    return {"data and plan": rest, "capture": parts["capture"], "check": parts["prove"], "weights": weights}


def _steps(steps: list[Part]) -> dict[str, Part]:
    wall, worked = zip(*steps[1:])
    return {"first step": steps[0], "later step": (statistics.median(wall), statistics.median(worked))}


def _model(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=TOKENS, tie_word_embeddings=False,
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
