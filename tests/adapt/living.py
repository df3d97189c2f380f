"""How many bytes of tensors live at once while something runs, as the storages say that operators make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Living(TorchDispatchMode):
    """before: tensors that there are. Views of one storage count once, and what no operator made does not count."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in before:
            self._see(tensor)
        self.most = self.now

    @property
    def now(self) -> int:
        self._known = {key: own for key, own in self._known.items() if not own[0].expired()}
        return sum(size for _, size in self._known.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and not isinstance(each, FakeTensor) and each.device.type != "meta":
                self._see(each)
        self.most = max(self.most, self.now)
        return found

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0].expired():
            self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
