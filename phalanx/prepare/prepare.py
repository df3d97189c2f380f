"""From options to what is trained on what: the model, its weights, the data, the device, the plan, the length.

Everything that is derived rather than given is decided here, once, with the reason in words; nothing is trained.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from phalanx import tasks
from phalanx.config import RunConfig, cache_folder
from phalanx.data.batches import Batches, needs_tokenizer, open_data, sample_length
from phalanx.data.own import is_own_dataset, shown
from phalanx.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from phalanx.errors import ConfigError, DataError
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.model.zoo.configure import override
from phalanx.model.zoo.zoo import Model, ModelSpec
from phalanx.params.groups import Groups, ParameterGroup
from phalanx.plan.complete import require_evaluation
from phalanx.plan.periods import changes
from phalanx.plan.plan import Plan
from phalanx.prepare.auto import Choice, Subject
from phalanx.prepare.did_not_fit import NONE_TRIED, Tried
from phalanx.prepare.initial_weights import require_no_weights
from phalanx.prepare.read_model import Phase, find_model, read_model, require_fit, require_may_cut, untimed
from phalanx.state.huggingface import changed_tensors
from phalanx.state.snapshot import Mark, digest
from phalanx.tasks.base import Task
from phalanx.tasks.custom import Custom, infer_inputs
from phalanx.tasks.vocabulary import vocab_size
from phalanx.written import parse_steps

Collate = Callable[[list[Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Prepared:
    """All that a run needs to know before its first step. `reasons` says why derived values are what they are."""

    spec: ModelSpec
    task: Task
    tokenizer: Tokenizer | None
    batches: Batches
    eval_batches: Batches | None
    captured: Captured
    trainable: tuple[str, ...]
    groups: Groups
    plan: Plan
    device: torch.device
    dtype: torch.dtype
    total_steps: int
    reasons: dict[str, str] = field(default_factory=dict)
    choice: Choice | None = None  # of the plan, where it was searched
    subject: Subject | None = None  # what one rank would search for, once it knows what fits
    lengths: Mapping[int | None, Batches] = field(default_factory=dict)  # the data by every seq_len that it comes in
    may_cut: bool = True  # whether batches are known to be sums of their samples

    @property
    def model_mark(self) -> Mark:
        shapes = {name: list(shape) for name, shape in self.captured.shapes.items()}
        return Mark(self.spec.name, digest(shapes, type(self.task).__name__))

    @property
    def data_mark(self) -> Mark:
        """The data is recognised by its size, its first sample and the weights of its sources, so that moving files
        does not make it other data."""
        batches = next(iter(self.lengths.values()), self.batches)  # as the run begins
        first, again = (_contents(_first_sample(batches)) for _ in range(2))
        # A dataset that answers differently each time (it augments) can be recognised by its size only.
        seen = first if first == again else ""
        return Mark(batches.describe(), digest(batches.num_samples, seen, *batches.weights))


def _first_sample(batches: Batches) -> Mapping[str, Tensor]:
    """As the data has it, whatever it is evaluated on."""
    added = "attention_mask" if batches.adds_mask else None
    return {name: tensor for name, tensor in batches.batch(0, 1).items() if name != added}


def prepare(
    model: Model, data: Any, eval_data: Any, config: RunConfig, context: RankContext, *,
    collate: Collate | None = None, groups: Sequence[ParameterGroup] = (), step: int = 1,
    optimizer_class: type[Any] | None = None, plan: str | None = None, phase: Phase = untimed,
    tried: Tried = NONE_TRIED,
) -> Prepared:  # fmt: skip
    """Resolves everything in the order in which mistakes are cheapest to find: options, model, data, capture, plan.
    step: the first that will be made. plan: the one that the run has by now, instead of what its options say. tried:
    plans of it that did not fit."""
    device, dtype = torch.device(context.device), getattr(torch, config.dtype)
    if plan is None:
        require_fit(config, context.world)
    if config.deterministic and collate is not None:
        raise ConfigError(
            "option deterministic does not go with collate: it is given the samples of one rank, and what it makes of "
            "them (such as padding to the longest) may depend on which those are",
            "return samples of one length from the dataset, and leave collate out",
        )
    spec = find_model(model, config)
    task = _task(spec, data, collate)
    periods = config.periods

    def opened(source: Any, shuffle: bool, collate: Collate | None, seq_len: int | None) -> Batches:
        return _opened(source, spec, task, tokenizer, config, shuffle, collate, seq_len)

    with phase("data"):
        spec, tokenizer = _tokenizer(spec, task, data, eval_data, config)
        lengths = {seq_len: opened(data, config.shuffle, collate, seq_len) for seq_len in _seq_lens(config, data, task)}
        batches = lengths[periods.at(step).seq_len]
        eval_collate = collate if is_own_dataset(eval_data) else None
        eval_batches = None if eval_data is None else opened(eval_data, False, eval_collate, config.seq_len)
        if eval_batches is not None:
            for own in lengths.values():
                eval_batches.mask_like(own)
                own.mask_like(eval_batches)
    total_steps, length_reason = run_length(config, next(iter(lengths.values()), batches))  # as the run begins
    evaluated = 0 if eval_batches is None else eval_length(config, eval_batches)
    read = read_model(
        spec, task, batches, config, context, groups, step, optimizer_class, plan, phase, tried, evaluated
    )  # fmt: skip
    if config.export and context.rank == 0:
        _warn_of_changed_layers(model)
    require_evaluation(read.plan, evaluated)
    return Prepared(
        spec, task, tokenizer, batches, eval_batches, read.captured, read.trainable, read.groups, read.plan,
        device, dtype, total_steps,
        {**read.reasons, "device": device_reason(config.device, device), "steps": length_reason},
        read.choice, read.subject, lengths, read.may_cut,
    )  # fmt: skip


def training_data(config: RunConfig) -> Batches:
    """The data of a run that is all in its options, opened as `prepare` does."""
    spec = find_model(config.model, config)
    task = _task(spec, config.data, None)
    spec, tokenizer = _tokenizer(spec, task, config.data, None, config)
    return _opened(config.data, spec, task, tokenizer, config, config.shuffle, None, config.seq_len)


def _opened(
    source: Any, spec: ModelSpec, task: Task, tokenizer: Tokenizer | None, config: RunConfig, shuffle: bool,
    collate: Collate | None, seq_len: int | None,
) -> Batches:  # fmt: skip
    return open_data(
        source, task=task, config=spec.config, tokenizer=tokenizer,
        tokens=sample_length(seq_len, task, spec.config), seed=config.seed, documents=config.documents,
        shuffle=shuffle, on_broken=config.on_broken, cache=cache_folder() / "data", text_key=config.text_key,
        collate=collate,
    )  # fmt: skip


def _seq_lens(config: RunConfig, data: Any, task: Task) -> list[int | None]:
    """All that samples come in, as they follow each other."""
    found = list(dict.fromkeys(period.seq_len for period in config.periods))
    if len(found) > 1 and (is_own_dataset(data) or task.modality == "image"):
        what = (
            "samples of your own dataset are as long as they are" if is_own_dataset(data) else "an image has no tokens"
        )
        raise ConfigError(f"option seq_len_at = {list(config.seq_len_at)} does nothing: {what}", "leave seq_len_at out")
    return found


def device_reason(choice: str, device: torch.device) -> str:
    """Why it is this one."""
    if device.type == "cpu":
        return "chosen" if choice == "cpu" else "there is no CUDA device"
    name = torch.cuda.get_device_name(device)
    return name if choice == "cuda" else f"{name}, found"


def run_length(config: RunConfig, batches: Batches) -> tuple[int, str]:
    """How many steps the run has, and why."""
    if config.steps is not None:
        total, reason = config.steps, "as given"
    else:
        assert config.epochs is not None
        if batches.num_samples is None:
            raise ConfigError(
                f"option epochs = {config.epochs:g}: the data is a stream without a known end", "give steps instead"
            )
        total = config.periods.num_steps(config.epochs * batches.num_samples)
        sizes = ", then ".join(str(size) for size in dict.fromkeys(period.batch_size for period in config.periods))
        reason = f"{config.epochs:g} epochs of {batches.num_samples:,} samples in batches of {sizes}"
    for option in ("plan_at", "batch_size_at", "seq_len_at"):
        for step in changes(option, getattr(config, option)):
            if step > total:
                raise ConfigError(
                    f"option {option}: step {step} is after the last of {total} steps ({reason})",
                    f"choose steps between 2 and {total}",
                )
    if config.warmup_steps > total:
        raise ConfigError(
            f"option warmup_steps = {config.warmup_steps} is longer than the run of {total} steps ({reason})",
            f"choose warmup_steps between 0 and {total}",
        )
    if config.profile_steps is not None and parse_steps(config.profile_steps)[0] > total:
        raise ConfigError(
            f"option profile_steps = {config.profile_steps} begins after the last of {total} steps ({reason})",
            f"choose steps between 1 and {total}",
        )
    if config.timeline_step is not None and config.timeline_step > total:
        raise ConfigError(
            f"option timeline_step = {config.timeline_step} is after the last of {total} steps ({reason})",
            f"choose a step between 1 and {total}",
        )
    return total, reason


def eval_length(config: RunConfig, batches: Batches) -> int:
    """How many samples an evaluation has."""
    return min(config.eval_samples, batches.num_samples or config.eval_samples)


def _task(spec: ModelSpec, data: Any, collate: Collate | None) -> Task:
    if spec.task != "custom":
        return tasks.get(spec.task)
    if not is_own_dataset(data):
        raise DataError(
            f"{spec.name!r} takes inputs of its own, which {shown(data)} does not hold",
            "give a dataset whose items are dicts of its inputs, or name what it learns with task=",
        )
    first = data[0]
    if collate is None and not isinstance(first, Mapping):
        raise DataError(
            f"a sample of the dataset is a {type(first).__name__}, not a dict",
            "return dicts of tensors, or give a collate function",
        )
    columns = collate([first]) if collate else {name: torch.as_tensor(value)[None] for name, value in first.items()}
    return Custom(infer_inputs({name: torch.as_tensor(column) for name, column in columns.items()}))


def _tokenizer(
    spec: ModelSpec, task: Task, data: Any, eval_data: Any, config: RunConfig
) -> tuple[ModelSpec, Tokenizer | None]:
    """Loaded where text must be read, and where there is one to be exported with the model.

    A shrunken model has lost most of its vocabulary, so it gets one that holds the tokenizer.
    """
    needed = any(needs_tokenizer(source, task) for source in (data, eval_data) if source is not None)
    wanted = config.tokenizer is not None or (spec.folder is not None and has_tokenizer(spec.folder))
    if not needed and not wanted:
        return spec, None
    if needed and config.tokenizer is None and spec.folder is not None and not has_tokenizer(spec.folder):
        require_no_weights(spec.folder, config.init)
    size = vocab_size(spec.config)
    if config.tiny:
        tokenizer = load_tokenizer(config.tokenizer, spec.folder, sys.maxsize)
        assert spec.config is not None
        return replace(spec, config=override(spec.config, {"vocab_size": max(size, tokenizer.vocab_size)})), tokenizer
    return spec, load_tokenizer(config.tokenizer, spec.folder, size)


def require_change(run: Prepared, config: RunConfig, plan: Plan) -> None:
    """Refuses a plan that the run, which began with others, cannot go on with."""
    require_may_cut(run.may_cut, run.spec, plan)
    if run.eval_batches is not None:
        require_evaluation(plan, eval_length(config, run.eval_batches))


def _warn_of_changed_layers(model: Model) -> None:
    """Before the run, not after it."""
    if isinstance(model, PreTrainedModel) and (changed := changed_tensors(model)):
        warnings.warn(
            f"the layers of this {type(model).__name__} are not those of its configuration ({changed[0]} and "
            f"{len(changed) - 1} other tensors), so from_pretrained could not load it: the export will be a weights "
            "file for load_state_dict, without config.json",
            stacklevel=2,
        )


def _contents(batch: Mapping[str, Tensor]) -> str:
    return digest(*(part for name, t in sorted(batch.items()) for part in (name, list(t.shape), t.numpy().tobytes())))
