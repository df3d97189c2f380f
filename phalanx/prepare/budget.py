"""Will it fit? What a rank will hold, by its compiled plan, against what it may: before anything lies on the device.

A plan that cannot fit is refused with what it needs and with the cheapest changes that would fit; running out of memory
all the same is told in the same words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.engine.compiled import Compiled
from phalanx.engine.inputs import split
from phalanx.engine.memory import RankMemory, bucket_costs, rank_memory
from phalanx.engine.step import micro_batches
from phalanx.observe.format import bytes_text
from phalanx.observe.metrics import peak_memory
from phalanx.plan.lighter import Lighter, Needs, lighter_plans
from phalanx.plan.plan import Plan
from phalanx.predict.costs import Costs
from phalanx.predict.from_facts import Device, block_seconds
from phalanx.predict.simulate import seconds_among_others
from phalanx.prepare.did_not_fit import DoesNotFit
from phalanx.tasks.base import Batch

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_ASSUMED = Device()


@dataclass(frozen=True)
class Budget:
    """bytes: what a rank may hold. source: why so many."""

    bytes: int
    source: str

    @classmethod
    def of(cls, given: int | None, device: torch.device, held: int = 0) -> Budget | None:
        """What was asked for; else what is free where it will lie, if that is known. held: by what makes way for it."""
        if given is not None:
            return cls(given, "as asked for (--memory)")
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device)  # which this process can use again
            return cls(free, f"free of the {bytes_text(total)} of {torch.cuda.get_device_name(device)}")
        free = free_main_memory()
        return None if free is None else cls(free + held, "free main memory")


class MemoryGuard:
    """Refuses a plan that cannot fit before anything lies on the device, and explains memory that runs out. batch: the
    part of the first batch that a plan gives this rank, and its place in the stream. replan: the plan to take instead
    of one, given what it needs, how to ask that of others, and what there is; None: the plan stays. held: bytes that
    make way for what a plan needs. foreseen: what is known of plans that may come."""

    fit: Fit
    budget: Budget | None

    def __init__(
        self, given: int | None, device: torch.device, batch_size: int, batch: Callable[[Compiled], tuple[Batch, int]],
        replan: Replan | None = None, held: int = 0, foreseen: MutableMapping[Compiled, Fit] | None = None,
    ) -> None:  # fmt: skip
        self.held = held
        self._given, self._device, self._batch_size, self.batch = given, device, batch_size, batch
        self._replan, self._foreseen = replan, {} if foreseen is None else foreseen
        if given is not None and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, given / total), device)

    def foresee(self, compiled: Compiled, compile: Callable[[Plan], Compiled]) -> None:
        """Finds what `look` will ask for."""
        self._foreseen[compiled] = Fit(compiled, compile, self.batch, self._batch_size)

    def look(self, compiled: Compiled, compile: Callable[[Plan], Compiled]) -> Compiled:
        """What is to be run: this, or another plan that suits the memory there is."""
        made = {compiled.plan: compiled}

        def fit(plan: Plan) -> Fit:
            if plan not in made:
                made[plan] = compile(plan)
            return self._foreseen.get(made[plan]) or Fit(made[plan], compile, self.batch, self._batch_size)

        self.fit, self.budget = fit(compiled.plan), Budget.of(self._given, self._device, self.held)
        plan = self._replan(self.fit, fit, self.budget) if self._replan is not None else None
        if plan is not None and plan != compiled.plan:
            self.fit = fit(plan)
        self.fit.require(self.budget)
        return made[self.fit.plan]

    @contextmanager
    def explained(self, what: str = "") -> Iterator[None]:
        """what: does not fit, if memory runs out within it (default: a micro-batch)."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._ran_out(error, what) from error

    def _ran_out(self, error: RuntimeError, what: str) -> DoesNotFit:
        if "fit" in vars(self):
            return self.fit.error(error, what)
        message = f"nothing fits in the memory of {self._device}: {str(error).splitlines()[0]}"
        return DoesNotFit(message, "give it more memory (--memory), or end what else uses the device")


Replan = Callable[["Fit", Callable[[Plan], "Fit"], Budget | None], Plan | None]


class Fit:
    """What a rank's plan needs on its part of a batch. compile: another plan, for this rank and model. batch: gives the
    part of the first batch that a plan gives this rank, and its place in the stream."""

    def __init__(
        self, compiled: Compiled, compile: Callable[[Plan], Compiled], batch: Callable[[Compiled], tuple[Batch, int]],
        batch_size: int,
    ) -> None:  # fmt: skip
        self.plan, self.device, self._batch_size = compiled.plan, compiled.device, batch_size
        self._compile, self._batch = compile, batch
        self._place = compiled.formation.place
        (self.components, self.on_host), self._seconds = self._predict(compiled)

    @property
    def bytes(self) -> int:
        return sum(self.components.values())

    def describe(self) -> str:
        """What a rank will hold, the largest parts first."""
        beside = f"; on the host {_listed(self.on_host)}" if self.on_host else ""
        return f"{bytes_text(self.bytes)} of tensors at the peak: {_listed(self.components)}{beside}"

    def require(self, budget: Budget | None) -> None:
        """Refuses what cannot be."""
        if budget is not None and self.bytes > budget.bytes:
            raise DoesNotFit(
                f"plan {self.plan.shown} does not fit: {self._place} needs {bytes_text(self.bytes)} "
                f"({_listed(self.components)}), and {bytes_text(budget.bytes)} are there ({budget.source})",
                self.advice(budget.bytes), self.plan.shown,
            )  # fmt: skip
        free, needed = free_main_memory(), sum(self.on_host.values())
        if self.device.type == "cuda" and free is not None and needed > free:
            raise DoesNotFit(
                f"plan {self.plan.shown} does not fit: {self._place} needs {bytes_text(needed)} of main memory "
                f"({_listed(self.on_host)}), and {bytes_text(free)} are free",
                "offload less, or use more ranks on other machines", self.plan.shown,
            )  # fmt: skip

    def error(self, error: RuntimeError, what: str = "") -> DoesNotFit:
        """Memory ran out: what was tried, what was predicted of it, and what would need less."""
        held = f", {bytes_text(peak_memory(self.device))} were held at most" if self.device.type == "cuda" else ""
        return DoesNotFit(
            f"{what or self._micro_batch()} does not fit in the memory of {self.device}: {str(error).splitlines()[0]}; "
            f"{bytes_text(self.bytes)} were predicted ({_listed(self.components)}){held}",
            self.advice(self.bytes - 1), self.plan.shown,
        )  # fmt: skip

    def advice(self, budget: int) -> str:
        """The cheapest changes after which the plan needs no more than so many bytes."""
        fitting, least = self._lighter(budget)
        if fitting:
            changes = [
                f"{own.change} ({bytes_text(own.needs.memory)}, {own.needs.seconds / self._seconds:.2f}× the step)"
                for own in fitting
            ]
            return f"on an assumed device, these would fit: {'; '.join(changes)}"
        smallest = f", the least {bytes_text(least.needs.memory)} by {least.change}" if least else ""
        return f"no change of this plan would fit{smallest}: use more ranks, a shorter seq_len or a smaller model"

    def lighter(self, budget: int) -> list[Lighter]:
        """The cheapest changes of the plan after which it needs no more, quickest first."""
        return self._lighter(budget)[0]

    def _lighter(self, budget: int) -> tuple[list[Lighter], Lighter | None]:
        has_host = self.device.type == "cuda"
        return lighter_plans(self.plan, self._batch_size, budget, self._needs, has_host=has_host)

    def _micro_batch(self) -> str:
        part = -(-self._batch_size // self.plan.dp)
        largest = split(part, self.plan.mb)[0]
        samples = "1 sample" if largest == 1 else f"{largest} samples"
        return f"a micro-batch of {samples} (batch_size {self._batch_size}, plan {self.plan.shown})"

    def _needs(self, plan: Plan) -> Needs:
        memory, seconds = self._predict(self._compile(plan))
        return Needs(sum(memory.device.values()), seconds)

    def _predict(self, compiled: Compiled) -> tuple[RankMemory, float]:
        batch, first = self._batch(compiled)
        parts = micro_batches(compiled.training.feeder, compiled.plan, batch, first)
        largest = next(iter(parts.values()))
        dims = compiled.captured.dims({name: tensor[: largest.num_samples] for name, tensor in batch.items()})
        forward = block_seconds(compiled.formation.shape, dims, _ASSUMED)
        costs = Costs(
            forward, forward, forward, tuple(bucket_costs(compiled)), _ASSUMED.link, _ASSUMED.link, dims=dims,
            element_bytes=compiled.dtype.itemsize,
        )  # fmt: skip
        return rank_memory(compiled, parts), seconds_among_others(compiled.programs, costs)


def _listed(components: Mapping[str, int]) -> str:
    largest = sorted(components.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in largest)


def free_main_memory() -> int | None:
    """As the kernel says, within the limit of this process's control group."""
    if not _MEMINFO.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    if found is None:
        return None
    free = int(found[1]) * 1024
    most, now = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return free if most is None or now is None else min(free, max(0, most - now))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# What libraries say that have no error class for it: the CPU's allocator, cuBLAS, cuDNN, NCCL, compiled kernels.
_SIGNS = ("DefaultCPUAllocator", "ALLOC_FAILED", "out of memory", "Cuda failure 2 ")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Compilers and libraries wrap what happened to them."""
    if error is None:
        return False
    found = isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)
    return found or is_out_of_memory(error.__cause__)
