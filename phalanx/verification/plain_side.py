"""The plain side: the unpatched HuggingFace model with the weights that transformers reads, or the user's own module; a
plain loop, torch's own clipping and AdamW. Runs in its own process.

It also finds out how exact its own numbers are: beside every backward, copies whose weights differ in the last bit do
the same. What changes there by so much is rounding, whatever a plan computes.

The process is started afresh (never forked from one in which models were captured) and may serve many cases, because
starting Python and torch costs more than a tiny case.
"""

from __future__ import annotations

import copy
import io
import logging
import multiprocessing
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, VerifyError
from phalanx.launch.main_script import MainScript, unpickle
from phalanx.model import reference
from phalanx.model.ops import random
from phalanx.model.zoo.zoo import ModelSpec
from phalanx.tasks.base import Task
from phalanx.verification.case import Case, Noise, Plain, Start, Step

Run = Callable[[nn.Module], tuple[float, dict[str, Tensor]]]  # a model → the loss and its gradients
Measured = tuple[float, dict[str, Tensor], Noise]
NUM_NUDGES = 2  # one could by chance leave a gradient of few elements nearly where it is


def run_plain(case: Case, start: Start, attention_sites: tuple[str, ...]) -> Plain:
    """Every step of the case on the plain model, from values that it reads itself as far as there are any."""
    spec = case.spec()
    pretrained = start.loads and spec.folder is not None
    model = reference.plain(spec, case.torch_dtype, case.dropout, pretrained=pretrained)
    _take(model, start.given)
    optimizer = torch.optim.AdamW(
        _groups(model, case), lr=case.training.lr, betas=case.training.betas, eps=case.training.eps
    )
    done = Plain(_parameters(model), [], [], {}, {})
    for consumed, batch in case.batches(spec):
        run = partial(_backward, case, spec, consumed, batch, attention_sites)
        loss, gradients, noise = with_noise(run, model, case.seed, batch)
        done.noise.append(noise)
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.training.clip)
        optimizer.step()
        optimizer.zero_grad()
        done.steps.append(Step([loss], gradients, _parameters(model)))
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    done.optimizer = {
        f"{slot}/{names[p]}": value.detach().clone()
        for p, state in optimizer.state.items()
        for slot, value in state.items()
    }
    done.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return done


def with_noise(run: Run, model: nn.Module, seed: int, batch: Mapping[str, Tensor]) -> Measured:
    """What `run` finds with a model, and how far rounding alone moves that."""
    nudged = [_nudged(model, seed + number) for number in range(NUM_NUDGES)]
    loss, gradients = run(model)
    return loss, gradients, _noise(loss, gradients, [run(other) for other in nudged], batch)


def _backward(
    case: Case, spec: ModelSpec, consumed: int, batch: dict[str, Tensor], sites: tuple[str, ...], model: nn.Module
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and its gradients, which the parameters keep."""
    keys = random.sample_keys(case.seed, consumed, next(iter(batch.values())).shape[0])
    with reference.injected(model, keys, sites, case.torch_dtype):
        inputs = plain_inputs(case.task_of(spec), batch, spec.config, case.torch_dtype)
        loss = reference.loss(model, inputs)
    return gradients_of(loss, model)


def gradients_of(loss: Tensor, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """The loss as a number, and its gradients, which the parameters keep."""
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose weights are all moved by the last bit or so: what it computes differs by rounding alone."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
                parameter.mul_(1 + signs.to(parameter.dtype) * torch.finfo(parameter.dtype).eps)
    return copied


def _noise(
    loss: float, gradients: Mapping[str, Tensor], nudged: Sequence[tuple[float, dict[str, Tensor]]], batch: Any
) -> Noise:
    changes = {
        name: max((float((other[name] - gradient).abs().max()) for _, other in nudged), default=0.0)
        for name, gradient in gradients.items()
    }
    num_terms = max(tensor.numel() for tensor in batch.values())
    return Noise(max(abs(other - loss) for other, _ in nudged), changes, num_terms)


def plain_inputs(task: Task, batch: dict[str, Tensor], config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the plain model is given. Some architectures do not derive document boundaries from restarting positions;
    an explicit mask says the same to all, except that it would switch off sliding windows."""
    inputs = task.reference_inputs(batch)
    documents = batch.get("document_ids")
    if documents is not None and not getattr(config, "sliding_window", None):
        tokens = documents.shape[1]
        seen = (documents[:, :, None] == documents[:, None, :]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        inputs["attention_mask"] = torch.where(seen[:, None], 0.0, torch.finfo(dtype).min).to(dtype)
    return inputs


def _take(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.copy_(values[name])


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _groups(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": case.training.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


class PlainProcess:
    """A fresh process that runs plain cases until it is closed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, MainScript.of_this_process()), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, case: Case, start: Start, attention_sites: tuple[str, ...]) -> Plain:
        with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as folder:
            torch.save(vars(start), Path(folder) / "start.pt")
            try:
                self._connection.send((case, folder, attention_sites))
                answer = self._connection.recv()
            except (EOFError, ConnectionError):
                raise self._died() from None
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise VerifyError(
                    f"the model cannot be handed to the plain process: {error}",
                    "give a name, a configuration, or a factory defined at the top level of a module",
                ) from error
            if isinstance(answer, ConfigError):
                raise VerifyError(f"the plain model cannot be built: {answer.message}", answer.hint)
            if answer is not None:
                raise VerifyError(
                    f"the plain model failed:\n{answer}", "the model itself must run before a plan can be checked"
                )
            return _read(Path(folder) / "plain.pt")

    def _died(self) -> VerifyError:
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is not None and code > 0:
            return VerifyError(
                f"the process of the plain model ended with exit code {code}; what it wrote is above",
                'it loads the script that calls phalanx.verify: put the call under `if __name__ == "__main__":`',
            )
        cause = f" by {signal.Signals(-code).name}" if code else ""
        return VerifyError(
            f"the process of the plain model was ended{cause}", "is there enough memory for a second model?"
        )

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()


def _write(done: Plain, path: Path) -> None:
    nested = {"steps": [vars(step) for step in done.steps], "noise": [vars(noise) for noise in done.noise]}
    torch.save({**vars(done), **nested}, path)


def _read(path: Path) -> Plain:
    found = torch.load(path)
    found["steps"] = [Step(**step) for step in found["steps"]]
    found["noise"] = [Noise(**noise) for noise in found["noise"]]
    return Plain(**found)


def _serve(connection: Connection, main: MainScript) -> None:
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    while True:
        try:
            received = connection.recv_bytes()
        except EOFError:
            return
        try:
            case, folder, attention_sites = unpickle(io.BytesIO(received), main)
        except ConfigError as error:
            connection.send(error)
            continue
        try:
            start = Start(**torch.load(Path(folder) / "start.pt"))
            _write(run_plain(case, start, attention_sites), Path(folder) / "plain.pt")
            connection.send(None)
        except Exception:
            connection.send(traceback.format_exc(limit=-4))
