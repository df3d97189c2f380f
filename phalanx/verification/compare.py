"""Two sides compared, tensor by tensor: what counts as equal.

A tensor is compared relative to its own largest element. Below that lies a floor that is measured, not chosen: the
plain side says how far rounding alone moves each of its gradients (`Noise`), and what is smaller than a few times that
carries no information. A gradient that is zero in theory (a key projection's bias) is all of it below its floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.verification.case import Copy, Execution, Noise, Plain, Step, Training

# The plan adds in another order than the plain side, on another device perhaps: its rounding is of the same kind as
# that of the nudged copies, but not the same. docs/verify.md tells how far apart they were found.
SAFETY = 8
_SHARES = {"copy": "copies", "optimizer": "copies", "buffer": "copies"}

_TINY = 1e-300  # so that zero may be compared with zero

Scale = Tensor | float


@dataclass(frozen=True)
class Row:
    """The worst case of one quantity in one step. Step 0 is before the first."""

    step: int
    quantity: str  # initial, loss, gradient, parameter; after the last step also copy, optimizer, buffer
    error: float
    tensor: str
    compared: int  # tensors, or copies of them on all ranks
    rank: int | None = None  # of the copy

    @property
    def where(self) -> str:
        return "" if self.rank is None else f" on rank {self.rank}"

    @property
    def unit(self) -> str:
        return _SHARES.get(self.quantity, "tensors")

    @property
    def place(self) -> str:
        return f"{self.quantity} '{self.tensor}'{self.where}"


def compare(ours: Execution, plain: Plain, tolerance: float, training: Training) -> Iterator[Row]:
    floors = Floors(tolerance, training)
    yield _tensors(0, "initial", ours.initial, plain.initial, _sizes(plain.initial))
    for number, (mine, theirs, noise) in enumerate(zip(ours.steps, plain.steps, plain.noise, strict=True), start=1):
        yield from compare_gradients(number, mine, theirs, noise, floors)
        yield _tensors(number, "parameter", mine.parameters, theirs.parameters, floors.of_parameters(theirs))
    last, number = plain.steps[-1], len(plain.steps)
    scales = {"copy": floors.of_parameters(last), "optimizer": floors.of_optimizer(plain.optimizer)}
    scales["buffer"] = _sizes(plain.buffers)
    for quantity, expected in (("copy", last.parameters), ("optimizer", plain.optimizer), ("buffer", plain.buffers)):
        yield _copies(number, quantity, ours.copies, expected, scales[quantity])


def compare_gradients(number: int, mine: Step, theirs: Step, noise: Noise, floors: Floors) -> Iterator[Row]:
    """The loss of a step and its gradients."""
    floors.add(theirs, noise)
    yield _losses(number, mine.losses, theirs.loss, floors.scale(abs(theirs.loss), SAFETY * noise.loss))
    yield _tensors(number, "gradient", *_zero_for_none(mine.gradients, theirs.gradients), floors.of_gradients())


class Floors:
    """What differences are divided by, after the steps so far: what exceeds the tolerance then is an error.

    An error of δ in a gradient moves what AdamW makes of it by at most 2 lr δ / ε (once through the mean, once through
    the root of the mean square), so rounding can move a parameter by so much in every step. That counts only where the
    gradient is below its floor: elsewhere the relative tolerance stands.
    """

    def __init__(self, tolerance: float, training: Training) -> None:
        self._tolerance, self._training = tolerance, training
        self._gradients: dict[str, Scale] = {}
        self._reach: dict[str, Tensor] = {}  # how far rounding can have moved each element of a parameter
        self._means: dict[str, float] = {}  # and the mean of its gradients,
        self._squares: dict[str, float] = {}  # and of their squares

    def add(self, step: Step, noise: Noise) -> None:
        largest = max(map(_largest, step.gradients.values()), default=0.0)
        amplified = 2 * self._training.lr / self._training.eps
        for name, parameter in step.parameters.items():
            gradient = step.gradients.get(name, torch.zeros_like(parameter))
            size, floor = _largest(gradient), SAFETY * noise.gradients.get(name, 0.0)
            if size <= floor:  # zero in theory: in another order of adding, all its terms may cancel less well
                floor = max(floor, noise.num_terms * _unit(parameter.dtype) * largest)
            self._gradients[name] = self.scale(size, floor)
            noisy = (gradient.abs() <= floor) & ((gradient != 0) | (size == 0))
            self._reach[name] = self._reach.get(name, 0.0) + amplified * floor * noisy.double()
            self._means[name] = self._means.get(name, 0.0) + floor
            self._squares[name] = self._squares.get(name, 0.0) + (2 * size + floor) * floor

    def scale(self, size: float, floor: Scale) -> Scale:
        """Such that a difference within the tolerance of `size`, or of at most `floor`, is within tolerance of it."""
        if isinstance(floor, Tensor):
            return (floor / self._tolerance).clamp_(min=max(size, _TINY))
        return max(size, floor / self._tolerance, _TINY)

    def of_gradients(self) -> dict[str, Scale]:
        return self._gradients

    def of_parameters(self, step: Step) -> dict[str, Scale]:
        return {name: self.scale(_largest(value), self._reach[name]) for name, value in step.parameters.items()}

    def of_optimizer(self, state: Mapping[str, Tensor]) -> dict[str, Scale]:
        floors = {"exp_avg": self._means, "exp_avg_sq": self._squares, "step": {}}
        found: dict[str, Scale] = {}
        for key, value in state.items():
            slot, _, name = key.partition("/")
            found[key] = self.scale(_largest(value), floors[slot].get(name, 0.0))
        return found


def _losses(step: int, ours: Sequence[float], plain: float, scale: Scale) -> Row:
    """Of all ranks, which must agree too."""
    errors = [_finite(abs(loss - plain) / float(scale)) for loss in ours]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Row(step, "loss", errors[worst], "loss", 1, worst if len(set(ours)) > 1 else None)


def _zero_for_none(
    ours: Mapping[str, Tensor], plain: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """No gradient is a zero gradient."""
    either = {**plain, **ours}
    mine, theirs = ({n: side.get(n, torch.zeros_like(t)) for n, t in either.items()} for side in (ours, plain))
    return mine, theirs


def _tensors(
    step: int, quantity: str, ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], scales: Mapping[str, Scale]
) -> Row:
    errors = {name: _error(ours.get(name), expected, scales[name]) for name, expected in plain.items()}
    tensor = max(errors, key=errors.__getitem__, default="")
    return Row(step, quantity, errors.get(tensor, float("inf")), tensor, len(errors))


def _copies(
    step: int, quantity: str, copies: Sequence[Copy], plain: Mapping[str, Tensor], scales: Mapping[str, Scale]
) -> Row:
    """Every copy on every rank; and some rank must hold each element."""
    missing = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in plain.items()}
    rows = [Row(step, quantity, 0.0, "", 0)]
    for copy in (copy for copy in copies if copy.quantity == quantity):
        name, data = copy.part.name, copy.part.data
        expected, scale = plain.get(name, torch.zeros(())), scales.get(name, 1.0)
        for box, values in zip(copy.part.boxes, data.split([box.numel for box in copy.part.boxes]), strict=True):
            if name in missing:
                missing[name][box.slices()] = False
                own = scale[box.slices()] if isinstance(scale, Tensor) else scale
                error = _error(values.view(box.shape), expected[box.slices()], own)
                rows.append(Row(step, quantity, error, name, 0, copy.rank))
    rows += [Row(step, quantity, float("inf"), name, 0) for name, lacking in missing.items() if bool(lacking.any())]
    worst = max(rows, key=lambda row: row.error)
    return Row(step, quantity, worst.error, worst.tensor, len(rows) - 1, worst.rank)


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, Scale]:
    return {name: max(_largest(tensor), _TINY) for name, tensor in tensors.items()}


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _unit(dtype: torch.dtype) -> float:
    """The unit roundoff."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def _error(got: Tensor | None, expected: Tensor, scale: Scale) -> float:
    if got is None or got.shape != expected.shape:
        return float("inf")
    apart = (got.double() - expected.double()).abs() / scale
    return _finite(float(apart.max())) if apart.numel() else 0.0


def _finite(error: float) -> float:
    """NaN compares as equal to nothing; here it is the worst error there is."""
    return error if error == error else float("inf")
