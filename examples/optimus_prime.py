"""A script written for OptimusPrime, on each of the models it was tested with.

    python examples/optimus_prime.py
    .venv/bin/phalanx launch --ranks 2 examples/optimus_prime.py gpt2
    torchrun --nproc-per-node 4 examples/optimus_prime.py meta-llama/Llama-3.2-1B --tp_size 2

Models are shrunken to test size with fresh weights (`--full`: as they are); samples are random, made for the model.
"""

from __future__ import annotations

import argparse

import torch

from phalanx import tasks
from phalanx.compat.optimus_prime import Optimus_p
from phalanx.model.zoo.zoo import build, resolve

MODELS = (
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "EleutherAI/gpt-neo-2.7B", "EleutherAI/gpt-j-6b", "bert-base-cased",
    "facebook/opt-6.7b", "facebook/opt-13b", "meta-llama/Llama-2-13b-chat-hf", "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.3-70B-Instruct", "openai/whisper-small",
    "google/electra-base-generator", "google/vit-base-patch16-224-in21k",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="gpt2", choices=MODELS, metavar="MODEL")
    parser.add_argument("--full", action="store_true", help="at full size")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--mode", default="1f1b", choices=("gpipe", "1f1b"))
    for size in ("pp_size", "dp_size", "tp_size"):
        parser.add_argument(f"--{size}", type=int, default=None if size == "pp_size" else 1)
    given = parser.parse_args()
    torch.manual_seed(0)
    spec = resolve(given.model, tiny=not given.full)
    model = build(spec)
    num_mb, batch_size, tokens = 2, 4 * given.dp_size * given.tp_size, 32

    optimus_p = Optimus_p(
        model, num_mb, use_gpu=torch.cuda.is_available(), pp_size=given.pp_size, dp_size=given.dp_size,
        tp_size=given.tp_size,
    )  # fmt: skip
    optimus_p.train()
    optimus_p.optimizer = torch.optim.Adam(optimus_p.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimus_p.optimizer, 1, gamma=0.95)
    for step in range(given.steps):
        data, labels = None, None
        if optimus_p.is_first_stage():
            batch = tasks.get(spec.task).synthetic(spec.config, batch=batch_size, tokens=tokens, seed=step)
            data = {name: tensor for name, tensor in batch.items() if name != "labels"}
            labels = batch["labels"]
        labels = optimus_p.move_labels2last_stage(labels)
        optimus_p.optimizer.zero_grad()
        optimus_p.run(data, labels, mode=given.mode)
        optimus_p.clip_grad_norm_(0.5)
        optimus_p.optimizer.step()
        scheduler.step()
        if optimus_p.is_last_stage() and optimus_p.session.rank == optimus_p.session.world - 1:
            print(f"{given.model}  step {step}  loss {float(sum(optimus_p.get_loss()) / num_mb):.4f}", flush=True)


if __name__ == "__main__":
    main()
