"""Folders of wav files with transcripts, and the log-mel features that Whisper hears.

Only uncompressed wav at 16 kHz: converting is left to tools made for it. Features are computed when asked for.
"""

from __future__ import annotations

import wave
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.data.broken import BrokenData, warn_skipped
from phalanx.data.files import read_file
from phalanx.data.samples import RecordSamples, Request
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError
from phalanx.tasks.base import Sample
from phalanx.tasks.speech_to_text import feature_shape
from phalanx.tasks.vocabulary import text_config

SAMPLING_RATE, _WINDOW, _HOP = 16_000, 400, 160
TRANSCRIPTS = ("transcripts.jsonl", "transcripts.tsv")


def speech_samples(folder: Path, request: Request, tokenizer: Tokenizer) -> RecordSamples:
    """The recordings that the folder's transcripts name."""
    broken = BrokenData(request.on_broken)
    bins, frames = feature_shape(request.config)
    items: list[tuple[Path, list[int]]] = []
    for place, name, text in _transcripts(folder, broken):
        reason = _wav_reason(folder / name)
        if reason is None:
            items.append((folder / name, _labels(text, request, tokenizer)))
        else:
            broken.report(f"{place}: {folder / name}", reason)
    warn_skipped(broken.skipped, str(folder))

    def load(item: tuple[Path, list[int]]) -> Sample:
        return {"input_features": log_mel(read_wav(item[0]), bins, frames), "labels": item[1]}

    return RecordSamples(items, load, request, f"{folder} (recordings)")


def log_mel(waveform: Tensor, num_mel_bins: int, num_frames: int) -> Tensor:
    """Whisper's features of a recording, cut or filled with silence to `num_frames`: [num_mel_bins, num_frames]."""
    filled = torch.zeros(num_frames * _HOP)
    filled[: len(waveform)] = waveform[: len(filled)]
    spectrum = torch.stft(filled, _WINDOW, _HOP, window=torch.hann_window(_WINDOW), return_complex=True)
    power = spectrum[:, :-1].abs() ** 2
    features = (_mel_filters(num_mel_bins) @ power).clamp(min=1e-10).log10()
    return (features.maximum(features.max() - 8.0) + 4.0) / 4.0


def read_wav(path: Path) -> Tensor:
    """A recording as one channel in -1 … 1."""
    try:
        with wave.open(str(path), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise DataError(f"{path} is not a readable wav file ({error})", "repair or remove it") from error
    # 8-bit wav is unsigned, wider samples are signed.
    raw = np.frombuffer(data, {1: np.uint8, 2: np.dtype("<i2"), 4: np.dtype("<i4")}[width]).astype(np.float32)
    raw = raw - 128 if width == 1 else raw
    return torch.from_numpy(raw.reshape(-1, channels).mean(axis=1) / np.float32(2 ** (8 * width - 1)))


def _transcripts(folder: Path, broken: BrokenData) -> Iterator[tuple[str, str, str]]:
    """Place, file name and text of every transcript."""
    path = next((folder / name for name in TRANSCRIPTS if (folder / name).is_file()), None)
    if path is None:
        raise DataError(
            f"{folder} holds no transcripts",
            'add transcripts.jsonl with lines {"file": "a.wav", "text": "…"}, or transcripts.tsv with file<TAB>text',
        )
    for place, name, text in _jsonl_rows(path, broken) if path.suffix == ".jsonl" else _tsv_rows(path, broken):
        if isinstance(name, str) and name and isinstance(text, str) and text:
            yield place, name, text
        else:
            broken.report(place, "does not hold a file and its text")


def _jsonl_rows(path: Path, broken: BrokenData) -> Iterator[tuple[str, Any, Any]]:
    for record in read_file(path, broken):
        yield record.place, record.fields.get("file"), record.fields.get("text")


def _tsv_rows(path: Path, broken: BrokenData) -> Iterator[tuple[str, str, str]]:
    text = "".join(record.fields["text"] for record in read_file(path, broken))
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            name, _, transcript = line.partition("\t")
            yield f"{path}:{number}", name, transcript


def _labels(text: str, request: Request, tokenizer: Tokenizer) -> list[int]:
    (ids,) = tokenizer.encode([text], special=True, limit=request.tokens + 1)
    labels = ids.tolist()
    # The decoder is given its start token anyway; some tokenizers write it too, and it must not be learned twice.
    if labels and labels[0] == text_config(request.config).decoder_start_token_id:
        labels = labels[1:]
    return labels[: request.tokens]


def _wav_reason(path: Path) -> str | None:
    """Why a recording cannot be used, from its header alone."""
    try:
        with wave.open(str(path), "rb") as file:
            rate, width, frames = file.getframerate(), file.getsampwidth(), file.getnframes()
    except (OSError, EOFError, wave.Error) as error:
        return f"is not a readable wav file ({error})"
    if rate != SAMPLING_RATE:
        return f"has {rate} samples per second instead of {SAMPLING_RATE}; convert it, e.g. ffmpeg -ar {SAMPLING_RATE}"
    if width not in (1, 2, 4):
        return f"has {8 * width} bits per sample instead of 8, 16 or 32"
    return None if frames else "holds no sound"


@cache
def _mel_filters(num_mel_bins: int) -> Tensor:
    """Triangular filters on Slaney's mel scale up to 8 kHz: [num_mel_bins, frequencies]."""
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(1 + _WINDOW // 2, num_mel_bins, 0.0, 8000.0, SAMPLING_RATE, "slaney", "slaney")
    return torch.from_numpy(filters).float().T.contiguous()
