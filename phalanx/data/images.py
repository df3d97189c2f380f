"""Folders of images, one subfolder per class, read when a sample is asked for.

PNG and JPEG need Pillow; .ppm and .npy are read with numpy. Images are resized to what the model takes and brought to
the range -1 … 1, as ViT expects.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from phalanx.data.broken import BrokenData, warn_skipped
from phalanx.data.samples import RecordSamples, Request
from phalanx.errors import DataError
from phalanx.tasks.base import Sample
from phalanx.tasks.image_classification import image_shape
from phalanx.tasks.vocabulary import num_labels

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
