"""From options to what is trained on what: the model, its weights, the data, the device, the plan, the length.

Everything that is derived rather than given is decided here, once, with the reason in words; nothing is trained.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from phalanx import tasks
from phalanx.config import RunConfig, cache_folder, parse_steps
from phalanx.data.batches import Batches, needs_tokenizer, open_data, sample_length
from phalanx.data.own import is_own_dataset, shown
from phalanx.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from phalanx.engine.inputs import require_inputs
from phalanx.errors import ConfigError, DataError, PlanError
from phalanx.launch.context import RankContext
from phalanx.model.capture import capture, capture_for_check
from phalanx.model.captured import Captured
from phalanx.model.lora import AdaptedWeights, Lora, is_adapter
from phalanx.model.selfcheck import num_samples, prove
from phalanx.model.separable import NUM_CANDIDATES, require_separable
from phalanx.model.weights.init_recipe import record
from phalanx.model.weights.weights import ModuleWeights, SafetensorsWeights, SeededWeights, Weights
from phalanx.model.zoo.configure import override
from phalanx.model.zoo.zoo import Model, ModelSpec, build, resolve, with_config
from phalanx.params.groups import Groups, ParameterGroup, group_parameters
from phalanx.params.parameters import choose_trainable
from phalanx.plan import fields
from phalanx.plan.complete import Completed, complete, needed_ranks, require_evaluation, usable_ranks
from phalanx.plan.periods import changes
from phalanx.plan.plan import Plan
from phalanx.state.dcp import DcpWeights, is_dcp
from phalanx.state.huggingface import changed_tensors
from phalanx.state.snapshot import Mark, digest
from phalanx.tasks.base import Task
from phalanx.tasks.custom import Custom, infer_inputs
from phalanx.tasks.vocabulary import vocab_size
from phalanx.training.auto import Choice, Subject, choose

MOST_STAGES = 16  # on one rank: for what can be said about a plan before the model is known

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
    optimizer_class: type[Any] | None = None, plan: str | None = None,
) -> Prepared:  # fmt: skip
    """Resolves everything in the order in which mistakes are cheapest to find: options, model, data, capture, plan.
    step: the first that will be made. plan: the one that the run has by now, instead of what its options say."""
    device, dtype = torch.device(context.device), getattr(torch, config.dtype)
    require_fit(config, context.world)
    spec = find_model(model, config)
    task = _task(spec, data, collate)
    spec, tokenizer = _tokenizer(spec, task, data, eval_data, config)
    periods = config.periods

    def opened(source: Any, shuffle: bool, collate: Collate | None, seq_len: int | None) -> Batches:
        return _opened(source, spec, task, tokenizer, config, shuffle, collate, seq_len)

    lengths = {seq_len: opened(data, config.shuffle, collate, seq_len) for seq_len in _seq_lens(config, data, task)}
    batches = lengths[periods.at(step).seq_len]
    eval_collate = collate if is_own_dataset(eval_data) else None
    eval_batches = None if eval_data is None else opened(eval_data, False, eval_collate, config.seq_len)
    if eval_batches is not None:
        for own in lengths.values():
            eval_batches.mask_like(own)
            own.mask_like(eval_batches)
    total_steps, length_reason = run_length(config, batches)
    read = read_model(spec, task, batches, config, context, groups, step, optimizer_class, plan)
    if config.export and context.rank == 0:
        _warn_of_changed_layers(model)
    if eval_batches is not None:
        require_evaluation(read.plan, eval_length(config, eval_batches))
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


def plan_for(config: RunConfig, given: str, world: int, batch_size: int, costs: Sequence[float]) -> Completed:
    """A plan of the run with nothing left open. Where the plan changes while it runs, one may leave ranks without a
    place."""
    usable = usable_ranks(given, world) if config.plan_at else world
    return complete(given, world=usable, batch_size=batch_size, costs=costs)


def find_model(model: Model, config: RunConfig) -> ModelSpec:
    spec = with_config(resolve(model, task=config.task, tiny=config.tiny, overrides=config.model_options or None))
    return spec if config.lora is None else replace(spec, lora=Lora.read(config.lora))


@dataclass(frozen=True)
class ReadModel:
    """A model as a graph, what of it is trained, and the plan. `reasons`, `choice`, `subject` as in `Prepared`.
    may_cut: whether it is known that batches may be cut."""

    captured: Captured
    trainable: tuple[str, ...]
    groups: Groups
    plan: Plan
    reasons: dict[str, str]
    may_cut: bool
    choice: Choice | None = None
    subject: Subject | None = None


def read_model(
    spec: ModelSpec, task: Task, batches: Batches, config: RunConfig, context: RankContext,
    groups: Sequence[ParameterGroup] = (), step: int = 1, optimizer_class: type[Any] | None = None,
    given: str | None = None,
) -> ReadModel:  # fmt: skip
    """Captured, proven on samples of these batches, and with a plan that suits it. step: whose plan it is; given: the
    one that is taken instead."""
    dtype, period = getattr(torch, config.dtype), config.periods.at(step)
    inputs = task.inputs(spec.config, padding=batches.padding, documents=batches.documents)
    captured = capture(spec, inputs, dtype=dtype, dropout=config.dropout, check=False)
    checked = _proof(spec, task, captured, batches, period.batch_size, dtype) if context.rank == 0 else ""
    wanted = [*groups, *map(ParameterGroup.read, config.groups)]
    found = group_parameters(wanted, captured.shapes, captured.aliases, dtype)
    frozen = {*found.frozen, *(name for name in captured.shapes if spec.lora is not None and not is_adapter(name))}
    trainable = choose_trainable(captured.trainable, captured.shapes, captured.aliases, config.freeze, frozen)
    if not set(trainable) & set(captured.blocks.parameters()):
        raise ConfigError("no trainable parameter takes part in the loss", "unfreeze one that does")
    costs = captured.blocks.flops(captured.dims(batches.batch(0, 1)))
    plan, reasons = plan_for(config, given or period.plan, context.world, period.batch_size, costs)
    subject, choice = None, None
    if config.searches_plan and period.plan == config.given_plan and given is None:
        current = config.override(batch_size=period.batch_size)
        subject = Subject(spec, captured, trainable, batches, current, plan, optimizer_class)
    if subject is not None and context.world > 1:
        choice = choose(subject, context)
        plan, reasons = choice.plan, {} if choice.plan != plan else reasons
    later = [
        plan_for(config, each.plan, context.world, each.batch_size, costs).plan
        for each in config.periods
        if each.step > step
    ]
    cutting = next((each for each in (plan, *later) if _cuts(each)), plan)
    captured = _without_coupling(spec, captured, batches, cutting, period.batch_size)
    may_cut = _is_known(spec, captured) or _cuts(cutting)
    return ReadModel(captured, trainable, found, plan, {**reasons, "check": checked}, may_cut, choice, subject)


def choose_num_ranks(config: RunConfig) -> int:
    """How many ranks to start on this machine: as asked for, as the plan needs, or one per GPU."""
    usable = torch.cuda.is_available() and config.device != "cpu"
    found = max(1, torch.cuda.device_count()) if usable else 1
    needed = [needed_ranks(period.plan) or 0 for period in config.periods]
    ranks = config.ranks or max(needed) or found
    require_fit(config, ranks)  # before any is started
    return ranks


def require_fit(config: RunConfig, world: int) -> None:
    """Whatever the model's blocks cost, this much of the plan must fit ranks and batch."""
    if config.ranks not in (None, world):
        raise ConfigError(
            f"option ranks = {config.ranks}, but the launcher started {world}",
            "leave ranks out where a launcher starts them, or have it start as many",
        )
    for period in config.periods:
        num_blocks = sum(fields.read(period.plan).get("stages", ())) or world * MOST_STAGES
        plan_for(config, period.plan, world, period.batch_size, [1.0] * num_blocks)


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


def open_weights(model: Model, spec: ModelSpec, seed: int, init: str = "auto") -> tuple[Weights, str]:
    """Where the initial values come from, and that in words."""
    if spec.lora is not None:
        shapes = {name: tuple(p.shape) for name, p in build(spec, device="meta").named_parameters()}
        base, said = open_weights(model, replace(spec, lora=None), seed, init)
        return AdaptedWeights(base, shapes, seed), f"{said}; adapters from seed {seed}"
    if isinstance(model, nn.Module):
        return ModuleWeights(model), "the module's own values"
    seeded = SeededWeights(record(lambda: build(spec)), seed)
    folder = spec.folder
    if init == "fresh" or folder is None or not _has_weights(folder):
        return seeded, f"FRESH, from seed {seed}: {_why_fresh(model, spec, init)}"
    if is_dcp(folder):
        return DcpWeights(folder, build(spec, device="meta")), f"from {folder} (torch.distributed.checkpoint)"
    stored = SafetensorsWeights(folder, build(spec, device="meta"), missing_from=seeded)
    said = f"from {folder}"
    if stored.missing:
        said += f"; {len(stored.missing)} that it lacks from seed {seed}: {', '.join(stored.missing[:3])}"
    return stored, said


def _has_weights(folder: Path) -> bool:
    return is_dcp(folder) or any((*folder.glob("model*.safetensors*"), *folder.glob("pytorch_model*.bin")))


def _why_fresh(model: Model, spec: ModelSpec, init: str) -> str:
    """Nobody should take a model that knows nothing for one that was trained."""
    if init == "fresh":
        return "as asked for (init=fresh)"
    if spec.folder is not None:
        return f"{spec.folder} holds none"
    if not isinstance(model, str | Path):
        return "a configuration or factory has none"
    if spec.name.endswith("-tiny"):
        return "a shrunken model has none"
    return f"none of {spec.name!r} are on this machine (hf download {spec.name} fetches them where the hub has them)"


def load_buffers(captured: Captured, weights: Weights | None, device: torch.device) -> dict[str, Tensor]:
    """The model's buffers on the device; those that the weights' source holds come from there."""
    stored = set(weights.buffer_names()) if weights else set()
    return {
        name: (weights.read(name, dtype=buffer.dtype) if weights and name in stored else buffer).to(device)
        for name, buffer in captured.buffers.items()
    }


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
        _require_no_weights(spec.folder, config.init)
    size = vocab_size(spec.config)
    if config.tiny:
        tokenizer = load_tokenizer(config.tokenizer, spec.folder, sys.maxsize)
        assert spec.config is not None
        return replace(spec, config=override(spec.config, {"vocab_size": max(size, tokenizer.vocab_size)})), tokenizer
    return spec, load_tokenizer(config.tokenizer, spec.folder, size)


def _require_no_weights(folder: Path, init: str) -> None:
    """Weights that were trained on other tokens would be taught nonsense."""
    if init != "fresh" and _has_weights(folder):
        raise DataError(
            f"{folder} holds weights, but not the tokenizer that they were trained with",
            "put its files (tokenizer.json, tokenizer_config.json …) there, or name their folder with tokenizer=FOLDER "
            "(--tokenizer); tokenizer=bytes only for a model of bytes",
        )


def _without_coupling(spec: ModelSpec, captured: Captured, batches: Batches, plan: Plan, batch_size: int) -> Captured:
    """Samples may depend on each other only where the plan leaves batches whole. Asked of modules of the user's own,
    and wherever the loss is not known to be a mean."""
    if _is_known(spec, captured) or not _cuts(plan):
        return captured
    candidates = batches.batch(0, min(batches.num_samples or NUM_CANDIDATES, NUM_CANDIDATES))
    require_inputs(captured, candidates)
    return require_separable(spec, captured, candidates, batch_size, plan.shown)


def _is_known(spec: ModelSpec, captured: Captured) -> bool:
    """Whether samples are known not to depend on each other."""
    return spec.factory is None and not captured.blocks.assumed


def _cuts(plan: Plan) -> bool:
    """Whether a plan computes parts of a batch by themselves."""
    return plan.dp * plan.mb * plan.multiple > 1


def require_may_cut(may_cut: bool, spec: ModelSpec, plan: Plan) -> None:
    if _cuts(plan) and not may_cut:
        raise PlanError(
            f"plan {plan.shown} cuts batches, and whether the samples of {spec.name} depend on each other was not "
            "looked into: it began with a plan that leaves batches whole",
            "begin with a plan that cuts batches (mb=2), or name this one from the beginning on (plan_at)",
        )


def require_change(run: Prepared, config: RunConfig, plan: Plan) -> None:
    """Refuses a plan that the run, which began with others, cannot go on with."""
    require_may_cut(run.may_cut, run.spec, plan)
    if run.eval_batches is not None:
        require_evaluation(plan, eval_length(config, run.eval_batches))


def _refuse_rounding(batch: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Samples in float64 would become float32 without a word; torch itself refuses to mix the two."""
    for name, tensor in batch.items():
        if tensor.dtype == torch.float64 != dtype and not torch.equal(tensor, tensor.float().double()):
            raise DataError(
                f"input {name!r} is in float64, whose values would be rounded to {str(dtype).removeprefix('torch.')}",
                "convert it in the dataset (.float()) if that is meant, or train with dtype=float64",
            )


def _proof(
    spec: ModelSpec, task: Task, captured: Captured, batches: Batches, batch_size: int, dtype: torch.dtype
) -> str:
    """That the graph is the model, on the first samples. One rank finds out for all."""
    first, second = num_samples(captured, batch_size)
    samples = [batches.batch(0, first), batches.batch(first, second)]
    for batch in samples:
        require_inputs(captured, batch)
        _refuse_rounding(batch, dtype)
    return prove(spec, task, captured, samples, capture_for_check)


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
