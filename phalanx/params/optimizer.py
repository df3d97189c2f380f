"""The optimizer of a run: which class updates which parameters with which arguments, and the update of one step.

What the user names or hands over is checked here, before anything is trained. A step is clipping, skipping of
non-finite gradients, the optimizer, refreshed copies; on the way that is fused nothing waits for the device: clipping
and skipping are decided there. State goes in and out as named tensors.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.errors import CheckpointError, ConfigError, nearest
from phalanx.params.element_wise import KNOWN, needs_closure, reach_of
from phalanx.params.flat import Piece
from phalanx.params.groups import Groups
from phalanx.params.matrix_wise import Holders, Kind, MatrixWise
from phalanx.params.optimizer_groups import LR_SCALE, MUON, REST, entries_of, entry_number
from phalanx.params.parameters import Weight
from phalanx.params.state_facts import Slot
from phalanx.params.streams import Streams
from phalanx.state.layout import StateShard
from phalanx.state.local import Local

_NAMED: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": torch.optim.Muon,
}  # fmt: skip
_FUSED = (torch.optim.AdamW, torch.optim.SGD)
_GROUP = "group."
_PLAIN = bool | int | float | str | None
_NUM_STREAMS = 2  # more of them gain nothing
_COPIED_BYTES = 512 * 2**20  # of gradients in the precision of what is updated, at a time
_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping equals it


class Optimizer:
    """Updates the pieces in `weights` by their gradients and rounds them into the copies that the model computes with.

    A weight and its copy are one tensor unless weights are kept in higher precision.
    """

    def __init__(self, inner: torch.optim.Optimizer, weights: Mapping[str, Weight], clip: float | None) -> None:
        self.inner, self.weights, self.clip = inner, weights, clip
        apart = [weight for weight in weights.values() if weight.copy is not weight.exact]
        self._copies, self._copied = [weight.copy for weight in apart], [weight.exact for weight in apart]
        # Only these start from zeroed state: fused SGD, told to skip its first step, leaves its momentum undefined.
        adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        self._skips_on_device = adam and bool(inner.defaults.get("fused"))
        # A step of torch's own Adam is one of each weight that has a gradient, so it can be made in parts.
        divisible = self._skips_on_device and type(inner) in (torch.optim.Adam, torch.optim.AdamW)
        device = next((weight.exact.device for weight in weights.values()), torch.device("cpu"))
        self._streams = Streams(device, _NUM_STREAMS if divisible and device.type == "cuda" else 1)

    def step(
        self, gradients: Mapping[str, Tensor], lr: float | None, norm: Tensor, finite: Tensor,
        loss_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One update. A weight without a gradient is left alone; if not all is finite, nothing changes.

        lr: None where each group has its own. norm: of the gradients of all ranks, before clipping. loss_scale: what
        gradients are still multiplied by.
        """
        for group in self.inner.param_groups if lr is not None else ():
            group["lr"] = lr * group.get(LR_SCALE, 1.0)
        factor = self._divisor(norm, loss_scale)
        if self._skips_on_device:
            self._update_on_device(gradients, factor, finite)
        elif bool(finite):
            _divide(gradients, factor)
            self._update(gradients)
        self.refresh()

    def make_state(self, names: Collection[str]) -> None:
        """What is kept of these weights, before anything else that a step needs lies in between: by an update that is
        skipped. An optimizer that cannot skip one makes its state in its first."""
        own = {name: weight.exact.detach() for name, weight in self.weights.items() if name in names}
        if own and self._skips_on_device:
            device = next(iter(own.values())).device
            self._update_on_device(own, None, finite=torch.tensor(False, device=device))

    def forget(self) -> None:
        """Lets go of all tensors, whoever still knows this optimizer."""
        self.inner.state.clear()
        if isinstance(self.inner, MatrixWise):
            self.inner.forget()
        for group in self.inner.param_groups:
            group["params"] = []
        self.weights, self._copies, self._copied = {}, [], []

    def adopt(self, other: torch.optim.Optimizer) -> None:
        """From now on this one updates, with its own settings; it has the same groups, of other tensors."""
        if other is not self.inner:
            for group, own in zip(other.param_groups, self.inner.param_groups, strict=True):
                group["params"] = own["params"]
            other.state = self.inner.state
            if isinstance(other, MatrixWise) and isinstance(self.inner, MatrixWise):
                other.go_on_as(self.inner)
            self.inner = other

    def refresh(self) -> None:
        """Rounds what was updated into the copies that the model computes with."""
        if self._copied:
            torch._foreach_copy_(self._copies, self._copied)

    def squared_norm(
        self, gradients: Mapping[str, Tensor], like: Tensor, others: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The squared norm of these gradients as one vector; zero, on the device of `like`, if there are none. others:
        norms of further gradients, which are not here any more."""
        norms = dict(others or {})
        for part in self._streams.run(norms_of, gradients):
            norms |= part
        return squared_norm(norms) if norms else torch.zeros_like(like)

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """The state's tensors as (slot, parameter, tensor)."""
        for name, weight in self.weights.items():
            for slot, value in self.inner.state.get(weight.exact, {}).items():
                if isinstance(value, Tensor):
                    yield slot, name, value

    def owned(self) -> Iterator[tuple[StateShard, Tensor]]:
        """What of the state is kept whole by an owner of a matrix."""
        return self.inner.owned() if isinstance(self.inner, MatrixWise) else iter(())

    def scalars(self) -> dict[str, Any]:
        """What else the state holds, by the same names; JSON."""
        found = {key: value for key, value in self._state() if not isinstance(value, Tensor)}
        for key, value in found.items():
            if not isinstance(value, _PLAIN):
                raise CheckpointError(
                    f"{type(self.inner).__name__} keeps a {type(value).__name__} in {key}, which cannot be saved",
                    "choose an optimizer whose state holds tensors and numbers by parameter",
                )
        return found

    def load(
        self, slots: Iterable[tuple[str, str]], read: Callable[[str, str], Tensor], scalars: Mapping[str, Any],
        read_whole: Callable[[str, str], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Takes back what `tensors`, `owned` and `scalars` gave. slots: the (slot, parameter) pairs of all ranks;
        `read` gives this rank's piece of one."""
        groups = {id(weight): group for group in self.inner.param_groups for weight in group["params"]}
        for slot, name in slots:
            if isinstance(self.inner, MatrixWise) and self.inner.take(slot, name, read_whole or read):
                continue
            if name in self.weights:
                weight = self.weights[name].exact
                self.inner.state[weight][slot] = read(slot, name).to(_home(slot, weight, groups[id(weight)]))
        for key, value in scalars.items():
            _, slot, name = key.split("/", 2)
            if slot.startswith(_GROUP):
                self.inner.param_groups[int(slot.removeprefix(_GROUP))][name] = value
            elif name in self.weights:
                self.inner.state[self.weights[name].exact][slot] = value

    def _state(self) -> Iterator[tuple[str, Any]]:
        for number, group in enumerate(self.inner.param_groups):
            for name, value in group.items():
                # Lists and tuples are arguments (betas), which the options give again.
                if isinstance(value, Tensor | _PLAIN):
                    yield f"optimizer/{_GROUP}{number}/{name}", value
        for name, weight in self.weights.items():
            for slot, value in self.inner.state.get(weight.exact, {}).items():
                yield f"optimizer/{slot}/{name}", value

    def _divisor(self, norm: Tensor, loss_scale: Tensor | None) -> Tensor | None:
        """What gradients are to be divided by before they are used; None for nothing."""
        if self.clip is None:
            return loss_scale
        clipping = ((norm + _EPSILON) / self.clip).clamp(min=1.0)
        return clipping if loss_scale is None else clipping * loss_scale

    def _update_on_device(self, gradients: Mapping[str, Tensor], divisor: Tensor | None, finite: Tensor) -> None:
        # torch's fused optimizers divide gradients by `grad_scale` as they read them, and do nothing on `found_inf`.
        inner: Any = self.inner
        inner.found_inf = (~finite).float()
        inner.grad_scale = None
        if any(gradient.dtype == torch.float64 for gradient in gradients.values()):
            _divide(gradients, divisor)  # their scale is float32, too coarse here
        elif divisor is not None:
            inner.grad_scale = divisor.float()
        self._streams.run(self._update_in_parts, gradients)
        inner.found_inf = inner.grad_scale = None  # in a loop of the user's own it also steps without this

    def _update_in_parts(self, gradients: Mapping[str, Tensor]) -> None:
        """Gradients of another precision than what is updated are copied; not all of them at once."""
        part, copied = dict[str, Tensor](), 0
        for name, gradient in gradients.items():
            exact = self.weights[name].exact
            size = exact.nbytes if gradient.dtype != exact.dtype else 0
            if part and copied + size > _COPIED_BYTES:
                self._update(part)
                part, copied = {}, 0
            part[name] = gradient
            copied += size
        if part:
            self._update(part)

    def _update(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            weight = self.weights[name].exact
            weight.grad = gradient.to(weight.dtype)
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)


def norms_of(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each."""
    found: dict[str, Tensor] = {}
    for dtype in sorted(
        {gradient.dtype for gradient in gradients.values()}, key=str
    ):  # torch fuses only over one dtype
        own = {name: gradient for name, gradient in gradients.items() if gradient.dtype == dtype}
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        found |= zip(own, torch._foreach_norm(list(own.values()), 2, dtype=wide), strict=True)
    return found


def squared_norm(norms: Mapping[str, Tensor]) -> Tensor:
    """Of all these together, in an order that does not depend on who came first."""
    ordered = [norms[name] for name in sorted(norms)]
    alike = len({norm.dtype for norm in ordered}) == 1
    return torch.stack(ordered if alike else [norm.double() for norm in ordered]).double().square().sum()


def _divide(gradients: Mapping[str, Tensor], divisor: Tensor | None) -> None:
    if divisor is not None and gradients:
        torch._foreach_mul_(list(gradients.values()), divisor.reciprocal())


def _home(slot: str, weight: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where torch's optimizers keep a state: beside its weight, but plain step counters on the host."""
    if slot == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return weight.device


def make_optimizer(
    weights: Mapping[str, Weight], config: RunConfig, optimizer_class: type[Any] | None = None,
    groups: Groups | None = None, holders: Holders | None = None,
) -> torch.optim.Optimizer:  # fmt: skip
    """The optimizer of the run, for these pieces. `optimizer_class` stands before the one that `config` names. holders:
    of parts of tensors, where the plan splits them; None where one that needs them whole is refused."""
    groups = groups or Groups()
    chosen = _chosen(config, optimizer_class)
    if not (isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer {chosen!r} is not a torch optimizer", "give a subclass of torch.optim.Optimizer")
    if needs_closure(chosen):
        raise ConfigError(
            f"optimizer {chosen.__name__} evaluates the loss several times per step, which a program cannot do",
            "choose an optimizer whose step needs no closure",
        )
    kinds = _kinds(chosen, config, weights, holders)
    decayed = _takes(chosen, "weight_decay")
    for group in groups.settings if not decayed else ():
        if group.decay is not None:
            raise ConfigError(
                f"{group.shown}: decay = {group.decay:g} does nothing: {chosen.__name__} does not decay weights",
                "leave decay out, or choose another optimizer",
            )
    if not decayed and config.weight_decay != RunConfig.model_fields["weight_decay"].default:
        raise ConfigError(
            f"option weight_decay = {config.weight_decay} does nothing: {chosen.__name__} does not decay weights",
            "leave weight_decay out, or choose another optimizer",
        )
    entries = entries_of(config, decayed, groups, kinds)
    made = [entry.group(weights, groups, kinds) for entry in entries]
    try:
        if len(kinds) == 1 and not kinds[""].by_matrix:
            return chosen(made, **kinds[""].arguments)
        find = partial(entry_number, entries=entries, groups=groups, kinds=kinds)
        return MatrixWise(made, kinds, weights, config.lr, find, holders)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        own = ("params", "weight_decay", *_own_options(chosen, config))
        allowed = [name for name in inspect.signature(chosen).parameters if name not in own]
        raise ConfigError(
            f"optimizer {chosen.__name__} refuses its arguments: {error}",
            f"optimizer_options may hold: {', '.join(allowed)}",
        ) from error


def optimizer_slots(
    config: RunConfig, dtype: torch.dtype, device: torch.device, optimizer_class: type[Any] | None = None
) -> tuple[Slot, ...] | None:
    """What the optimizer of the run keeps for each parameter of this dtype, found by updating a small one; None for one
    that is not known to keep as much for each of its elements."""
    if _chosen(config, optimizer_class) not in KNOWN:
        return None
    value = torch.ones(2, 2, dtype=dtype, device=device)
    weights = {"probe": Weight(Piece.whole("probe", Local((2, 2))), value, value, trained=True)}
    optimizer = Optimizer(make_optimizer(weights, config, optimizer_class), weights, clip=None)
    true = torch.tensor(True, device=device)
    optimizer.step({"probe": torch.ones_like(value)}, config.lr, torch.ones((), device=device), true)
    return tuple(
        Slot(slot, str(tensor.dtype).removeprefix("torch."), is_counter=tensor.dim() == 0)
        for slot, _, tensor in optimizer.tensors()
    )


def is_muon(config: RunConfig, optimizer_class: type[Any] | None) -> bool:
    """Whether the matrices of layers are updated by Muon, and all else by AdamW."""
    return _chosen(config, optimizer_class) is torch.optim.Muon


def _chosen(config: RunConfig, optimizer_class: type[Any] | None) -> Any:
    return optimizer_class or _NAMED.get(config.optimizer) or _import(config.optimizer)


def _kinds(
    chosen: type[Any], config: RunConfig, weights: Mapping[str, Weight], holders: Holders | None
) -> dict[str, Kind]:
    """Which optimizers there are: one, or Muon for the matrices of layers and AdamW for all else."""
    options = _arguments(chosen, config)
    if chosen is torch.optim.Muon:
        if holders is None:  # of parts on the host
            require_element_wise(chosen, weights, options, has_all=False)
        return {
            MUON: Kind(chosen, {"adjust_lr_fn": "match_rms_adamw", **options}, by_matrix=True),
            REST: Kind(torch.optim.AdamW, {"lr": config.lr, "betas": config.betas, "eps": config.eps}, by_matrix=False),
        }
    has_all = holders is not None and len(holders.ranks) == holders.num_ranks
    if chosen in KNOWN or holders is None or not holders.split:
        require_element_wise(chosen, weights, options, has_all)
        return {"": Kind(chosen, options, by_matrix=False)}
    reach = reach_of(chosen, lambda tensors: chosen(tensors, **options), holders.device)
    if reach == "all":
        raise _of_all(chosen)
    return {"": Kind(chosen, options, by_matrix=reach == "tensor")}


def require_element_wise(
    kind: type[Any], weights: Mapping[str, Weight], arguments: Mapping[str, Any], has_all: bool
) -> None:
    """A rank that holds part of a tensor can only update it if no element's update depends on the others, and one that
    holds some of the tensors only if it depends on no other tensor. arguments: what the optimizer is made with.
    has_all: whether every tensor has its part here."""
    whole = all(w.piece.is_whole and w.piece.local.is_whole for w in weights.values())
    if (whole and has_all) or kind in KNOWN or not weights:
        return
    device = next(iter(weights.values())).exact.device
    reach = reach_of(kind, lambda tensors: kind(tensors, **arguments), device)
    if reach == "all":
        raise _of_all(kind)
    if whole or reach == "element":
        return
    raise ConfigError(
        f"optimizer {kind.__name__} does not update each element by itself, but the plan splits tensors",
        "use zero=0, tp=1 and no offload of the optimizer; or let the session make it (phalanx.open(…, optimizer=its "
        f"class), session.step()), where owners get whole tensors; or one of torch's {_known()}",
    )


def _of_all(kind: type[Any]) -> ConfigError:
    return ConfigError(
        f"optimizer {kind.__name__} looks at all parameters together, but the plan keeps some of them elsewhere",
        "use replicas alone (dp=…, with zero=0, tp=1, pp=1 and no offload of the optimizer); or one of torch's "
        f"{_known()}",
    )


def _known() -> str:
    return ", ".join(sorted(kind.__name__ for kind in KNOWN))


def _arguments(chosen: type[Any], config: RunConfig) -> dict[str, Any]:
    """What the class is called with besides its parameters."""
    arguments = _own_options(chosen, config)
    for name in ("weight_decay", *arguments):
        if name in config.optimizer_options:
            raise ConfigError(f"optimizer_options must not hold {name!r}", f"use the option {name} itself")
    fused = {"fused": True} if chosen in _FUSED else {}
    return arguments | fused | config.optimizer_options


def _own_options(chosen: type[Any], config: RunConfig) -> dict[str, Any]:
    """The arguments for which a run has options of their own."""
    adamw = {"betas": config.betas, "eps": config.eps} if chosen is torch.optim.AdamW else {}
    return {"lr": config.lr, **adamw}


def _takes(chosen: type[Any], name: str) -> bool:
    return name in inspect.signature(chosen).parameters


def _import(path: str) -> Any:
    """By a path that the user gave; one from a file is refused before (`RunConfig.load`)."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"option optimizer = {path!r}: {module_name!r} cannot be imported: {error}",
            "give a dotted path such as torch.optim.Adagrad, importable from where you start phalanx",
        ) from error
    if not hasattr(module, name):
        classes = [n for n, member in vars(module).items() if isinstance(member, type)]
        raise ConfigError(f"option optimizer = {path!r}: {module_name} has no {name!r}", nearest(name, classes))
    return getattr(module, name)
