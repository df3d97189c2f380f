"""From an `nn.Module` to one flat graph with the loss inside, by torch.export with dynamic batch and sequence.

The module's parameters may be on the meta device. Nothing here knows blocks or plans.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

import phalanx
from phalanx.errors import CaptureError, DataError
from phalanx.expressions import evaluate
from phalanx.model.graph import hooks
from phalanx.model.graph.functionalise import FlatGraph
from phalanx.model.graph.normalise import normalise
from phalanx.model.reference import default_dtype, loss_of
from phalanx.model.weights.weights import tied_names
from phalanx.tasks.base import Input

# Pairwise different, and different from sizes that models use: the exporter identifies dims that look alike.
_EXAMPLE_SIZES = {"batch": 5, "tokens": 37, "source": 43}


_NOT_THE_MODEL = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, phalanx.__file__)) + ("<",)
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _WithLoss(nn.Module):
    """The model as a function of one dict of inputs to its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        inputs = dict(inputs)
        with hooks.documents(inputs.pop("document_ids", None), own_positions="position_ids" in inputs):
            return loss_of(self.model(**inputs))


def export(model: nn.Module, inputs: Sequence[Input], dtype: torch.dtype) -> FlatGraph:
    """The flat, normalised graph of `model` called with `inputs`. Parameters and buffers keep their names."""
    _require_arguments(model, [spec.name for spec in inputs])
    with hooks.unmade_masks() as unmade:
        try:
            flat = _exported(model, inputs, dtype)
            if not hooks.uses_unmade_mask(flat.graph):
                return flat
        except CaptureError:
            if not unmade:
                raise
    return _exported(model, inputs, dtype)


def _exported(model: nn.Module, inputs: Sequence[Input], dtype: torch.dtype) -> FlatGraph:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    examples = {spec.name: _fake(mode, _example(spec, dtype)) for spec in inputs}
    dynamic = {
        spec.name: {i: torch.export.Dim.DYNAMIC for i, dim in enumerate(spec.dims) if isinstance(dim, str)}
        for spec in inputs
    }
    patches = (
        _no_layerdrop(), _no_fixed_sizes(), default_dtype(dtype), hooks.own_attention_methods(model),
        hooks.experts_of_any_dtype(), hooks.no_checkpointing(), hooks.means_of_class_probabilities(),
        hooks.masks_are_not_looked_at(),
    )  # fmt: skip
    with _quiet(), _fake_state(model, mode), contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            program = torch.export.export(_WithLoss(model), (examples,), strict=False, dynamic_shapes=(dynamic,))
        except CaptureError:
            raise
        except Exception as error:
            raise _explain(error, inputs) from error
    flat = _flatten(program, inputs)
    flat.conditions = _conditions(flat)
    _merge_tied(flat, tied_names(model))
    normalise(flat, dtype)
    return flat


def _require_arguments(model: nn.Module, names: Sequence[str]) -> None:
    """The inputs must be what the model is called with; inside the exporter a wrong name would look like its fault."""
    given = [name for name in names if name != "document_ids"]  # goes to the attention, not to the model
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError:
        wanted = [name for name, argument in signature.parameters.items() if argument.kind not in _MANY]
        raise DataError(
            f"the samples hold {', '.join(given)}, but forward of {type(model).__name__} takes {', '.join(wanted)}",
            "name what the samples hold, in the dataset or in collate, as forward names its arguments",
        ) from None


def _example(spec: Input, dtype: torch.dtype) -> Tensor:
    shape = [_EXAMPLE_SIZES[dim] if isinstance(dim, str) else dim for dim in spec.dims]
    return torch.empty(shape, dtype=torch.int64 if spec.dtype == "int64" else dtype, device="meta")


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Shape and dtype without storage. It claims to be on the CPU, so that constants which a model makes on its inputs'
    device keep their values; on the meta device they would lose them."""
    return FakeTensor(mode, torch.empty_like(tensor, device="meta", requires_grad=False), torch.device("cpu"))


@contextlib.contextmanager
def _fake_state(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Within, parameters and buffers have no storage."""
    tables: list[Any] = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    places: list[tuple[dict[str, Tensor], str, Tensor]] = [
        (table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None
    ]
    fakes: dict[Tensor, Tensor] = {}  # tied tensors stay tied
    for table, name, tensor in places:
        if tensor not in fakes:
            fake = _fake(mode, tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[tensor] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        table[name] = fakes[tensor]
    try:
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor


def _flatten(program: torch.export.ExportedProgram, inputs: Sequence[Input]) -> FlatGraph:
    signature = program.graph_signature
    roles: dict[torch.fx.Node, tuple[str, str]] = {}
    symbols: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    users = iter(inputs)
    for module in program.graph_module.modules():
        for node in module.graph.nodes:  # pyright: ignore
            node.meta["path"] = _path(node)
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        if name := signature.inputs_to_parameters.get(node.name):
            roles[node] = ("parameter", name.removeprefix("model."))
        elif name := signature.inputs_to_buffers.get(node.name):
            roles[node] = ("buffer", name.removeprefix("model."))
        elif name := signature.inputs_to_lifted_tensor_constants.get(node.name):
            value = program.constants[name]
            assert isinstance(value, Tensor), f"{name} is a constant that is no tensor"
            if isinstance(value, FakeTensor):
                raise CaptureError(
                    "forward uses a tensor that a graph of it cannot hold: a gradient that it computes by itself "
                    "(torch.autograd.grad), one that it puts in .data, or one that it keeps from elsewhere",
                    "write such a derivative out, and keep tensors as parameters or buffers",
                )
            roles[node] = ("constant", _constant_name(value))
            constants[_constant_name(value)] = value
        else:
            spec = next(users)
            roles[node] = ("input", spec.name)
            _learn_symbols(node, spec, symbols)
    return FlatGraph(program.graph, roles, symbols, constants)


def _conditions(flat: FlatGraph) -> tuple[str, ...]:
    """What the exporter took for granted about the number of samples, mostly because a branch was taken."""
    samples = {symbol for symbol, dim in flat.symbols.items() if dim == "batch"}
    values = [node.meta["val"] for node, (kind, _) in flat.roles.items() if kind == "input"]
    sizes = [size for value in values for size in value.shape if isinstance(size, torch.SymInt)]
    found = []
    for guard in sizes[0].node.shape_env.guards if sizes else ():
        symbols = {str(symbol): symbol for symbol in guard.expr.free_symbols}
        if symbols and set(symbols) <= samples:
            text = str(guard.expr.subs({symbol: "batch" for symbol in symbols.values()}))
            with contextlib.suppress(NameError, AssertionError):  # one that is no arithmetic cannot be asked again
                evaluate(text, {"batch": _EXAMPLE_SIZES["batch"]})
                found.append(text)
    return tuple(dict.fromkeys(found))


def _merge_tied(flat: FlatGraph, aliases: dict[str, str]) -> None:
    """One placeholder per parameter, under its canonical name."""
    first: dict[str, torch.fx.Node] = {}
    for node, (kind, name) in list(flat.roles.items()):
        if kind != "parameter":
            continue
        canonical = aliases.get(name, name)
        flat.roles[node] = ("parameter", canonical)
        if first.setdefault(canonical, node) is not node:
            node.replace_all_uses_with(first[canonical])


def _constant_name(value: Tensor) -> str:
    """Equal constants get equal names, so that layers which carry their own copies still share a template's ports."""
    content = f"{value.dtype} {tuple(value.shape)} {value.flatten().tolist()}"
    return f"constant-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"


def _learn_symbols(node: torch.fx.Node, spec: Input, symbols: dict[str, str]) -> None:
    for axis, (size, dim) in enumerate(zip(node.meta["val"].shape, spec.dims, strict=True)):
        if not isinstance(dim, str):
            continue
        if not isinstance(size, torch.SymInt):
            raise _only_works_for(spec, axis, size)
        symbols.setdefault(str(size.node.expr), dim)


def _path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"@\d+", "", path)  # the exporter marks repeated calls of one module
    return path.removeprefix("model").removeprefix(".")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs whole graphs when it fails; our error names the place instead."""
    names = ("torch.export", "torch.fx", "torch._export", "torch", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _no_layerdrop() -> Iterator[None]:
    """transformers' layerdrop branches on `torch.rand([])`; with layerdrop 0 no branch is taken, whatever is drawn."""
    original = torch.rand

    def rand(*size: Any, **options: Any) -> Any:
        in_transformers = sys._getframe(1).f_globals.get("__name__", "").startswith("transformers.")
        return 1.0 if in_transformers and size in (([],), ((),)) else original(*size, **options)

    torch.rand = rand
    try:
        yield
    finally:
        torch.rand = original


@contextlib.contextmanager
def _no_fixed_sizes() -> Iterator[None]:
    """A model that makes a Python number of a dynamic size, as a loop over tokens does, is refused there and then: it
    would be read for one size only, after as many turns of the loop."""
    original = torch.SymInt.__index__

    def index(size: torch.SymInt) -> int:
        frame = sys._getframe(1)
        file, node = frame.f_code.co_filename, size.node
        if file.startswith(_NOT_THE_MODEL) or node.expr.is_number or not node.has_hint():
            return original(size)
        dim = next((dim for dim, example in _EXAMPLE_SIZES.items() if example == node.hint), "a dynamic size")
        raise CaptureError(
            f"the model makes a Python number of {dim}, as a loop over {dim} does "
            f"({file}, line {frame.f_lineno}, in {frame.f_code.co_name})",
            "a graph for any number of them cannot hold such a loop; write it with tensor operators, or choose another "
            "architecture",
        )

    torch.SymInt.__index__ = torch.SymInt.__int__ = index  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.SymInt.__index__ = torch.SymInt.__int__ = original


class NotReadable(CaptureError):
    """The exporter failed: perhaps because of the model's code, perhaps because layers were left out."""


def _explain(error: Exception, inputs: Sequence[Input]) -> CaptureError:
    """The module line that stopped the export, without the exporter's pages of context."""
    text = str(error)
    fixed = re.search(r"L\['inputs'\]\['(\w+)'\]\.size\(\)\[(\d+)\].* to be a constant \((\d+)\)", text)
    if fixed is not None:
        name, axis, size = fixed.groups()
        return _only_works_for(next(spec for spec in inputs if spec.name == name), int(axis), size)
    reason = _by_values(error) or _by_moving(text) or (text.strip().splitlines() or [type(error).__name__])[0]
    return NotReadable(
        f"the model cannot be read as a graph: {reason}\n  at {_place(error) or 'an unknown place'}", _next_step(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """What stopped the export, and what caused that."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _by_values(error: BaseException) -> str:
    """What needs the values of tensors, empty where nothing does."""
    for each in _chain(error):
        if isinstance(each, GuardOnDataDependentSymNode):
            return "a branch or a size in it depends on the values of a tensor"
        if isinstance(each, DataDependentOutputException | DynamicOutputShapeException):
            return f"{each.func} needs the values of a tensor"
    return ""


def _by_moving(text: str) -> str:
    """torch's words for it name nothing that a user wrote."""
    moved = re.search(r"Couldn't swap ([\w.]+)", text)
    return f"forward moves {moved[1]} to another dtype or device, as module.to does" if moved else ""


def _next_step(error: BaseException) -> str:
    if _by_values(error) or any(".numpy()" in str(each) for each in _chain(error)):
        return "make that line independent of tensor values (no .item(), no branches on data), or replace the module"
    return "call the module with a batch of your data to see whether that line works; if so, write it in another way"


def _place(error: Exception) -> str:
    """The innermost line that belongs neither to torch nor to us."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(.*)', str(error))
    frames = [frame for frame in frames if not frame[0].startswith(_NOT_THE_MODEL)] or frames
    if frames:
        file, line, function, code = frames[-1]
        return f"{file}, line {line}, in {function}: {code.strip()}"
    traceback, place = error.__traceback__, ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_NOT_THE_MODEL):
            place = f"{code.co_filename}, line {traceback.tb_lineno}, in {code.co_name}"
        traceback = traceback.tb_next
    return place


def _only_works_for(spec: Input, axis: int, size: object) -> CaptureError:
    dim = spec.dims[axis]
    return CaptureError(
        f"the model only works for {dim} = {size} (input '{spec.name}')",
        f"look for code that fixes the {dim} dimension, for example a reshape with a constant",
    )
