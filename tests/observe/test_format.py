from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.format import bytes_text, field_texts, number_text, seconds_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (999, "999"),
        (12345, "12.3k"),
        (999_960, "1.0M"),
        (1.5e9, "1.5G"),
        (2e18, "2.0E"),
        (None, "-"),
        (math.inf, "inf"),
        (-12345, "-12.3k"),
    ],
)
def test_numbers_get_a_thousands_suffix(value: float | None, text: str):
    assert number_text(value) == text


def test_a_unit_follows_the_suffix():
    assert number_text(1.5e9, "FLOP/s") == "1.5 GFLOP/s"
    assert number_text(7, "FLOP/s") == "7 FLOP/s"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_get_a_binary_unit(value: int, text: str):
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.35, "350ms"),
        (0.9999, "1.0s"),
        (12.4, "12.4s"),
        (59.96, "1:00"),
        (75, "1:15"),
        (7509, "2:05:09"),
        (math.nan, "-"),
        (None, "-"),
    ],
)
def test_durations_read_like_a_clock(value: float | None, text: str):
    assert seconds_text(value) == text


@given(st.floats(1e-6, 1e17))
def test_a_number_text_is_short_and_close_to_its_value(value: float):
    text = number_text(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1], 1)
    assert math.isclose(float(text.rstrip("kMGTP")) * scale, value, rel_tol=0.051, abs_tol=1e-12)
    assert len(text.rstrip("kMGTP")) <= 9


@pytest.mark.parametrize(
    ("name", "value", "texts"),
    [
        ("memory_bytes", 3 << 29, ("memory", "1.5 GiB")),
        ("eta_seconds", 75, ("eta", "1:15")),
        ("seconds", 12.4, ("seconds", "12.4s")),
        ("tokens_per_second", 12345.6, ("tokens per second", "12.3k")),
        ("mfu", 0.537, ("mfu", "53.7%")),
        ("mfu", None, ("mfu", "-")),
        ("tokens", 51200, ("tokens", "51,200")),
        ("loss", 1.23456, ("loss", "1.235")),
        ("export", True, ("export", "True")),
        ("model", "gpt2", ("model", "gpt2")),
    ],
)
def test_a_field_is_shown_by_the_unit_in_its_name(name: str, value: object, texts: tuple[str, str]):
    assert field_texts(name, value) == texts
