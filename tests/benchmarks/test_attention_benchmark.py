"""The attention benchmark: what it says where there is no GPU, and how its page shows results."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import attention
import report


def test_rows_and_page_show_ratios_and_what_torch_cannot_do(tmp_path: Path) -> None:
    seconds = {name: report.summary([value]) for name, value in (("tiles", 0.002), ("chunks", 0.02))}
    capped = {"case": asdict(attention.CASES[3]), "seconds": seconds, "bytes": {"tiles": 2**29, "chunks": 2**31}}
    cells = [
        "Gemma 2, soft cap",
        "1 × 4096 tokens, 8 heads (4 of keys) of 256",
        "2.00 (2.00–2.00)",
        "20.00 (20.00–20.00)",
    ]
    assert attention.row(capped) == [*cells, "–", "10.00×", "–", "0.50, 2.00, –"]
    report.write(tmp_path / "attention.json", "attention", {"rounds": 1}, [capped])
    text = (tmp_path / "attention.json").read_text().replace('"gpus": []', '"gpus": ["a GPU"]')
    (tmp_path / "attention.json").write_text(text)
    assert " | ".join(cells) in attention.page(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["attention.py"])
    with pytest.raises(SystemExit, match="attention needs a CUDA device, and none can be used"):
        attention.main()
