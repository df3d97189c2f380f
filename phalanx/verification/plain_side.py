"""The plain side: the unpatched HuggingFace model, a plain loop, torch's own clipping and AdamW. Runs in its own
process.

The process is started afresh (never forked from one in which models were captured) and may serve many cases, because
starting Python and torch costs more than a tiny case.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import pickle
import signal
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, VerifyError
from phalanx.launch.main_script import MainScript, unpickle
from phalanx.tasks.base import Task
from phalanx.verification.case import Case, Step


def run_plain(case: Case, initial: Mapping[str, Tensor], attention_sites: tuple[str, ...]) -> list[Step]:
    """Every step of the case on the plain model, from these parameter values."""
    from phalanx.model import reference
    from phalanx.model.ops import random

    spec = case.spec()
    task = case.task_of(spec)
    model = reference.plain(spec, case.torch_dtype, case.dropout)
    _load(model, initial)
    optimizer = torch.optim.AdamW(
        _groups(model, case), lr=case.training.lr, betas=case.training.betas, eps=case.training.eps
    )
    steps: list[Step] = []
    for consumed, batch in case.batches(spec):
        keys = random.sample_keys(case.seed, consumed, next(iter(batch.values())).shape[0])
        with reference.injected(model, keys, attention_sites, case.torch_dtype):
            loss = reference.loss(model, _plain_inputs(task, batch, spec.config, case.torch_dtype))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.training.clip)
        optimizer.step()
        optimizer.zero_grad()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        steps.append(Step(float(loss.detach()), gradients, parameters))
    return steps


def _plain_inputs(task: Task, batch: dict[str, Tensor], config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the plain model is given. Some architectures do not derive document boundaries from restarting positions;
    an explicit mask says the same to all, except that it would switch off sliding windows."""
    inputs = task.reference_inputs(batch)
    documents = batch.get("document_ids")
    if documents is not None and not getattr(config, "sliding_window", None):
        tokens = documents.shape[1]
        seen = (documents[:, :, None] == documents[:, None, :]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        inputs["attention_mask"] = torch.where(seen[:, None], 0.0, torch.finfo(dtype).min).to(dtype)
    return inputs


def _load(model: nn.Module, initial: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial[name])


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

    def run(self, case: Case, initial: Mapping[str, Tensor], attention_sites: tuple[str, ...]) -> list[Step]:
        with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as folder:
            torch.save(dict(initial), Path(folder) / "initial.pt")
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
            return torch.load(Path(folder) / "steps.pt", weights_only=False)

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
            initial = torch.load(Path(folder) / "initial.pt")
            torch.save(run_plain(case, initial, attention_sites), Path(folder) / "steps.pt")
            connection.send(None)
        except Exception:
            connection.send(traceback.format_exc(limit=-4))
