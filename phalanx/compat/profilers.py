"""Optimus-Megatron's three profilers: what the hardware is, what a model asks for, what a dataset holds.

Each has `profile()`, which gives plain data; planning takes `cluster` and `work` from them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import tasks
from phalanx.engine.describe import describe
from phalanx.engine.measure import measure
from phalanx.errors import ConfigError, DataError
from phalanx.launch.join import find_place
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.facts.facts import ModelFacts, load
from phalanx.model.zoo.zoo import ModelSpec, resolve
from phalanx.planning import devices
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.devices import Figure
from phalanx.planning.work import ModelWork
from phalanx.predict.work_of_facts import work_of_facts

_SIDE, _COPIED = 512, 1 << 24  # of a product, elements of a copy: what a processor is measured with
_ROUNDS = 3
_MOST_LOOKED_AT = 1000
SEQ_LEN = 128  # tokens a sample, where no data says


class HardwareProfiler:
    """cluster: in words ("2x8 A100"), where it is not this machine that is planned for."""

    def __init__(self, cluster: str | Cluster | None = None) -> None:
        self._given = cluster

    @cached_property
    def cluster(self) -> Cluster:
        if self._given is not None:
            return Cluster.read(self._given) if isinstance(self._given, str) else self._given
        place = find_place(os.environ)
        if torch.cuda.is_available():
            count = place.world if place is not None else torch.cuda.device_count()
            per_node = min(count, torch.cuda.device_count())
            name = _known_name(torch.cuda.get_device_name(0))
            return Cluster.read(f"{-(-count // per_node)}x{per_node} {name}")
        return _processors(place.world if place is not None else 1)

    def profile(self) -> dict[str, Any]:
        """Devices, memory, and what connects them."""
        kinds = self.cluster.nodes
        return {
            "num_devices": self.cluster.world,
            "num_nodes": self.cluster.num_nodes,
            "devices": [kind.device.name for kind in kinds],
            "memory_bytes": [kind.memory for kind in kinds],
            "flops_per_second": [kind.device.flops.value for kind in kinds],
            "interconnect": [kind.device.link_name for kind in kinds],
            "link_bytes_per_second": [kind.link for kind in kinds],
            "network_bytes_per_second": [kind.network for kind in kinds],
            "known_by": [kind.device.flops.known for kind in kinds],
        }


class ModelProfiler:
    """model: a HuggingFace model, or what names one: of some zoo models all is known without reading them. seq_len:
    tokens of a sample. dtype: precision of training, of a model that is read."""

    def __init__(self, model: nn.Module | str, seq_len: int = SEQ_LEN, dtype: str = "float32") -> None:
        self.model, self._seq_len, self._dtype = model, seq_len, dtype

    @cached_property
    def _read(self) -> tuple[ModelSpec, Captured]:
        spec = resolve(self.model)
        if spec.task == "custom":
            raise ConfigError(
                f"ModelProfiler: nothing is known of the inputs of {type(self.model).__name__}",
                "give one of HuggingFace's models, or plan with phalanx plan for a shape like it",
            )
        return spec, capture(spec, tasks.get(spec.task).inputs(spec.config), dtype=getattr(torch, self._dtype))

    @cached_property
    def _shipped(self) -> ModelFacts | None:
        return load(self.model) if isinstance(self.model, str) else None

    @cached_property
    def facts(self) -> ModelFacts:
        return self._shipped or measure(*self._read, getattr(torch, self._dtype))

    @cached_property
    def work(self) -> ModelWork:
        """What planning needs to know."""
        tokens = min(self._seq_len, self.facts.max_tokens or self._seq_len)
        dims = {dim: 1 if dim == "batch" else tokens for dim in self.facts.dims}
        if self._shipped is not None:
            return work_of_facts(self.facts, dims)
        return work_of_facts(self.facts, dims, lambda plan: describe(self._read[1], plan, self._dtype, "cpu"))

    def profile(self) -> dict[str, Any]:
        """Parameters, and of every block what it computes and keeps for one sample."""
        blocks = [self.work.block(index) for index in range(len(self.work.blocks))]
        return {
            "num_parameters": self.work.num_parameters,
            "num_layers": len(self.work.layers),
            "flops_per_sample": self.work.flops,
            "blocks": [
                {
                    "name": facts.name, "parameters": block.parameters, "flops": block.products + block.attention,
                    "kept_bytes": block.kept["none"].alone, "sent_bytes": block.crossing,
                }
                for facts, block in zip(self.facts.blocks, blocks, strict=True)
            ],
        }  # fmt: skip

    def layers_for_tensor_parallelism(self) -> list[str]:
        """The blocks that can be split, those that compute most first."""
        found = [(self.work.block(index), self.facts.blocks[index].name) for index in self.work.layers]
        return [name for block, name in sorted(found, key=lambda each: -(each[0].products + each[0].attention))]

    def layers_for_pipeline_cuts(self) -> list[str]:
        """The blocks after which least is sent, the first of them first."""
        last = len(self.work.blocks) - 1
        order = sorted(range(last), key=lambda index: (self.work.block(index).crossing, index))
        return [self.facts.blocks[index].name for index in order]


class DatasetProfiler:
    """dataset: anything with a length whose samples are mappings, tensors or pairs."""

    def __init__(self, dataset: Any, batch_size: int | None = None) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def profile(self) -> dict[str, Any]:
        """Its size, the lengths of its samples, and how many batches it makes."""
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise DataError(
                f"DatasetProfiler: a {type(self.dataset).__name__} has no length or no numbered samples",
                "give a dataset with __len__ and __getitem__",
            )
        size = len(self.dataset)
        if size == 0:
            raise DataError("DatasetProfiler: the dataset is empty", "give one with samples")
        step = max(1, size // _MOST_LOOKED_AT)
        lengths = [_length(self.dataset[index]) for index in range(0, size, step)]
        found: dict[str, Any] = {
            "num_samples": size, "fields": _fields(self.dataset[0]), "min_length": min(lengths),
            "mean_length": statistics.fmean(lengths), "max_length": max(lengths),
        }  # fmt: skip
        if self.batch_size is not None:
            found |= {"batch_size": self.batch_size, "batches_per_epoch": -(-size // self.batch_size)}
        return found


def _first(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return sample.get("input_ids", next(iter(sample.values()), 0))
    return sample[0] if isinstance(sample, tuple | list) and sample and isinstance(sample[0], Tensor) else sample


def _length(sample: Any) -> int:
    value = _first(sample)
    if isinstance(value, Tensor):
        return value.shape[-1] if value.dim() else 1
    return len(value) if hasattr(value, "__len__") else 1


def _fields(sample: Any) -> list[str]:
    return [str(name) for name in sample] if isinstance(sample, Mapping) else [type(sample).__name__]


def _known_name(reported: str) -> str:
    """Of a GPU as its driver calls it ("NVIDIA A100-SXM4-80GB"), the one that is in the table."""
    words = reported.upper().replace("-", " ").split()
    spelled = sorted(devices.DEVICES, key=len, reverse=True)
    for name in spelled:
        if set(name.upper().replace("-", " ").split()) <= set(words):
            return name
    raise ConfigError(
        f"HardwareProfiler: nothing is known of the device {reported!r}",
        f"describe the cluster: HardwareProfiler('8 A100'); known are {', '.join(devices.DEVICES)}",
    )


def _processors(count: int) -> Cluster:
    """This machine's processor, measured: ranks share it, and exchange through its memory."""
    flops, bandwidth = _measured()
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    own, compute, copies = (Figure(value / count, "this machine", "measured") for value in (memory, flops, bandwidth))
    link = Figure(bandwidth / count, "this machine", "measured")  # messages are copied there and back
    device = devices.Device("processor", own, compute, copies, link, "memory", link, count)
    return Cluster.of([Nodes(1, count, device, link.value, link.value, device.memory.value)])


def _measured() -> tuple[float, float]:
    """FLOPs and bytes of a copy per second, the best of a few."""
    matrix, source = torch.randn(_SIDE, _SIDE), torch.zeros(_COPIED)
    target, products, copies = torch.empty_like(source), list[float](), list[float]()
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        products.append(time.perf_counter() - began)
        began = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - began)
    return 2 * _SIDE**3 / min(products), 8 * _COPIED / min(copies)
