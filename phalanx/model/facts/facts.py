"""What planning needs to know about a model, as plain data: blocks, units, parameters, FLOPs, bytes, crossing shapes.

Importing it loads neither torch nor transformers, and the facts of every zoo model are shipped, so that a 70B model can
be reasoned about in milliseconds. `engine/measure.py` computes facts from a capture; how long anything takes is not
known here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from phalanx.expressions import evaluate
from phalanx.model.zoo import zoo_table

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
FIRST = (
    "bfloat16"  # the precision that most large models are trained in: of it everything that is shipped is plain text
)
SHIPPED = Path(__file__).parent / "facts_data"

Dims = Mapping[str, int]  # sizes of "batch", "tokens", "source": those that `ModelFacts.dims` names


@dataclass(frozen=True)
class TensorFacts:
    """A tensor that is sent when the model is cut here. `shape` holds numbers and expressions over the dims."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str

    def sizes(self, dims: Dims) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else evaluate(size, dims) for size in self.shape)

    def bytes(self, dims: Dims) -> int:
        return prod(self.sizes(dims)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class UnitFacts:
    """A unit of a block: elements of the parameters it uses first, and its forward FLOPs as an expression."""

    name: str  # "" in blocks that are not layers
    parameters: int
    flops: str


@dataclass(frozen=True)
class SharedFacts:
    """A tensor kept for the backward pass that other blocks may keep as well (their output, a mask, rotary tables)."""

    name: str
    bytes: str


@dataclass(frozen=True)
class BlockFacts:
    """A block. Blocks with the same `template` compute the same function; it is the name of the first of them.

    saved_bytes: everything the forward pass keeps for the backward pass when nothing is recomputed, each storage once,
    parameters and buffers never. `shared` is the part of it that a stage of several blocks holds only once.
    """

    name: str
    template: str
    units: tuple[UnitFacts, ...]
    crossing: tuple[TensorFacts, ...]  # alive after this block
    saved_bytes: str
    shared: tuple[SharedFacts, ...]

    @property
    def parameters(self) -> int:
        """Elements of all parameters the block uses; a tied one counts in every block that uses it."""
        return sum(unit.parameters for unit in self.units)

    @property
    def flops(self) -> str:
        """Forward FLOPs, as an expression."""
        return " + ".join(unit.flops for unit in self.units if unit.flops != "0") or "0"


@dataclass(frozen=True)
class TiedFacts:
    """A parameter that several blocks use, so that its gradients are added up between the stages that hold them."""

    name: str
    parameters: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class ModelFacts:
    """A whole model, trained for `task` with weights and activations in `dtype`."""

    name: str
    task: str
    dtype: str
    dims: tuple[str, ...]  # the dynamic dims its expressions are about
    max_tokens: int | None  # the longest sequence its positions allow; None: no limit
    num_parameters: int  # tied ones once
    blocks: tuple[BlockFacts, ...]
    tied: tuple[TiedFacts, ...]
    notes: tuple[str, ...]  # what could not be captured the fast way

    @property
    def parameter_bytes(self) -> int:
        return self.num_parameters * DTYPE_BYTES[self.dtype]

    def flops(self, dims: Dims, training: bool = True) -> int:
        """FLOPs of one batch: forward, and with `training` the backward pass, which computes twice as much again."""
        forward = sum(evaluate(block.flops, dims) for block in self.blocks)
        return 3 * forward if training else forward

    def saved_bytes(self, dims: Dims, blocks: Sequence[BlockFacts] | None = None) -> int:
        """What one batch keeps between forward and backward on a rank that holds these blocks (default: all)."""
        chosen = self.blocks if blocks is None else blocks
        own = sum(evaluate(block.saved_bytes, dims) for block in chosen)
        shared = [(tensor.name, evaluate(tensor.bytes, dims)) for block in chosen for tensor in block.shared]
        return own - sum(size for _, size in shared) + sum(dict(shared).values())

    def tokens_per_sample(self, dims: Dims) -> int:
        """Tokens that one sample is made of, source and target together; 1 for models without a token dim."""
        return sum(dims[dim] for dim in self.dims if dim != "batch") or 1


def load(name: str, dtype: str = FIRST) -> ModelFacts | None:
    """The shipped facts of a zoo model, by any name the zoo knows it; None when there are none of this precision."""
    entry = zoo_table.lookup(name)
    text = None if entry is None else shipped_text(entry.name, dtype)
    return None if text is None else from_json(text)


_HEADS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
_USUAL_HEADS = {"bert": 12, "vit": 12, "t5": 8}  # where a configuration leaves them at their default


def fewest_heads(name: str) -> int:
    """Of a zoo model: the most ranks that its attention can be split over, keys and values too; 0 where unknown."""
    entry = zoo_table.lookup(name)
    if entry is None:
        return 0
    return heads_of(entry.fields.get, entry.model_type)


def heads_of(field: Callable[[str], object], model_type: str = "") -> int:
    """The same of a configuration. field: its value of a name, None where it has none."""
    given = [value for key in _HEADS if isinstance(value := field(key), int)]
    return min(given, default=_USUAL_HEADS.get(model_type, 0))


def shipped_path(name: str, dtype: str = FIRST, folder: str = "") -> Path:
    """Where the facts of the zoo model of exactly this name are, if they have a file of their own. folder: "splits" for
    those of `predict/split_facts.py`."""
    stem = name.replace("/", "--")
    return SHIPPED / folder / (f"{stem}.json" if dtype == FIRST else f"{dtype}/{stem}.json.gz")


def shipped_text(name: str, dtype: str, folder: str = "") -> str | None:
    """What is in that file. A model that has none of a precision as wide as the first does the same in both: dtypes
    alone differ. One of another width keeps what it casts, or does not, and that cannot be told from sums of bytes."""
    if shipped_path(name, dtype).is_file() or dtype == FIRST:
        path = shipped_path(name, dtype, folder)
        return read_text(path) if path.is_file() else None
    is_alike = DTYPE_BYTES.get(dtype) == DTYPE_BYTES[FIRST]
    first = shipped_text(name, FIRST, folder) if is_alike else None
    return None if first is None else first.replace(FIRST, dtype)


def read_text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def write_text(path: Path, text: str) -> None:
    """The same text gives the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def runs(blocks: Iterable[BlockFacts]) -> list[list[BlockFacts]]:
    """Consecutive blocks that do and cost the same, together."""
    found: list[list[BlockFacts]] = []
    for block in blocks:
        if found and _same(found[-1][-1], block):
            found[-1].append(block)
        else:
            found.append([block])
    return found


def _same(one: BlockFacts, other: BlockFacts) -> bool:
    def cost(block: BlockFacts) -> tuple[object, ...]:
        crossing = [(tensor.shape, tensor.dtype) for tensor in block.crossing]
        return block.template, block.units, crossing, block.saved_bytes, [shared.bytes for shared in block.shared]

    return cost(one) == cost(other)


def to_json(facts: ModelFacts) -> str:
    """The same facts give the same text.

    Blocks that differ in name only share one entry of "kinds", in which the names of tensors are relative: "{block}:0"
    is an output of the block itself, "{before}:0" one of the block before it.
    """
    kinds: list[dict[str, Any]] = []
    blocks: dict[str, int] = {}
    before = ""
    for block in facts.blocks:
        kind = _kind(block, before)
        if kind not in kinds:
            kinds.append(kind)
        blocks[block.name] = kinds.index(kind)
        before = block.name
    data = {
        "name": facts.name,
        "task": facts.task,
        "dtype": facts.dtype,
        "dims": facts.dims,
        "max_tokens": facts.max_tokens,
        "num_parameters": facts.num_parameters,
        "tied": [{"name": t.name, "parameters": t.parameters, "blocks": t.blocks} for t in facts.tied],
        "notes": facts.notes,
        "kinds": kinds,
        "blocks": blocks,
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> ModelFacts:
    data = json.loads(text)
    names = list(data["blocks"])
    blocks = tuple(
        _block(name, before, data["kinds"][data["blocks"][name]])
        for before, name in zip(["", *names], names, strict=False)
    )
    tied = tuple(TiedFacts(row["name"], row["parameters"], tuple(row["blocks"])) for row in data["tied"])
    return ModelFacts(
        data["name"], data["task"], data["dtype"], tuple(data["dims"]), data["max_tokens"], data["num_parameters"],
        blocks, tied, tuple(data["notes"]),
    )  # fmt: skip


def _kind(block: BlockFacts, before: str) -> dict[str, Any]:
    def relative(name: str) -> str:
        owner, colon, output = name.rpartition(":")
        word = {block.name: "{block}", before: "{before}"}.get(owner, owner) if owner else ""
        return f"{word}{colon}{output}"

    return {
        "template": block.template,
        "units": {unit.name: {"parameters": unit.parameters, "flops": unit.flops} for unit in block.units},
        "crossing": {relative(t.name): f"{t.dtype}[{', '.join(map(str, t.shape))}]" for t in block.crossing},
        "saved_bytes": block.saved_bytes,
        "shared": {relative(shared.name): shared.bytes for shared in block.shared},
    }


def _block(name: str, before: str, kind: dict[str, Any]) -> BlockFacts:
    def absolute(tensor: str) -> str:
        return tensor.replace("{block}:", f"{name}:").replace("{before}:", f"{before}:")

    return BlockFacts(
        name,
        kind["template"],
        tuple(UnitFacts(unit, row["parameters"], row["flops"]) for unit, row in kind["units"].items()),
        tuple(_tensor(absolute(activation), text) for activation, text in kind["crossing"].items()),
        kind["saved_bytes"],
        tuple(SharedFacts(absolute(shared), size) for shared, size in kind["shared"].items()),
    )


def _tensor(name: str, text: str) -> TensorFacts:
    """From 'bfloat16[batch, tokens, 8192]'."""
    dtype, _, sizes = text.rstrip("]").partition("[")
    shape = tuple(int(size) if size.isdigit() else size for size in sizes.split(", ") if size)
    return TensorFacts(name, shape, dtype)
