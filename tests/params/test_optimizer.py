"""The update: schedule, groups, clipping and skipping on and off the device, masters, state by name, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.config import RunConfig
from phalanx.engine.inputs import split
from phalanx.errors import CheckpointError, ConfigError, PlanError
from phalanx.params import optimizer as optimizer_module
from phalanx.params.element_wise import reach_of
from phalanx.params.flat import Piece
from phalanx.params.lr_schedule import lr_factor
from phalanx.params.optimizer import Optimizer, make_optimizer, norms_of, require_element_wise, squared_norm
from phalanx.params.parameters import Weight, choose_trainable
from phalanx.params.streams import Streams, divide
from phalanx.state.local import Local

LENGTHS = st.integers(1, 500).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total)))
SHAPES = st.sampled_from(["cosine", "linear", "constant"])


@given(LENGTHS, SHAPES, st.floats(0, 1))
def test_the_rate_rises_to_its_peak_and_never_rises_again(length: tuple[int, int], shape: str, low: float):
    total, warmup = length
    factors = [lr_factor(n, total=total, warmup=warmup, shape=shape, min_ratio=low) for n in range(1, total + 1)]
    rising, falling = factors[: max(warmup, 1)], factors[max(warmup, 1) - 1 :]
    assert all(0 < factor <= 1 for factor in rising if warmup)
    assert rising == sorted(rising)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(falling))
    assert warmup == 0 or factors[warmup - 1] == 1
    assert all(factor >= low - 1e-12 for factor in falling)


@given(LENGTHS.filter(lambda length: length[1] < length[0]), st.sampled_from(["cosine", "linear"]), st.floats(0, 1))
def test_the_last_step_has_the_smallest_rate(length: tuple[int, int], shape: str, low: float):
    assert lr_factor(length[0], total=length[0], warmup=length[1], shape=shape, min_ratio=low) == pytest.approx(low)


@given(st.integers(1, 200), st.integers(1, 200))
def test_micro_batches_are_as_even_as_possible(samples: int, parts: int):
    if parts > samples:
        with pytest.raises(PlanError, match=f"mb={parts} cuts a batch of {samples} samples"):
            split(samples, parts)
        return
    sizes = split(samples, parts)
    assert sum(sizes) == samples and len(sizes) == parts and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(4, 3, dtype=dtype, generator=generator),
        "bias": torch.randn(4, dtype=dtype, generator=generator),
        "unused": torch.randn(2, 2, dtype=dtype, generator=generator),
    }


def gradients(step: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shapes = {"matrix": (4, 3), "bias": (4,)}
    return {name: scale * torch.randn(shape, dtype=dtype, generator=generator) for name, shape in shapes.items()}


def held(values: dict[str, Tensor]) -> dict[str, Weight]:
    """These tensors as a rank that keeps all of them holds them."""
    return {
        name: Weight(Piece.whole(name, Local(tuple(value.shape))), value, value, trained=True)
        for name, value in values.items()
    }


def made(values: dict[str, Tensor], clip: float | None = 1.0, **options: Any) -> Optimizer:
    return Optimizer(make_optimizer(held(values), RunConfig.create(**options)), held(values), clip)


def update(optimizer: Optimizer, found: dict[str, Tensor], lr: float) -> Tensor:
    """A step of the only rank; returns the norm of its gradients."""
    norm = squared_norm(norms_of(found)).sqrt()
    optimizer.step(found, lr, norm, norm.isfinite())
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [None, 0.7, 1e6])
@pytest.mark.parametrize("options", [{}, {"optimizer_options": {"fused": False}}], ids=["fused", "plain"])
def test_the_update_equals_clip_grad_norm_and_plain_adamw(dtype: torch.dtype, clip: float | None, options: Any):
    ours, theirs = weights(dtype), weights(dtype)
    optimizer = made(ours, clip, weight_decay=0.3, lr=0.1, **options)
    decayed = [theirs["matrix"], theirs["unused"]]
    plain = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": [theirs["bias"]], "weight_decay": 0.0}],
        lr=0.1, betas=(0.9, 0.95), foreach=False,
    )  # fmt: skip
    for step in range(4):
        norm = update(optimizer, gradients(step, dtype), 0.1)
        for name, gradient in gradients(step, dtype).items():
            theirs[name].grad = gradient
        expected = nn.utils.clip_grad_norm_([theirs["matrix"], theirs["bias"]], clip or float("inf"))
        plain.step()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours["unused"], weights(dtype)["unused"])


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("when", [0, 2])
def test_a_step_that_is_not_finite_changes_nothing(options: Any, value: float, when: int):
    skipping, without = weights(), weights()
    first, second = made(skipping, lr=0.1, **options), made(without, lr=0.1, **options)
    for step in range(4):
        if step == when:
            bad = gradients(9)
            bad["bias"][1] = value
            assert not update(first, bad, 0.1).isfinite()
        update(first, gradients(step), 0.1)
        update(second, gradients(step), 0.1)
    assert not torch.equal(without["matrix"], weights()["matrix"])
    assert all(torch.equal(skipping[name], without[name]) for name in without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_state_that_is_made_beforehand_is_that_of_a_weight_without_steps(dtype: torch.dtype):
    ready, plain = weights(dtype), weights(dtype)
    first, second = made(ready, lr=0.1), made(plain, lr=0.1)
    first.make_state({"matrix", "bias"})
    found = {(slot, name): tensor for slot, name, tensor in first.tensors()}
    assert found.keys() == {(s, n) for s in ("step", "exp_avg", "exp_avg_sq") for n in ("matrix", "bias")}
    assert not any(tensor.any() for tensor in found.values())
    assert all(torch.equal(ready[name], value) for name, value in weights(dtype).items())
    for step in range(2):
        update(first, gradients(step, dtype), 0.1)
        update(second, gradients(step, dtype), 0.1)
    assert all(torch.equal(ready[name], plain[name]) for name in plain)
    assert all(torch.equal(tensor, found[slot, name]) for slot, name, tensor in first.tensors())  # in the same place


def test_after_its_state_was_made_an_optimizer_steps_by_itself():
    """As in a loop of the user's own."""
    ready, plain = weights(), weights()
    first, second = made(ready, lr=0.1), made(plain, lr=0.1)
    first.make_state({"matrix", "bias"})
    for values, optimizer in ((ready, first), (plain, second)):
        for name, gradient in gradients(0).items():
            values[name].grad = gradient
        optimizer.inner.step()
    assert all(torch.equal(ready[name], plain[name]) for name in plain)
    assert not torch.equal(plain["matrix"], weights()["matrix"])


def test_an_optimizer_that_cannot_skip_an_update_makes_its_state_in_the_first():
    optimizer = made(weights(), optimizer="sgd", optimizer_options={"momentum": 0.9})
    optimizer.make_state({"matrix"})
    assert not list(optimizer.tensors())


def test_finite_gradients_are_not_used_where_another_rank_has_others():
    values = weights()
    made(values).step(gradients(0), 0.1, torch.tensor(float("inf")), torch.tensor(False))
    assert all(torch.equal(values[name], value) for name, value in weights().items())


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd"}], ids=["on the device", "on the host"])
def test_the_scale_of_the_loss_is_taken_out_of_gradients_before_they_are_clipped(options: Any, clip: float | None):
    scaled, plain = weights(), weights()
    update(made(plain, clip, **options), gradients(0), 0.1)
    scale = torch.tensor(512.0, dtype=torch.float64)
    norm = squared_norm(norms_of(gradients(0))).sqrt()
    larger = {name: 512 * gradient for name, gradient in gradients(0).items()}
    made(scaled, clip, **options).step(larger, 0.1, norm, norm.isfinite(), scale)
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value, rtol=1e-6, atol=1e-6)


def test_the_norm_is_that_of_all_gradients_as_one_vector():
    mixed = {"a": torch.full((3,), 2.0), "b": torch.full((2, 2), 1.0, dtype=torch.bfloat16)}
    assert squared_norm(norms_of(mixed)).item() == pytest.approx(16.0)
    assert made(weights()).squared_norm({}, torch.ones(())).item() == 0


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 4))
def test_streams_share_all_tensors_about_equally(sizes: list[int], count: int):
    tensors = {f"t{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    parts = divide(tensors, count)
    assert all(parts) and len(parts) <= count
    assert sorted(name for part in parts for name in part) == sorted(tensors)
    loads = [sum(tensor.numel() for tensor in part.values()) for part in parts]
    assert not loads or max(loads) - min(loads) <= max(sizes) or len(parts) < count
    assert all(list(part) == [name for name in tensors if name in part] for part in parts)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_update_on_several_streams_is_the_same_update(clip: float | None):
    together, apart = weights(), weights()
    first, second = made(together, clip, lr=0.1), made(apart, clip, lr=0.1)
    second._streams = Streams(torch.device("cpu"), 2)
    for step in range(3):
        found = gradients(step)
        one, two = (optimizer.squared_norm(found, torch.zeros(())) for optimizer in (first, second))
        assert one.item() == pytest.approx(two.item(), rel=1e-6)
        update(first, gradients(step), 0.1)
        update(second, gradients(step), 0.1)
    for name in together:
        torch.testing.assert_close(apart[name], together[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "parts"), [(torch.bfloat16, 2), (torch.float32, 1)])
def test_gradients_of_another_precision_are_copied_part_by_part(
    dtype: torch.dtype, parts: int, monkeypatch: pytest.MonkeyPatch
):
    whole, apart = weights(), weights()
    first, second = made(whole, 1.0, lr=0.1), made(apart, 1.0, lr=0.1)
    update(first, {name: gradient.to(dtype) for name, gradient in gradients(0).items()}, 0.1)
    monkeypatch.setattr(optimizer_module, "_COPIED_BYTES", apart["matrix"].nbytes)
    calls, step = list[int](), second.inner.step

    def watched() -> None:
        calls.append(sum(weight.grad is not None for weight in apart.values()))
        step()

    monkeypatch.setattr(second.inner, "step", watched)
    update(second, {name: gradient.to(dtype) for name, gradient in gradients(0).items()}, 0.1)
    assert (len(calls), sum(calls)) == (parts, len(gradients(0)))
    for name in whole:
        torch.testing.assert_close(apart[name], whole[name], rtol=0, atol=0)


def test_parameters_are_refreshed_from_float32_masters():
    exact = weights()["matrix"]
    copy = exact.bfloat16()
    weight = Weight(Piece.whole("matrix", Local((4, 3))), exact, copy, trained=True)
    inner = make_optimizer({"matrix": weight}, RunConfig(weight_decay=0))
    optimizer = Optimizer(inner, {"matrix": weight}, clip=None)
    for _ in range(20):
        update(optimizer, {"matrix": torch.ones(4, 3)}, 1e-4)
    # Steps of 1e-4 are lost in bfloat16 weights of about one; in the masters they add up.
    assert torch.allclose(weights()["matrix"] - exact, torch.full((4, 3), 20e-4), rtol=0.2)
    assert torch.equal(copy, exact.bfloat16())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
        {"optimizer": "torch.optim.NAdam"},
        {"optimizer": "torch.optim.ASGD"},
        {"optimizer": "torch.optim.Rprop", "weight_decay": 0.1},
    ],
    ids=lambda options: options.get("optimizer", "adamw"),
)
def test_the_state_is_named_and_comes_back(options: Any):
    values = weights()
    optimizer = made(values, lr=0.05, **options)
    for step in range(3):
        update(optimizer, gradients(step), 0.05)
    stored, scalars = {(slot, name): t.clone() for slot, name, t in optimizer.tensors()}, optimizer.scalars()
    others = {name: value.clone() for name, value in values.items()}
    restored = made(others, lr=0.05, **options)
    elsewhere = ("exp_avg", "on another rank")
    restored.load((*stored, elsewhere), lambda slot, name: stored[slot, name].clone(), scalars)
    for step in range(3, 5):
        update(optimizer, gradients(step), 0.05)
        update(restored, gradients(step), 0.05)
    assert all(torch.equal(values[name], others[name]) for name in values)
    assert not any(name == "unused" for _, name in stored)


def test_adamw_names_its_moments_by_parameter():
    optimizer = made(weights())
    update(optimizer, gradients(0), 0.1)
    found = {(slot, name) for slot, name, _ in optimizer.tensors()}
    assert found == {(slot, name) for slot in ("exp_avg", "exp_avg_sq", "step") for name in ("matrix", "bias")}


class KeepsLists(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["history"] = [1, 2]


def test_state_that_cannot_be_saved_is_named():
    values = weights()
    optimizer = Optimizer(KeepsLists(list(values.values()), lr=0.1), held(values), None)
    update(optimizer, gradients(0), 0.1)
    with pytest.raises(CheckpointError, match="KeepsLists keeps a list in optimizer/history/matrix"):
        optimizer.scalars()


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"optimizer": "torch.optim.AdamX"}, "torch.optim has no 'AdamX'", "did you mean 'Adam'"),
        ({"optimizer": "nowhere.Adam"}, "'nowhere' cannot be imported", "dotted path"),
        ({"optimizer": "torch.nn.Linear"}, "is not a torch optimizer", "subclass of torch.optim.Optimizer"),
        ({"optimizer_options": {"beta": 1}}, "optimizer AdamW refuses its arguments: .*beta", "may hold: amsgrad"),
        ({"optimizer": "sgd", "optimizer_options": {"nesterov": True}}, "SGD refuses.*momentum", "momentum"),
        ({"optimizer_options": {"lr": 1}}, "optimizer_options must not hold 'lr'", "use the option lr itself"),
        ({"optimizer_options": {"foreach": True}}, "AdamW refuses its arguments", "may hold"),
        ({"optimizer": "torch.optim.LBFGS"}, "LBFGS evaluates the loss several times", "needs no closure"),
        (
            {"optimizer": "tests.run_helpers.NoDecay", "weight_decay": 0.3},
            "weight_decay = 0.3 does nothing: NoDecay does not decay", "leave weight_decay out",
        ),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_made_is_refused(options: Any, message: str, hint: str):
    with pytest.raises(ConfigError, match=message) as info:
        make_optimizer(held(weights()), RunConfig.create(**options))
    assert hint in info.value.hint


def held_piece(piece: Piece) -> dict[str, Weight]:
    values = torch.ones(piece.stop - piece.start)
    return {piece.name: Weight(piece, values, values, trained=True)}


class OfElements(torch.optim.SGD):
    """Somebody's own, that does nothing new."""


class OfWholeTensors(torch.optim.SGD):
    """Somebody's own, which looks at a tensor as a whole."""

    def step(self, closure: Any = None) -> None:
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            weight.grad = weight.grad / weight.grad.norm()
        super().step(closure)


def test_a_part_of_a_tensor_is_only_given_to_optimizers_that_update_each_element_by_itself():
    part = held_piece(Piece("matrix", Local((4, 3)), 0, 5))
    assert make_optimizer(part, RunConfig()) and make_optimizer(part, RunConfig(), OfElements)
    with pytest.raises(ConfigError, match="OfWholeTensors does not update each element by itself") as info:
        make_optimizer(part, RunConfig(), OfWholeTensors)
    assert "use zero=0, tp=1" in info.value.hint and "AdamW" in info.value.hint
    with pytest.raises(ConfigError, match="Adafactor does not update each element by itself"):
        make_optimizer(part, RunConfig(), torch.optim.Adafactor)
    columns = held_piece(Piece.whole("matrix", Local((4, 3), 1, ((0, 2),))))
    with pytest.raises(ConfigError, match="but the plan splits tensors"):
        make_optimizer(columns, RunConfig(), OfWholeTensors)
    assert make_optimizer(held(weights()), RunConfig(), OfWholeTensors)


class OfAllTensors(torch.optim.SGD):
    """Somebody's own, which looks at all tensors together."""

    def step(self, closure: Any = None) -> None:
        own = [weight for group in self.param_groups for weight in group["params"]]
        torch._foreach_div_([w.grad for w in own], torch.stack([w.grad.norm() for w in own]).norm())
        super().step(closure)


def test_what_an_optimizer_looks_at_is_found_by_trying_it():
    def reach(kind: type[Any], **arguments: Any) -> str:
        return reach_of(kind, lambda tensors: kind(tensors, **arguments), torch.device("cpu"))

    found = [reach(kind, lr=0.1) for kind in (torch.optim.Adam, OfElements, OfWholeTensors, OfAllTensors)]
    assert found == ["element", "element", "tensor", "all"]
    assert reach(torch.optim.LBFGS, lr=0.1) == "all"
    assert reach(torch.optim.Adafactor, lr=0.1) == "tensor"


def test_an_optimizer_of_all_tensors_needs_all_of_them():
    own = held(weights())
    require_element_wise(OfAllTensors, own, {"lr": 0.1}, has_all=True)
    with pytest.raises(ConfigError, match="OfAllTensors looks at all parameters together, but the plan keeps") as info:
        require_element_wise(OfAllTensors, own, {"lr": 0.1}, has_all=False)
    assert "use replicas alone (dp=…" in info.value.hint


def test_matrices_decay_by_their_own_shape_even_where_only_a_row_of_elements_is_here():
    part = held_piece(Piece("matrix", Local((4, 3)), 0, 5))
    decayed, kept = make_optimizer(part, RunConfig(weight_decay=0.3)).param_groups
    assert (len(decayed["params"]), decayed["weight_decay"], kept["params"]) == (1, 0.3, [])


NAMES = ("embed.weight", "layers.0.mlp.weight", "layers.1.mlp.weight", "norm.weight")


def test_frozen_patterns_and_tied_names_are_left_out():
    tied = {"lm_head.weight": "embed.weight"}
    assert choose_trainable(NAMES[:3], NAMES, tied, ["*.mlp.*"]) == ("embed.weight",)
    assert choose_trainable(NAMES, NAMES, tied, ["lm_head.*"]) == NAMES[1:]


def test_a_pattern_that_matches_nothing_names_the_nearest_parameter():
    with pytest.raises(ConfigError, match=r"no parameter matches 'layers.0.mpl.weight'") as info:
        choose_trainable(NAMES, NAMES, {}, ["layers.0.mpl.weight"])
    assert "did you mean 'layers.0.mlp.weight'" in info.value.hint
    with pytest.raises(ConfigError) as info:
        choose_trainable(NAMES, NAMES, {}, ["zzz"])
    assert info.value.hint == "names look like 'embed.weight' or 'norm.weight'"


def test_nothing_left_to_train_is_refused():
    with pytest.raises(ConfigError, match=r"option freeze = \['\*'\] leaves no parameter to train"):
        choose_trainable(NAMES, NAMES, {}, ["*"])
    with pytest.raises(ConfigError, match="the model has no parameter to train"):
        choose_trainable((), NAMES, {}, [])
