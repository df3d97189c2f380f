"""RunConfig: every option a user can set, once, with its type, its limits and one line that explains it.

The command line, YAML files and Python all go through it, so an option means and is refused the same everywhere; what
pydantic found wrong is said in our words. It holds what the user asked for, not what was derived from it: the plan, the
device and the model are resolved later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from phalanx.contradictions import require_no_import, require_together
from phalanx.errors import PhalanxError
from phalanx.plan import fields as plan_fields
from phalanx.plan.periods import Periods
from phalanx.plan.plan import Plan
from phalanx.plan.rules import require_searchable
from phalanx.written import (
    AUTO,
    SIMPLE,
    explain,
    given_fields,
    is_searched,
    parse_bytes,
    plain_value,
    plan_text,
    read_mapping,
)

OptionValue = bool | int | float | str | tuple[float, ...] | None


def _option(group: str, default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group}, **limits)


class RunConfig(BaseModel):
    """The options of one run, however it is made: by keyword, `create`, `load` or `override`.

    All raise a ConfigError, or a PlanError for a plan that cannot be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    model: str = _option("Model", "phalanx-demo", "zoo name, HuggingFace folder or cached hub id", min_length=1)
    init: Literal["auto", "fresh"] = _option(
        "Model", "auto", "first weights: auto takes those stored with the model where there are some; fresh never"
    )
    task: str | None = _option("Model", None, "what the model learns, e.g. causal-lm (default: from the model)")
    tiny: bool = _option("Model", False, "shrink the model to test size, same structure")
    model_options: dict[str, OptionValue] = _option(
        "Model", {}, "value of the model's configuration to change, e.g. num_labels=5 (repeatable)"
    )
    dropout: float | None = _option("Model", None, "override every dropout probability of the model", ge=0, lt=1)
    freeze: tuple[str, ...] = _option("Model", (), "glob pattern of parameter names that are not trained (repeatable)")
    lora: str | None = _option(
        "Model", None, "train adapters instead of the model: r=16, also alpha=32, dropout=0.05, targets=q_proj+v_proj"
    )
    merge_lora: bool = _option("Model", False, "export the model with its adapters merged in, not the adapters alone")

    data: tuple[str, ...] = _option(
        "Data", ("stdlib",), "file, folder, hf:NAME, 'stdlib' or 'synthetic'; PATH:0.7 gives it a weight (repeatable)"
    )
    eval_data: tuple[str, ...] = _option("Data", (), "data to evaluate on (repeatable)")
    text_key: str = _option("Data", "text", "field of a JSONL record that holds the text", min_length=1)
    tokenizer: str | None = _option("Data", None, "tokenizer folder or 'bytes' (default: the model's, else bytes)")
    documents: bool = _option("Data", False, "respect document boundaries in attention and positions")
    on_broken: Literal["refuse", "skip"] = _option("Data", "refuse", "what to do with a data file that cannot be read")
    shuffle: bool = _option("Data", True, "visit samples in an order drawn from the seed")
    seq_len: int | None = _option(
        "Data", None, "tokens per sample (default: 1024, or as many as the model takes)", ge=1
    )
    batch_size: int = _option("Data", 8, "samples per step (the global batch)", ge=1)
    seq_len_at: tuple[str, ...] = _option(
        "Data", (), "STEP:TOKENS: another seq_len from this step on (repeatable); evaluation keeps seq_len"
    )
    batch_size_at: tuple[str, ...] = _option(
        "Data", (), "STEP:SAMPLES: another batch_size from this step on (repeatable)"
    )

    steps: int | None = _option("Training", None, "steps to train (instead of epochs)", ge=1)
    epochs: float | None = _option("Training", None, "passes over the data (default: 1, unless steps is given)", gt=0)
    plan: str = _option(
        "Training", AUTO,
        "auto: searched for these devices (auto,tp=2: beside what is given); simple: an even pipeline; or a plan as "
        "text, e.g. pp=2,mb=4, or a .json or .yaml file of it; what it leaves out is decided simply",
    )  # fmt: skip
    measure_top: int | None = _option(
        "Training", None, "run a few steps of so many of the best plans of plan=auto, and take the fastest", ge=2, le=16
    )
    plan_at: tuple[str, ...] = _option(
        "Training", (), "STEP:PLAN: another plan from this step on, without stopping (repeatable)"
    )
    ranks: int | None = _option(
        "Training", None, "local ranks to start (default: what the plan needs, else the CUDA devices, else 1)", ge=1
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = _option(
        "Training", "float32", "precision of training"
    )
    master_weights: bool = _option("Training", True, "keep float32 master weights when training in half precision")
    compile: Literal["auto", "off", "aot_eager", "inductor"] = _option("Training", "auto", "how segments are compiled")
    device: Literal["auto", "cpu", "cuda"] = _option("Training", "auto", "where to train")
    memory: str | None = _option(
        "Training", None, "most that a rank may hold, e.g. 16GiB; what needs more is refused (default: what is free)"
    )
    timeout: float = _option("Training", 600.0, "seconds a rank waits for another that lives and computes", gt=0)
    silence: float = _option(
        "Training", 15.0, "seconds without a sign of life in a step after which a rank counts as lost", gt=0
    )
    on_loss: Literal["stop", "shrink", "replace", "regrow"] = _option(
        "Training", "stop",
        "when a rank is lost: stop; shrink: the others go on with a plan for them; replace: with a new rank; regrow: "
        "shrink, and take a new rank in when it is ready",
    )  # fmt: skip
    min_ranks: int = _option("Training", 1, "when ranks are lost: with fewer left, the others wait for new ones", ge=1)
    mirror_every: Annotated[int, Field(ge=0)] | Literal["auto", "never"] = _option(
        "Training", "never",
        "steps between copies of the state in other ranks' memory, for on_loss (0: kept current by gradients; auto: at "
        "most 1 % of the time)",
    )  # fmt: skip
    seed: int = _option("Training", 0, "seed of initialisation, data order and dropout", ge=0, lt=2**63)
    deterministic: bool = _option(
        "Training", False,
        "the same bits whatever the plan, restarts and changes of plan included; not between tensor degrees or slices",
    )  # fmt: skip
    slot_size: int = _option("Training", 1, "with deterministic: samples of every micro-batch, whatever the plan", ge=1)
    clip: float | None = _option("Training", 1.0, "global gradient norm limit ('none': no clipping)", gt=0)
    early_stop: int | None = _option(
        "Training", None, "end the run after this many evaluations in a row without a lower eval loss", ge=1
    )
    max_nonfinite: int = _option(
        "Training", 10, "consecutive steps with non-finite gradients to skip before stopping", ge=0
    )

    spike_factor: float | None = _option(
        "Training", None, "skip the update of a step whose loss is this many times the median of recent ones", gt=1
    )
    on_spike: Literal["skip", "rollback"] = _option(
        "Training",
        "skip",
        "skip its update, or also go back to the newest checkpoint and leave its batches out",
    )

    optimizer: str = _option("Optimizer", "adamw", "adamw, sgd, muon or the dotted path of an optimizer class")
    optimizer_options: dict[str, OptionValue] = _option("Optimizer", {}, "further optimizer argument (repeatable)")
    lr: float = _option("Optimizer", 3e-4, "peak learning rate", gt=0)
    betas: tuple[float, float] = _option("Optimizer", (0.9, 0.95), "decay rates of AdamW's moments (adamw, muon)")
    eps: float = _option("Optimizer", 1e-8, "term that keeps AdamW's denominator above zero (adamw, muon)", gt=0)
    weight_decay: float = _option("Optimizer", 0.1, "decay of matrices; vectors are never decayed", ge=0)
    groups: tuple[str, ...] = _option(
        "Optimizer", (), "parameters updated in another way: PATTERN:lr=0.1,decay=0 or PATTERN:freeze (repeatable)"
    )
    lr_schedule: Literal["cosine", "linear", "constant"] = _option(
        "Optimizer", "cosine", "shape of the learning rate after warm-up"
    )
    warmup_steps: int = _option("Optimizer", 0, "steps in which the learning rate rises to its peak", ge=0)
    min_lr_ratio: float = _option("Optimizer", 0.1, "final over peak learning rate (cosine, linear)", ge=0, le=1)
    lr_steps: int | None = _option(
        "Optimizer", None, "steps in which the learning rate falls to its final value (default: all of the run's)", ge=1
    )

    out: str = _option("Run folder", "runs/run", "folder for log, checkpoints and the exported model", min_length=1)
    checkpoint_every: Annotated[int, Field(ge=0)] | Literal["never"] = _option(
        "Run folder", 0, "steps between checkpoints (0: only at the end; never: not even then)"
    )
    keep_checkpoints: int = _option("Run folder", 2, "how many checkpoints to keep", ge=1)
    keep_best: bool = _option(
        "Run folder",
        False,
        "save where the eval loss is the lowest so far, and keep that checkpoint as well",
    )
    resume: str = _option("Run folder", "never", "never, auto (newest checkpoint in out) or a checkpoint", min_length=1)
    export: bool = _option("Run folder", True, "write the trained model as a HuggingFace folder at the end")

    export_dcp: bool = _option(
        "Run folder", False, "also write the trained model as a torch.distributed.checkpoint folder, export-dcp"
    )
    remote: str | None = _option(
        "Run folder", None, "URL of remote storage (s3://bucket/run …) that checkpoints and export are copied to"
    )

    log_every: int = _option("Display", 10, "steps between plain lines", ge=1)
    eval_every: int = _option("Display", 0, "steps between evaluations (0: only at the end)", ge=0)
    eval_samples: int = _option("Display", 64, "samples per evaluation", ge=1)
    generate_every: int = _option("Display", 0, "steps between samples of what the model writes (0: none)", ge=0)
    generate_prompts: tuple[str, ...] = _option("Display", (), "text that the model is to continue (repeatable)")
    generate_tokens: int = _option("Display", 32, "most tokens that a sample has", ge=1)
    metrics: tuple[str, ...] = _option(
        "Display",
        (),
        "of evaluations besides loss and perplexity: accuracy, values (what the model returns) (repeatable)",
    )
    progress: Literal["auto", "rich", "plain", "off"] = _option("Display", "auto", "how progress is shown")
    report_to: tuple[str, ...] = _option(
        "Display",
        (),
        "tensorboard, wandb, wandb:PROJECT, trackio, mlflow, prometheus or prometheus:PORT (repeatable)",
    )
    json_output: bool = _option("Display", False, "print JSON lines on standard output instead")
    profile_steps: str | None = _option("Display", None, "A:B writes a torch.profiler trace of steps A to B (first: 1)")
    memory_snapshot: int | None = _option(
        "Display", None, "write CUDA's memory snapshot of this step to memory-step-N.pickle, on every rank", ge=1
    )
    timeline_step: int | None = _option(
        "Display", None, "write the measured timeline of this step to timeline.json (phalanx program --measured)", ge=1
    )

    @classmethod
    def create(cls, **options: Any) -> Self:
        """The same as the constructor, for options whose names are only known at run time."""
        return cls.model_validate(options)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, optimizer: str | None = None) -> Self:
        """Read a YAML or JSON file of options; what it leaves out keeps its default.

        `optimizer` stands before the file's, which may only name what needs no import: files come from other people.
        """
        try:
            content = read_mapping(Path(path))
            if optimizer is None:
                require_no_import(content.get("optimizer"))
            return cls.model_validate(content if optimizer is None else {**content, "optimizer": optimizer})
        except PhalanxError as error:
            raise type(error)(f"{os.fspath(path)}: {error.message}", error.hint) from None

    def override(self, **options: Any) -> Self:
        """A copy with these options replaced. Giving steps drops epochs and the other way round."""
        current = self.model_dump()
        if ("steps" in options) != ("epochs" in options):
            current["epochs" if "steps" in options else "steps"] = None
        return type(self).model_validate({**current, **options})

    def to_yaml(self) -> str:
        """Every option, in the order of definition; `load` reads it back to an equal RunConfig."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, options: Any, validate: Callable[[Any], Self]) -> Self:
        # Not a ValueError, so pydantic lets it through: every way to make a RunConfig fails with our words.
        try:
            return validate(options)
        except ValidationError as error:
            raise explain(error, cls.model_fields) from None

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, options: Any) -> Any:
        if not isinstance(options, dict):
            return options
        given = cast(dict[str, Any], options)
        no_length = given.get("steps") is None and given.get("epochs") is None
        return {**given, "epochs": 1.0} if no_length else given

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept what people write: a path object for a text, the word none for None; but no true for 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind is not bool:
            raise ValueError("must not be true or false")
        if isinstance(value, str) and value.lower() == "none" and type(None) in get_args(kind):
            return None
        return str(value) if isinstance(value, Path) else value

    @field_validator(
        "data", "eval_data", "freeze", "groups", "metrics", "generate_prompts", "report_to", "plan_at", "batch_size_at",
        "seq_len_at", mode="before",
    )  # fmt: skip
    @classmethod
    def _one_is_enough(cls, value: Any) -> Any:
        if isinstance(value, str | Path):
            return (str(value),)
        if isinstance(value, list | tuple):
            return tuple(str(v) if isinstance(v, Path) else v for v in cast(Sequence[Any], value))
        return value

    @field_validator("optimizer_options", "model_options", mode="before")
    @classmethod
    def _texts_are_values(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: plain_value(v) for name, v in cast(dict[Any, Any], value).items()}

    @field_validator("plan", mode="before")
    @classmethod
    def _plan_as_text(cls, value: Any) -> Any:
        """Checks how the plan is written; whether it suits the model and the ranks is known later."""
        if isinstance(value, Plan):
            return value.full_text
        if isinstance(value, str | Path):
            value = "" if str(value) == SIMPLE else plan_text(value)
            if is_searched(value):
                require_searchable(plan_fields.read(given_fields(value)))
            else:
                plan_fields.read(value)
        return value

    @property
    def periods(self) -> Periods:
        """Which plan, batch size and sample length hold from which step on."""
        return Periods.of(
            self.given_plan, self.batch_size, self.seq_len, self.plan_at, self.batch_size_at, self.seq_len_at
        )  # fmt: skip

    @property
    def searches_plan(self) -> bool:
        """Whether what the plan leaves open is searched; otherwise it is decided simply (`plan/complete.py`)."""
        return is_searched(self.plan)

    @property
    def given_plan(self) -> str:
        """The fields of the plan that the user gave."""
        return given_fields(self.plan)

    @property
    def slot(self) -> int | None:
        """Samples that are computed together under every plan; None where that may differ."""
        return self.slot_size if self.deterministic else None

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes("memory", self.memory)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        require_together(self)
        return self


def cache_folder() -> Path:
    """Where captures, token streams and measurements are kept between runs: $PHALANX_CACHE, else the user's cache."""
    if chosen := os.environ.get("PHALANX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "phalanx"
