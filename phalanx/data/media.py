"""Folders of images, one subfolder per class, and of wav files with transcripts, read when a sample is asked for.

PNG and JPEG need Pillow; .ppm and .npy are read with numpy. Images are resized to what the model takes and brought to
the range -1 … 1, as ViT expects. Speech becomes the log-mel features that Whisper hears, from uncompressed wav at
16 kHz only: converting is left to tools made for it.
"""

from __future__ import annotations

import re
import wave
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from phalanx.data.samples import RecordSamples, Request
from phalanx.data.sources import BrokenData, read_file, warn_skipped
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError
from phalanx.tasks.base import Sample
from phalanx.tasks.classification import image_shape
from phalanx.tasks.sequence_to_sequence import feature_shape
from phalanx.tasks.vocabulary import num_labels, text_config

PILLOW_SUFFIXES = (".png", ".jpg", ".jpeg")
IMAGE_SUFFIXES = (*PILLOW_SUFFIXES, ".ppm", ".npy")


class UnreadableImage(Exception):
    """Why an image cannot be read, without its place."""


def image_samples(folder: Path, request: Request) -> RecordSamples:
    """The images of a folder whose subfolders, in the order of their names, are the classes."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise DataError(f"{folder} has no subfolders", "put the images of each class in a subfolder of their own")
    if len(classes) > num_labels(request.config):
        raise DataError(
            f"{folder} has {len(classes)} classes, but the model tells {request.config.num_labels} apart",
            f"set the option model_options num_labels={len(classes)}, or num_labels in the model's configuration",
        )
    broken = BrokenData(request.on_broken)
    items = [(file, label) for label, path in enumerate(classes) for file in _images(path, broken)]
    warn_skipped(broken.skipped, str(folder))

    def load(item: tuple[Path, int]) -> Sample:
        return {"pixel_values": _load(item[0], image_shape(request.config)), "labels": item[1]}

    return RecordSamples(items, load, request, f"{folder} ({len(classes)} classes of images)")


def _images(folder: Path, broken: BrokenData) -> list[Path]:
    files: list[Path] = []
    for file in sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES):
        try:
            _check(file)
            files.append(file)
        except UnreadableImage as error:
            broken.report(str(file), str(error))
    return files


def _check(file: Path) -> None:
    """Find out whether an image is broken, without decoding it where that would take long."""
    try:
        if file.suffix.lower() in PILLOW_SUFFIXES:
            with _pillow(file).open(file) as image:
                image.verify()
        else:
            _read(file)
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise UnreadableImage(f"is not a readable image ({error})") from error


def _load(file: Path, shape: tuple[int, int, int]) -> Tensor:
    try:
        pixels = _read(file)
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise DataError(f"{file} is not a readable image ({error})", "repair or remove it") from error
    image = _with_channels(torch.from_numpy(pixels).permute(2, 0, 1), shape[0])
    if image.shape[1:] != shape[1:]:
        image = interpolate(image[None], size=shape[1:], mode="bilinear", antialias=True, align_corners=False)[0]
    return (image - 0.5) / 0.5


def _read(file: Path) -> NDArray[np.float32]:
    """Pixels in 0 … 1: [height, width, channels]."""
    match file.suffix.lower():
        case ".npy":
            pixels = np.load(file, allow_pickle=False)
        case ".ppm":
            pixels = _read_ppm(file.read_bytes())
        case _:
            with _pillow(file).open(file) as image:
                pixels = np.asarray(image.convert("RGB"))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or 0 in pixels.shape:
        raise ValueError(f"its shape is {list(pixels.shape)}, not [height, width, channels]")
    if pixels.dtype != np.uint8 and pixels.dtype.kind != "f":
        raise ValueError(f"its values are {pixels.dtype.name}, not uint8 or floats in 0 … 1")
    return pixels.astype(np.float32) / np.float32(255 if pixels.dtype == np.uint8 else 1)


def _read_ppm(data: bytes) -> NDArray[Any]:
    """Binary PPM: 'P6 width height maximum', one white space, then the pixels."""
    header = re.match(rb"P6\s+(?:#[^\n]*\n\s*)*(\d+)\s+(\d+)\s+255\s", data)
    if header is None:
        raise ValueError("not a binary PPM (P6) with 8 bits per colour")
    width, height = int(header[1]), int(header[2])
    pixels = data[header.end() : header.end() + width * height * 3]
    if len(pixels) < width * height * 3:
        raise ValueError("the file is cut short")
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


def _with_channels(image: Tensor, channels: int) -> Tensor:
    image = image[:3] if image.shape[0] == 4 else image
    if image.shape[0] == channels:
        return image
    grey = image.mean(dim=0, keepdim=True)
    return grey.expand(channels, -1, -1)


def _pillow(file: Path) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            f"{file} needs the package 'Pillow', which is not installed",
            "pip install pillow, or use .ppm or .npy images",
        ) from None
    return Image


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
