"""OptimusPrime's interface: `Optimus_p` wraps a HuggingFace model, `run` makes the gradients of a batch.

Scripts keep their loops. As there, only the first stage needs the batch; here that is the global batch, and every
replica takes its part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.model.zoo.zoo import resolve
from phalanx.own_loop.open import open as open_session
from phalanx.own_loop.open import open_on
from phalanx.own_loop.session import OwnSession
from phalanx.tasks.base import Batch
from phalanx.verification.report import Report
from phalanx.verification.verify_session import verify_session

_MODES = ("gpipe", "1f1b")
_EXAMPLE_TOKENS = 16
_MOST_DIMS = 8


class Optimus_p:
    """A model as a pipeline over the ranks that torchrun started, with replicas and tensor parallelism as asked for.

    pp_size: what the ranks allow, where it is not given. activation_ckpt: blocks are computed again in the backward.
    swap_opt_in_fwdbwd: the optimizer's state lies on the host; swap_model_in_optstep: the host updates, too. The
    optimizer is then made here, of the class `optimizer` with `lr`, because others keep their state on the device.
    example: a batch, for a module that is not one of HuggingFace's. dtype: precision of training.
    """

    def __init__(
        self,
        model: nn.Module,
        num_mb: int,
        use_gpu: bool = False,
        pp_size: int | None = None,
        dp_size: int = 1,
        tp_size: int = 1,
        activation_ckpt: bool = False,
        swap_opt_in_fwdbwd: bool = False,
        swap_model_in_optstep: bool = False,
        *,
        optimizer: type[torch.optim.Optimizer] | None = None,
        lr: float | None = None,
        example: Any = None,
        dtype: str = "float32",
        context: RankContext | None = None,
    ) -> None:
        swaps = _offload(swap_opt_in_fwdbwd, swap_model_in_optstep, optimizer, lr)
        self.num_mb = num_mb
        sizes = {"pp": pp_size, "dp": dp_size, "tp": tp_size, "mb": num_mb}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigError(f"Optimus_p: {_OURS[name]} = {size} is below 1", "give a whole number of 1 or more")
        plan = ",".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        plan += ",schedule=gpipe" + (",recompute=block" if activation_ckpt else "") + swaps
        made: dict[str, Any] = {"lr": lr, "weight_decay": 0.0} if swaps else {}
        batch = _example(model, num_mb * dp_size * tp_size) if example is None else example
        device = "cuda" if use_gpu else "cpu"
        if context is None:
            self.session = open_session(
                model, example=batch, plan=plan, optimizer=optimizer, device=device, dtype=dtype, **made
            )
        else:
            config = RunConfig.create(plan=plan, clip=None, device=device, dtype=dtype, **made)
            self.session = open_on(context, model, config, batch, has_optimizer=bool(swaps), optimizer_class=optimizer)
        self._stepping = _Stepping(self.session) if swaps else None
        self._loss: Tensor | None = None
        self._names = tuple(batch)

    # A step.

    def run(self, data: Any, labels: Tensor | None = None, mode: Literal["gpipe", "1f1b"] = "gpipe") -> None:
        """The gradients of a batch, added to those that are there. data: the model's inputs by name, or the first of
        them; labels: as the model takes them. Ranks that do not hold the first stage may give None."""
        if mode not in _MODES:
            raise ConfigError(f"Optimus_p.run: mode = {mode!r} is unknown", f"use {' or '.join(_MODES)}")
        self.session.use_schedule(mode)
        self._loss = self.session.forward_backward(self._everywhere(data, labels))

    def verify(self, data: Any, labels: Tensor | None = None) -> Report:
        """Whether `run` gives the loss and the gradients of the plain model; nothing is kept of it."""
        return verify_session(self.session, [self._everywhere(data, labels)])

    def get_loss(self) -> list[Tensor]:
        """The mean loss of the last batch once for each micro-batch: sum(loss) / num_mb is what it was."""
        if self._loss is None:
            raise ConfigError("Optimus_p.get_loss: there is no loss yet", "call run(data, labels) before")
        return [self._loss] * self.num_mb

    def parameters(self) -> Iterator[Tensor]:
        return self.session.parameters()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, of the gradients of all ranks."""
        return self.session.clip_grad_norm_(max_norm)

    @property
    def optimizer(self) -> Any:
        """Yours; with `swap_opt_in_fwdbwd` one that has `step`, `zero_grad` and `param_groups`."""
        return self._stepping or self.session.optimizer

    @optimizer.setter
    def optimizer(self, given: torch.optim.Optimizer) -> None:
        self.session.optimizer = given

    def train(self) -> None:
        """A session always trains; `session.evaluate` leaves dropout out."""

    # Data.

    def prepare_dataloader(self, dataset: Dataset[Any], batch_size: int, shuffle: bool = True) -> DataLoader[Any]:
        """batch_size: of the global batch. All ranks visit the same samples in the same order; batches that the
        replicas cannot divide at the end are left out."""
        generator = torch.Generator().manual_seed(0)
        return DataLoader(dataset, batch_size, shuffle=shuffle, drop_last=True, generator=generator)

    def move_labels2last_stage(self, labels: Tensor | None) -> Tensor | None:
        """`run` sees to it."""
        return labels

    # Where this is.

    def is_first_stage(self) -> bool:
        return 0 in self.session.stages

    def is_last_stage(self) -> bool:
        return self.session.plan.num_stages - 1 in self.session.stages

    def get_rank(self) -> int:
        return self.session.rank

    def get_world_size(self) -> int:
        return self.session.world

    # What is kept.

    def save_ckpt(self, folder: Path | str) -> Path:
        return self.session.save(folder)

    def load_ckpt(self, folder: Path | str) -> None:
        """With the state of the optimizer that was given before; where none was, the weights alone."""
        self.session.load(folder, weights_only=self.session.optimizer is None)

    def _everywhere(self, data: Any, labels: Tensor | None) -> Batch:
        """The batch on every rank: those of a pipeline that were given none get it from the first."""
        given: Batch | None = None
        if data is not None:
            first = next(name for name in self._names if name != "labels")
            given = {**(data if isinstance(data, Mapping) else {first: data})}
            given |= {} if labels is None else {"labels": labels}
        if self.session.plan.pp == 1:
            return _required(given)
        if self.session.rank == 0:
            _required(given)
        return {name: self._told((given or {}).get(name)) for name in self._names}

    def _told(self, tensor: Tensor | None) -> Tensor:
        """What rank 0 has, on every rank."""
        group, device = self.session.world_group, self.session.device
        look = torch.zeros(2 + _MOST_DIMS, dtype=torch.int64)
        if tensor is not None:
            look[: 2 + tensor.dim()] = torch.tensor([tensor.is_floating_point(), tensor.dim(), *tensor.shape])
        look = look.to(device)
        group.broadcast(look, 0).wait("what a batch looks like")
        is_float, dims, *shape = look.tolist()
        mine = torch.zeros(shape[:dims], dtype=torch.float32 if is_float else torch.int64, device=device)
        if tensor is not None and self.session.rank == 0:
            mine.copy_(tensor)
        group.broadcast(mine, 0).wait("a batch")
        return mine


_OURS = {"pp": "pp_size", "dp": "dp_size", "tp": "tp_size", "mb": "num_mb"}


def _required(given: Batch | None) -> Batch:
    if given is None:
        raise ConfigError("Optimus_p.run: the first stage was given no data", "give data where is_first_stage() holds")
    return given


class _Stepping(torch.optim.Optimizer):
    """The optimizer of a session whose state lies on the host, as loops and schedulers use one."""

    def __init__(self, session: OwnSession) -> None:
        assert session.optimizer is not None
        super().__init__([torch.empty(0)], {"lr": 0.0})
        self._session = session
        self.param_groups = session.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self._session.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._session.zero_grad()


def _offload(
    optimizer: bool, model: bool, kind: type[torch.optim.Optimizer] | None, lr: float | None
) -> str:  # fmt: skip
    """What a plan says for these options."""
    if model and not optimizer:
        raise ConfigError(
            "Optimus_p: swap_model_in_optstep = True needs swap_opt_in_fwdbwd = True", "set both, or neither"
        )
    hint = "write Optimus_p(…, swap_opt_in_fwdbwd=True, optimizer=torch.optim.Adam, lr=3e-5)"
    if optimizer and (kind is None or lr is None):
        raise ConfigError("Optimus_p: swap_opt_in_fwdbwd = True needs to make the optimizer itself", hint)
    if not optimizer and (kind is not None or lr is not None):
        raise ConfigError(
            "Optimus_p: optimizer and lr do nothing without swap_opt_in_fwdbwd = True",
            f"assign optimus_p.optimizer, or {hint}",
        )
    return "" if not optimizer else ",offload=optimizer-step" if model else ",offload=optimizer"


def _example(model: nn.Module, samples: int) -> Batch:
    """A batch as the model's task has them, for a model of HuggingFace's."""
    spec = resolve(model)
    if spec.task == "custom":
        raise ConfigError(
            f"Optimus_p: nothing is known of the inputs of {type(model).__name__}",
            "give one of HuggingFace's models, or an example of a batch (example=…)",
        )
    task = tasks.get(spec.task)
    return task.synthetic(spec.config, batch=max(samples, 2), tokens=_EXAMPLE_TOKENS, seed=0)
