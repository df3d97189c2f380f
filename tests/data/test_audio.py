"""Recordings with transcripts: the features of Whisper, labels from the text, broken files named."""

from __future__ import annotations

import json
import wave

import numpy as np
import pytest
import torch

from phalanx.data.media import log_mel, read_wav
from phalanx.errors import DataError
from phalanx.tasks.base import IGNORE


def write_wav(path, samples, rate=16_000, width=2, channels=1):
    scale = 2 ** (8 * width - 1) - 1
    raw = np.round(np.asarray(samples) * scale)
    data = (raw + 128).astype(np.uint8) if width == 1 else raw.astype({2: "<i2", 3: "<i4", 4: "<i4"}[width])
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data.tobytes())


def tone(num, frequency=440.0):
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(num) / 16_000)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "speech"
    root.mkdir()
    write_wav(root / "a.wav", tone(8_000))
    write_wav(root / "b.wav", tone(40_000, 880))
    lines = [{"file": "a.wav", "text": "hi"}, {"file": "b.wav", "text": "x" * 30}]
    (root / "transcripts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


def opened_speech(opened, folder, **options):
    return opened(folder, "speech-to-text", shuffle=False, **options)


@pytest.mark.parametrize("num", [100, 8_000, 16_000, 20_000])
@pytest.mark.parametrize("bins", [80, 128])
def test_features_equal_those_of_whispers_extractor(num, bins):
    from transformers import WhisperFeatureExtractor

    waveform = (tone(num) + 0.1 * np.random.default_rng(0).standard_normal(num)).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=bins, chunk_length=1)
    expected = extractor(waveform, sampling_rate=16_000, return_tensors="pt").input_features[0]
    ours = log_mel(torch.from_numpy(waveform), bins, 100)
    assert ours.shape == (bins, 100)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_recordings_come_with_their_transcripts(folder, opened):
    batches = opened_speech(opened, folder)
    batch = batches.batch(0, 2)
    assert batch["input_features"].shape == (2, 80, 100)
    assert batch["labels"][0].tolist() == [*b"hi", 257, *[IGNORE] * 5]
    assert batch["labels"][1].tolist() == [*b"xxxxxxxx"]
    assert batch["decoder_input_ids"][0].tolist() == [256, *b"hi", 257, *[258] * 4]
    torch.testing.assert_close(batch["input_features"][1], log_mel(read_wav(folder / "b.wav"), 80, 100))


def test_transcripts_may_be_tab_separated(folder, opened):
    (folder / "transcripts.jsonl").unlink()
    (folder / "transcripts.tsv").write_text("b.wav\thello\n\na.wav\tho\n")
    batch = opened_speech(opened, folder).batch(0, 2)
    assert batch["labels"][:, :2].tolist() == [[*b"he"], [*b"ho"]]


def test_a_start_token_written_by_the_tokenizer_is_not_learned(folder, opened, config):
    from types import SimpleNamespace

    starts_with_h = SimpleNamespace(**{**vars(config), "decoder_start_token_id": ord("h")})
    assert opened_speech(opened, folder, config=starts_with_h).batch(0, 1)["labels"][0, :2].tolist() == [ord("i"), 257]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_sample_width_gives_the_same_sound(tmp_path, width):
    write_wav(tmp_path / "a.wav", tone(500), width=width)
    np.testing.assert_allclose(read_wav(tmp_path / "a.wav").numpy(), tone(500), atol=0.01)


def test_channels_are_averaged(tmp_path):
    write_wav(tmp_path / "a.wav", np.stack([tone(500), -tone(500)], axis=1), channels=2)
    assert read_wav(tmp_path / "a.wav").abs().max() < 1e-4


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"nothing", "is not a readable wav file"),
        ({"rate": 44_100}, "has 44100 samples per second instead of 16000; convert it"),
        ({"width": 3}, "has 24 bits per sample instead of 8, 16 or 32"),
        ({"samples": []}, "holds no sound"),
        (None, "is not a readable wav file .*No such file"),
    ],
)
def test_a_recording_that_cannot_be_used_is_named_and_refused_or_skipped(folder, opened, content, reason):
    if content is None:
        (folder / "a.wav").unlink()
    elif isinstance(content, bytes):
        (folder / "a.wav").write_bytes(content)
    else:
        write_wav(folder / "a.wav", content.pop("samples", tone(300)), **content)
    with pytest.raises(DataError, match=f"transcripts.jsonl:1: .*a.wav: {reason}"):
        opened_speech(opened, folder)
    with pytest.warns(UserWarning, match="skipped 1 broken part"):
        assert opened_speech(opened, folder, on_broken="skip").num_samples == 1


def test_a_recording_that_breaks_after_opening_is_named(folder, opened):
    batches = opened_speech(opened, folder)
    (folder / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"a.wav is not a readable wav file"):
        batches.batch(0, 1)


def test_a_folder_without_transcripts_is_refused(tmp_path, opened):
    with pytest.raises(DataError, match=r"holds no transcripts(.|\n)*add transcripts.jsonl"):
        opened_speech(opened, tmp_path)


@pytest.mark.parametrize("line", ['{"file": "a.wav"}', '{"text": "hi"}', '{"file": 3, "text": "hi"}'])
def test_a_transcript_without_file_or_text_is_broken(folder, opened, line):
    (folder / "transcripts.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"transcripts.jsonl:1: does not hold a file and its text"):
        opened_speech(opened, folder)
