"""Data sets: files in their official layouts, whole, broken and absent; augmentation beside one image at a time."""

import gzip
import math
import os
import pickle
import struct
import sys
from functools import partial

import numpy as np
import pytest
import torch

from gnomon.experiments import data
from gnomon.experiments.data import augment, cifar, folders, idx, images

PIXELS = np.random.default_rng(0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------- files in the official layouts
def write_cifar(layout, root, labels=range(4), protocol=4):
    folder = root / layout.folder
    folder.mkdir(parents=True)
    for name in layout.files["train"] + layout.files["test"]:
        content = {b"data": PIXELS.integers(0, 256, (4, 3072), np.uint8), layout.labels: list(labels)}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return folder


write_cifar10, write_cifar100 = partial(write_cifar, cifar.CIFAR10), partial(write_cifar, cifar.CIFAR100)


def idx_bytes(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, count=5, labels=range(5), compressed=True):
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        arrays = {
            "images-idx3": PIXELS.integers(0, 256, (count, 28, 28), np.uint8),
            "labels-idx1": np.array(labels, dtype=np.uint8),
        }
        for kind, array in arrays.items():
            name = f"{part}-{kind}-ubyte"
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
            else:
                (folder / name).write_bytes(idx_bytes(array))
    return folder


def write_image(file, width, height, mode="RGB"):
    Image = pytest.importorskip("PIL.Image")
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = PIXELS.integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file)
    return pixels


def write_tiny(root, classes=("n2", "n1"), count=3):
    folder = root / "tiny-imagenet-200"
    lines = []
    for name in classes:
        for i in range(count):
            write_image(folder / "train" / name / "images" / f"{name}_{i}.JPEG", 64, 64, "L" if i == 0 else "RGB")
        (folder / "train" / name / f"{name}_boxes.txt").write_text("0\n")
        write_image(folder / "val" / "images" / f"val_{name}.JPEG", 64, 64)
        lines.append(f"val_{name}.JPEG\t{name}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(classes))
    return folder


def write_folders(root, held_out="val", classes=("ant", "bee"), count=3):
    for part in ("train", held_out):
        for name in classes:
            for i in range(count):
                write_image(root / part / name / f"{i}.png", 300 + 2 * i, 280)
    return root


# ---------------------------------------------------------------------- what is read is what was written
def raw(recipe, batch):
    """The bytes behind a normalized batch."""
    mean, std = (torch.tensor(x)[:, None, None] for x in (recipe.mean, recipe.std))
    return ((batch * std + mean) * recipe.white).round().to(torch.uint8)


@pytest.mark.parametrize("protocol", [4, 5])
def test_cifar100(tmp_path, protocol):
    folder = write_cifar100(tmp_path, protocol=protocol, labels=[7, 99, 0, 3])
    whole = data.load("cifar100", tmp_path)
    assert (whole.classes, whole.channels, whole.kind) == (100, 3, "images")
    assert (whole.train_size, whole.test_size) == (4, 4)
    x, y = whole.test_batch(torch.tensor([2, 0]))
    stored = pickle.loads((folder / "test").read_bytes())[b"data"].reshape(-1, 3, 32, 32)
    assert torch.equal(raw(cifar.RECIPE, x), torch.from_numpy(stored[[2, 0]]))
    assert y.tolist() == [0, 7]
    limited = data.load("cifar100", folder, train_limit=3, test_limit=1)  # the folder itself will do
    assert (limited.train_size, limited.test_size) == (3, 1)
    assert torch.equal(limited.test_batch(torch.tensor([0]))[0], whole.test_batch(torch.tensor([0]))[0])


def test_cifar_pickles_of_python_2(tmp_path):
    """The official files: protocol 2, strings instead of bytes, numpy's old module names."""
    pixels = bytes(range(256)) * 12
    content = b"".join(
        (
            b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
            b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff",
            b"K\x00tb\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb",
            b"U\x06labels](K\x07e",
            b"u.",
        )
    )
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*cifar.CIFAR10.files["train"], "test_batch"):
        (folder / name).write_bytes(content)
    x, y = data.load("cifar10", tmp_path).test_batch(torch.tensor([0]))
    assert raw(cifar.RECIPE, x).flatten().tolist() == list(pixels)
    assert y.tolist() == [7]


def test_cifar10_joins_its_batches(tmp_path):
    write_cifar10(tmp_path)
    ten = data.load("cifar10", tmp_path)
    assert (ten.classes, ten.train_size, ten.test_size) == (10, 20, 4)
    assert ten.train_batch(torch.arange(20), seeded())[1].tolist() == 5 * [0, 1, 2, 3]


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion-mnist", "FashionMNIST/raw")])
def test_idx(tmp_path, monkeypatch, name, folder, compressed):
    monkeypatch.setattr(idx, "DEBIAN", tmp_path / "absent")
    monkeypatch.setenv("GNOMON_DATA", str(tmp_path))
    write_idx(tmp_path / folder, compressed=compressed)
    grey = data.load(name, test_limit=2)
    assert (grey.classes, grey.channels, grey.train_size, grey.test_size) == (10, 1, 5, 2)
    x, y = grey.train_batch(torch.tensor([4, 1]), seeded())
    file = tmp_path / folder / ("train-images-idx3-ubyte" + (".gz" if compressed else ""))
    stored = gzip.decompress(file.read_bytes()) if compressed else file.read_bytes()
    stored = torch.frombuffer(bytearray(stored[16:]), dtype=torch.uint8).view(5, 1, 28, 28)
    assert torch.equal(raw(grey.recipe, x), stored[[4, 1]])
    assert y.tolist() == [4, 1]


def test_debian_s_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "DEBIAN", tmp_path / "share")
    monkeypatch.setenv("GNOMON_DATA", str(tmp_path / "absent"))
    write_idx(tmp_path / "share" / "fashion-mnist")
    assert data.load("fashion-mnist").train_size == 5


def test_tiny_imagenet(tmp_path):
    folder = write_tiny(tmp_path)
    tiny = data.load("tiny-imagenet", tmp_path)
    assert (tiny.classes, tiny.channels, tiny.train_size, tiny.test_size) == (2, 3, 6, 2)
    x, y = tiny.test_batch(torch.arange(2))
    from PIL import Image

    for pixels, label in zip(raw(folders.TINY, x), y.tolist(), strict=True):
        name = ("n2", "n1")[label]  # numbered as in wnids.txt
        stored = np.asarray(Image.open(folder / "val" / "images" / f"val_{name}.JPEG"))
        assert torch.equal(pixels, torch.from_numpy(stored.copy()).permute(2, 0, 1))
    assert sorted(tiny.train_batch(torch.arange(6), seeded())[1].tolist()) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("name", "held_out"), [("image-folder", "val"), ("imagenet-100", "test")])
def test_image_folder(tmp_path, name, held_out):
    write_folders(tmp_path / name, held_out)
    found = data.load(name, tmp_path)
    assert (found.name, found.classes, found.train_size, found.test_size) == (name, 2, 6, 6)
    x, y = found.test_batch(torch.arange(6))
    assert x.shape == (6, 3, 224, 224)
    assert x.is_contiguous()
    assert sorted(y.tolist()) == [0, 0, 0, 1, 1, 1]
    from PIL import Image

    file = found._test.files[2]
    with Image.open(file) as image:
        width = 256 * image.width // 280
        left = round((width - 224) / 2)
        middle = np.asarray(image.resize((width, 256), Image.Resampling.BILINEAR))[16:240, left : left + 224]
    assert torch.equal(raw(folders.IMAGENET, x[2]), torch.from_numpy(middle.copy()).permute(2, 0, 1))
    assert y[2] == ["ant", "bee"].index(file.parent.name)


def test_small_and_oblong_images_fill_the_input(tmp_path):
    for part in ("train", "val"):
        write_image(tmp_path / part / "a" / "wide.png", 90, 7)
        write_image(tmp_path / part / "b" / "deep" / "tall.png", 5, 60, "L")
    found = data.load("image-folder", tmp_path)
    assert found.test_batch(torch.arange(2))[0].shape == (2, 3, 224, 224)
    assert found.train_batch(torch.arange(2), seeded())[0].shape == (2, 3, 224, 224)


def test_digits():
    small = data.load("digits")
    assert (small.name, small.classes, small.channels, small.train_size, small.test_size) == (
        "digits",
        10,
        1,
        1437,
        360,
    )
    x, y = small.train_batch(torch.arange(1437), seeded())
    assert x.shape == (1437, 1, 8, 8)
    assert y.bincount().min() > 100
    assert small.test_batch(torch.arange(360))[1].bincount().min() > 20


@pytest.mark.slow
def test_python_text():
    text = data.load("python-text", test_limit=100)
    assert (text.kind, text.classes, text.test_size) == ("text", 256, 100)
    assert text.train_size > 10_000
    for x, y in (text.test_batch(torch.arange(100)), text.train_batch(torch.arange(text.train_size), seeded())):
        assert x.shape == y.shape == (len(x), 64)
        assert torch.equal(x[:, 1:], y[:, :-1])
    last = text._starts.max() // text.context
    assert last * text.context + text.context - 1 + text.context + 1 <= len(text._text)


@pytest.mark.slow
def test_limits_take_the_first_of_a_mixed_order(tmp_path):
    write_folders(tmp_path, count=8, classes=("a", "b", "c"))
    whole, part = data.load("image-folder", tmp_path), data.load("image-folder", tmp_path, train_limit=15)
    assert part._train.files == whole._train.files[:15]
    assert len(set(part._train.labels.tolist())) == 3


@pytest.mark.slow
def test_a_part_of_the_training_set_is_held_out(tmp_path):
    write_folders(tmp_path, count=8, classes=("a", "b"))
    whole = data.load("image-folder", tmp_path)
    part = whole.held_out(0.25)
    assert (part.classes, part.train_size, part.test_size, whole.train_size) == (2, 12, 4, 16)
    assert part._train.files + part._test.files == whole._train.files
    assert torch.equal(part.test_batch(torch.arange(4))[1], whole._train.labels[12:])
    digits = data.load("digits")
    some = digits.held_out(0.1)
    assert (some.train_size, some.test_size) == (1293, 144)
    assert torch.equal(some.test_batch(torch.arange(144))[0], digits.recipe.normalized(digits._train.images[1293:]))
    text = data.load("python-text", train_limit=1000).held_out(0.2)
    assert (text.train_size, text.test_size) == (800, 200)
    assert text._held_out.data_ptr() == text._text.data_ptr() + len(text._text)  # no byte is in both
    with pytest.raises(data.DataError, match=r"validation=0.1 of 2 training examples"):
        data.load("digits", train_limit=2).held_out(0.1)


# ---------------------------------------------------------------------- batches
SETS = {
    "digits": lambda root: None,
    "python-text": lambda root: None,
    "cifar100": write_cifar100,
    "tiny-imagenet": write_tiny,
    "image-folder": write_folders,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_a_batch_is_a_function_of_indices_and_generator(tmp_path, name):
    SETS[name](tmp_path)
    first, again = data.load(name, tmp_path), data.load(name, tmp_path)
    indices = torch.tensor([3, 1, 0])
    first.train_batch(indices, seeded(9))  # nothing is kept between batches
    torch.manual_seed(5)
    state = torch.get_rng_state()
    x, y = first.train_batch(indices, seeded(1))
    assert torch.equal(torch.get_rng_state(), state)  # only the given generator is asked
    x_again, y_again = again.train_batch(indices, seeded(1))
    assert torch.equal(x, x_again)
    assert torch.equal(y, y_again)
    if name != "digits":  # whose images are not augmented
        assert not torch.equal(x, first.train_batch(indices, seeded(2))[0])
    assert torch.equal(first.test_batch(indices[1:])[0], again.test_batch(indices[1:])[0])
    for chosen in (slice(0, 1), slice(1, 3)):  # whoever makes a part of a batch makes it alike
        part = first.train_batch(indices, seeded(1), chosen)
        assert torch.equal(part[0], x[chosen])
        assert torch.equal(part[1], y[chosen])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "fashion-mnist", "cifar100"])
def test_normalized_images_have_mean_zero_and_variance_one(name):
    x, _ = load_real(name).test_batch(torch.arange(360))
    assert x.mean((0, 2, 3)).abs().max() < 0.1
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.1


def test_normalization_keeps_its_input():
    recipe = images.Recipe((0.25, 0.5), (0.5, 2.0))
    pixels = torch.full((1, 2, 1, 1), 255.0)
    assert recipe.normalized(pixels).flatten().tolist() == [1.5, 0.25]
    assert pixels.flatten().tolist() == [255.0, 255.0]


# ---------------------------------------------------------------------- augmentation
@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (7, 1, 6, 9)])
def test_crop_and_flip(shape):
    pixels = torch.randint(1, 256, shape, dtype=torch.uint8)
    cropped = augment.crop_and_flip(pixels, seeded(3))
    generator = seeded(3)
    tops, lefts = torch.randint(9, (2, shape[0], 1), generator=generator).squeeze(-1).tolist()
    mirrored = (torch.rand(shape[0], generator=generator) < 0.5).tolist()
    for image, result, top, left, mirror in zip(pixels, cropped, tops, lefts, mirrored, strict=True):
        padded = torch.zeros(shape[1], shape[2] + 8, shape[3] + 8, dtype=torch.uint8)
        padded[:, 4:-4, 4:-4] = image
        window = padded[:, top : top + shape[2], left : left + shape[3]]
        assert torch.equal(result, window.flip(-1) if mirror else window)
    assert {*tops, *lefts} <= set(range(9))
    assert len(set(mirrored)) == 2


@pytest.mark.parametrize("shape", [(12, 3, 16, 16), (12, 2, 9, 14)])
def test_rotate_and_flip(shape):
    count, channels, height, width = shape
    pixels = torch.randint(1, 256, shape, dtype=torch.uint8)
    turned = augment.rotate_and_flip(pixels, seeded(3))
    generator = seeded(3)
    angles = (torch.rand(count, generator=generator) * 2 - 1) * math.radians(20)
    mirrored = torch.rand(count, generator=generator) < 0.5
    different = 0
    for i in range(count):
        c, s = math.cos(angles[i]), math.sin(angles[i])
        expected = torch.zeros(channels, height, width, dtype=torch.uint8)
        for row in range(height):
            for column in range(width):
                y, x = row - (height - 1) / 2, column - (width - 1) / 2
                from_x, from_y = round(c * x + s * y + (width - 1) / 2), round(c * y - s * x + (height - 1) / 2)
                if 0 <= from_x < width and 0 <= from_y < height:
                    expected[:, row, column] = pixels[i, :, from_y, from_x]
        expected = expected.flip(-1) if mirrored[i] else expected
        different += (expected != turned[i]).any(0).sum().item()
    assert different <= 2  # a coordinate half-way between two pixels may round either way
    assert (turned == 0).any()
    assert set(mirrored.tolist()) == {True, False}


def test_a_turn_is_pillow_s():
    Image = pytest.importorskip("PIL.Image")
    pixels = torch.randint(1, 256, (6, 1, 32, 32), dtype=torch.uint8)
    generator = seeded(1)
    angles = (torch.rand(6, generator=generator) * 2 - 1) * 20
    mirrored = torch.rand(6, generator=generator) < 0.5
    for image, result, angle, mirror in zip(
        pixels, augment.rotate_and_flip(pixels, seeded(1)), angles, mirrored, strict=True
    ):
        turned = np.array(Image.fromarray(image[0].numpy()).rotate(-angle.item()))
        expected = torch.from_numpy(turned).flip(-1) if mirror else torch.from_numpy(turned)
        assert (expected == result[0]).float().mean() > 0.97  # its fixed-point coordinates round otherwise now and then


def test_flip():
    pixels = torch.arange(2 * 8 * 3 * 4).view(8, 2, 3, 4)
    mirrored = torch.rand(8, generator=seeded(4)) < 0.5
    for image, result, mirror in zip(pixels, augment.flip(pixels, seeded(4)), mirrored, strict=True):
        assert torch.equal(result, image.flip(-1) if mirror else image)


def test_random_resized_crops():
    shares, ratios = [], []
    for draws in augment.crop_draws(500, seeded()):
        left, top, right, bottom = augment.resized_crop_box(400, 300, draws)
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        shares.append((right - left) * (bottom - top) / 120_000)
        ratios.append((right - left) / (bottom - top))
    assert 0.07 < min(shares) < 0.15
    assert 0.85 < max(shares) <= 1
    assert 0.74 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.35
    no_room = [[0.999, 0.5, 0.5, 0.5]] * augment.ATTEMPTS
    assert augment.resized_crop_box(400, 100, no_room) == (133, 0, 266, 100)
    assert augment.resized_crop_box(90, 400, no_room) == (0, 140, 90, 260)
    assert augment.resized_crop_box(1, 1, no_room) == (0, 0, 1, 1)


# ---------------------------------------------------------------------- bad input
def fails(name, directory, *parts, error=data.DataError, **limits):
    with pytest.raises(error) as caught:
        data.load(name, directory, **limits)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message
    assert isinstance(caught.value, ValueError)


def test_unknown_name():
    fails("cifar1000", None, "'cifar1000'", "digits, mnist")


@pytest.mark.parametrize("name", [name for name in data.DATA if name not in ("digits", "python-text")])
def test_missing_data_says_where_it_was_looked_for(tmp_path, monkeypatch, name):
    monkeypatch.setattr(idx, "DEBIAN", tmp_path / "share")
    fails(name, tmp_path, tmp_path, "GNOMON_DATA, or --data-dir", error=data.DataMissingError)
    monkeypatch.setenv("GNOMON_DATA", str(tmp_path / "here"))
    package = "install Debian's dataset-fashion-mnist" if name == "fashion-mnist" else ""
    fails(name, None, tmp_path / "here", package, error=data.DataMissingError)


@pytest.mark.parametrize(("limit", "bad"), [("train_limit", 0), ("test_limit", -1), ("train_limit", 1438)])
def test_limits_that_are_none(limit, bad):
    fails("digits", None, f"{limit}={bad}", "between 1 and", **{limit: bad})


@pytest.mark.parametrize("kept", [0, 10, 200, 3000, -1])
def test_truncated_cifar(tmp_path, kept):
    file = write_cifar100(tmp_path) / "train"
    file.write_bytes(file.read_bytes()[:kept])
    fails("cifar100", tmp_path, file, "not a whole CIFAR-100 file", "--data-dir")


def test_cifar_of_the_wrong_kind(tmp_path):
    file = write_cifar100(tmp_path, labels=[0, 1, 2, 100]) / "train"
    fails("cifar100", tmp_path, file, "label 100", "0 to 99")
    file.write_bytes(pickle.dumps({b"data": np.zeros((2, 3072)), b"fine_labels": [0, 1]}))
    fails("cifar100", tmp_path, file, "f8, not u1")
    file.write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0]}))
    fails("cifar100", tmp_path, file, "2 images, 1 labels")
    file.write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}))
    fails("cifar100", tmp_path, file, "no b'fine_labels'")
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_3").unlink()
    fails("cifar10", tmp_path, folder / "data_batch_3", "missing", error=data.DataMissingError)


class Hostile:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch touched"),
        (eval, "open('touched', 'w')"),
        (getattr, "text", "upper"),
        (np.ndarray, (1,), np.dtype(object), b"12345678"),  # numpy itself would follow this pointer
    ],
)
def test_a_pickle_cannot_run_code(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    file = write_cifar100(tmp_path) / "train"
    file.write_bytes(pickle.dumps({b"data": Hostile(*call), b"fine_labels": [0]}))
    fails("cifar100", tmp_path, file)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kept", [0, 3, 14, 100, -1])
def test_truncated_idx(tmp_path, kept, compressed):
    folder = write_idx(tmp_path / "mnist", compressed=compressed)
    file = folder / ("train-images-idx3-ubyte" + (".gz" if compressed else ""))
    file.write_bytes(file.read_bytes()[:kept])
    fails("mnist", tmp_path, file, "not a whole IDX file", "--data-dir")


def test_idx_of_the_wrong_kind(tmp_path):
    folder = write_idx(tmp_path / "mnist", labels=[0, 1, 2, 3, 46], compressed=False)
    labels = folder / "train-labels-idx1-ubyte"
    fails("mnist", tmp_path, labels, "label 46", "0 to 9")
    labels.write_bytes(idx_bytes(np.zeros(4, np.uint8)))
    fails("mnist", tmp_path, labels, "4 labels for 5 images")
    labels.write_bytes((folder / "train-images-idx3-ubyte").read_bytes())
    fails("mnist", tmp_path, labels, "00000803", "00000801")
    labels.unlink()
    fails("mnist", tmp_path, labels, "missing", error=data.DataMissingError)


def test_broken_tiny_imagenet(tmp_path):
    folder = write_tiny(tmp_path)
    annotations = folder / "val" / "val_annotations.txt"
    good = annotations.read_text()
    annotations.write_text(good + "val_9.JPEG\tn9\t0\t0\t1\t1\n")
    fails("tiny-imagenet", tmp_path, annotations, "line 3", "'n9'")
    annotations.write_text("")
    fails("tiny-imagenet", tmp_path, annotations, "empty")
    annotations.write_text(good + "val_8.JPEG\tn1\t0\t0\t1\t1\n")
    fails("tiny-imagenet", tmp_path, folder / "val" / "images" / "val_8.JPEG", "missing", error=data.DataMissingError)
    annotations.write_text(good)
    write_image(folder / "val" / "images" / "val_n1.JPEG", 32, 64)
    fails("tiny-imagenet", tmp_path, "val_n1.JPEG", "32 x 64, not 64 x 64")
    (folder / "wnids.txt").write_bytes(b"n1\nn2\n\xff")
    fails("tiny-imagenet", tmp_path, "names 3 classes", "2 class folders")
    annotations.unlink()
    (folder / "wnids.txt").write_text("n1\nn2")
    fails("tiny-imagenet", tmp_path, annotations, "missing", error=data.DataMissingError)


def test_broken_image_folder(tmp_path):
    write_folders(tmp_path)
    found = data.load("image-folder", tmp_path)
    file = tmp_path / "train" / "ant" / "0.png"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not an image"):
        file.write_bytes(content)
        with pytest.raises(data.DataError, match=r"0\.png is not a whole image .*; replace it or remove it"):
            found.train_batch(torch.arange(6), seeded())
    (tmp_path / "train" / "cow").mkdir()
    fails("image-folder", tmp_path, "3 classes", "has 2", "cow", "same class folders")
    (tmp_path / "val" / "cow").mkdir()
    fails("image-folder", tmp_path, tmp_path / "train" / "cow", "no images")


def test_empty_folders(tmp_path):
    (tmp_path / "train").mkdir()
    fails("image-folder", tmp_path, tmp_path, "neither val nor test", error=data.DataMissingError)
    (tmp_path / "val").mkdir()
    fails("image-folder", tmp_path, tmp_path / "train", "no class folders")


@pytest.mark.parametrize(
    ("name", "module", "package"), [("image-folder", "PIL", "Pillow"), ("digits", "sklearn", "scikit")]
)
def test_a_library_that_is_absent(tmp_path, monkeypatch, name, module, package):
    folders._pillow.cache_clear()
    for loaded in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    fails(name, tmp_path, package, "pip install 'gnomon[experiments]'")


# ---------------------------------------------------------------------- real data
def load_real(name, **limits):
    try:
        return data.load(name, **limits)
    except data.DataMissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "classes", "shape"),
    [("fashion-mnist", 10, (1, 28, 28)), ("cifar100", 100, (3, 32, 32)), ("tiny-imagenet", 200, (3, 64, 64))],
)
def test_real_data(name, classes, shape):
    real = load_real(name, train_limit=2000, test_limit=1000)
    assert real.classes == classes
    x, y = real.train_batch(torch.arange(2000), seeded())
    assert x.shape == (2000, *shape)
    assert len(y.unique()) > 0.95 * classes
    x, y = real.test_batch(torch.arange(1000))
    assert x.dtype == torch.float32
    assert len(y.unique()) > 0.95 * classes
    assert x.mean().abs() < 0.1
