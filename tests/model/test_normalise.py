"""What a captured graph keeps of a module's meaning, and what it refuses to guess."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.errors import CaptureError
from phalanx.model import interpret
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import cut
from phalanx.model.graph.export import export
from phalanx.tasks.base import Input
from tests import captured

ours, aten = torch.ops.phalanx, torch.ops.aten
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Applied(nn.Module):
    """A linear layer, a function of its result, and the mean of that as the loss."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias)
        self.norm = nn.BatchNorm1d(4)
        self.table = torch.arange(4.0)  # neither parameter nor buffer
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x)).mean()


def nodes(case: captured.Case) -> list:
    return [
        node for t in case.blocks.templates.values() for node in graphs.load(t.text).nodes if node.op == "call_function"
    ]


def targets(case: captured.Case) -> set:
    return {node.target for node in nodes(case)}


def in_place(self, x):
    y = x * 2
    y.mul_(3).add_(x)
    return y * y


def in_place_on_a_copy(self, x):
    y = x.clone()
    y.mul_(3)
    return x * y


def in_place_with_promotion(self, x):
    y = x.to(torch.float16)
    y += x * 1.1
    return y.double()


def in_place_logic(self, x):
    mask = x > 0
    mask &= x < 1
    return x * mask


def in_place_on_the_only_name(self, x):
    y = x.transpose(0, 1)
    y.masked_fill_(y > 0, 0.5)
    return y * y


def in_place_on_a_cast(self, x):
    y = x.float()
    y.mul_(2)
    return x * y


def in_place_dropout_of_nothing(self, x):
    return functional.dropout(x * 2, 0.0, inplace=True)


def stopped_gradient(self, x):
    return x * x.detach()


def without_gradients(self, x):
    with torch.no_grad():
        y = self.linear(x)
        with torch.enable_grad():
            y = y * 2
    return x * y


def constants(self, x):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) * torch.tensor([4.0, 3.0, 2.0, 1.0], device=x.device) * self.table


def switched_off_autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        return x @ x.T


def stock_attention(self, x):
    q = x.reshape(-1, 2, 2, 1)
    return functional.scaled_dot_product_attention(q, q * 2, q * 3, is_causal=True)


def stock_attention_aligned_at_the_first_key(self, x):
    q = x.reshape(-1, 1, 4, 1)
    return functional.scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2], is_causal=True)


def part_of_a_tensor(self, x):
    x[:, 0] += 1
    return x


def assignment(self, x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y[:, 0] = 2.0
    return y


def part_of_a_part(self, x):
    x.view(-1, 2, 2).transpose(1, 2)[:, 1, :1] *= 3
    return x


def parts_one_after_the_other(self, x):
    for place in range(1, 4):
        x[..., place] = x[..., place] + x[..., :place].clone().sum(-1)
    return x


def mask_seen_by_another_name(self, x):
    mask = x > 0
    other = mask.view(-1)
    mask &= x < 1
    return x * other.view(-1, 4)


def parts_of_a_new_tensor(self, x):
    y = x.new_empty(x.shape[0], 6)
    y[:, :4], y[:, 4:] = x, x[:, :2]
    return y


def a_part_of_a_new_tensor_twice(self, x):
    y = x.new_empty(x.shape[0], 6)
    y[:, :5], y[:, 3:] = x[:, :1], x[:, 1:]
    return y


def neighbours_by_their_numbers(self, x):
    return x[:, [1, 2]] * x[:, [-1]] + x[:, [0, 2]]


def operators_by_other_names(self, x):
    return torch.multiply(x, x).reshape_as(x) + x[:, :1].expand_as(x) + x @ self.linear.weight.T


EXACT = [
    in_place, in_place_on_a_copy, in_place_with_promotion, in_place_logic, in_place_on_the_only_name,
    in_place_on_a_cast, in_place_dropout_of_nothing, stopped_gradient, without_gradients, constants,
    switched_off_autocast, stock_attention, stock_attention_aligned_at_the_first_key, part_of_a_tensor, assignment,
    part_of_a_part, parts_one_after_the_other, mask_seen_by_another_name, parts_of_a_new_tensor,
    a_part_of_a_new_tensor_twice, neighbours_by_their_numbers, operators_by_other_names,
]  # fmt: skip


@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_loss_and_gradients_are_those_of_the_module(function) -> None:
    case = captured.own(Applied(function), x=X)
    captured.require_equal(case.interpreted(), case.plain())
    mutating = [node.target for node in nodes(case) if node.target._schema.is_mutable] if function is in_place else []
    assert not mutating


def test_the_same_is_said_with_plain_operators() -> None:
    joined, twice = (
        targets(captured.own(Applied(f), x=X)) for f in (parts_of_a_new_tensor, a_part_of_a_new_tensor_twice)
    )
    assert aten.cat.default in joined and aten.slice_scatter.default not in joined
    assert aten.slice_scatter.default in twice
    picked = [node for node in nodes(captured.own(Applied(neighbours_by_their_numbers), x=X))]
    assert [node.args[1:] for node in picked if node.target is aten.slice.Tensor] == [(1, 1, 3), (1, -1, 2**63 - 1)]
    assert sum(node.target is aten.index.Tensor for node in picked) == 1
    assert not targets(captured.own(Applied(operators_by_other_names), x=X)) & {
        aten.multiply.Tensor, aten.reshape_as.default, aten.expand_as.default, aten.numpy_T.default,
    }  # fmt: skip


def through_a_reshape(self, x):
    x.reshape(-1).mul_(3)
    return x


def test_changing_a_tensor_that_others_still_see_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="in place that others still see") as refused:
        captured.own(Applied(through_a_reshape), x=X)
    assert "test_normalise.py" in str(refused.value)
    assert "write the operation out of place" in refused.value.hint


def test_a_loop_over_a_dynamic_size_is_refused_with_its_line() -> None:
    def loop(self, x):
        for sample in range(x.shape[0]):
            x = x * sample
        return x

    with pytest.raises(CaptureError, match=r"a Python number of batch, as a loop over batch does.*in loop"):
        captured.own(Applied(loop), x=X)


class Changes(Applied):
    def __init__(self, change: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__(lambda self, x: x)
        self.change = change
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)  # the line that changes
        return super().forward(x)


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda self, x: x.mul_(2), "input 'x'"),
        (lambda self, x: self.seen.add_(1), "buffer 'seen'"),
        (lambda self, x: self.seen[0].add_(1), "buffer 'seen'"),
        (lambda self, x: torch.no_grad()(self.linear.weight.mul_)(0.9), "parameter 'linear.weight'"),
    ],
)
def test_changing_state_in_the_forward_pass_is_refused_by_its_name(change, what: str) -> None:
    with pytest.raises(CaptureError, match=f"changes {what} in place.*test_normalise.py.*the line that changes"):
        captured.own(Changes(change), x=X)


def test_batch_normalisation_is_refused_by_the_name_of_its_module() -> None:
    with pytest.raises(CaptureError, match=r"running statistics of batches \(module 'norm'") as refused:
        captured.own(Applied(lambda self, x: self.norm(x)), x=X)
    assert "GroupNorm or LayerNorm" in refused.value.hint


class Noise(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)  # the line that draws


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(4, 4), Noise(draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(self.linear(x)).mean()


RANDOM = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "exponential_": lambda x: functional.gumbel_softmax(x),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "feature_dropout": lambda x: functional.dropout1d(x[:, :, None], 0.5),
    "randperm": lambda x: x[:, torch.randperm(4)],
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operators_are_refused_naming_operator_module_and_line(name: str) -> None:
    with pytest.raises(CaptureError) as refused:
        captured.own(Noisy(RANDOM[name]), x=X)
    for part in (f"aten::{name} draws random numbers", "module 'noise'", "test_normalise.py", "the line that draws"):
        assert part in str(refused.value)
    assert "use dropout" in refused.value.hint


def line_of(function: Callable, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


def branch_on_data(self, x):
    if x.sum() > 0:
        return x
    return x * 2


def stochastic_depth(self, x):
    if torch.rand([]) < 0.5:
        return x
    return x * 2


@pytest.mark.parametrize("function", [branch_on_data, stochastic_depth], ids=lambda f: f.__name__)
def test_control_flow_that_depends_on_data_is_refused_with_file_and_line(function) -> None:
    with pytest.raises(CaptureError, match="cannot be read as a graph") as refused:
        captured.own(Applied(function), x=X)
    assert "a branch or a size in it depends on the values of a tensor" in refused.value.message
    assert f"test_normalise.py, line {line_of(function, 'if ')}, in {function.__name__}" in str(refused.value)
    assert "no branches on data" in refused.value.hint


def wrong_shape(self, x):
    return x @ torch.ones(7, 2)


def test_an_error_of_another_kind_is_not_blamed_on_tensor_values() -> None:
    with pytest.raises(CaptureError, match="cannot be read as a graph") as refused:
        captured.own(Applied(wrong_shape), x=X)
    assert f"test_normalise.py, line {line_of(wrong_shape, 'return')}, in wrong_shape" in str(refused.value)
    assert "tensor values" not in refused.value.hint and "call the module with a batch" in refused.value.hint


def test_values_read_by_python_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"reads a tensor's value as a Python number.*test_normalise.py"):
        captured.own(Applied(lambda self, x: x * x.sum().item()), x=X)


def test_sizes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"a size depends on the data \(module .*test_normalise.py") as refused:
        captured.own(Applied(lambda self, x: x[x > 0]), x=X)
    assert "multiply by a mask" in refused.value.hint


def test_autocast_inside_a_module_is_refused() -> None:
    def mixed(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.T

    with pytest.raises(CaptureError, match="switches autocast on by itself"):
        captured.own(Applied(mixed), x=X)


@pytest.mark.parametrize("function", [lambda self, x: x.reshape(5, 2, 2), lambda self, x: x + torch.ones(5, 1)])
def test_a_module_made_for_one_batch_size_is_refused_naming_the_dim(function) -> None:
    with pytest.raises(CaptureError, match=r"only works for batch = 5 \(input 'x'\)") as refused:
        captured.own(Applied(function), x=X)
    assert "fixes the batch dimension" in refused.value.hint


def test_plain_attention_calls_become_our_operator() -> None:
    case = captured.own(Applied(stock_attention), x=X)
    assert ours.attention.default in targets(case)
    assert aten.scaled_dot_product_attention.default not in targets(case)


class MaskedAttention(nn.Module):
    """Attention with a boolean mask, as nn.TransformerEncoderLayer calls it."""

    def __init__(self, dropout: float, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        return self.layer(x, src_mask=torch.ones(6, 6, dtype=torch.bool).triu(1)).square().mean()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_with_a_mask_of_its_own_is_exact(dropout: float) -> None:
    case = captured.own(MaskedAttention(dropout), x=torch.randn(5, 6, 8))
    assert (ours.attention.default in targets(case)) == bool(dropout)
    keyed = [node for node in nodes(case) if node.target in (ours.attention.default, ours.dropout.default)]
    assert len(keyed) == (4 if dropout else 0)
    session = case.session()
    whole, split = case.step(session, (5,)), case.step(session, (2, 3))
    captured.require_equal(split, whole)
    if not dropout:
        captured.require_equal(whole, case.plain())


def test_dropout_whose_rows_are_not_samples_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"whose first dim is not the batch \(module 'layer") as refused:
        captured.own(MaskedAttention(0.3, batch_first=False), x=torch.randn(5, 6, 8))
    assert "batch_first=True" in refused.value.hint
    with pytest.raises(CaptureError, match="whose first dim is not the batch"):
        captured.own(Applied(lambda self, x: x @ functional.dropout(self.linear.weight, 0.5)), x=X)


def test_attention_dropout_that_cannot_be_keyed_is_refused() -> None:
    def flat_heads(self, x):
        q = x.reshape(-1, 2, 2)
        return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)

    with pytest.raises(CaptureError, match="this form of attention has dropout"):
        captured.own(Applied(flat_heads), x=X)


def test_each_call_of_a_dropout_module_is_a_site_of_its_own() -> None:
    class DropsTwice(Applied):
        def __init__(self) -> None:
            super().__init__(lambda self, x: self.drop(self.drop(x) + 1))
            self.drop = nn.Dropout(0.5)

    [block] = captured.own(DropsTwice(), x=X).blocks.blocks
    assert block.names("dropout") == ("drop#0", "drop#1")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_casts_to_float32_are_widened_in_float64_only(dtype: torch.dtype) -> None:
    class Casts(Applied):
        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x).half().float()
            return (h * torch.ones(4, dtype=torch.float32)).mean()

    model = Casts(in_place).to("meta", dtype)
    blocks = cut(export(model, (Input("x", "float", ("batch", 4)),), dtype), [])
    [template] = blocks.templates.values()
    casts = [node.args[1] for node in graphs.load(template.text).nodes if node.target is aten.to.dtype]
    assert casts == [torch.float16, torch.float64 if dtype == torch.float64 else torch.float32]
    parameters = {f"linear.{n}": torch.randn(s, dtype=dtype) for n, s in (("weight", (4, 4)), ("bias", (4,)))}
    total, count = interpret.sum_and_count(blocks, parameters, {}, {"x": X.to(dtype)}, {"batch": 5}, {})
    loss = total / count
    assert loss.dtype == dtype
