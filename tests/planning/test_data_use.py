"""What of a batch is data: padding, samples that an epoch sees again, and which batches are worth looking at."""

from __future__ import annotations

import pytest

from phalanx.planning.data_use import DataUse, batches_between, useful_share

CHAT = DataUse("chat", 1000, 512, 0.5)


def test_padding_and_samples_that_are_seen_again_are_not_useful() -> None:
    assert CHAT.steps(300) == 4 and CHAT.repeated(300) == 200
    assert CHAT.useful(300) == pytest.approx(0.5 * 1000 / 1200)
    assert CHAT.repeated(250) == 0 and CHAT.useful(250) == 0.5
    assert CHAT.useful(2000) == 0.25  # a batch of twice the data sees all of it twice


def test_a_stream_has_no_end_at_which_samples_repeat() -> None:
    stream = DataUse("stream", None, 512, 0.25)
    assert stream.steps(64) is None and stream.repeated(64) == 0 and stream.useful(64) == 0.75
    assert useful_share(None, 64) == 1


def test_batches_double_and_stop_at_the_data_and_beside_them_stand_those_that_repeat_least() -> None:
    assert batches_between(8, 40, None) == [8, 16, 32, 40]
    assert batches_between(64, 64, None) == [64]
    assert batches_between(128, 512, CHAT) == [128, 250, 256, 500, 512]
    assert batches_between(256, 4096, CHAT) == [256, 500, 512, 1000]
    assert batches_between(2000, 4000, CHAT) == [2000]
