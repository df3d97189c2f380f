"""The facts of a model under a split of its tensors (`predict/split_facts.py`): its graph is composed as a rank has it,
traced without contents at a few shapes, and every size is fitted. `python -m phalanx.engine.describe` writes all facts
that are shipped with the package anew.

So what is predicted from facts and what a rank makes of its graph have one source: `compose` and `trace` (`probe.py`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import product

import torch

from phalanx import tasks
from phalanx.engine.measure import measure
from phalanx.engine.probe import Prober
from phalanx.errors import CaptureError, PlanError
from phalanx.expressions import Fit, evaluate
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.facts.facts import FIRST, load, shipped_path, to_json, write_text
from phalanx.model.ops.operators import as_on_gpu
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.segments import Working
from phalanx.model.zoo import zoo_table
from phalanx.model.zoo.zoo import resolve
from phalanx.plan.plan import Plan
from phalanx.predict.split_facts import FOLDER, TP, Split, SplitFacts, splits_of, write_all
from phalanx.program.shape import Backward, BlockOp, ModelShape

_SIZES = ("saved_b", "saved_bw", "saved_w", "d_parameters")  # of what a backward needs and gives
SHIPPED_IN = (FIRST, "float16", "float32")
# Whose tensor-parallel facts are shipped too: for the others a plan with tp > 1 reads the graph.
SPLIT_MODELS = (
    "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "bert-base-cased",
    "google/electra-base-generator", "google/vit-base-patch16-224-in21k",
)  # fmt: skip


def describe(captured: Captured, plan: Plan, dtype: str, device: str = "cuda") -> SplitFacts:
    """device: operators have the form that they have there. On CPUs nothing is compiled unless somebody asks for it:
    there both shapes are the same."""
    walk = _Walk(captured, Split.of(plan), dtype)
    with as_on_gpu() if device == "cuda" else contextlib.nullcontext():
        eager = walk.described(Compiler("off"))
        return walk.facts(eager, walk.described(Compiler("inductor")) if device == "cuda" else eager)


class _Walk:
    def __init__(self, captured: Captured, split: Split, dtype: str) -> None:
        self._split, self._dtype = split, dtype
        self._prober = Prober(captured, split, getattr(torch, dtype))
        self._composed, self._fit = self._prober.composed, self._prober.fit
        self._polynomial = cache(self._fit.polynomial)

    def facts(self, eager: ModelShape, compiled: ModelShape) -> SplitFacts:
        captured, shapes = self._composed.captured, self._composed.local_shapes()

        def elements(names: Sequence[str]) -> int:
            return sum(math.prod(shapes[name]) for name in dict.fromkeys(names))

        own = tuple(elements(names) for names in self._composed.buckets.names)
        frozen = tuple(n - learning for n, learning in zip(own, self._composed.shape.elements, strict=True))
        return SplitFacts(
            self._split, self._dtype, eager, compiled, own,
            tuple(elements(block.names("parameter")) for block in captured.blocks.blocks),
            frozen if any(frozen) else (),
        )  # fmt: skip

    def described(self, compiler: Compiler) -> ModelShape:
        """The shape with sizes as expressions."""
        composed, probes = self._composed, self._prober.probes(compiler)
        ops: list[tuple[BlockOp, ...]] = []
        for block, parts in enumerate(self._prober.graph.parts):
            name, chain = composed.captured.blocks.blocks[block].name, list[BlockOp]()
            for number, part in enumerate(parts):
                seen = [probe.traced.ops[block][number] for probe in probes]
                op = self._fitted(name, seen)
                if part.segment is not None:
                    segments = [probe.traced.segments[part.segment] for probe in probes]
                    needs = self._working(name, [segment.working for segment in segments])
                    past = self._expression(name, [int(own.past_bytes) for own in seen])
                    op = replace(op, working=needs, past_bytes=past)
                chain.append(op)
            ops.append(tuple(chain))
        inputs = self._expression("the inputs", [probe.inputs for probe in probes])
        return replace(composed.shape, ops=tuple(ops), inputs=inputs, elements=())  # which facts have beside it

    def _fitted(self, block: str, seen: Sequence[BlockOp]) -> BlockOp:
        """One op from what it is at each point."""
        first = seen[0]
        sizes = tuple(
            self._expression(block, [int(size) for size in at])
            for at in zip(*(op.sizes for op in seen), strict=True)
        )  # fmt: skip
        if first.traced is None:
            return replace(first, sizes=sizes)
        backwards = [op.bw for op in seen]
        if any(_structure(own) != _structure(backwards[0]) for own in backwards):
            raise _not_fitted(block, self._fit)
        fitted = {
            name: self._expression(block, [int(getattr(own, name)) for own in backwards])
            for name in _SIZES
            if getattr(backwards[0], name)
        }
        return replace(first, sizes=sizes, flops=self._flops(first.flops), traced=replace(backwards[0], **fitted))

    def _flops(self, text: str) -> str:
        """As one short polynomial, where they are one."""
        whole, _, divisor = text.rpartition("/") if "/" in text else (text, "", "1")
        if not divisor.isdigit():
            return text
        return self._fit.scaled([evaluate(whole, point) for point in self._fit.points], int(divisor)) or text

    def _working(self, block: str, seen: Sequence[Working]) -> tuple[str, ...]:
        found: list[str] = []
        for function in fields(Working):
            places = [getattr(own, function.name) for own in seen]
            same = len(set(map(len, places))) == 1
            text = self._fit.largest(list(zip(*places, strict=True))) if same else None
            if text is None:
                raise _not_fitted(block, self._fit)
            found.append(text)
        return tuple(found)

    def _expression(self, block: str, values: Sequence[int]) -> str:
        expression = self._polynomial(tuple(values))
        if expression is None:
            raise _not_fitted(block, self._fit)
        return expression


def _structure(backward: Backward) -> Backward:
    """All but how large things are."""
    return replace(backward, **{name: "1" if getattr(backward, name) else "" for name in _SIZES})


def _not_fitted(block: str, fit: Fit) -> CaptureError:
    return CaptureError(
        f"what block '{block}' keeps or needs is no polynomial of {', '.join(fit.dims)}",
        "look for a stride, a pooling or a padding to a multiple along these dims: such a model can be trained but not "
        "planned",
    )


def write_shipped(names: Sequence[str], dtypes: Sequence[str] = SHIPPED_IN) -> None:
    """Describes these zoo models and writes their files: none of a precision in which a model does what it does in the
    first one.

    Every capture is made anew; that captures are right is shown by the tests, once for each architecture.
    """
    for name, dtype in product(names, dtypes):
        spec = resolve(name)
        inputs = tasks.get(spec.task).inputs(spec.config)
        captured = capture(spec, inputs, dtype=getattr(torch, dtype), check=False, use_cache=False)
        shipped_path(spec.name, dtype).unlink(missing_ok=True)
        facts, splits = measure(spec, captured, getattr(torch, dtype)), list(_all_splits(spec.name, captured, dtype))
        is_new = dtype == FIRST or load(spec.name, dtype) != facts or any(
            splits_of(spec.name, dtype).get(own.split) != own for own in splits
        )  # fmt: skip
        if is_new:
            write_text(shipped_path(spec.name, dtype), to_json(facts))
        if is_new and splits:
            text = write_all(splits, [block.name for block in captured.blocks.blocks])
            write_text(shipped_path(spec.name, dtype, FOLDER), text)
        print(spec.name, dtype, "written" if is_new else f"as {FIRST}", flush=True)


def _all_splits(name: str, captured: Captured, dtype: str) -> Iterator[SplitFacts]:
    """Those that the model can be split into; over tensor-parallel ranks in the first precision alone."""
    splits = (
        [Split(tp, sequence=sequence) for tp in TP for sequence in (False, True)]
        if name in SPLIT_MODELS and dtype == FIRST
        else []
    )
    for split in (Split(), Split(recompute=("light",)), Split(sliced=True), *splits):
        try:
            yield describe(captured, split.plan, dtype)
        except PlanError as refused:
            print(f"{name}: {refused.message}", flush=True)


if __name__ == "__main__":
    write_shipped(sys.argv[1:] or zoo_table.names())
