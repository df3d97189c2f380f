"""Train a small language model on text and let the exported HuggingFace folder write a few words.

    python examples/train_and_generate.py [STEPS]

The default of 20 steps takes seconds and is too short to write anything but spaces; give it more.
"""

from __future__ import annotations

import sys

import phalanx


def main(steps: int = 20) -> None:
    result = phalanx.train(
        "phalanx-demo", "stdlib", tiny=True, steps=steps, seq_len=64, batch_size=8, lr=2e-3, out="runs/words"
    )
    print(f"loss {result.losses[0]:.3f} → {result.loss:.3f}")
    print(generate(str(result.export), "def "))


def generate(folder: str, prompt: str) -> str:
    """Nothing but transformers from here on: the export is an ordinary folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=30, do_sample=False)
    return tokenizer.decode(written[0], skip_special_tokens=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
