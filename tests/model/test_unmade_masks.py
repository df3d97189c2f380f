"""Masks that nothing but our attention reads are not made while a model is read; whoever else reads one gets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, masking_utils

from phalanx.model.capture import capture
from phalanx.model.graph import export, hooks
from phalanx.model.zoo import zoo
from phalanx.tasks.custom import infer_inputs
from tests import captured


class ReadsItsMask(nn.Module):
    """Attends by itself, with the mask that transformers makes."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11, attn_implementation="eager")
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        mask = masking_utils.create_causal_mask(self.config, x, None, None)
        assert mask is not None
        seen = (x @ x.mT + mask[:, 0]).softmax(-1) @ x
        return nn.functional.cross_entropy(self.head(seen).flatten(0, 1), labels.flatten())


@pytest.fixture
def num_exports(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    original = export._exported

    def counted(*given: Any) -> Any:
        found.append(original(*given))
        return found[-1]

    monkeypatch.setattr(export, "_exported", counted)
    return found


def test_a_model_that_attends_with_our_operator_is_read_once_without_masks(num_exports: list[Any]) -> None:
    spec = zoo.resolve(captured.GPT2, tiny=True)
    inputs = infer_inputs({"input_ids": torch.zeros(3, 9, dtype=torch.int64), "labels": torch.zeros(3, 9).long()})
    capture(spec, inputs, dtype=torch.float64, check=False, use_cache=False)
    assert len(num_exports) == 1
    sizes = [node.meta["val"].shape for node in num_exports[0].graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert not any(len(size) > 1 and isinstance(size[-1], torch.SymInt) and size[-1] == size[-2] for size in sizes)


def test_a_model_that_reads_its_mask_is_read_again_with_it(num_exports: list[Any]) -> None:
    model = ReadsItsMask().double()
    model.config._attn_implementation = hooks.NAME
    ids = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    inputs = infer_inputs({"input_ids": ids, "labels": ids})
    found = export.export(model, inputs, torch.float64)
    assert len(num_exports) == 2 and hooks.uses_unmade_mask(num_exports[0].graph)
    assert found is num_exports[1] and not hooks.uses_unmade_mask(found.graph)
