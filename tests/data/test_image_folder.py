"""A folder of images as a data set: classes, splits, pixels, and refusals in one line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hotloop
from hotloop.data.readers import image_folder as module
from hotloop.data.readers.images import ImageReader
from hotloop.errors import DataError, RunError
from tests.support.programs import assert_resumes, trained

ORIENTATION = 0x0112


def write_pets(folder: Path, classes=("cat", "dog", "ant"), count: int = 20, side: int = 12) -> Path:
    """A folder with images whose colour shows class and number."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (side, side), (80 * label, number, 7)).save(folder / name / f"{number}.png")
    return folder


def task_of(data: hotloop.data.Bundle, **fields) -> hotloop.Task:
    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(len(data.classes))),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=data,
        batch_size=8,
        **fields,
    )


def samples(part) -> set[tuple[int, int]]:
    """(class, number) of each image, from its colour and from its label."""
    x, y = part
    assert torch.equal(x[:, 0, 0, 0].long() // 80, torch.tensor([{0: 2, 1: 0, 2: 1}[label] for label in y.tolist()]))
    return {(label, int(image[1, 0, 0])) for image, label in zip(x, y.tolist(), strict=True)}


# --- classes and splits


def test_classes_are_sorted_and_parts_are_disjoint_with_shares_of_each_class(tmp_path) -> None:
    data = hotloop.data.image_folder(write_pets(tmp_path / "pets"))
    assert data.classes == ("ant", "cat", "dog") and data.name == "pets"
    assert data.sizes() == {"train": 48, "validation": 6, "test": 6}
    parts = [samples(part) for part in (data.train, data.validation, data.test)]
    assert len(set.union(*parts)) == 60 == sum(map(len, parts))
    for part in (data.validation, data.test):
        assert part[1].bincount().tolist() == [2, 2, 2]
    assert "train=48" in repr(data)


def test_the_order_of_the_file_system_changes_nothing(tmp_path, monkeypatch) -> None:
    folder = write_pets(tmp_path / "pets")
    first = hotloop.data.image_folder(folder)
    walk, entries = os.walk, Path.iterdir

    def reversed_walk(*args, **options):
        for place, folders, files in walk(*args, **options):
            folders.sort(reverse=True)
            yield place, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)
    monkeypatch.setattr(Path, "iterdir", lambda path: sorted(entries(path), reverse=True))
    again = hotloop.data.image_folder(folder)
    assert torch.equal(first.train[0], again.train[0]) and torch.equal(first.test[1], again.test[1])
    assert first.digest == again.digest and first.classes == again.classes


def test_the_seed_decides_the_split(tmp_path) -> None:
    folder = write_pets(tmp_path / "pets")
    first, again, other = (hotloop.data.image_folder(folder, seed=seed).test for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0]) and samples(first) != samples(other)


def test_folders_for_the_parts(tmp_path) -> None:
    for part, count in (("train", 20), ("val", 3), ("test", 4)):
        write_pets(tmp_path / "pets" / part, count=count)
    data = hotloop.data.image_folder(tmp_path / "pets")
    assert data.sizes() == {"train": 60, "validation": 9, "test": 12}
    for file in sorted((tmp_path / "pets/val").rglob("*.png")):
        file.unlink()
    with pytest.raises(DataError, match=r"val/ant has no images"):
        hotloop.data.image_folder(tmp_path / "pets")


def test_validation_is_drawn_from_the_training_images_without_a_folder_for_it(tmp_path) -> None:
    write_pets(tmp_path / "pets/train")
    data = hotloop.data.image_folder(tmp_path / "pets")
    assert data.sizes() == {"train": 54, "validation": 6, "test": 0} and data.test is None
    write_pets(tmp_path / "pets/test", classes=("cat", "fox"), count=2)
    with pytest.raises(DataError, match=r"test/fox is of the class 'fox'.*no training images"):
        hotloop.data.image_folder(tmp_path / "pets")


def test_a_class_may_have_the_name_of_a_part(tmp_path) -> None:
    data = hotloop.data.image_folder(write_pets(tmp_path / "vehicles", classes=("train", "bus", "car")))
    assert data.classes == ("bus", "car", "train")


def test_a_class_of_one_image_is_in_the_training_part(tmp_path) -> None:
    folder = write_pets(tmp_path / "pets", count=30)
    for file in sorted((folder / "dog").iterdir())[1:]:
        file.unlink()
    for seed in range(20):
        assert 2 in hotloop.data.image_folder(folder, seed=seed).train[1]


def test_files_of_other_kinds_are_skipped_with_a_note(tmp_path) -> None:
    folder = write_pets(tmp_path / "pets")
    (folder / "cat/notes.txt").write_text("meow")
    (folder / "cat/.DS_Store").write_text("x")
    (folder / "__MACOSX").mkdir()
    (folder / "cat/small").mkdir()
    (folder / "cat/0.png").rename(folder / "cat/small/0.PNG")
    data = hotloop.data.image_folder(folder)
    assert sum(data.sizes().values()) == 60
    assert "1 files without an image's name were skipped, such as cat/notes.txt" in data.note


# --- pixels


def saved(folder: Path, image: Image.Image, name: str = "image.png", **options) -> Path:
    image.save(folder / name, **options)
    return folder / name


def test_each_orientation_of_exif_shows_the_same_image(tmp_path) -> None:
    upright = Image.fromarray(np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3))
    turns = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    for orientation, turn in turns.items():
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        stored = upright if turn is None else upright.transpose(turn)
        path = saved(tmp_path, stored, f"{orientation}.png", exif=exif)
        pixels = ImageReader((6, 4), is_resized=False).decode(path)
        assert torch.equal(pixels.permute(1, 2, 0), torch.from_numpy(np.asarray(upright).copy())), orientation
        assert module.image_size(path) == (6, 4)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (4, 4), 100), (100, 100, 100)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (200, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (200, 10, 0, 255)), (200, 10, 0)),
        (Image.new("LA", (4, 4), (50, 255)), (50, 50, 50)),
        (Image.new("RGB", (4, 4), (9, 8, 7)).convert("P", palette=Image.Palette.ADAPTIVE), (9, 8, 7)),
        (Image.fromarray(np.full((4, 4), 257 * 90, np.uint16)), (90, 90, 90)),
    ],
    ids=["grey", "bits", "transparent", "opaque", "grey with alpha", "palette", "16 bits"],
)
def test_images_of_each_mode_become_rgb(tmp_path, image, expected) -> None:
    pixels = ImageReader((4, 4)).decode(saved(tmp_path, image))
    assert pixels.shape == (3, 4, 4) and pixels.dtype == torch.uint8
    assert tuple(pixels[:, 2, 1].tolist()) == expected


def test_cmyk_becomes_grey_or_rgb(tmp_path) -> None:
    path = saved(tmp_path, Image.new("CMYK", (4, 4), (0, 0, 0, 0)), "image.jpg")
    assert ImageReader((4, 4), channels=1).decode(path).tolist() == [[[255] * 4] * 4]


def test_images_are_resized_and_cropped_at_the_centre(tmp_path) -> None:
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 255  # the middle third
    reader = ImageReader((5, 5))
    assert (reader.decode(saved(tmp_path, Image.fromarray(pixels))) > 200).all()
    folder = write_pets(tmp_path / "pets", side=20)
    assert hotloop.data.image_folder(folder, size=(8, 6)).train[0].shape == (48, 3, 8, 6)
    assert hotloop.data.image_folder(folder, size=8, channels=1).train[0].shape == (48, 1, 8, 8)


def test_prepare_scales_and_normalises(tmp_path) -> None:
    folder = write_pets(tmp_path / "pets")
    data = hotloop.data.image_folder(folder)
    x = data.prepare(data.train[0])
    assert x.dtype == torch.float32 and torch.equal(x, data.train[0].float() / 255)
    own = hotloop.data.image_folder(folder, normalize=((0.1, 0.2, 0.3), (0.5, 1, 2)))
    assert torch.allclose(own.prepare(data.train[0])[:, 2], (x[:, 2] - 0.3) / 2)
    assert hotloop.data.image_folder(folder, normalize="imagenet").prepare.std == (0.229, 0.224, 0.225)


# --- refusals


def test_refusals_take_one_line(tmp_path) -> None:
    with pytest.raises(DataError, match=r"no folder .*nowhere"):
        hotloop.data.image_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no sub-folders; expected one for each class"):
        hotloop.data.image_folder(tmp_path / "empty")
    folder = write_pets(tmp_path / "pets")
    Image.new("RGB", (5, 7)).save(folder / "dog/odd.png")
    with pytest.raises(DataError, match=r"0.png has 12x12 pixels .*odd.png has 7x5; expected .* size=224"):
        hotloop.data.image_folder(folder)
    (folder / "fox").mkdir()
    with pytest.raises(DataError, match=r"fox has no images"):
        hotloop.data.image_folder(folder, size=8)
    for options in (
        dict(size=0), dict(size=True), dict(size=(3,)), dict(channels=4), dict(normalize="mean"), dict(seed=-1, size=8),
        dict(normalize=((0.5,), (0.5,))), dict(size=8, test=1.5), dict(size=8, test=59, validation=5),
    ):  # fmt: skip
        (folder / "fox").exists() and (folder / "fox").rmdir()
        with pytest.raises(DataError) as refusal:
            hotloop.data.image_folder(folder, **options)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"no image", "truncated", "float"], ids=str)
def test_an_unreadable_image_is_named(tmp_path, content) -> None:
    folder = write_pets(tmp_path / "pets")
    path = folder / "dog/bad.png"
    if content == "truncated":
        noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        path.write_bytes(saved(tmp_path, Image.fromarray(noise)).read_bytes()[:3000])
    elif content == "float":
        path = saved(folder / "dog", Image.fromarray(np.ones((4, 4), np.float32)), "bad.tiff")
    else:
        path.write_bytes(content)
    data = hotloop.data.image_folder(folder, size=8, validation=0, test=0)
    with pytest.raises(DataError, match=rf"{path.name} can't be read as an image .*Replace or remove"):
        data.train  # noqa: B018


def test_without_pillow_the_error_names_the_command(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(DataError, match="pip install pillow"):
        hotloop.data.image_folder(tmp_path)


# --- training


def test_images_in_memory_and_images_decoded_as_needed_train_the_same(tmp_path) -> None:
    folder = write_pets(tmp_path / "pets")
    runs = []
    for name, in_memory, workers in (("memory", True, None), ("files", False, 0), ("workers", False, 2)):
        data = hotloop.data.image_folder(folder, size=8, in_memory=in_memory)
        assert isinstance(data.train, tuple) == in_memory
        task = task_of(data, epochs=2, augment=hotloop.data.random_flip())
        runs.append(
            hotloop.fit(task, run=tmp_path / name, device="cpu", plan=hotloop.Plan(workers=workers), progress=False)
        )
    weights = [hotloop.load_model(run).state_dict() for run in runs]
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])
    assert hotloop.evaluate(runs[1]).classes == ["ant", "cat", "dog"]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_resumed_training_is_exact(tmp_path, in_memory) -> None:
    data = hotloop.data.image_folder(write_pets(tmp_path / "pets"), size=8, in_memory=in_memory)
    assert_resumes(task_of(data, epochs=3, augment=hotloop.data.random_crop(1)))


def test_large_sets_are_not_decoded_into_memory(tmp_path, monkeypatch) -> None:
    folder = write_pets(tmp_path / "pets")
    monkeypatch.setattr(module, "_MAX_BYTES_IN_MEMORY", 60 * 3 * 64 - 1)
    data = hotloop.data.image_folder(folder, size=8)
    image, label = data.train[3]
    assert not isinstance(data.train, tuple) and image.shape == (3, 8, 8) and label == 0
    assert isinstance(hotloop.data.image_folder(folder, size=7).train, tuple)


def test_a_run_refuses_changed_files_and_predicts_without_them(tmp_path) -> None:
    folder = write_pets(tmp_path / "pets")
    run = trained(task_of(hotloop.data.image_folder(folder, size=8)), tmp_path / "run")
    scores = hotloop.predict(run, folder / "dog")
    assert scores.shape == (20, 3)
    files = sorted((folder / "dog").iterdir(), key=lambda file: file.name)
    assert np.allclose(hotloop.predict(run, files[3]), scores[3], atol=1e-5)
    Image.new("RGB", (12, 12)).save(folder / "dog/new.png")
    changed = task_of(hotloop.data.image_folder(folder, size=8))
    with pytest.raises(RunError, match="are not those that the run was started with"):
        hotloop.evaluate(run, task=changed)
    with pytest.raises(RunError, match="are not those that the run was started with"):
        hotloop.fit(changed, run=run.path, resume=True, progress=False)
    assert len(hotloop.predict(run, folder / "dog", task=changed)) == 21
    with pytest.raises(DataError, match=r"nowhere.png"):
        hotloop.predict(run, tmp_path / "nowhere.png")
