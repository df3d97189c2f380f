"""Image folders: classes from subfolders, any size resized, broken files named."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from phalanx.errors import DataError


def write_ppm(path, pixels, comment=b""):
    height, width, _ = pixels.shape
    path.write_bytes(b"P6\n" + comment + b"%d %d\n255\n" % (width, height) + pixels.astype(np.uint8).tobytes())


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "images"
    for name, value in (("cats", 0), ("dogs", 255)):
        (root / name).mkdir(parents=True)
        write_ppm(root / name / "a.ppm", np.full((8, 8, 3), value))
        np.save(root / name / "b.npy", np.full((20, 10), value, np.uint8))
    return root


def opened_images(opened, folder, **options):
    return opened(folder, "image-classification", shuffle=False, **options)


def test_subfolders_are_classes_and_pixels_are_normalised(folder, opened):
    batches = opened_images(opened, folder)
    batch = batches.batch(0, 4)
    assert batches.num_samples == 4 and batches.tokens_per_sample == 1
    assert not batches.padding
    assert batch["labels"].tolist() == [0, 0, 1, 1]
    assert batch["pixel_values"].shape == (4, 3, 8, 8)
    assert batch["pixel_values"].dtype == torch.float32
    assert torch.allclose(batch["pixel_values"][:2], torch.tensor(-1.0))
    assert torch.allclose(batch["pixel_values"][2:], torch.tensor(1.0))


def test_channels_and_rows_stay_where_they_are(tmp_path, opened):
    (tmp_path / "images" / "x").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3))
    write_ppm(tmp_path / "images" / "x" / "a.ppm", pixels, comment=b"# made by hand\n")
    got = opened_images(opened, tmp_path / "images").batch(0, 1)["pixel_values"][0]
    np.testing.assert_allclose(got.permute(1, 2, 0).numpy(), pixels / 127.5 - 1, atol=1e-6)


def test_alpha_is_dropped(tmp_path, opened):
    (tmp_path / "images" / "x").mkdir(parents=True)
    pixels = np.random.default_rng(0).random((8, 8, 4))
    np.save(tmp_path / "images" / "x" / "a.npy", pixels)
    got = opened_images(opened, tmp_path / "images").batch(0, 1)["pixel_values"][0]
    np.testing.assert_allclose(got.permute(1, 2, 0).numpy(), pixels[..., :3] * 2 - 1, atol=1e-6)


BROKEN = {
    "cut.ppm": (b"P6\n9 9\n255\nxx", "the file is cut short"),
    "ascii.ppm": (b"P3\n1 1\n255\n0 0 0", "not a binary PPM"),
    "bad.npy": (b"nothing", "is not a readable image"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named_and_refused_or_skipped(folder, opened, name):
    content, reason = BROKEN[name]
    (folder / "cats" / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: .*{reason}(.|\n)*on_broken=skip"):
        opened_images(opened, folder)
    with pytest.warns(UserWarning, match=f"skipped 1 broken part of .*{name}"):
        assert opened_images(opened, folder, on_broken="skip").num_samples == 4


@pytest.mark.parametrize(
    "array, reason",
    [(np.zeros((4, 4, 7), np.uint8), r"shape is \[4, 4, 7\]"), (np.zeros((4, 4, 3), np.int64), "values are int64")],
)
def test_an_array_that_is_no_image_is_refused(folder, opened, array, reason):
    np.save(folder / "cats" / "c.npy", array)
    with pytest.raises(DataError, match=f"c.npy: .*{reason}"):
        opened_images(opened, folder)


def test_an_image_that_breaks_after_opening_is_named(folder, opened):
    batches = opened_images(opened, folder)
    (folder / "cats" / "a.ppm").write_bytes(b"P6")
    with pytest.raises(DataError, match=r"a.ppm is not a readable image"):
        batches.batch(0, 1)


def test_more_classes_than_the_model_has_are_refused(folder, opened):
    (folder / "owls").mkdir()
    with pytest.raises(DataError, match=r"has 3 classes, but the model tells 2 apart(.|\n)*num_labels=3"):
        opened_images(opened, folder)


def test_a_folder_without_classes_is_refused(tmp_path, opened):
    (tmp_path / "flat").mkdir()
    with pytest.raises(DataError, match=r"has no subfolders(.|\n)*each class"):
        opened_images(opened, tmp_path / "flat")


def test_a_folder_without_images_is_refused(tmp_path, opened):
    (tmp_path / "images" / "x").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no samples"):
        opened_images(opened, tmp_path / "images")


@pytest.mark.parametrize("data", ["stdlib", __file__])
def test_images_come_from_a_folder_only(opened, data):
    with pytest.raises(DataError, match=r"is not a folder(.|\n)*image-classification learns from a folder"):
        opened_images(opened, data)


def test_png_without_pillow_names_the_package(folder, opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    (folder / "cats" / "c.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"needs the package 'Pillow'(.|\n)*pip install pillow"):
        opened_images(opened, folder, on_broken="skip")


class FakeImage:
    """Pillow's image, as far as it is used: opened, verified, converted, read by numpy."""

    @staticmethod
    def open(path):
        if path.read_bytes() != b"png":
            raise OSError("cannot identify image file")
        return FakeImage()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def verify(self):
        return None

    def convert(self, mode):
        assert mode == "RGB"
        return np.full((4, 4, 3), 51, np.uint8)


def test_png_is_read_by_pillow(tmp_path, opened, monkeypatch):
    package = ModuleType("PIL")
    package.Image = FakeImage
    monkeypatch.setitem(sys.modules, "PIL", package)
    (tmp_path / "images" / "x").mkdir(parents=True)
    (tmp_path / "images" / "x" / "a.PNG").write_bytes(b"png")
    got = opened_images(opened, tmp_path / "images").batch(0, 1)["pixel_values"]
    assert torch.allclose(got, torch.tensor(51 / 127.5 - 1))
    (tmp_path / "images" / "x" / "b.jpg").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"b.jpg: is not a readable image .cannot identify"):
        opened_images(opened, tmp_path / "images")
