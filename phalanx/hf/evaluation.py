"""An evaluation as transformers' Trainer makes it: the loss of every batch, and where metrics want them all
predictions, which are whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from phalanx.hf.computation import Computation
from phalanx.hf.data import Batch, rows_of


@dataclass(frozen=True)
class Wanted:
    """What an evaluation gives. items: of a batch, the labels that are learned."""

    labels: Sequence[str]
    ignore_keys: Sequence[str]
    loss_only: bool
    items: Callable[[Batch], int | None]
    preprocess: Callable[[Any, Any], Any] | None
    metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None
    prefix: str


class _Collected:
    """All batches of one kind of thing, in the order they came."""

    def __init__(self, concatenates: bool) -> None:
        self._container = EvalLoopContainer(concatenates, padding_index=-100)

    def add(self, value: Any) -> None:
        if value is not None:
            self._container.add(value)
            self._container.to_cpu_and_numpy()

    def arrays(self) -> Any:
        return self._container.get_arrays()


def evaluate(
    computation: Computation, batches: Iterable[Batch], args: transformers.TrainingArguments,
    wanted: Wanted, after_batch: Callable[[], None],
) -> EvalLoopOutput:  # fmt: skip
    losses, predictions, labels, inputs = (_Collected(args.eval_do_concat_batches) for _ in range(4))
    main_input = getattr(computation.module, "main_input_name", "input_ids")
    num_samples = 0
    for batch in batches:
        rows = rows_of(batch)
        num_samples += rows
        known = _labels(batch, wanted.labels)
        if known is not None:
            losses.add(computation.loss(batch, wanted.items(batch)).reshape(1).repeat(rows))
        if not wanted.loss_only:
            logits = _logits(computation.outputs(batch), wanted.ignore_keys)
            predictions.add(logits if wanted.preprocess is None else wanted.preprocess(logits, known))
            labels.add(known)
        if "inputs" in args.include_for_metrics:
            inputs.add(batch[main_input])
        after_batch()
    found_losses, found, known_labels = losses.arrays(), predictions.arrays(), labels.arrays()
    metrics: dict[str, Any] = {}
    if wanted.metrics is not None and found is not None and known_labels is not None:
        further = {"losses": found_losses} if "loss" in args.include_for_metrics else {}
        further |= {"inputs": inputs.arrays()} if "inputs" in args.include_for_metrics else {}
        metrics = dict(wanted.metrics(EvalPrediction(predictions=found, label_ids=known_labels, **further)))
    metrics = cast(dict[str, Any], denumpify_detensorize(metrics))
    if found_losses is not None and len(found_losses):
        flat = torch.cat([torch.as_tensor(each).reshape(-1) for each in found_losses])
        metrics["loss"] = float(flat.mean())
    named = {name if name.startswith(f"{wanted.prefix}_") else f"{wanted.prefix}_{name}": value
             for name, value in metrics.items()}  # fmt: skip
    return EvalLoopOutput(predictions=cast(Any, found), label_ids=known_labels, metrics=named, num_samples=num_samples)


def _labels(batch: Batch, names: Sequence[str]) -> Any:
    """None where the batch has not all of them."""
    found = tuple(batch.get(name) for name in names)
    if not found or any(each is None for each in found):
        return None
    return found[0] if len(found) == 1 else found


def _logits(outputs: Any, ignored: Sequence[str]) -> Any:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        outputs = tuple(value for name, value in outputs.items() if name not in (*ignored, "loss"))
    return outputs[0] if len(outputs) == 1 else outputs
