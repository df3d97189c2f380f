"""Records what operators do to tensors on the meta device, as a graph: several times quicker than torch's own tracer on
fake tensors, and node by node the same. It knows the plain case: static shapes, one device, which is the CPU (on which
operators look on the meta device as they do there), no operator that changes its arguments, no constants. Everything
else is told apart, and left to torch's tracer (`joint.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_META, _CPU = torch.device("meta"), torch.device("cpu")


class NotPlain(Exception):
    """Something that is left to torch's own tracer."""


class Recorder(TorchDispatchMode):
    """Within it every operator becomes a node. Tensors that operators are given must have come from `placeholder` or
    from an operator before."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._values: dict[fx.Node, Any] = {}
        # Of the tensors given, by its identity, so that it must live on; and what stands for it on the meta device.
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def placeholder(self, name: str, tensor: Tensor, wants_gradient: bool = False) -> Tensor:
        """What stands for a tensor: it looks the same, and shares memory with the others that do."""
        if tensor.device.type not in ("cpu", "meta") or tensor.layout is not torch.strided:
            raise NotPlain(f"a tensor on {tensor.device}")
        memory = tensor.untyped_storage()
        if memory._cdata not in self._memory:
            self._memory[memory._cdata] = memory, torch.UntypedStorage(memory.nbytes(), device="meta")
        own = torch.empty(0, dtype=tensor.dtype, device=_META)
        own.set_(self._memory[memory._cdata][1], tensor.storage_offset(), tensor.shape, tensor.stride())
        self._note(own, self.graph.placeholder(name))
        return own.requires_grad_(wants_gradient)

    def node(self, tensor: Tensor) -> fx.Node:
        found = self._nodes.get(id(tensor))
        if found is None:
            raise NotPlain("a tensor that nothing here has made")
        return found

    def describe(self, mode: FakeTensorMode) -> None:
        """Gives every node its value, without contents."""
        with torch.no_grad():
            for node, value in self._values.items():
                node.meta["val"] = _fake(mode, value)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if _is_special(func):
            raise NotPlain(str(func))
        taken, named = self._taken(args), {name: self._taken(value) for name, value in given.items()}
        if (device := given.get("device")) is not None:
            if torch.device(device).type not in ("cpu", "meta"):
                raise NotPlain(f"{func} on {device}")
            given, named["device"] = {**given, "device": _META}, _CPU
        try:
            out = func(*args, **given)
        except Exception as error:  # a kernel that the meta device has not, for example
            raise NotPlain(f"{func}: {error}") from error
        name = func.overloadpacket.__name__
        self._put(self.graph.create_node("call_function", func, taken, named, name=name), out)
        return out

    def _taken(self, value: Any) -> Any:
        """The same with nodes for tensors."""
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, list | tuple):
            return type(value)(self._taken(part) for part in value)
        return value

    def _put(self, node: fx.Node, out: Any) -> None:
        if isinstance(out, Tensor):
            self._note(out, node)
        elif isinstance(out, list | tuple):
            self._values[node] = out
            for place, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._note(part, self.graph.call_function(operator.getitem, (node, place)))
        else:
            raise NotPlain(f"{node.target} gives a {type(out).__name__}")

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        if tensor.device != _META:
            raise NotPlain(f"{node.target} on {tensor.device}")
        self._nodes[id(tensor)] = node
        self._values[node] = tensor  # which must live on, as it is known by its identity


@cache
def _is_special(func: OpOverload) -> bool:
    """Changes what it is given, answers by contents, or is made of other operators because a CPU has it not."""
    key = torch._C.DispatchKey
    made_of_others = func.has_kernel_for_dispatch_key(key.CompositeImplicitAutograd) and not (
        func.has_kernel_for_dispatch_key(key.CPU)
    )
    return func._schema.is_mutable or made_of_others or torch.Tag.data_dependent_output in func.tags


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, Tensor):
        return FakeTensor(mode, value.detach(), _CPU)
    return type(value)(_fake(mode, part) for part in value) if isinstance(value, list | tuple) else value
