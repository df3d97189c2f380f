"""A zoo of modules as users write them: each is exact (whole and in micro-batches), exact as long as the batch stays
whole, or refused with the true reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.errors import CaptureError, ModelError, PlanError
from phalanx.model import selfcheck, separable
from phalanx.model.zoo import zoo
from phalanx.tasks.custom import Custom
from tests import captured

GENERATOR = torch.Generator().manual_seed(0)
WIDTH, CLASSES, TOKENS, SAMPLES = 6, 4, 5, 8
X = torch.randn(SAMPLES, WIDTH, generator=GENERATOR, dtype=torch.float64)
Y = torch.rand(SAMPLES, CLASSES, generator=GENERATOR, dtype=torch.float64)
IDS = torch.randint(0, 9, (SAMPLES, TOKENS), generator=GENERATOR)
MASK = (torch.arange(TOKENS) < torch.tensor([5, 5, 5, 5, 5, 2, 3, 1])[:, None]).long()
LABELS = torch.where(MASK == 1, IDS, -100)

Loss = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A regression whose loss is any function of its output."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), loss
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 3.0]))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self, torch.tanh(self.first(x)), y)


class Text(nn.Module):
    """A language model whose loss is any function of its logits, labels and mask."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(9, WIDTH, **options), nn.Linear(WIDTH, 9), loss

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.embed(ids))), labels, mask)


def net(loss: Loss) -> Callable[[], nn.Module]:
    return lambda: Net(loss)


def regression(h: Callable[[Net, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """The hidden values go through a function."""
    return net(lambda m, x, y: functional.mse_loss(m.second(h(m, x)), y))


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


class Reversed(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -gradient


class Square(Straight):
    """Its backward is the ordinary derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * ctx.saved_tensors[0] * gradient


def hooked(register: Callable[[Net], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = regression(lambda m, x: x)()
        register(module)  # pyright: ignore[reportArgumentType]
        return module

    return make


def hooked_inside(m: Net, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: 2 * gradient)
    return x


class Counting(Net):
    """Its forward depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__(lambda m, x, y: functional.mse_loss(m.second(x) / m.calls, y))  # pyright: ignore
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.calls += 1
        return super().forward(x, y)


class Remembering(Net):
    """Compares with what it computed last."""

    def __init__(self) -> None:
        super().__init__(lambda m, x, y: functional.mse_loss(m.second(x), y))
        self.bank: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Any:
        last = self.bank[-1] if self.bank else torch.zeros(())
        self.bank.append(x.detach().mean())
        return super().forward(x, y) + last * self.first.weight.square().mean()


def reassigned(m: Net, x: Tensor) -> Tensor:
    m.weights = 0.9 * m.weights + 0.1 * x.detach().mean()
    return x * m.weights.sum()


def changed_data(m: Net, x: Tensor) -> Tensor:
    m.second.weight.data = m.second.weight.data.clamp(-0.1, 0.1)
    return x


def frozen_inside(m: Net, x: Tensor) -> Tensor:
    m.second.weight.requires_grad_(False)
    return x


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.rnn, self.head = kind(WIDTH, WIDTH, batch_first=True, **options), nn.Linear(WIDTH, 9)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(ids[:, :2]))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels[:, :2].flatten())


class Normalised(Net):
    """With a layer of its own between."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(lambda m, x, y: functional.mse_loss(m.second(m.norm(x)), y))  # pyright: ignore
        self.norm = norm


class InstanceNormalised(Normalised):
    def __init__(self, **options: Any) -> None:
        super().__init__(nn.InstanceNorm1d(WIDTH // 2, **options))
        self.loss = lambda m, x, y: functional.mse_loss(m.second(m.norm(x.view(-1, WIDTH // 2, 2)).flatten(1)), y)


class PartlyInEval(Normalised):
    """A batch norm with frozen statistics, and dropout that is off."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)))
        self.norm.eval()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, CLASSES, dtype=torch.complex64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss((x.to(self.weight.dtype) @ self.weight).abs(), y)


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__(lambda m, x, y: functional.mse_loss(m.second(x), y))
        self.second = parametrizations.spectral_norm(self.second)


class Weighted(Net):
    def __init__(self) -> None:
        super().__init__(lambda m, x, y: functional.mse_loss(m.second(x), y))
        self.second = parametrizations.weight_norm(self.second)


class Uncertain(Net):
    """Learns how much each of its losses weighs."""

    def __init__(self) -> None:
        super().__init__(self.combined)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def combined(self, m: Net, x: Tensor, y: Tensor) -> Tensor:
        out = m.second(x)
        return torch.exp(-self.scale) * functional.mse_loss(out, y) + functional.l1_loss(out, y) + self.scale


def penalised(m: Net, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on the gradient with respect to hidden values."""
    out = m.second(x).square().sum()
    [gradient] = torch.autograd.grad(out, x, create_graph=True)
    return functional.mse_loss(m.second(x), y) + gradient.square().mean()


def written_slice(m: Net, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2] = 0.5 * x[:, 2:4]
    y[:, 4:] += 1
    return y


def into_out(m: Net, x: Tensor) -> Tensor:
    result = torch.empty_like(x).detach()
    torch.mul(x.detach(), 2.0, out=result)
    return x + result


@dataclass
class Returned:
    logits: Tensor
    loss: Tensor


class Named(NamedTuple):
    logits: Tensor
    loss: Tensor


class Attending(nn.Module):
    """torch's own encoder, with a mask that it would look at."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=dropout, batch_first=True)
        self.embed, self.encoder = nn.Embedding(9, WIDTH), nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]).to(self.embed.weight.dtype)
        return self.encoder(self.embed(ids), mask=causal).square().mean()


class Frozen(Net):
    """A part that is not trained, before and behind parts that are."""

    def __init__(self) -> None:
        super().__init__(lambda m, x, y: functional.mse_loss(m.second(m.fixed(x)), y))  # pyright: ignore
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(2, 2)


class Towers(nn.Module):
    """Containers in containers, and weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.ModuleList([Layer(), Layer()]) for name in ("left", "right")})
        self.mix = nn.ParameterDict({name: nn.Parameter(torch.tensor(0.5)) for name in ("left", "right")})
        self.head = nn.ParameterList([nn.Parameter(torch.ones(WIDTH, CLASSES))])

    def forward(self, **batch: Tensor) -> Tensor:
        found = torch.zeros(())
        for name, layers in self.towers.items():
            hidden = batch["x"]
            for layer in layers:  # pyright: ignore
                hidden = layer(hidden)
            found = found + self.mix[name] * hidden
        return functional.huber_loss(found @ self.head[0], batch["y"], delta=0.3)


class Optional(Net):
    def __init__(self) -> None:
        super().__init__(lambda m, x, y: functional.mse_loss(m.second(x), y))

    def forward(self, x: Tensor, y: Tensor | None = None, scale: Tensor | None = None) -> Any:
        assert y is not None and scale is None
        return super().forward(x, y)


class Recorded(Net):
    """Keeps what nothing computes with."""

    def __init__(self) -> None:
        super().__init__(lambda m, x, y: functional.mse_loss(m.second(x), y))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = super().forward(x, y)
        self.seen.append(loss.detach())
        return loss


def chosen_rows(m: Net, x: Tensor, y: Tensor) -> Tensor:
    out = m.second(x)
    return (out[y > 0.5] - y[y > 0.5]).abs().mean()


def in_place(m: Net, x: Tensor) -> Tensor:
    x = x.clone()
    x.mul_(2).add_(1).clamp_(-3, 3)
    return x


def returned(kind: Callable[..., Any]) -> Callable[[], nn.Module]:
    def loss(m: Net, x: Tensor, y: Tensor) -> Any:
        return kind(logits=(out := m.second(x)), loss=functional.mse_loss(out, y))

    return net(loss)


@dataclass(frozen=True)
class Case:
    """make: the module. whole: why the batch may not be cut. refused: why it is not trained at all."""

    make: Callable[[], nn.Module]
    whole: str = ""
    refused: str = ""


def mean_of_quotients(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = per_token(logits, labels)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


EACH_OTHER = "depend on each other"
NO_BACKWARD = "the gradient of .* is off by .*\n.*autograd.Function with a backward of its own"
CASES: dict[str, Case] = {
    # Losses.
    "sum of means": Case(net(lambda m, x, y: functional.mse_loss(m.second(x), y) + x.square().mean())),
    "difference of means": Case(net(lambda m, x, y: functional.mse_loss(m.second(x), y) - 0.1 * x.abs().mean())),
    "scaled mean": Case(net(lambda m, x, y: 0.25 * functional.mse_loss(m.second(x), y) / 3)),
    "weight from a buffer": Case(net(lambda m, x, y: functional.mse_loss(m.second(x), y) * m.weights[1])),
    "learned weights": Case(Uncertain),
    "regularised": Case(
        net(lambda m, x, y: functional.mse_loss(m.second(x), y) + 0.1 * m.first.weight.square().sum())
    ),
    "distillation": Case(
        lambda: Text(
            lambda x, y, m: (
                functional.cross_entropy(x[:, -1], m[:, 0])
                + 2.0 * functional.kl_div(x[:, 0].log_softmax(-1), x[:, 1].detach().softmax(-1), reduction="batchmean")
            )
        ),
    ),
    "distillation with ignored labels": Case(
        lambda: Text(
            lambda x, y, m: (
                functional.cross_entropy(x.flatten(0, 1), y.flatten()) + 0.1 * (x[:, 0] - x[:, 1].detach()).abs().mean()
            )
        ),
        whole="some of 'labels' are -100, and so ignored",
    ),
    "means of computed labels": Case(
        net(lambda m, x, y: functional.cross_entropy(m.second(x), y.argmax(-1)) + x.abs().mean()),
        whole="nothing is known about their number",
    ),
    "sum over the batch size": Case(net(lambda m, x, y: (m.second(x) - y).square().sum() / x.shape[0])),
    "kl_div batchmean": Case(
        net(lambda m, x, y: functional.kl_div(m.second(x).log_softmax(-1), y.softmax(-1), reduction="batchmean"))
    ),
    "nll_loss": Case(net(lambda m, x, y: functional.nll_loss(m.second(x).log_softmax(-1), y.argmax(-1)))),
    "weighted nll_loss": Case(
        net(lambda m, x, y: functional.nll_loss(m.second(x).log_softmax(-1), y.argmax(-1), weight=m.weights))
    ),
    "class weights": Case(net(lambda m, x, y: functional.cross_entropy(m.second(x), y.argmax(-1), weight=m.weights))),
    "class probabilities": Case(net(lambda m, x, y: functional.cross_entropy(m.second(x), y.softmax(-1)))),
    "mean of means": Case(net(lambda m, x, y: (m.second(x) - y).square().mean(0).mean())),
    "cosine embedding": Case(
        net(lambda m, x, y: functional.cosine_embedding_loss(m.second(x), y, torch.ones(x.shape[0])))
    ),
    "loss of shape [1]": Case(net(lambda m, x, y: functional.mse_loss(m.second(x), y).reshape(1))),
    "classes in the middle": Case(lambda: Text(lambda x, y, m: functional.cross_entropy(x.transpose(1, 2), y))),
    "masked mean of tokens": Case(lambda: Text(lambda x, y, m: (per_token(x, y) * m).sum() / m.sum().clamp(min=1))),
    "token means inside a sample mean": Case(lambda: Text(mean_of_quotients)),
    "token mean of the batch inside a sample mean": Case(
        lambda: Text(lambda x, y, m: ((per_token(x, y) * m).sum(1) / m.sum() * m.shape[0]).mean()), whole=EACH_OTHER
    ),
    "sum": Case(net(lambda m, x, y: (m.second(x) - y).square().sum()), whole="is a sum over samples, not a mean"),
    "logarithm of a mean": Case(net(lambda m, x, y: functional.mse_loss(m.second(x), y).log()), whole=EACH_OTHER),
    "contrastive": Case(
        net(lambda m, x, y: functional.cross_entropy(m.second(x) @ m.second(x).t(), torch.arange(x.shape[0]))),
        whole=EACH_OTHER,
    ),
    "no gradient": Case(
        net(lambda m, x, y: functional.mse_loss(m.second(x), y).detach()), refused="has no gradient"
    ),
    "several numbers": Case(net(lambda m, x, y: m.second(x)), refused="returned a tensor of shape"),
    "focal": Case(net(lambda m, x, y: (lambda p: (-((1 - p.exp()) ** 2) * p).mean())(m.second(x).log_softmax(-1)))),
    "label smoothing": Case(
        net(lambda m, x, y: functional.cross_entropy(m.second(x), y.argmax(-1), label_smoothing=0.1))
    ),
    "positive weights": Case(
        net(lambda m, x, y: functional.binary_cross_entropy_with_logits(m.second(x), y, pos_weight=m.weights))
    ),
    "dice": Case(
        net(lambda m, x, y: (lambda p: 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1))(m.second(x).sigmoid())),
        whole=EACH_OTHER,
    ),
    "triplets within a sample": Case(net(lambda m, x, y: functional.triplet_margin_loss(x, x.roll(1, -1), x.flip(-1)))),
    "triplets of samples": Case(
        net(lambda m, x, y: functional.triplet_margin_loss(x, x.roll(1, 0), x.roll(2, 0))), whole=EACH_OTHER
    ),
    "largest error": Case(net(lambda m, x, y: (m.second(x) - y).abs().max()), whole=EACH_OTHER),
    "chosen elements": Case(net(chosen_rows), refused=r"a size depends on the data \(.*test_own_modules.py"),
    "variances that are looked at": Case(
        net(lambda m, x, y: functional.gaussian_nll_loss(m.second(x), y, functional.softplus(m.second(x)))),
        refused="a branch or a size in it depends on the values of a tensor",
    ),
    # What is returned, and what is given.
    "dataclass": Case(returned(Returned)),
    "named tuple": Case(returned(Named)),
    "dict": Case(returned(dict)),
    "tuple": Case(net(lambda m, x, y: (functional.mse_loss(m.second(x), y), x))),
    "empty tuple": Case(net(lambda m, x, y: ()), refused="returned no loss"),
    "an object without a loss": Case(net(lambda m, x, y: m.training), refused="returned bool, in which nothing is"),
    "optional inputs": Case(Optional),
    "inputs by keyword, and containers in containers": Case(Towers),
    # Gradients that a graph of the forward does not hold.
    "straight-through": Case(regression(lambda m, x: Straight.apply(4 * x)), refused=NO_BACKWARD),
    "gradient reversal": Case(regression(lambda m, x: Reversed.apply(x)), refused=NO_BACKWARD),
    "a function with its ordinary derivative": Case(regression(lambda m, x: Square.apply(x))),
    "straight-through by detach": Case(regression(lambda m, x: x + ((4 * x).round() - x).detach())),
    "tensor hook": Case(regression(hooked_inside), refused="such as a hook on a tensor"),
    "parameter hook": Case(
        hooked(lambda m: m.first.weight.register_hook(lambda g: 2 * g)),
        refused="parameter 'first.weight' .* has a hook on its gradient",
    ),
    "post-accumulate hook": Case(
        hooked(lambda m: m.second.bias.register_post_accumulate_grad_hook(lambda p: None)),
        refused="parameter 'second.bias' .* has a hook on its gradient",
    ),
    "full backward hook": Case(
        hooked(lambda m: m.second.register_full_backward_hook(lambda *_: None)),
        refused=r"module 'second' \(Linear\) .* has a backward hook",
    ),
    "forward hook": Case(hooked(lambda m: m.first.register_forward_hook(lambda mod, args, out: 2 * out))),
    # State.
    "reassigned buffer": Case(regression(reassigned), refused="changes buffer 'weights'"),
    "changed .data": Case(regression(changed_data), refused=r"puts in \.data"),
    "requires_grad_ inside": Case(regression(frozen_inside), refused="parameter 'second.weight'"),
    "a record of losses": Case(Recorded),
    "parts that are not trained": Case(Frozen),
    "counter": Case(Counting, refused="keeps state between calls .*'calls'"),
    "memory bank": Case(Remembering, refused="keeps state between calls .*'bank'"),
    "branch on the batch size": Case(
        regression(lambda m, x: 2 * x if x.shape[0] > 6 else x), refused="another branch for this number of samples"
    ),
    "branch that batches do not take": Case(regression(lambda m, x: 2 * x if x.shape[0] > 100 else x)),
    "scale_grad_by_freq": Case(
        lambda: Text(lambda x, y, m: functional.cross_entropy(x.flatten(0, 1), y.flatten()), scale_grad_by_freq=True),
        whole="another gradient of 'embed.weight'",
    ),
    # Layers.
    "parts in eval mode": Case(PartlyInEval),
    "batch norm": Case(lambda: Normalised(nn.BatchNorm1d(WIDTH)), refused="running statistics"),
    "batch norm without statistics": Case(
        lambda: Normalised(nn.BatchNorm1d(WIDTH, track_running_stats=False)), whole=EACH_OTHER
    ),
    "instance norm": Case(InstanceNormalised),
    "instance norm with statistics": Case(
        lambda: InstanceNormalised(track_running_stats=True), refused="running statistics"
    ),
    "lstm": Case(lambda: Recurrent(nn.LSTM)),
    "gru": Case(lambda: Recurrent(nn.GRU)),
    "lstm with dropout": Case(lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.5), refused="draws random numbers"),
    "weight norm": Case(Weighted),
    "spectral norm": Case(Spectral, refused="changes buffer '.*' in place .*, which training does not carry on"),
    "input changed in place": Case(
        net(lambda m, x, y: functional.mse_loss(m.second(x), y.mul_(2))), refused="changes input 'y' in place"
    ),
    "complex parameter": Case(Complex, refused="parameter 'weight' is complex"),
    "sparse embedding": Case(
        lambda: Text(lambda x, y, m: functional.cross_entropy(x.flatten(0, 1), y.flatten()), sparse=True)
    ),
    # Ways to compute.
    "reentrant checkpoint": Case(regression(lambda m, x: checkpoint(m.first, x, use_reentrant=True))),  # pyright: ignore
    "checkpoint": Case(regression(lambda m, x: checkpoint(m.first, x, use_reentrant=False))),  # pyright: ignore
    "changed in place": Case(regression(in_place)),
    "torch's own encoder with a mask": Case(Attending),
    "sorted": Case(net(lambda m, x, y: functional.mse_loss(m.second(x).sort(-1).values, y))),
    "random numbers of Python's": Case(
        regression(lambda m, x: x * random.random()), refused="between calls outside of the module, or draws random"
    ),
    "random numbers": Case(regression(lambda m, x: x + torch.randn_like(x)), refused="draws random numbers"),
    "written slices": Case(regression(written_slice)),
    "gradient penalty": Case(net(penalised), refused="torch.autograd.grad"),
    "vmap": Case(regression(lambda m, x: torch.vmap(lambda row: row * row.sum())(x)), refused="torch.vmap"),
    "out=": Case(regression(into_out), refused="out="),
}  # fmt: skip


class Regularised(Uncertain):
    """Means over different numbers of items, and a penalty on a weight that tensor parallelism splits."""

    def combined(self, m: Net, x: Tensor, y: Tensor) -> Tensor:
        return super().combined(m, x, y) + 0.1 * x.square().mean() + 0.01 * m.second.weight.square().sum()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Shared(nn.Module):
    """Its embedding is looked up in the middle again, and is its head."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.embed, self.layers, self.middle = nn.Embedding(9, WIDTH), nn.ModuleList([Layer(), Layer()]), middle

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        hidden, head = self.layers[0](self.embed(ids)), self.embed.weight
        if self.middle == "looked up":
            hidden = hidden + 0.1 * self.embed(mask)
        else:
            hidden = hidden + functional.linear(hidden, head).softmax(-1) @ head
        losses = per_token(functional.linear(self.layers[1](hidden), head), labels)
        return (losses * mask).sum() / mask.sum()


class MadeAhead(nn.Module):
    """Its layers compute with weights that were made of others before the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        halves = [{name: 0.5 * p for name, p in layer.named_parameters()} for layer in self.layers]
        hidden = self.first(x)
        for layer, values in zip(self.layers, halves, strict=True):
            hidden = torch.func.functional_call(layer, values, (hidden,))
        return functional.mse_loss(hidden[:, :CLASSES], y)


SPLIT: dict[str, Callable[[], nn.Module]] = {
    "regularised": Regularised,
    "embedding looked up in the middle": lambda: Shared("looked up"),
    "embedding attended to in the middle": lambda: Shared("attended to"),
    "torch's own encoder with a mask": Attending,
    "containers in containers": Towers,
    "weights made ahead": MadeAhead,
}
QUICK_SPLIT = ("torch's own encoder with a mask", "weights made ahead")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_SPLIT else pytest.mark.long) for name in SPLIT]
)
def test_tensor_parallel_ranks_train_as_one(name: str, lent_ranks: list[int], tmp_path: Any) -> None:
    losses = []
    for plan in ("mb=1", "tp=2,mb=2"):
        torch.manual_seed(0)
        module = SPLIT[name]().double()
        rows = [dict(zip(_batch(module), row, strict=True)) for row in zip(*_batch(module).values(), strict=True)]
        options: dict[str, Any] = {"batch_size": SAMPLES, "steps": 2, "lr": 0.1, "progress": "off", "export": False}
        losses.append(phalanx.train(module, rows, out=tmp_path / plan, plan=plan, dtype="float64", **options).losses)
    assert lent_ranks == [2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def _batch(module: nn.Module) -> dict[str, Tensor]:
    text = "ids" in module.forward.__code__.co_varnames
    return {"ids": IDS, "labels": LABELS, "mask": MASK} if text else {"x": X, "y": Y}


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_exact_or_refused(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    torch.manual_seed(0)
    wanted, module = CASES[name], CASES[name].make()
    if wanted.refused:
        with pytest.raises(CaptureError, match=f"(?s){wanted.refused}") as refused:
            _proven(module)
        assert refused.value.hint
        return
    case = _proven(module)
    spec = zoo.resolve(case.model)
    if wanted.whole:
        captured.require_equal(case.step(case.session(), [SAMPLES]), case.plain())
        with pytest.raises(PlanError, match=wanted.whole):
            separable.require_separable(spec, case.captured, case.batch, SAMPLES, "mb=2")
        return
    separable.require_separable(spec, case.captured, case.batch, SAMPLES, "mb=2")
    captured.require_equal(case.step(case.session(), [5, 3]), case.plain())


@pytest.mark.parametrize("plan", ["mb=1", "dp=2"])
@pytest.mark.parametrize(
    "module, message, hint",
    [
        (nn.Sequential(nn.LazyLinear(2)), "'0.weight' of module 'Sequential' has no shape yet", "call the module once"),
        (torch.jit.script(nn.Linear(2, 2)), "is a script or trace of torch.jit", "hand over the module that it was"),
    ],
    ids=["lazy", "scripted"],
)
def test_what_is_no_readable_module_is_refused_before_anything_starts(
    module: nn.Module, message: str, hint: str, plan: str, tmp_path: Any
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        phalanx.train(module, [{"input": X[0]}] * 4, plan=plan, steps=1, batch_size=4, out=tmp_path, progress="off")
    assert refused.value.hint.startswith(hint)


def test_a_hook_for_all_modules_is_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="a backward hook is registered for all modules"):
            selfcheck.refuse_lost_hooks(nn.Linear(2, 2), "it")
    finally:
        handle.remove()


def test_what_is_checked_takes_the_branches_of_a_whole_batch() -> None:
    module = CASES["branch on the batch size"].make()
    case = captured.own(module, **_batch(module))
    assert case.blocks.conditions == ("batch <= 6",)
    assert [selfcheck.num_samples(case.captured, size) for size in (2, 6, 8)] == [(2, 2), (5, 3), (7, 7)]


def _proven(module: nn.Module) -> captured.Case:
    """Captured and checked as before training."""
    selfcheck.refuse_lost_hooks(module, "it")  # what is in float64 has lost those of parameters
    case = captured.own(module, **_batch(module))
    batches = [case.batch, {name: tensor[2:5] for name, tensor in case.batch.items()}]
    task = Custom(case.captured.inputs)
    selfcheck.prove(zoo.resolve(case.model), task, case.captured, batches, lambda *_: case.captured)
    return case
