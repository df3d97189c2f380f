"""`phalanx.hf.Trainer` beside transformers' Trainer: one script, one changed import; losses and seconds per step.

    python benchmarks/hf_trainer.py [--model meta-llama/Llama-3.2-1B] [--tiny] [--cpu] [--steps 30] [--out FILE]

Each runs in a process of its own, in turns, with `torch_compile=True` on GPUs and the same data, seed, batch and
precision. A step's seconds are the median over the steps after the first ten. transformers' Trainer needs accelerate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
HEADERS = ["trainer", "step", "from – to", "last loss"]
SIDES = ("transformers", "phalanx")


def parser() -> argparse.ArgumentParser:
    given = report.options(__doc__ or "")
    given.add_argument("--model", default="meta-llama/Llama-3.2-1B", help="a zoo name; weights are random")
    given.add_argument("--tiny", action="store_true", help="at test size")
    given.add_argument("--cpu", action="store_true", help="on the processor, in float32, not compiled")
    given.add_argument("--steps", type=int, default=30)
    given.add_argument("--batch-size", type=int, default=8)
    given.add_argument("--tokens", type=int, default=1024)
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return given


def trained(chosen: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One side, in this process: its losses and the seconds of its steps."""
    import torch
    from transformers import TrainerCallback

    from phalanx.model.zoo.zoo import build, resolve

    if chosen.side == "phalanx":
        from phalanx.hf import Trainer, TrainingArguments
    else:
        from transformers import Trainer, TrainingArguments

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times = list[float]()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    torch.manual_seed(0)
    model: Any = build(resolve(chosen.model, tiny=chosen.tiny), attention="sdpa")
    size = model.config.get_text_config().vocab_size
    rows = torch.randint(0, size, (chosen.batch_size * chosen.steps, chosen.tokens))
    options: dict[str, Any] = {"use_cpu": True} if chosen.cpu else {"bf16": True, "torch_compile": True}
    clock, args = Clock(), TrainingArguments(
        folder, max_steps=chosen.steps, per_device_train_batch_size=chosen.batch_size, learning_rate=1e-4,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[clock])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {"losses": losses, "seconds": seconds}


def measured(side: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--side", side]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def page() -> str:
    data = json.loads((RESULTS / "hf_trainer.json").read_text())
    machine, setting, results = data["machine"], data["setting"], data["results"]
    where = machine["gpus"][0] if machine["gpus"] else f"{machine['cores']} cores"
    return "\n".join([
        "# `phalanx.hf.Trainer` beside transformers' Trainer", "",
        f"`python benchmarks/hf_trainer.py` on one {where} (torch {machine['torch']}, transformers "
        f"{machine['transformers']}), {machine['date']}. Data: [hf_trainer.json](hf_trainer.json). {setting['model']}, "
        f"{setting['batch_size']} × {setting['tokens']} tokens a step, bfloat16 over float32 weights, "
        "`torch_compile=True` for both, one changed import; the median of the steps after the first ten, "
        f"{setting['rounds']} round{'s' if setting['rounds'] > 1 else ''} of each.", "",
        report.markdown(HEADERS, rows(results)), "", f"**{verdict(results)}.**", "",
    ])  # fmt: skip


def rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    steps = [each["step_seconds"] for each in results]
    return [
        [each["side"], f"{own['median'] * 1e3:.0f} ms", f"{own['low'] * 1e3:.0f}–{own['high'] * 1e3:.0f} ms",
         f"{each['losses'][-1]:.4f}"] for each, own in zip(results, steps, strict=True)
    ]  # fmt: skip


def verdict(results: Sequence[dict[str, Any]]) -> str:
    apart = max(abs(a - b) for a, b in zip(results[0]["losses"], results[1]["losses"], strict=True))
    ratio = results[0]["step_seconds"]["median"] / results[1]["step_seconds"]["median"]
    return f"{ratio:.2f}× transformers' speed; losses at most {apart:.2g} apart"


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    if chosen.side:
        with tempfile.TemporaryDirectory(prefix="phalanx-hf-") as folder:
            print(json.dumps(trained(chosen, folder)))
        return
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(chosen.rounds):
        for side in SIDES:
            found[side].append(measured(side, arguments))
    warm = min(10, chosen.steps // 2)
    results: list[dict[str, Any]] = []
    for side in SIDES:
        seconds = [second for own in found[side] for second in own["seconds"][warm:]]
        results.append({"side": side, "losses": found[side][0]["losses"], "step_seconds": report.summary(seconds)})
    print(report.table(HEADERS, rows(results)))
    print(verdict(results))
    setting = {
        name: getattr(chosen, name) for name in ("model", "tiny", "cpu", "steps", "batch_size", "tokens", "rounds")
    }
    report.publish(chosen, "hf_trainer", setting, results, [])


if __name__ == "__main__":
    main(sys.argv[1:])
