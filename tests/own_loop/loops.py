"""Loops as researchers write them, each once: for plain modules in one process and for sessions under a plan.

`Plain` has the calls of a session that these loops make, in plain PyTorch, so that what differs is the plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.launch.context import RankContext
from tests.own_loop.jobs import LR, Net, Trained, both, finished, net, numbers, opened


class Plain:
    """A module in the place of a session."""

    def __init__(self, module: nn.Module, loss: Any = None) -> None:
        self.module, self.loss = module, loss
        self._saved: dict[str, Any] = {}
        self.optimizer: torch.optim.Optimizer | None = None

    def forward_backward(self, batch: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
        value = self.loss(self.module(batch[0]), batch[1])
        (scale * value).backward()
        return value.detach()

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)

    def evaluate(self, batch: tuple[Tensor, Tensor]) -> float:
        with torch.no_grad():
            return float(self.loss(self.module(batch[0]), batch[1]))

    @torch.no_grad()
    def outputs(self, batch: dict[str, Tensor]) -> Any:
        return self.module(**batch)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def refresh(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        torch.save([self.module.state_dict(), self.optimizer and self.optimizer.state_dict()], folder / "plain.pt")

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / "plain.pt")
        self.module.load_state_dict(model)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(optimizer)

    def state_dict(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def close(self, error: BaseException | None = None) -> None:
        pass

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *error: object) -> None:
        pass


Make = Callable[..., Any]  # of a module, an example and a loss: a session of it


def plain(loop: str, *arguments: Any) -> Trained:
    return LOOPS[loop](lambda module, example, loss: Plain(module, loss), *arguments)


def planned(context: RankContext, plan: str, loop: str, *arguments: Any) -> Trained:
    """Sessions after the first stand on the same ranks, as with `phalanx.open`."""
    made: list[int] = []

    def make(module: nn.Module, example: Any, loss: Any) -> Any:
        made.append(0)
        own = replace(context, generation=context.generation + 1000 * (len(made) - 1))
        return opened(own, module, plan, example, loss=loss)

    return LOOPS[loop](make, *arguments)


def generator() -> nn.Module:
    torch.manual_seed(1)
    return Net(8, 2).double()


def made_of(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """What a generator makes: numbers like those of a batch."""
    return outputs[1][:, :6]


def critic() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)).double()


def adversaries(make: Make) -> Trained:
    """A generator under a plan, and a critic that every rank has whole, each with its optimizer."""
    maker, judge = make(generator(), numbers(0)[0], "outer"), critic()
    of_maker = torch.optim.Adam(maker.parameters(), lr=LR)
    of_judge = torch.optim.Adam(judge.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(3):
        noise, real = numbers(step)[0], numbers(50 + step)[0]
        with torch.no_grad():
            fake = made_of(maker(noise))
        of_judge.zero_grad()
        judged = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()
        judged.backward()
        of_judge.step()
        of_maker.zero_grad()
        fooled = F.softplus(-judge(made_of(maker(noise)))).mean()
        fooled.backward()
        of_maker.step()
        losses += [judged.detach(), fooled.detach()]
    losses += [value.detach().sum() for value in judge.parameters()]
    return finished(maker, losses)


def distilled(make: Make) -> Trained:
    """A teacher that only answers and a student, both under the plan."""
    teacher, student = make(net(), numbers(0)[0], "outer"), make(generator(), numbers(0)[0], "outer")
    optimizer = torch.optim.SGD(student.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(3):
        x = numbers(step)[0]
        with torch.no_grad():
            wanted = teacher(x)[1][:, :6]
        optimizer.zero_grad()
        loss = F.mse_loss(made_of(student(x)), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    teacher.close()
    return finished(student, losses)


def unevenly_accumulated(make: Make) -> Trained:
    """Parts of other sizes each time, weighted by their samples; a last one of fewer than there are places for."""
    session = make(net(), numbers(0), both)
    optimizer = torch.optim.AdamW(session.parameters(), lr=LR)
    losses: list[Any] = []
    for step, parts in enumerate([(8, 4), (4, 6, 8), (8,), (5, 7)]):
        optimizer.zero_grad()
        for number, count in enumerate(parts):
            x, target = numbers(10 * step + number)
            losses.append(session.forward_backward((x[:count], target[:count]), scale=count / sum(parts)))
        losses.append(session.clip_grad_norm_(0.5))
        optimizer.step()
    return finished(session, losses)


def averaged(make: Make) -> Trained:
    """A moving average of the weights, evaluated in their place on the way and at the end."""
    session = make(net(), numbers(0), both)
    optimizer = torch.optim.AdamW(session.parameters(), lr=LR)
    average = [value.detach().clone() for value in session.parameters()]
    losses: list[Any] = []

    def swap() -> None:
        with torch.no_grad():
            for value, mean in zip(session.parameters(), average, strict=True):
                kept = value.clone()
                value.copy_(mean)
                mean.copy_(kept)
        session.refresh()

    for step in range(3):
        optimizer.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, [value.detach() for value in session.parameters()], 0.3)
        swap()
        losses.append(session.evaluate(numbers(100)))
        swap()
    swap()
    return finished(session, losses)


def frozen_on_the_way(make: Make) -> Trained:
    """A layer that stops learning after two steps, with momentum on it, and goes on later; another that begins late."""
    session = make(net(), numbers(0), both)
    named = dict(session.named_parameters())
    late = [value for name, value in named.items() if name.startswith("head.")]
    early = [value for name, value in named.items() if not name.startswith("head.")]
    optimizer = torch.optim.SGD(early, lr=LR, momentum=0.9)
    losses: list[Any] = []
    for step in range(6):
        for name, value in named.items():
            if name.startswith("layers.1."):
                value.requires_grad_(step not in (2, 3))
        if step == 4:
            optimizer.add_param_group({"params": late, "lr": 3 * LR})
        session.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        losses.append(session.clip_grad_norm_(0.5))
        optimizer.step()
    return finished(session, losses)


def groups_that_change(make: Make) -> Trained:
    """Groups by name, whose rates and decay the loop changes."""
    session = make(net(), numbers(0), both)
    named = list(session.named_parameters())
    groups = [
        {"params": [value for name, value in named if name.startswith("layers.")], "lr": LR},
        {"params": [value for name, value in named if not name.startswith("layers.")], "lr": 0.1 * LR},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.2)  # of which some are empty on a stage of a pipeline
    losses: list[Any] = []
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 if step % 2 else 3.0
            group["weight_decay"] = 0.1 * step
        optimizer.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        optimizer.step()
    return finished(session, losses)


def rolled_back(make: Make, folder: Path) -> Trained:
    """Saved after two steps; two more, and from the saved ones again, in the same session."""
    session = make(net(), numbers(0), both)
    session.optimizer = optimizer = torch.optim.AdamW(session.parameters(), lr=LR)
    losses: list[Any] = []

    def steps(*numbered: int) -> None:
        for step in numbered:
            optimizer.zero_grad()
            losses.append(session.forward_backward(numbers(step)))
            optimizer.step()

    steps(0, 1)
    session.save(folder)
    steps(2, 3)
    session.load(folder)
    steps(4, 5)
    return finished(session, losses)


def schedulers(make: Make) -> Trained:
    """One after another, and one that looks at an evaluation."""
    session = make(net(), numbers(0), both)
    optimizer = torch.optim.AdamW(session.parameters(), lr=LR)
    of = torch.optim.lr_scheduler
    chain = of.SequentialLR(
        optimizer, [of.LinearLR(optimizer, 0.1, total_iters=2), of.OneCycleLR(optimizer, LR, 4)], [2]
    )
    plateau = of.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    losses: list[Any] = []
    for step in range(5):
        optimizer.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        optimizer.step()
        chain.step()
        plateau.step(session.evaluate(numbers(100)))
        losses.append(optimizer.param_groups[0]["lr"])
    return finished(session, losses)


def scaled_outside(make: Make) -> Trained:
    """torch's GradScaler around a loss outside; in the second step a number that is not finite reaches one output."""
    session = make(net(), numbers(0)[0], "outer")
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses: list[Any] = []
    for step in range(4):
        x, target = numbers(step)
        optimizer.zero_grad()
        logits, hidden = session(x)
        loss = F.cross_entropy(logits, target) + 0.1 * hidden.square().mean()
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.detach(), torch.tensor(scaler.get_scale())]
    return finished(session, losses)


def overflows_in_one_place(make: Make) -> Trained:
    """In the second step a gradient overflows that of a pipeline one stage has, of tensor-parallel ranks one rank."""
    module = net()
    with torch.no_grad():
        module.first.weight[:, 0] = 0.0  # so that a large input is felt in a gradient only
    session = make(module, numbers(0)[0], "outer")
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**50, growth_interval=2)
    losses: list[Any] = []
    for step in range(4):
        x, target = numbers(step)
        x = x.index_fill(1, torch.tensor(0), 1e300 if step == 1 else 0.0)
        optimizer.zero_grad()
        loss = F.cross_entropy(session(x)[0], target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.detach(), torch.tensor(scaler.get_scale())]
    return finished(session, losses)


def looked_at_on_the_way(make: Make) -> Trained:
    """Accuracy of outputs and an evaluation between a gradient and its update."""
    session = make(net(), numbers(0), both)
    optimizer = torch.optim.AdamW(session.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        losses.append(session.evaluate(numbers(100)))
        x, target = numbers(101)
        right = session.outputs({"x": x})[0].argmax(-1) == target
        losses.append(right.double().mean())
        optimizer.step()
    return finished(session, losses)


def penalised(make: Make) -> Trained:
    """A penalty on the parameters themselves, added to a loss outside."""
    session = make(net(), numbers(0)[0], "outer")
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(3):
        x, target = numbers(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(session(x)[0], target)
        penalty = sum((value.square().sum() for value in session.parameters()), torch.zeros(()))
        (loss + 0.01 * penalty).backward()
        losses.append(session.clip_grad_norm_(0.5))
        optimizer.step()
        losses.append(loss.detach())
    return finished(session, losses)


def siamese(make: Make) -> Trained:
    """Two calls before one backward."""
    session = make(net(), numbers(0)[0], "outer")
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(3):
        one, other = numbers(step)[0], numbers(50 + step)[0]
        optimizer.zero_grad()
        loss = 1 - F.cosine_similarity(session(one)[1], session(other)[1]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return finished(session, losses)


def sharpness_aware(make: Make) -> Trained:
    """The gradient at weights that were moved along the gradient before (SAM)."""
    session = make(net(), numbers(0), both)
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        norm = session.clip_grad_norm_(float("inf"))
        with torch.no_grad():
            moves = [0.05 * value.grad / norm for value in session.parameters()]
            torch._foreach_add_(list(session.parameters()), moves)
        session.refresh()
        session.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        with torch.no_grad():
            torch._foreach_sub_(list(session.parameters()), moves)
        optimizer.step()
    return finished(session, losses)


def probed(make: Make) -> Trained:
    """Only the head learns: a stage that has nothing of it has nothing to update. With torch's GradScaler."""
    module = net()
    for name, value in module.named_parameters():
        value.requires_grad_(name.startswith("head."))
    session = make(module, numbers(0)[0], "outer")
    optimizer = torch.optim.AdamW(session.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses: list[Any] = []
    for step in range(3):
        x, target = numbers(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(session(x)[0], target)
        scaler.scale(loss * (float("nan") if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    with torch.inference_mode():
        losses.append(session(numbers(9)[0])[0].sum())
    losses.append(torch.tensor(scaler.get_scale()))
    return finished(session, losses)


def searched_along_lines(make: Make) -> Trained:
    """L-BFGS, which asks for gradients several times in a step and looks at all parameters as one vector."""
    session = make(net(), numbers(0), both)
    optimizer = torch.optim.LBFGS(session.parameters(), lr=0.1, max_iter=3)
    losses: list[Any] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(session.forward_backward(numbers(len(losses) // 6)))
        return losses[-1]

    for _ in range(2):
        optimizer.step(closure)
    return finished(session, losses)


def asked_again(make: Make) -> Trained:
    """A closure that an ordinary optimizer calls."""
    session = make(net(), numbers(0), both)
    optimizer = torch.optim.Adam(session.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            losses.append(session.forward_backward(numbers(step)))
            return float(losses[-1])

        optimizer.step(closure)
    with torch.inference_mode():
        losses.append(session.evaluate(numbers(9)))
    optimizer.zero_grad()
    losses.append(session.forward_backward(numbers(5)))
    return finished(session, losses)


LOOPS: dict[str, Callable[..., Trained]] = {
    loop.__name__: loop
    for loop in (
        adversaries, distilled, unevenly_accumulated, averaged, frozen_on_the_way, groups_that_change, rolled_back,
        schedulers, scaled_outside, overflows_in_one_place, looked_at_on_the_way, penalised, siamese, sharpness_aware,
        probed, searched_along_lines, asked_again,
    )
}  # fmt: skip
