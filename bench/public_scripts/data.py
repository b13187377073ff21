"""Writes the data that public scripts would download."""

from __future__ import annotations

import pickle
import random
import sysconfig
from pathlib import Path

import numpy as np

_TEXT_MODULES = (
    "argparse",
    "typing",
    "subprocess",
    "inspect",
    "tarfile",
    "datetime",
    "threading",
    "ast",
    "ssl",
    "pickle",
)


def citations(folder: Path) -> None:
    """Writes a graph of 2,708 documents in 7 classes with 1,433 words each, in Cora's format."""
    rng = np.random.default_rng(0)
    count, words, classes, edges = 2708, 1433, 7, 5429
    labels = rng.integers(0, classes, count)
    typical = rng.random((classes, words)) < 0.03
    features = (rng.random((count, words)) < 0.005) | (typical[labels] & (rng.random((count, words)) < 0.3))
    (folder / "cora").mkdir()
    with (folder / "cora/cora.content").open("w") as file:
        for number, (row, label) in enumerate(zip(features.astype(int), labels, strict=True)):
            print(number, *row, f"class{label}", sep="\t", file=file)
    pairs = set[tuple[int, int]]()
    while len(pairs) < edges:
        one, other = (int(value) for value in rng.integers(0, count, 2))
        if one != other and (labels[one] == labels[other] or rng.random() < 0.1):
            pairs.add((one, other))
    (folder / "cora/cora.cites").write_text("".join(f"{one}\t{other}\n" for one, other in sorted(pairs)))


def words(folder: Path) -> None:
    """Writes a text of about 60,000 words from Python's own library, in three files."""
    tokens = _text().split()[:62_000]
    common = _common(tokens, 3)
    tokens = [token if token in common else "<unk>" for token in tokens]
    place = folder / "data/words"
    place.mkdir(parents=True)
    for name, start, end in (("train", 0, 50_000), ("valid", 50_000, 55_000), ("test", 55_000, 60_000)):
        lines = [" ".join(tokens[at : at + 20]) for at in range(start, min(end, len(tokens)), 20)]
        (place / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")


def characters(folder: Path) -> None:
    """Writes the numbers of the characters of a text, as nanoGPT's `prepare.py` does."""
    text = _text()[:1_100_000].encode("ascii", "ignore")
    symbols = sorted(set(text))
    place = folder / "data/shakespeare_char"
    place.mkdir(parents=True, exist_ok=True)
    numbers = np.searchsorted(np.array(symbols), np.frombuffer(text, np.uint8)).astype(np.uint16)
    at = len(numbers) * 9 // 10
    numbers[:at].tofile(place / "train.bin")
    numbers[at:].tofile(place / "val.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(symbols)}))


def sine_waves(folder: Path) -> None:
    """Writes 100 sine waves, as `generate_sine_wave.py` does."""
    import torch

    rng = np.random.RandomState(2)
    places = np.arange(1000) + rng.randint(-80, 80, 100).reshape(100, 1)
    torch.save(np.sin(places / 20).astype("float64"), folder / "traindata.pt", pickle_protocol=4)


def photographs(folder: Path) -> None:
    """Writes 40 and 10 pictures of 321 x 321 with smooth shapes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 10)):
        place = folder / "dataset/BSDS300/images" / part
        place.mkdir(parents=True)
        for number in range(count):
            small = Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8))
            small.resize((321, 321), Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=90)


def _text() -> str:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    named = [library / f"{name}.py" for name in _TEXT_MODULES]
    random.Random(0).shuffle(files)
    return "\n".join(file.read_text(encoding="utf-8") for file in [*named, *files])


def _common(tokens: list[str], least: int) -> set[str]:
    counts: dict[str, int] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    return {token for token, count in counts.items() if count >= least}
