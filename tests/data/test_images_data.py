"""Images to classify: found, labelled, held out, decoded and changed at random."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from pipeline.config.data_schema import ImagesDataConfig
from pipeline.data.images import prepare_images
from pipeline.data.images.dataset import Augmentation, decode_image
from pipeline.errors import DataError

FLIPS = {"RandomHorizontalFlip": {"p": 0.5}, "ColorJitter": {"brightness": 0.5}}


def picture(seed: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(seed)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    return Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode)


def encode(image: Image.Image, form: str = "PNG", **how) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **how)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Three classes of 20 images; names that sort otherwise than they were written."""
    for number, name in enumerate(("owl", "cat", "bee")):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(20):
            (tmp_path / "train" / name / f"{i}.png").write_bytes(encode(picture(100 * number + i)))
    return tmp_path / "train"


def prepare(path, **given):
    return prepare_images(ImagesDataConfig(kind="images", path=str(path), **({"image_size": 8} | given)))


def error_of(path, **given):
    with pytest.raises(DataError) as caught:
        prepare(path, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(bundle, split):
    """The held images of a split, as stored."""
    dataset = bundle.train if split == "train" else bundle.eval["images"]
    return {dataset.images.read_encoded(int(row)) for row in dataset.rows}


def test_a_folder_of_classes(folder):
    bundle = prepare(folder)
    assert bundle.num_classes == 3
    assert bundle.train.class_names == ("bee", "cat", "owl")
    assert len(bundle.train) + len(bundle.eval["images"]) == 60
    for dataset in (bundle.train, bundle.eval["images"]):
        for index in range(len(dataset)):
            item = dataset[index]
            assert (item["inputs"].shape, item["inputs"].dtype) == ((3, 8, 8), torch.float32)
            assert item["labels"].dtype == torch.int64
            name = dataset.class_names[int(item["labels"])]
            assert f"/{name}/" in dataset.images.get_path(int(dataset.rows[index]))
    batch = bundle.collate([bundle.train[0], bundle.train[1]])
    assert batch["inputs"].shape == (2, 3, 8, 8)


def test_pixels_are_normalised(folder):
    bundle = prepare(folder, mean=[0.5, 0.25, 0.0], std=[0.5, 2.0, 1.0])
    pixels = bundle.train.read_pixels(3)
    item = bundle.train[3]["inputs"]
    for channel, (mean, std) in enumerate(((0.5, 0.5), (0.25, 2.0), (0.0, 1.0))):
        assert torch.allclose(item[channel] * std + mean, pixels[channel], atol=1e-6)
    assert prepare(folder, channels=1).train[0]["inputs"].shape == (1, 8, 8)


def test_what_is_held_out_stays_held_out(folder):
    """Adding, renaming and moving images among folders of a class moves none across; copies go together."""
    before = prepare(folder, eval_fraction=0.3)
    held = contents(before, "eval")
    trained = contents(before, "train")
    assert held
    assert not held & trained
    (folder / "cat" / "more").mkdir()
    (folder / "cat" / "3.png").rename(folder / "cat" / "more" / "renamed.png")
    for i in range(20):
        (folder / "bee" / f"0-{i}.png").write_bytes(encode(picture(5000 + i)))
        shutil.copy(folder / "owl" / f"{i}.png", folder / "owl" / f"copy-{i}.png")
    after = prepare(folder, eval_fraction=0.3)
    assert held <= contents(after, "eval")
    assert trained <= contents(after, "train")
    assert not contents(after, "eval") & contents(after, "train")
    assert len(after.train) + len(after.eval["images"]) == 100
    assert after.fingerprint != before.fingerprint
    assert prepare(folder, eval_fraction=0.3).fingerprint == after.fingerprint


def test_held_out_images_of_their_own(folder, tmp_path):
    held = tmp_path / "held"
    (held / "owl").mkdir(parents=True)
    (held / "owl" / "a.png").write_bytes(encode(picture(7)))
    bundle = prepare(folder, eval_path=str(held))  # a class may lack images there, and keeps its number
    assert (len(bundle.train), bundle.eval["images"].labels.tolist()) == (60, [2])
    (held / "oul").mkdir()
    (held / "oul" / "a.png").write_bytes(encode(picture(8)))
    assert "'oul' is not among the training images' 3 classes (did you mean \"owl\"?)" in error_of(
        folder, eval_path=str(held)
    )


def test_hidden_folders_are_no_classes_and_not_all_can_be_held_out(folder):
    (folder / ".cache").mkdir()
    assert prepare(folder).num_classes == 3
    assert "all 60 images are held out" in error_of(folder, eval_fraction=0.9999999999)


def test_a_folder_of_splits_is_told(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "val")
    told = f"write data.path={folder} and data.eval_path={tmp_path / 'val'}"
    assert f"data.path: {tmp_path} has the splits train/ and val/: {told}" in error_of(tmp_path)
    for name in ("train", "val"):  # two classes of these names
        for number, file in enumerate(sorted((tmp_path / name).rglob("*.png"))):
            file.rename(tmp_path / name / f"{number}.png")
        for inner in list((tmp_path / name).glob("*/")):
            inner.rmdir()
    assert prepare(tmp_path).num_classes == 2


@pytest.mark.parametrize(
    "content", [b"", b"not an image", encode(picture(0))[:150], encode(picture(0), "JPEG")[:300]]
)
def test_a_damaged_image_is_named(folder, content):
    (folder / "cat" / "5.png").write_bytes(content)
    dataset = prepare(folder, eval_fraction=0).train
    damaged = next(i for i in range(60) if dataset.images.get_path(i).endswith("cat/5.png"))
    with pytest.raises(DataError, match=r"cat/5\.png: not a readable image") as caught:
        dataset[damaged]
    assert "\n" not in str(caught.value)
    (folder / "cat" / "5.png").unlink()
    with pytest.raises(DataError, match=r"cat/5\.png: cannot be read: No such file"):
        dataset[damaged]


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK", "P", "1", "I;16", "I", "F"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_pixel_is_read(mode, channels):
    grey = picture(3, mode="L")
    wide = {"I;16": (np.uint16, 257), "I": (np.int32, 257), "F": (np.float32, 1 / 255)}
    if mode in wide:
        kind, step = wide[mode]
        image = Image.fromarray((np.asarray(grey).astype(kind) * step).astype(kind))
        assert image.mode == mode
    else:
        colour = grey.convert("RGB")
        image = colour.quantize(256) if mode == "P" else colour.convert(mode)
    pixels = decode_image(encode(image, "TIFF" if mode in ("CMYK", "I", "F") else "PNG"), "it", 10, channels)
    assert pixels.shape == (channels, 10, 10)
    assert (pixels.min() >= 0) & (pixels.max() <= 1)
    if mode != "1":
        expected = torch.from_numpy(np.asarray(grey)[:, 1:11] / 255.0).float()
        assert (pixels - expected).abs().max() < 0.02


@pytest.mark.parametrize("channels", [1, 3])
def test_floats_from_0_to_1_are_black_to_white(channels):
    file = Path(__file__).parent / "images" / "float32.tif"
    pixels = decode_image(file.read_bytes(), "it", 64, channels)
    given = torch.from_numpy(np.asarray(Image.open(file)).copy())
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert (pixels - given).abs().max() <= 0.5001 / 255


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((4, 4), 255.0, np.float32), "of mode F with values from 255 to 255; expected 0 to 1: scale"),
        (
            np.full((4, 4), np.nan, np.float32),
            "of mode F with values from nan to nan; expected 0 to 1: scale",
        ),
        (np.full((4, 4), 70_000, np.int32), "of mode I with values from 70000 to 70000; expected 0 to 65535"),
        (None, "of mode LAB; save it as RGB or as grey"),
    ],
)
def test_pixels_without_a_rule_are_refused_by_name(values, message):
    image = Image.new("LAB", (4, 4)) if values is None else Image.fromarray(values)
    with pytest.raises(DataError, match=f"^dark.tif: an image {message}"):
        decode_image(encode(image, "TIFF"), "dark.tif", 4, 3)


def test_the_camera_was_held_sideways():
    upright = picture(1, (16, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to see it upright
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    turned = decode_image(encode(stored, "PNG", exif=exif), "it", 8, 3)
    assert torch.equal(turned, decode_image(encode(upright), "it", 8, 3))


@given(width=st.integers(1, 60), height=st.integers(1, 60), size=st.integers(2, 20))
@settings(max_examples=50, deadline=None)
def test_the_shorter_side_is_resized_and_the_middle_cut_out(width, height, size):
    """A ramp along the longer side keeps its middle value in the middle and loses both ends evenly."""
    ramp = np.linspace(0, 255, max(width, height)).astype(np.uint8)
    array = np.tile(ramp, (height, 1)) if width >= height else np.tile(ramp[:, None], (1, width))
    pixels = decode_image(encode(Image.fromarray(array)), "it", size, 1)[0]
    assert pixels.shape == (size, size)
    line = (pixels if width >= height else pixels.T)[0]
    if max(width, height) > 1:
        assert line.mean() == pytest.approx(0.5, abs=0.06)
    assert torch.all(line.diff() >= -1e-6)


def test_a_large_photograph_keeps_its_looks():
    """JPEGs are decoded at a fraction of their size; what comes out is what the whole would have given."""
    smooth = picture(2, (9, 9)).resize((900, 900), Image.Resampling.BICUBIC)
    stored = encode(smooth, "JPEG", quality=95)
    quick = decode_image(stored, "it", 48, 3)
    whole = Image.open(io.BytesIO(stored)).resize((48, 48), Image.Resampling.BILINEAR)
    assert (quick - torch.from_numpy(np.asarray(whole) / 255.0).permute(2, 0, 1)).abs().mean() < 0.01


def test_changes_are_drawn_from_the_number_alone(folder):
    """Earlier draws and the worker do not matter, and no other random numbers change."""
    bundle = prepare(folder, augmentations=FLIPS)
    first = [bundle.train.augmented(index, 1000 + index)["inputs"] for index in range(10)]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = [bundle.train.augmented(index, 1000 + index)["inputs"] for index in reversed(range(10))]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    assert not torch.equal(first[0], bundle.train.augmented(0, 77)["inputs"])
    plain = bundle.train[0]["inputs"]
    assert torch.equal(plain, prepare(folder).train[0]["inputs"])
    assert torch.equal(bundle.eval["images"].augmented(0, 3)["inputs"], bundle.eval["images"][0]["inputs"])
    other = prepare(folder, augmentations=FLIPS)
    assert torch.equal(other.train.augmented(4, 1004)["inputs"], first[4])


class Drawn(torch.utils.data.Dataset):
    """The indices that a loader with positions asks for."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset.augmented(index, 31 * index)


@pytest.mark.slow
def test_workers_give_what_one_process_gives(folder):
    train = prepare(folder, augmentations=FLIPS | {"RandomErasing": {"p": 1.0}}).train
    by_workers = torch.cat([batch["inputs"] for batch in DataLoader(Drawn(train), 5, num_workers=2)])
    alone = torch.stack([Drawn(train)[i]["inputs"] for i in range(len(train))])
    assert torch.equal(by_workers, alone)


USUAL = [
    {"RandomHorizontalFlip": {}},
    {"RandomVerticalFlip": {}},
    {"RandomResizedCrop": {"scale": [0.3, 1.0]}},
    {"RandomCrop": {"padding": 2}},
    {"RandomRotation": {"degrees": 20.0}},
    {"ColorJitter": {"brightness": 0.5, "contrast": 0.5, "saturation": 0.5}},
    {"RandomGrayscale": {"p": 0.5}},
    {"RandomErasing": {}},
]


@pytest.mark.parametrize("augmentations", USUAL, ids=lambda given: next(iter(given)))
def test_the_usual_ones(augmentations):
    augment = Augmentation(augmentations)
    image = decode_image(encode(picture(5)), "it", 8, 3)
    first = [augment(image, draw) for draw in range(12)]
    again = [augment(image, draw) for draw in reversed(range(12))]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    assert len({a.numpy().tobytes() for a in first}) > 1
    assert all(a.shape == image.shape and a.min() >= 0 and a.max() <= 1 for a in first)
    assert torch.equal(image, decode_image(encode(picture(5)), "it", 8, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("augmentations", "message"),
    [
        ({"RandomHorizontalFlip": {"p": "often"}}, "RandomHorizontalFlip.p: 'often'; expected a number"),
        (
            {"ColorJitter": {"brightness": -3.0}},
            "ColorJitter.brightness: -3.0; expected a number of at least 0",
        ),
        ({"RandomErasing": {"scale": [0.5, 0.1]}}, "scale: [0.5, 0.1]; expected two numbers from 0 to 1"),
        ({"RandomErasing": {"scale": 0.5}}, "scale: 0.5; expected two numbers from 0 to 1"),
        ({"RandomErasing": {"p": 5}}, "p: 5; expected a number from 0 to 1"),
        ({"RandomResizedCrop": {"ratio": [0, 1]}}, "ratio: [0, 1]; expected two numbers from 0.01 to 100"),
    ],
)
def test_augmentations_that_cannot_be(folder, augmentations, message):
    assert message in error_of(folder, augmentations=augmentations)
