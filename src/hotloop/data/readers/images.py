"""Decodes image files with Pillow into uint8 tensors of one size."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hotloop.core.terminal import Terminal
from hotloop.errors import DataError, MemoryExhausted
from hotloop.report.progress import progress_bar

_THREADS = 8
"""Largest number of decoding threads; Pillow releases the interpreter's lock while it decodes."""

_ORIENTATION_TAG = 0x0112
_FIRST_ROTATED = 5
"""EXIF orientations from 5 on exchange height and width."""


def load_pillow() -> Any:
    """Returns Pillow's modules `(Image, ImageOps)`."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError(
            "Pillow, which reads image files, isn't installed",
            expected="Pillow 10 or newer",
            fix="install it by: pip install pillow",
        ) from None
    return Image, ImageOps


@dataclass(frozen=True)
class ScaleImages:
    """The `prepare` of image files: uint8 to 0..1, then `(value - mean) / std` per channel.

    Args:
        channels: 1 or 3.
        mean, std: one number per channel, on the scale 0..1; empty for none.
        size: required height and width.
    """

    channels: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    size: tuple[int, int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns float32 (B, channels, H, W) of images of the same shape: integers 0..255 or floats 0..1."""
        if x.ndim != 4 or x.shape[1] != self.channels or self.size not in (None, tuple(x.shape[2:])):
            height, width = self.size or ("height", "width")
            raise DataError(
                f"images of shape {tuple(x.shape)}",
                expected=f"(N, {self.channels}, {height}, {width})",
                fix="resize the images, or give predict the image files",
            )
        images = x.to(torch.float32) if x.is_floating_point() else x.to(torch.float32) / 255
        if not self.mean:
            return images
        mean, std = (torch.tensor(part, device=x.device).view(-1, 1, 1) for part in (self.mean, self.std))
        return (images - mean) / std


@dataclass(frozen=True)
class ImageReader:
    """Decodes image files of any mode, turned by their EXIF orientation.

    Args:
        size: (height, width) of the result.
        channels: 3 for RGB, 1 for grey.
        is_resized: whether images are resized and cropped to `size`; else images of other sizes are errors.
        mean, std: see `ScaleImages`.
    """

    size: tuple[int, int]
    channels: int = 3
    is_resized: bool = True
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    kind: ClassVar[str] = "images"
    targets: ClassVar[tuple[str, ...]] = ()

    @property
    def prepare(self) -> ScaleImages:
        return ScaleImages(self.channels, self.mean, self.std, self.size)

    def decode(self, path: Path) -> Tensor:
        """Returns uint8 (channels, height, width).

        Raises:
            DataError: the file is no image, is damaged, or has another size.
        """
        Image, ImageOps = load_pillow()
        try:
            with Image.open(path) as opened:
                image = _to_mode(ImageOps.exif_transpose(opened), "RGB" if self.channels == 3 else "L")
        except MemoryError:
            raise
        except Exception as error:  # Pillow's readers raise OSError, ValueError, SyntaxError, struct.error and others
            raise unreadable_image(path, error) from error
        height, width = self.size
        if self.is_resized:
            image = ImageOps.fit(image, (width, height), method=Image.Resampling.BILINEAR)
        elif image.size != (width, height):
            raise DataError(
                f"{path} has {image.height}x{image.width} pixels",
                expected=f"{height}x{width}, as the other images",
                fix="pass size= to resize all images, such as size=224",
            )
        pixels = np.array(image, dtype=np.uint8).reshape(height, width, self.channels)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def decode_all(self, paths: Sequence[Path], progress: Callable[[int, int | None], None] | None = None) -> Tensor:
        """Returns uint8 (N, channels, height, width), in the order of `paths`."""
        try:
            images = torch.empty(len(paths), self.channels, *self.size, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryExhausted(
                f"no memory for {len(paths):,} images", expected="memory for all", fix="pass in_memory=False"
            ) from error
        pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
        try:
            for place, pixels in enumerate(pool.map(self.decode, paths)):
                images[place] = pixels
                if progress is not None:
                    progress(place + 1, len(paths))
        finally:
            pool.shutdown(cancel_futures=True)
        return images

    def names(self, path: Path) -> list[str]:
        """Returns the images' paths relative to the folder, or the file's name, in the order of `read`."""
        return [file.relative_to(path).as_posix() for file in list_images(path)] if path.is_dir() else [path.name]

    def read(self, path: Path, say: Callable[[str], None]) -> ImageRows:
        """Returns the images of a file, or of a folder and its sub-folders, sorted by their relative paths."""
        files = list_images(path) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path} has no images", expected="image files", fix="check the path")
        return ImageRows(self, files)

    def to_json(self) -> dict[str, Any]:
        fields = ("size", "channels", "is_resized", "mean", "std")
        return {"kind": self.kind, **{name: getattr(self, name) for name in fields}}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ImageReader:
        return cls(
            size=tuple(document["size"]),
            channels=document["channels"],
            is_resized=document["is_resized"],
            mean=tuple(document["mean"]),
            std=tuple(document["std"]),
        )


@dataclass(frozen=True)
class ImageRows:
    """Image files with an array's interface of rows, decoded when sliced: (N, channels, height, width)."""

    reader: ImageReader
    files: list[Path]
    ndim: ClassVar[int] = 4

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: slice) -> Tensor:
        return self.reader.decode_all(self.files[rows])


class ImageDataset(Dataset):
    """A map-style data set of image files, decoded at each access: `(uint8 (channels, height, width), label)`."""

    def __init__(self, reader: ImageReader, files: Sequence[Path], labels: Sequence[int]) -> None:
        self.reader, self.labels = reader, list(labels)
        self._files = [str(file) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.reader.decode(Path(self._files[index])), self.labels[index]

    def nbytes(self) -> int:
        """Returns the bytes of all decoded images."""
        return len(self) * self.reader.channels * math.prod(self.reader.size)

    @cached_property
    def pair(self) -> tuple[Tensor, Tensor]:
        """All images and labels, decoded at first use: uint8 (N, channels, height, width) and int64 (N,)."""
        with progress_bar(Terminal(), "decoding", of="images") as progress:
            return self.reader.decode_all([*map(Path, self._files)], progress), torch.tensor(self.labels)


def _to_mode(image: Any, mode: str) -> Any:
    """Converts to 8 bits per channel; transparent pixels become white."""
    Image, _ = load_pillow()
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its 32-bit pixels have no known range")
        image = Image.fromarray((values // 257).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("its floating-point pixels have no known range")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def unreadable_image(path: Path, error: Exception) -> DataError:
    if not path.exists():
        return DataError(f"no file {path}", expected="an image file", fix="check the path")
    reason = str(error).replace(repr(str(path)), "").strip() or type(error).__name__
    return DataError(
        f"{path} can't be read as an image ({reason})",
        expected="an image that Pillow reads, of 8 or 16 bits per channel",
        fix="replace or remove the file",
    )


def image_size(path: Path) -> tuple[int, int]:
    """Returns (height, width) after the EXIF orientation, from the file's header."""
    Image, _ = load_pillow()
    try:
        with Image.open(path) as image:
            width, height = image.size
            is_rotated = image.getexif().get(_ORIENTATION_TAG, 1) >= _FIRST_ROTATED and image.format != "TIFF"
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise OSError, ValueError, SyntaxError, struct.error and others
        raise unreadable_image(path, error) from error
    return (width, height) if is_rotated else (height, width)


def list_images(folder: Path) -> list[Path]:
    """Returns the image files of a folder and its sub-folders, sorted by relative path, independent of the system."""
    found = [file for file in _walk(folder) if file.suffix.lower() in image_suffixes()]
    return sorted(found, key=lambda file: file.relative_to(folder).parts)


def other_files(folder: Path) -> list[Path]:
    """Returns the files of a folder and its sub-folders whose names are no image's, sorted."""
    return sorted(file for file in _walk(folder) if file.suffix.lower() not in image_suffixes())


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        yield from (Path(place, name) for name in files if not is_hidden(name))


def is_hidden(name: str) -> bool:
    """Returns whether a file belongs to a tool, such as `.DS_Store`, `Thumbs.db` or `__MACOSX`."""
    return name.startswith((".", "__")) or name in ("Thumbs.db", "desktop.ini")


def image_suffixes() -> set[str]:
    Image, _ = load_pillow()
    known = Image.registered_extensions()
    return {suffix for suffix, name in known.items() if name in Image.OPEN}
