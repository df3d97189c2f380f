from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.metrics import Meter, device_peak_flops, faster_in_half, peak_memory
from phalanx.planning.precision import peak_flops


def feed(meter: Meter, seconds: list[float], tokens: int = 100, flops: float = 1e9) -> list[dict]:
    numbered = enumerate(seconds, start=1)
    return [meter.step(n, tokens=tokens, flops=flops, seconds=s, memory_bytes=7) for n, s in numbered]


def test_rates_are_medians_so_that_a_slow_step_does_not_show():
    record = feed(Meter(total_steps=10), [30.0, 1.0, 1.0])[-1]
    assert record["tokens_per_second"] == 100
    assert record["flops_per_second"] == 1e9
    assert record["eta_seconds"] == 7.0
    assert (record["tokens"], record["step_seconds"], record["memory_bytes"]) == (100, 1.0, 7)


def test_only_the_last_steps_count_for_rates():
    record = feed(Meter(total_steps=9, window=3), [1.0] * 6 + [2.0] * 3)[-1]
    assert record["tokens_per_second"] == 50
    assert record["eta_seconds"] == 0


def test_the_summary_counts_every_step():
    meter = Meter(total_steps=3, peak=1e10)
    feed(meter, [3.0, 1.0, 1.0])
    summary = meter.summary()
    assert (summary["tokens"], summary["seconds"], summary["tokens_per_second"]) == (300, 5.0, 60)
    assert summary["mfu"] == pytest.approx(3e9 / 5 / 1e10)


def test_the_summary_of_no_steps_is_zero():
    assert Meter(total_steps=0).summary()["tokens_per_second"] == 0


def test_mfu_is_the_share_of_the_peak_and_unknown_without_one():
    assert feed(Meter(total_steps=1, peak=4e9), [1.0])[0]["mfu"] == 0.25
    assert feed(Meter(total_steps=1), [1.0])[0]["mfu"] is None


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_rates_lie_between_the_slowest_and_the_fastest_step(seconds: list[float]):
    record = feed(Meter(total_steps=100), seconds)[-1]
    assert 100 / max(seconds) <= record["tokens_per_second"] <= 100 / min(seconds)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H200", "float32", 67e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA A10G", "bfloat16", 70e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA GeForce RTX 4090", "float32", 82.6e12),
        ("NVIDIA H200", "float64", None),
        ("Some Other Device", "bfloat16", None),
    ],
)
def test_the_peak_is_found_by_the_devices_name(name: str, dtype: str, peak: float | None):
    assert peak_flops(name, dtype) == peak


def test_a_cpu_has_no_known_peak():
    assert device_peak_flops(torch.device("cpu"), "float32") is None


def test_a_header_says_what_half_precision_would_gain() -> None:
    assert faster_in_half("NVIDIA H200", "float32").endswith("has 15× the peak rate on this device")
    assert faster_in_half("NVIDIA H200", "bfloat16") == faster_in_half("NVIDIA H200", "float64") == ""
    assert faster_in_half("Tesla V100-SXM2-16GB", "float32") == faster_in_half("", "float32") == ""


def test_peak_memory_on_the_cpu_grows_with_what_was_touched():
    before = peak_memory(torch.device("cpu"))
    assert before > 2**24, "a Python with torch is larger than 16 MiB"
    held = bytearray(before + 2**26)
    held[:: 2**12] = b"x" * len(held[:: 2**12])
    assert peak_memory(torch.device("cpu")) >= before + 2**26
