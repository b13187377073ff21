"""A data set of a folder of images, with a sub-folder for each class."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hotloop.core.terminal import Terminal
from hotloop.data.bundle import Bundle
from hotloop.data.readers.images import (
    ImageDataset,
    ImageReader,
    image_size,
    is_hidden,
    list_images,
    load_pillow,
    other_files,
)
from hotloop.data.readers.stratified_split import Share, split_by_class
from hotloop.errors import DataError
from hotloop.report.progress import progress_bar

_PARTS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
"""Names of folders for the parts of a data set."""

_DEFAULT_SHARE = 0.1

_MAX_BYTES_IN_MEMORY = 500e6
"""Largest size of the decoded uint8 images of a data set that is decoded once; a prepared copy takes four times this."""

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and std of ImageNet's training images, as torchvision's pretrained models expect."""

_LAYOUT_FIX = "put the images of each class into a sub-folder with the class's name, such as PATH/cat and PATH/dog"


class ImageBundle(Bundle):
    """A Bundle of image files; small sets are decoded at the first use of a part."""

    parts: dict[str, ImageDataset]
    in_memory: bool

    def __init__(self, parts: dict[str, ImageDataset], in_memory: bool, **fields: Any) -> None:
        vars(self).update(parts=parts, in_memory=in_memory, **fields)

    def __getattr__(self, name: str) -> Any:
        if name not in ("train", "validation", "test"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        part = vars(self).get("parts", {}).get(name)
        return part.pair if part is not None and self.in_memory else part

    def sizes(self) -> dict[str, int]:
        return {name: len(self.parts.get(name, ())) for name in ("train", "validation", "test")}


def image_folder(
    path: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    channels: Literal[1, 3] = 3,
    normalize: Literal["imagenet"] | tuple[Sequence[float], Sequence[float]] | None = None,
    validation: Share | None = None,
    test: Share | None = None,
    seed: int = 0,
    in_memory: bool | None = None,
) -> Bundle:
    """Returns the images of a folder with a sub-folder for each class, such as `pets/cat/1.jpg`.

    If all sub-folders are named `train`, `val` (or `valid`, `validation`) and `test`, they are the parts of the data
    set, with a sub-folder for each class in each. Class numbers follow the sorted names of the classes. Images are
    sorted by class and path. A class's sub-folders count for the class; hidden files are skipped.

    Pillow reads the images: grey, palette and CMYK images become RGB (or grey, for `channels=1`), transparent pixels
    become white, 16 bits become 8, EXIF orientations are applied, and of an animation the first image counts.

    Args:
        path: the folder.
        size: height and width of the images, as a number for both or (height, width). Images are resized to cover this
            size and cropped at the centre. None needs images of one size.
        channels: 3 for RGB, 1 for grey.
        normalize: None for float32 in 0..1; "imagenet" for the mean and std that pretrained models expect; or `(mean,
            std)`, each with a number per channel on the scale 0..1.
        validation, test: a share or number of the images, drawn by seed from each class; default 0.1 each without
            folders for the parts. With these folders, `validation` is drawn from the training images if there is no
            folder for it, and without a folder `test` there is no test data.
        seed: decides which images are for validation and test.
        in_memory: whether the images are decoded once, into memory; None for data sets of up to 500 MB of pixels.
            Other data sets are decoded by `--workers` in each epoch.

    Returns:
        A Bundle for `Task(data=...)`. Images are uint8 (N, channels, height, width), labels int64 (N,); `prepare` makes
        float32 of them.

    Raises:
        DataError: the folder is missing, has no classes, an empty class, an unreadable image or mixed sizes; or Pillow
            is missing.
    """
    folder = Path(path).expanduser()
    load_pillow()
    mean, std = _check_normalize(normalize, channels)
    roots = _part_folders(folder)
    files, skipped = _scan(roots)
    classes = tuple(sorted({file.label for file in files if file.part == "train"}))
    _check_classes(folder, files, classes)
    datasets_files = _split(files, classes, {"validation": validation, "test": test}, seed, roots.keys() != {""})
    height_width = _check_size(size) or _common_size([file.path for file in files])
    reader = ImageReader(height_width, channels, size is not None, mean, std)
    numbers = {name: number for number, name in enumerate(classes)}
    parts = {
        name: ImageDataset(reader, [file.path for file in part], [numbers[file.label] for file in part])
        for name, part in datasets_files.items()
        if part
    }
    if in_memory is None:
        in_memory = sum(part.nbytes() for part in parts.values()) <= _MAX_BYTES_IN_MEMORY
    example = skipped[0].relative_to(folder) if skipped else ""
    return ImageBundle(
        parts,
        in_memory,
        name=folder.resolve().name,
        classes=classes,
        prepare=reader.prepare,
        note=f"{folder}: {len(skipped):,} files without an image's name were skipped, such as {example}"
        * bool(skipped),
        reader=reader,
        digest=_digest(folder, files),
        inputs=(),
    )


@dataclass(frozen=True)
class _File:
    path: Path
    part: str
    label: str


def _part_folders(folder: Path) -> dict[str, Path]:
    """Returns the folders of the parts by name; the whole folder under the name "" without such folders."""
    if not folder.is_dir():
        here = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"{folder} isn't a folder" if folder.exists() else f"no folder {folder}{here}",
            expected="a folder with a sub-folder for each class",
            fix="check the path",
        )
    names = _folders(folder)
    if "train" not in names or not all(name in _PARTS for name in names):
        return {"": folder}
    if len({_PARTS[name] for name in names}) < len(names):
        raise DataError(f"{folder} has several folders for validation", expected="one", fix="join or rename the others")
    return {name: folder / name for name in names}


def _scan(roots: dict[str, Path]) -> tuple[list[_File], list[Path]]:
    """Returns the image files, sorted by part, class and path, and the files without an image's name."""
    files, skipped = list[_File](), list[Path]()
    for name, root in sorted(roots.items()):
        classes = _folders(root)
        if not classes:
            raise DataError(f"{root} has no sub-folders", expected="one for each class", fix=_layout_fix(root))
        for label in classes:
            images = list_images(root / label)
            if not images:
                raise DataError(
                    f"{root / label} has no images", expected="one image or more in each class", fix="add or remove it"
                )
            files += [_File(image, _PARTS.get(name, "train"), label) for image in images]
            skipped += other_files(root / label)
        skipped += [file for file in sorted(root.iterdir()) if file.is_file() and not is_hidden(file.name)]
    return files, skipped


def _layout_fix(root: Path) -> str:
    return _LAYOUT_FIX.replace("PATH", str(root)) + (
        "; images without classes are inputs for hotloop predict" if root.name == "test" else ""
    )


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name))


def _check_classes(folder: Path, files: list[_File], classes: tuple[str, ...]) -> None:
    if len(classes) < 2:
        raise DataError(
            f"{folder} has one class, {classes[0]!r}",
            expected="two or more sub-folders with images",
            fix=_layout_fix(folder),
        )
    for file in files:
        if file.label not in classes:
            raise DataError(
                f"{file.path.parent} is of the class {file.label!r}, which has no training images",
                expected=f"the classes of {folder / 'train'}",
                fix="rename the folder, or add training images",
            )


def _split(
    files: list[_File], classes: tuple[str, ...], shares: dict[str, Share | None], seed: int, has_folders: bool
) -> dict[str, list[_File]]:
    parts = {name: [file for file in files if file.part == name] for name in ("train", "validation", "test")}
    for name, share in shares.items():
        if parts[name] and share is not None:
            raise DataError(
                f"{name}={share!r}, and {parts[name][0].path.parents[1]} has {name} images",
                expected="one of them",
                fix=f"leave {name}= out, or move the folder",
            )
    validation = 0 if parts["validation"] else shares["validation"]
    validation = _DEFAULT_SHARE if validation is None else validation
    test = shares["test"] if shares["test"] is not None else (0 if has_folders else _DEFAULT_SHARE)
    training = parts["train"]
    labels = np.array([classes.index(file.label) for file in training])
    positions = split_by_class(labels, validation, test, seed)
    for name, chosen in zip(("train", "validation", "test"), positions, strict=True):
        if name == "train" or not parts[name]:
            parts[name] = [training[place] for place in chosen]
    return parts


def _common_size(paths: list[Path]) -> tuple[int, int]:
    """Returns (height, width) of all images.

    Raises:
        DataError: images of several sizes.
    """
    common = image_size(paths[0])
    with progress_bar(Terminal(), "checking sizes", of="images") as progress:
        for number, path in enumerate(paths):
            height, width = image_size(path)
            if (height, width) != common:
                raise DataError(
                    f"{paths[0]} has {common[0]}x{common[1]} pixels (height x width), and {path} has {height}x{width}",
                    expected="images of one size",
                    fix="pass size= to resize all images, such as size=224",
                )
            progress(number + 1, len(paths))
    return common


def _check_size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else size
    valid = isinstance(pair, tuple | list) and len(pair) == 2
    if not (valid and all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair)):
        raise DataError(
            f"size={size!r}", expected="a number of pixels, or (height, width)", fix="pass size=224, for example"
        )
    return pair[0], pair[1]


def _check_normalize(normalize: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if channels not in (1, 3):
        raise DataError(f"channels={channels!r}", expected="3 for RGB or 1 for grey", fix="choose one of them")
    if normalize is None:
        return (), ()
    pair = _IMAGENET if normalize == "imagenet" else normalize
    try:
        mean, std = (tuple(map(float, part)) for part in pair)
    except (TypeError, ValueError):
        mean, std = (), ()
    valid = len(mean) == len(std) == channels and all(map(math.isfinite, mean)) and all(0 < s < math.inf for s in std)
    if not valid:
        raise DataError(
            f"normalize={normalize!r} for {channels} channel{'s' * (channels > 1)}",
            expected="None, 'imagenet' for 3 channels, or (mean, std) with a number per channel, std above 0",
            fix="correct it",
        )
    return mean, std


def _digest(folder: Path, files: list[_File]) -> str:
    """Returns a hash of the paths and sizes of all files."""
    text = "\n".join(f"{file.path.relative_to(folder).as_posix()}\t{file.path.stat().st_size}" for file in files)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
