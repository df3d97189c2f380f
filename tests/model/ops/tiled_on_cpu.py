"""Run as a script where Triton interprets its kernels: each case of attention in tiles beside the chunked kernel.

Its argument is `CASES` or `MORE_CASES`. Prints, per case, how far the output, the log-sum-exp and each gradient are
apart at most.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.model.ops.kernels import Attention, Chunked


@dataclass(frozen=True)
class Case:
    """Attention of two samples. segments: of which tokens there are some. bias: its shape. strided: in views of larger
    tensors, as slices and joint projections have them."""

    causal: bool = True
    heads: int = 2
    kv_heads: int = 1
    queries: int = 37
    keys: int = 37
    dim: int = 16
    value_dim: int = 16
    window: int = 0
    softcap: float = 0.0
    dropout: float = 0.0
    first_head: int = 0
    first_query: int | None = None
    segments: str = ""
    bias: tuple[int, int, int, int] | None = None
    strided: bool = False


CASES = (  # whatever the kernel can be asked for is in one of them
    Case(causal=False, window=5),
    Case(dropout=0.7, first_query=11, first_head=3),
    Case(segments="keys", causal=False),
    Case(bias=(2, 2, 1, 37)),
    Case(bias=(1, 1, 1, 37), segments="both", window=9, softcap=3.0, dropout=0.2),
    Case(queries=20, keys=75, window=13, segments="both", dropout=0.1, first_query=55, strided=True),
    Case(queries=20, keys=75, bias=(1, 2, 20, 75), strided=True),
    Case(queries=70, keys=33, causal=False),
    Case(dim=24, value_dim=40),
    Case(heads=3, kv_heads=3, queries=1, keys=1),
    Case(heads=4, kv_heads=2, dim=8, value_dim=8),
)
MORE_CASES = (  # one thing at a time
    Case(),
    Case(causal=False),
    Case(window=5),
    Case(softcap=2.0),
    Case(dropout=0.3),
    Case(segments="both"),
    Case(bias=(1, 2, 37, 37)),
    Case(bias=(2, 1, 37, 37), causal=False),
    Case(queries=20, keys=75, strided=True),
    Case(dim=80, value_dim=80),
)


def tensors(case: Case) -> tuple[list[Tensor], Attention]:
    """q, k, v and the output's gradient; and what is asked."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        if not case.strided:
            return torch.randn(shape, generator=generator)
        wide = torch.randn(*shape[:2], shape[2] + 3, 2 * shape[3] + 1, generator=generator)
        return wide[:, :, 2:-1, 1 : 2 * shape[3] : 2] if shape[3] % 16 else wide[:, :, 2:-1, : shape[3]]

    shapes = (
        (2, case.heads, case.queries, case.dim), (2, case.kv_heads, case.keys, case.dim),
        (2, case.kv_heads, case.keys, case.value_dim), (2, case.heads, case.queries, case.value_dim),
    )  # fmt: skip
    ids = torch.sort(torch.randint(0, 4, (2, case.keys + 5), generator=generator), dim=1).values.flip(1)[:, 3:-2]
    spec = Attention(
        ids[:, case.keys - case.queries :] if case.segments == "both" else None, ids if case.segments else None,
        random(*case.bias) if case.bias else None, torch.tensor([7, 1 << 31]) if case.dropout else None, case.causal,
        case.dim**-0.5, case.window, case.softcap, case.dropout, case.first_head,
        None if case.first_query is None else torch.tensor(case.first_query),
    )  # fmt: skip
    return [random(*shape) for shape in shapes], spec


def apart(case: Case) -> list[float]:
    from phalanx.model.ops.tiled import Tiled

    (q, k, v, d_out), spec = tensors(case)
    out, lse = Chunked().forward(q, k, v, spec)
    expected = [out, lse, *Chunked().backward(d_out, q, k, v, out, lse, spec)]
    found = [*Tiled().forward(q, k, v, spec), *Tiled().backward(d_out, q, k, v, out, lse, spec)]
    return [_apart(a, b) for a, b in zip(found, expected, strict=True) if not (a is None and b is None)]


def _apart(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.isinf(), expected.isinf())
    return float(torch.where(expected.isinf(), 0.0, found - expected).abs().max())


if __name__ == "__main__":
    for case in globals()[sys.argv[1]]:
        print(json.dumps(apart(case)), flush=True)
