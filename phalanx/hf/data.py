"""The batches of transformers' Trainer: the same samples in the same order, the same on every rank.

The order of an epoch follows from the seed and the epoch's number. Collators that draw random numbers (masking) draw
from a stream that nothing else draws from, so that ranks cannot drift apart.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import RemoveColumnsCollator, has_length

from phalanx.errors import ConfigError, DataError
from phalanx.plan.plan import Plan

IGNORED = -100  # a label that is not learned

Batch = Mapping[str, Any]


class EpochOrder(Sampler[int]):
    """All samples once, in an order that follows from the seed and the epoch: accelerate's."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed, self.epoch = num_samples, seed, 0

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        yield from torch.randperm(self._num_samples, generator=generator).tolist()


class Randomness:
    """The random numbers of collators and workers, apart from all others."""

    def __init__(self) -> None:
        self._state = self._now()

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """What is drawn inside is drawn from here."""
        outside = self._now()
        self._set(self._state)
        try:
            yield
        finally:
            self._state = self._now()
            self._set(outside)

    def state(self) -> dict[str, Any]:
        """JSON."""
        own, (_, keys, *rest), (version, numbers, gauss) = self._state
        python = [version, list(numbers), gauss]
        return {"torch": own.numpy().tobytes().hex(), "numpy": [keys.tolist(), *rest], "python": python}

    def load(self, state: Mapping[str, Any]) -> None:
        own = torch.frombuffer(bytearray(bytes.fromhex(state["torch"])), dtype=torch.uint8).clone()
        keys, *rest = state["numpy"]
        version, numbers, gauss = state["python"]
        self._state = (own, ("MT19937", np.array(keys, np.uint32), *rest), (version, tuple(numbers), gauss))

    @staticmethod
    def _now() -> tuple[Tensor, Any, Any]:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    @staticmethod
    def _set(state: tuple[Tensor, Any, Any]) -> None:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


def train_sampler(dataset: Any, args: transformers.TrainingArguments, length_name: str | None) -> Sampler[int] | None:
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        return None
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(dataset)
    if args.train_sampling_strategy == "group_by_length":
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        column, columns = args.length_column_name, cast(Any, dataset)
        lengths = columns[column] if column in (getattr(dataset, "column_names", None) or ()) else None
        return LengthGroupedSampler(batch, dataset=columns, lengths=lengths, model_input_name=length_name)
    return EpochOrder(len(dataset), args.seed if args.data_seed is None else args.data_seed)


def loader(
    dataset: Any, args: transformers.TrainingArguments, collate: Callable[[list[Any]], Batch], batch_size: int,
    sampler: Sampler[int] | None,
) -> DataLoader[Any]:  # fmt: skip
    further: dict[str, Any] = {} if isinstance(dataset, IterableDataset) else {"sampler": sampler}
    if args.dataloader_num_workers:
        further |= {
            "prefetch_factor": args.dataloader_prefetch_factor,
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }
    return DataLoader(
        dataset, batch_size, collate_fn=collate, drop_last=args.dataloader_drop_last,
        num_workers=args.dataloader_num_workers, **further,
    )  # fmt: skip


def without_unused(collate: Callable[[list[Any]], Batch], columns: Sequence[str], model: str) -> Any:
    """A collator that sees the columns only that the model takes."""
    return RemoveColumnsCollator(data_collator=collate, signature_columns=list(columns), model_name=model)


def batches(
    source: DataLoader[Any], randomness: Randomness, skip: int = 0, drawn: Mapping[str, Any] | None = None
) -> Iterator[Batch]:
    """skip: of those that come first, what was trained on before. drawn: the state of the random numbers by then."""
    if drawn is not None and skip == 0:
        randomness.load(drawn)
    with randomness.drawn():
        iterator = iter(source)
    while True:
        with randomness.drawn():
            try:
                batch = next(iterator)
            except StopIteration:
                return
        if skip > 0:
            skip -= 1
            if skip == 0 and drawn is not None:
                randomness.load(drawn)
        else:
            yield batch


def num_items(batch: Batch, shifts: bool) -> int | None:
    """The labels of a batch that are learned; None where it has none. shifts: whether the first of every row is not."""
    labels = batch["shift_labels"] if "shift_labels" in batch else batch.get("labels")
    if not isinstance(labels, Tensor):
        return None
    counted = labels[..., 1:] if shifts and "shift_labels" not in batch else labels
    return int(counted.ne(IGNORED).sum())


def rows_of(batch: Batch) -> int:
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if not sizes:
        raise DataError(f"a batch of the collator holds no tensors but {list(batch)}", "have it return tensors by name")
    return sizes[0]


def as_large_as(plan: Plan, batch: Batch) -> dict[str, Any]:
    """A batch that every part of the plan has samples of: the last of an epoch may be too small. What is added is its
    last row, whose labels are not learned."""
    rows = rows_of(batch)
    least = plan.dp * plan.mb * plan.multiple
    wanted = -(-rows // least) * least if plan.multiple > 1 else max(rows, least)
    if wanted == rows:
        return dict(batch)
    return {name: _lengthened(name, value, wanted - rows) for name, value in batch.items()}


def _lengthened(name: str, value: Any, count: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    added = value[-1:].expand(count, *value.shape[1:])
    if name.endswith("labels"):
        if value.is_floating_point():
            raise ConfigError(
                f"a batch of {value.shape[0]} samples is too small for the plan, and labels that are numbers cannot be "
                "left out of a loss",
                "set dataloader_drop_last=True, or choose a plan with fewer replicas and micro-batches",
            )
        added = torch.full_like(added, IGNORED)
    return torch.cat([value, added])
