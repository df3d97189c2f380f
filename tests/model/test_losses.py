"""A mean becomes (sum, count): any split of the batch adds up to the loss of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.errors import CaptureError
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import cut
from phalanx.model.graph.export import export
from phalanx.tasks.base import Input
from tests import captured

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(7, 6, generator=GENERATOR)
CLASSES = torch.tensor([0, 3, -100, 1, 2, -100, 3])
VALUES = torch.rand(7, 4, generator=GENERATOR)


class Model(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(6, 4), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.linear(x), labels)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "cross entropy": (functional.cross_entropy, CLASSES),
    "cross entropy with smoothing": (lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.2), CLASSES),
    "cross entropy ignoring class 3": (lambda x, y: functional.cross_entropy(x, y.abs() % 4, ignore_index=3), CLASSES),
    "cross entropy of widened logits": (lambda x, y: functional.cross_entropy(x.float(), y), CLASSES),
    "cast loss": (lambda x, y: functional.cross_entropy(x, y).to(torch.float64), CLASSES),
    "mse": (functional.mse_loss, VALUES),
    "mse of an expanded target": (lambda x, y: functional.mse_loss(x, y[:, :1].expand_as(x)), VALUES),
    "l1": (functional.l1_loss, VALUES),
    "smooth l1": (lambda x, y: functional.smooth_l1_loss(x, y, beta=0.3), VALUES),
    "huber": (lambda x, y: functional.huber_loss(x, y, delta=0.3), VALUES),
    "binary cross entropy": (functional.binary_cross_entropy_with_logits, VALUES),
    "weighted binary cross entropy": (
        lambda x, y: functional.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        VALUES,
    ),
    "mean of means": (lambda x, y: (x * y).square().mean(0).mean(), VALUES),
    "two losses": (lambda x, y: x.abs().mean() + 0.5 * (x - y).square().mean(1).mean(), VALUES),
    "class weights": (
        lambda x, y: functional.cross_entropy(x, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)),
        CLASSES,
    ),
    "class probabilities": (lambda x, y: functional.cross_entropy(x, y.softmax(-1)), VALUES),
    "mean": (lambda x, y: (x * y).square().mean(), VALUES),
    "mean of a dict": (lambda x, y: {"logits": x, "loss": x.square().mean()}, VALUES),
    "mean of a tuple": (lambda x, y: (x.square().mean(), x), VALUES),
}


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_of_uneven_sizes_add_up_exactly(name: str) -> None:
    loss, labels = LOSSES[name]
    case = captured.own(Model(loss), x=X, labels=labels)
    captured.require_equal(case.step(case.session(), [1, 4, 2]), case.plain())


def test_the_count_leaves_ignored_labels_out() -> None:
    case = captured.own(Model(functional.cross_entropy), x=X, labels=CLASSES)
    assert [int(case.count(samples)) for samples in (slice(3), slice(3, 7))] == [2, 3]


def test_the_count_of_a_mean_is_a_whole_number_of_elements() -> None:
    case = captured.own(Model(functional.mse_loss), x=X, labels=VALUES)
    count = case.count(slice(7))
    assert (count.dtype, count.item()) == (torch.int64, 28)


@pytest.mark.parametrize(
    "cast, logits_before", [(torch.float32, torch.ops.aten.linear.default), (torch.bfloat16, torch.ops.aten.to.dtype)]
)
def test_widened_logits_are_not_stored_twice_but_narrowed_ones_stay_narrow(cast, logits_before) -> None:
    dtype = torch.bfloat16 if cast == torch.float32 else torch.float32
    model = Model(lambda x, y: functional.cross_entropy(x.to(cast), y)).to("meta", dtype)
    inputs = (Input("x", "float", ("batch", 6)), Input("labels", "int64", ("batch",)))
    [template] = cut(export(model, inputs, dtype), []).templates.values()
    [loss] = [n for n in graphs.load(template.text).nodes if n.target is torch.ops.phalanx.cross_entropy_sum.default]
    assert loss.args[0].target is logits_before


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "logits": (lambda x, y: x, r"returned a tensor of shape \[.*, 4\]"),
    "nothing": (lambda x, y: None, "returned no loss"),
    "dict without loss": (lambda x, y: {"logits": x}, "returned no loss"),
    "loss of the labels": (lambda x, y: y.mean(), "depends on no parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name: str) -> None:
    loss, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as refused:
        captured.own(Model(loss), x=X, labels=VALUES)
    assert refused.value.hint
