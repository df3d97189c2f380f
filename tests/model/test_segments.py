"""Segments as functions: F, B, W and BW equal autograd, keep no parameter, and do each thing once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from phalanx.expressions import evaluate
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block
from phalanx.model.segment import compile, policies, segments
from phalanx.model.segment.compile import Compiler, resolve_mode
from phalanx.model.segment.joint import trace
from phalanx.model.segment.segments import Segment
from tests import captured
from tests.traced import Run

aten = torch.ops.aten
_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, torch.ops.phalanx.grouped_matmul.default,
    torch.ops.phalanx.grouped_matmul_weight.default,
}  # fmt: skip
_HEAVY = {*_PRODUCTS, torch.ops.phalanx.attention.default, torch.ops.phalanx.attention_backward.default}
LAYERS = [
    (captured.GPT2, "transformer.h.1"),
    (captured.GPT2, "embedding"),
    (captured.GPT2, "head"),
    (captured.LLAMA, "model.layers.1"),
    pytest.param(captured.MIXTRAL, "model.layers.1", marks=pytest.mark.long),
]
MODES = ("off", "aot_eager")
LAYERS_IN_MODES = [
    *((captured.GPT2, block, mode) for block in ("transformer.h.1", "embedding", "head") for mode in MODES),
    (captured.LLAMA, "model.layers.1", "off"),
    pytest.param(captured.LLAMA, "model.layers.1", "aot_eager", marks=pytest.mark.long),
    *(pytest.param(captured.MIXTRAL, "model.layers.1", mode, marks=pytest.mark.long) for mode in MODES),
]


@dataclass(eq=False)
class Call:
    """One block with concrete arguments: activations random, everything else as in a real step."""

    case: captured.Case
    block: Block
    graph: fx.Graph
    arguments: list
    wants: list[bool]

    @property
    def ports(self) -> list:
        return [port for port in self.block.ports if port.kind != "size"]

    @property
    def tensors(self) -> list[Tensor]:
        return [a for a in self.arguments if isinstance(a, Tensor)]

    @property
    def is_parameter(self) -> list[bool]:
        return [port.kind == "parameter" for port in self.ports]

    @property
    def parameters(self) -> list[Tensor]:
        return [t for t, p in zip(self.tensors, self.is_parameter, strict=True) if p]

    @cache  # noqa: B019  (calls live as long as the tests)
    def build(self, *, mode: str = "off", frozen: tuple[str, ...] = (), light: bool = False) -> Segment:
        wants = tuple(w and port.name not in frozen for w, port in zip(self.wants, self.ports, strict=True))
        compiler = Compiler(mode)
        return segments.build(self.graph, self.arguments, self.is_parameter, wants, compiler=compiler, light=light)

    def autograd(self, d_outputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
        """Outputs, input gradients and parameter gradients by plain PyTorch."""
        leaves = [t.clone().requires_grad_(w) for t, w in zip(self.tensors, self.wants, strict=True)]
        remaining = iter(leaves)
        outputs = fx.GraphModule({}, self.graph)(
            *[next(remaining) if isinstance(a, Tensor) else a for a in self.arguments]
        )
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, d_outputs, allow_unused=True))
        gradients = [next(found) if w else None for w in self.wants]
        split = [[g for g, p in zip(gradients, self.is_parameter, strict=True) if p == kind] for kind in (False, True)]
        return [out.detach() for out in outputs], *split


@cache
def call(name: str, block_name: str) -> Call:
    case = captured.named(name)
    session = case.session()
    [inputs] = case.micro_batches(session, [3])
    compute, outlines = session.step.engine.compute, session.step.engine.parts.tracer(inputs).outlines
    [block] = [b for b in case.blocks.blocks if b.name == block_name]
    generator = torch.Generator().manual_seed(0)
    held = {"parameter": case.parameters, "buffer": compute.buffers, "constant": compute.constants}
    arguments = []
    for port in block.ports:
        if port.kind == "activation":
            arguments.append(torch.randn(outlines[port.name].shape, generator=generator, dtype=torch.float64))
        elif port.kind == "size":
            arguments.append(evaluate(port.name, inputs.dims(0, 1)))
        else:
            arguments.append(held[port.kind][port.name] if port.kind in held else inputs[0, 1, port.kind, port.name])
    wants = [port.kind in ("parameter", "activation") for port in block.ports if port.kind != "size"]
    return Call(case, block, graphs.load(case.blocks.templates[block.template].text), arguments, wants)


def d_outputs_for(segment: Segment) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(out.meta["val"].shape, generator=generator, dtype=torch.float64) for out in segment.joint.outputs
    ]


def close(got: list, expected: list) -> None:
    for a, b in zip(got, expected, strict=True):
        if a is None or b is None:
            other = b if a is None else a
            assert other is None or not other.any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("light", [False, True], ids=["none", "light"])
@pytest.mark.parametrize("name, block, mode", LAYERS_IN_MODES)
def test_f_then_b_then_w_equals_bw_equals_autograd(name: str, block: str, mode: str, light: bool) -> None:
    one = call(name, block)
    run = Run(one.build(mode=mode, light=light), one.tensors)
    d_outputs = d_outputs_for(run.segment)
    expected = one.autograd(d_outputs)
    close(run.forward(), expected[0])
    close(run.backward(d_outputs), expected[1])
    close(run.weight(), expected[2])
    fused = run.backward_weight(d_outputs)
    close(fused[0], expected[1])
    close(fused[1], expected[2])


@pytest.mark.parametrize("name, block, mode", LAYERS_IN_MODES)
def test_nothing_saved_is_a_parameter_or_made_of_parameters_alone(name: str, block: str, mode: str) -> None:
    one = call(name, block)
    run = Run(one.build(mode=mode), one.tensors)
    run.forward()
    run.backward(d_outputs_for(run.segment))
    ours = {parameter.untyped_storage().data_ptr() for parameter in one.parameters}
    values = [sorted_values(parameter) for parameter in one.parameters if parameter.numel() > 1]
    for kept in run.saved("saved_b", "saved_bw", "saved_w"):
        assert kept.untyped_storage().data_ptr() not in ours
        assert not any(torch.equal(sorted_values(kept), other) for other in values), (
            "a cast or transpose of a parameter"
        )


@pytest.mark.parametrize("name, block", LAYERS, ids=lambda value: value)
def test_nothing_saved_shares_the_memory_of_what_was_given_or_put_out(name: str, block: str) -> None:
    one = call(name, block)
    run = Run(one.build(), one.tensors)
    others = [*one.tensors, *run.forward()]
    run.backward(d_outputs_for(run.segment))
    known = {tensor.untyped_storage().data_ptr() for tensor in (*others, *run.saved("gradient"))}
    kept = run.saved("saved_b", "saved_bw", "saved_w")
    assert not known & {tensor.untyped_storage().data_ptr() for tensor in kept}


def sorted_values(tensor: Tensor) -> Tensor:
    """Equal for a tensor, its transpose and its cast to a lower precision."""
    return tensor.detach().flatten().to(torch.bfloat16).double().sort().values


def test_the_minimum_cut_keeps_fewer_bytes_than_everything_the_backward_reads() -> None:
    one = call(captured.LLAMA, "model.layers.1")
    nodes = {mode: one.build(mode=mode).saved for mode in ("off", "aot_eager")}
    everything, fewest = (sum(n.meta["val"].numel() for n in nodes[mode]) for mode in ("off", "aot_eager"))
    assert 0 < fewest < everything


@pytest.mark.parametrize("name, block, mode", LAYERS_IN_MODES)
def test_light_keeps_no_more_bytes_and_of_layers_fewer(name: str, block: str, mode: str) -> None:
    one = call(name, block)
    none, light = (one.build(mode=mode, light=light) for light in (False, True))
    kept, fewer = (segments.total_bytes([*own.saved_b, *own.saved_bw]) for own in (none, light))
    assert fewer < 0.8 * kept if "." in block else fewer <= kept


@pytest.mark.parametrize("name, block", LAYERS, ids=lambda value: value)
def test_light_computes_no_product_and_no_attention_again(name: str, block: str) -> None:
    none, light = (products(call(name, block).build(light=light), _HEAVY) for light in (False, True))
    assert light["backward_weight"] == none["backward_weight"]
    assert light["forward"] == none["forward"]


@pytest.mark.parametrize("name, block, mode", LAYERS_IN_MODES)
def test_the_outputs_alone_and_what_is_saved_alone_equal_those_of_one_forward(
    name: str, block: str, mode: str
) -> None:  # fmt: skip
    one = call(name, block)
    run = Run(one.build(mode=mode), one.tensors)
    outputs = run.forward()
    close(run.run(), outputs)
    close(run.again(), run.saved("saved_b", "saved_bw"))


@pytest.mark.parametrize("name, block", [
    (captured.GPT2, "transformer.h.1"), (captured.LLAMA, "model.layers.1"),
], ids=["gpt2", "llama"])  # fmt: skip
def test_what_is_saved_alone_does_without_the_last_product(name: str, block: str) -> None:
    counts = products(call(name, block).build())
    assert counts["again"] == counts["forward"] - 1
    assert counts["run"] == counts["forward"]


def test_functions_are_compiled_when_they_are_first_used_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    compile_ = Compiler.__call__
    monkeypatch.setattr(Compiler, "__call__", lambda self, graph: made.append(graph) or compile_(self, graph))
    one = call(captured.GPT2, "transformer.h.1")
    segment = segments.build(one.graph, one.arguments, one.is_parameter, one.wants, compiler=Compiler("off"))
    run = Run(segment, one.tensors)
    assert not made
    for _ in range(2):
        run.forward()
        run.backward_weight(d_outputs_for(segment))
    assert len(made) == 2
    for _ in range(2):
        run.run()
        run.again()
    assert len(made) == 4


def products(segment: Segment, targets: Collection[object] = _PRODUCTS) -> dict[str, int]:
    """Matrix products in each function, counted before compiling."""
    counts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "__call__", lambda self, graph: sum(node.target in targets for node in graph.nodes))
        for name in ("forward", "run", "again", "backward", "weight", "backward_weight"):
            segment.__dict__.pop(name, None)  # segments are shared by tests: it may have been made, and is made again
            counts[name] = getattr(segment, name).function
            del segment.__dict__[name]
    return counts


@pytest.mark.parametrize("name, block, linears", [
    (captured.GPT2, "transformer.h.1", 4), (captured.LLAMA, "model.layers.1", 7),
], ids=["gpt2", "llama"])  # fmt: skip
def test_b_holds_no_weight_gradient_and_w_holds_nothing_else(name: str, block: str, linears: int) -> None:
    counts = products(call(name, block).build())
    expected = {"forward": linears, "backward": linears, "weight": linears, "backward_weight": 2 * linears}
    assert {name: counts[name] for name in expected} == expected


def test_frozen_parameters_get_no_gradient_and_no_work() -> None:
    one = call(captured.GPT2, "transformer.h.1")
    trained = "transformer.h.1.ln_1.weight"
    frozen = tuple(name for name in one.block.names("parameter") if name != trained)
    segment = one.build(frozen=frozen)
    assert products(segment)["weight"] == 0
    run = Run(segment, one.tensors)
    run.forward()
    d_outputs = d_outputs_for(segment)
    gradients = dict(zip(one.block.names("parameter"), run.backward_weight(d_outputs)[1], strict=True))
    expected = dict(zip(one.block.names("parameter"), one.autograd(d_outputs)[2], strict=True))
    assert [name for name, gradient in gradients.items() if gradient is not None] == [trained]
    torch.testing.assert_close(gradients[trained], expected[trained])


def test_a_frozen_block_behind_a_frozen_input_is_not_differentiable_and_saves_nothing() -> None:
    one = call(captured.GPT2, "embedding")
    segment = one.build(frozen=one.block.names("parameter"))
    assert not any(segment.joint.differentiable)
    assert segment.saved == ()


def test_tracing_computes_nothing_and_leaves_its_arguments_alone() -> None:
    one = call(captured.GPT2, "transformer.h.1")
    before = [tensor.clone() for tensor in one.tensors]
    joint = trace(one.graph, one.arguments, one.wants, one.is_parameter, None)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(one.tensors, before, strict=True))
    assert len(joint.gradients) == len(joint.inputs) == len(one.tensors)
    assert policies.parameter_only(joint, joint.inputs) >= set(joint.inputs)


@pytest.fixture
def equipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine that has all that compiling for a GPU takes."""
    compile._missing_for_inductor.cache_clear()
    monkeypatch.setattr(compile, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(compile.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CC", raising=False)
    yield monkeypatch
    compile._missing_for_inductor.cache_clear()


def test_compiling_is_chosen_by_device_unless_the_user_says_otherwise(equipped: pytest.MonkeyPatch) -> None:
    assert resolve_mode("auto", torch.device("cpu")) == "off"
    assert resolve_mode("auto", torch.device("cuda")) == "inductor"
    assert resolve_mode("aot_eager", torch.device("cuda")) == "aot_eager"


def test_a_machine_that_cannot_compile_trains_without_and_says_why(equipped: pytest.MonkeyPatch) -> None:
    equipped.setattr(compile.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="no C compiler was found .* so segments are not compiled"):
        assert resolve_mode("auto", torch.device("cuda")) == "off"
    compile._missing_for_inductor.cache_clear()
    equipped.setenv("CC", "/opt/cc")
    assert resolve_mode("auto", torch.device("cuda")) == "inductor"
    compile._missing_for_inductor.cache_clear()
    equipped.setattr(compile, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="Triton is not installed, so segments are not compiled"):
        assert resolve_mode("auto", torch.device("cuda")) == "off"


@pytest.mark.parametrize(("case", "path"), [(captured.GPT2, "head"), (captured.LLAMA, "model.layers.1")])
def test_a_compiler_that_pads_results_changes_nothing_for_those_who_take_them(
    case: captured.Case, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As inductor does on GPUs with products that have an odd number of columns."""

    def padding(module: fx.GraphModule, examples: list[Tensor]):
        expected = [example.stride() for example in examples]

        def run(*arguments: Tensor) -> tuple:
            assert [argument.stride() for argument in arguments] == expected
            return tuple(padded(result) if isinstance(result, Tensor) else result for result in module(*arguments))

        return run

    def padded(result: Tensor) -> Tensor:
        return torch.cat([result, result[..., :1]], dim=-1)[..., :-1] if result.dim() > 1 else result

    monkeypatch.setattr("torch._dynamo.backends.registry.lookup_backend", lambda mode: padding)
    one = call(case, path)
    segment = segments.build(one.graph, one.arguments, one.is_parameter, one.wants, compiler=Compiler("inductor"))
    run, d_outputs = Run(segment, one.tensors), d_outputs_for(segment)
    expected = one.autograd(d_outputs)
    for _ in range(2):
        outputs = run.forward()
        found = (outputs, run.backward(d_outputs), run.weight())
        assert all(output.is_contiguous() for output in outputs)
        torch.testing.assert_close(found, tuple(expected), check_stride=False)


@pytest.mark.long
def test_what_was_compiled_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether torch keeps it is its own decision, which it takes silently: without assumptions about shapes it does
    not, and every run compiles anew."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    joint = trace(_sum_of_squares(), [torch.arange(12.0)], [False], [False], None)
    hits = list[int]()
    for _ in range(2):
        result, *_ = Compiler("inductor")(joint.graph)(torch.arange(12.0))
        assert result.item() == 506.0
        hits.append(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
    assert hits[1] > hits[0]


def _sum_of_squares() -> fx.Graph:
    graph = fx.Graph()
    given = graph.placeholder("given")
    squares = graph.call_function(aten.mul.Tensor, (given, given))
    graph.output((graph.call_function(aten.sum.default, (squares,)),))
    return graph
