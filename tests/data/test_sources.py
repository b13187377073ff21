"""Every form of data that a Task takes, what becomes of it, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import hotloop
from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.order import Order
from hotloop.data.sources import DataInput, Samples, Stream, Table, as_source
from hotloop.errors import DataError
from hotloop.lowering.build import lower
from tests.support.tasks.sample_data import Endless, Pairs, X, Y, arrived, roles


def bring(data: Any, **options: Any) -> DataInput:
    return as_source(data, "data", **options)


def table(data: Any) -> Any:
    source = bring(data).source
    assert isinstance(source, Table)
    return source.columns


# --- arrays


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.ones((3, 2)), torch.float32),
        (np.ones((3, 2), np.float32), torch.float32),
        (np.ones((3, 2), np.float16), torch.float16),
        (np.ones((3, 2), np.uint8), torch.uint8),
        (np.ones((3, 2), np.int16), torch.int16),
        (np.ones((3, 2), bool), torch.bool),
        (np.ones((3, 2), np.complex64), torch.complex64),
        (np.ones((3, 2), ">f4"), torch.float32),
        (np.ones((3, 2), ">f8"), torch.float32),
        (np.ones((3, 2), ">i4"), torch.int32),
        ([[1, 1], [1, 1], [1, 1]], torch.int64),
        ([[1.0, 1], [1, 1], [1, 1]], torch.float32),
        ([[True, True]] * 3, torch.bool),
        (range(6), torch.int64),
        ([np.ones(2), np.ones(2), np.ones(2)], torch.float32),
        ([torch.ones(2), torch.ones(2), torch.ones(2)], torch.float32),
        (torch.ones(3, 2), torch.float32),
        (torch.ones(3, 2, dtype=torch.float64), torch.float64),
        (torch.ones(3, 2, dtype=torch.bfloat16), torch.bfloat16),
        (torch.ones(3, 2, requires_grad=True), torch.float32),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, torch.dtype) else type(value).__name__,
)
def test_inputs_keep_their_numbers_and_get_a_dtype_that_torch_trains_with(given: Any, dtype: torch.dtype) -> None:
    inputs, _ = table((given, [0] * len(given)))
    assert inputs.dtype == dtype and inputs.device.type == "cpu" and not inputs.requires_grad
    wanted = (
        given.detach().float().numpy()
        if isinstance(given, torch.Tensor)
        else np.asarray([np.asarray(v) for v in given])
    )
    assert np.array_equal(inputs.to(torch.complex128).numpy(), wanted.astype(np.complex128))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", ">i4", "uint16", "uint32"])
def test_integer_labels_become_int64(dtype: str) -> None:
    _, labels = table((X[:3], np.array([0, 1, 2], dtype)))
    assert labels.dtype == torch.int64 and labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("targets", "dtype"),
    [
        (torch.zeros(20, dtype=torch.uint8), torch.int64),
        (torch.zeros(20, 3), torch.float32),
        (np.zeros(20), torch.float32),
        (np.zeros(20, bool), torch.bool),
        (torch.zeros(20, dtype=torch.float64), torch.float64),
    ],
)
def test_other_targets_stay_what_they_are(targets: Any, dtype: torch.dtype) -> None:
    assert table((X, targets))[1].dtype == dtype


def test_only_the_last_of_several_columns_is_a_target() -> None:
    tokens = np.zeros((20, 5), np.int32)
    first, second, target = table((tokens, X, np.zeros(20, np.int32)))
    assert (first.dtype, second.dtype, target.dtype) == (torch.int32, torch.float32, torch.int64)


def test_the_default_dtype_of_torch_is_respected() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert table((np.ones((3, 2)), [0, 1, 2]))[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cut", [np.s_[::-1], np.s_[:, ::-1], np.s_[::2], np.s_[:, 1:], np.s_[..., None]])
def test_views_with_any_strides(cut: Any) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)[cut]
    assert np.array_equal(table((array, [0] * len(array)))[0].numpy(), array)


def test_a_read_only_memory_map_is_taken_without_a_copy_or_a_warning(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.float32).reshape(20, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = roles((mapped, Y), batch_size=4)
        first = arrived(given)[0]
    assert np.shares_memory(given.train.columns[0].numpy(), mapped)
    assert first[0].tolist() == X[given.order.epoch(0)[:4]].tolist()


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_a_batch_is_the_rows_of_its_samples(rows: int, columns: int, data: st.DataObject) -> None:
    array = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=12)))
    inputs, labels = bring((array, range(rows))).source.take(index)
    assert np.array_equal(inputs.numpy(), array[index.numpy()]) and labels.equal(index)


# --- other forms in memory


def test_several_arrays_a_dict_one_alone_and_a_tensor_data_set() -> None:
    assert [column.shape for column in table((X, X, Y))] == [(20, 2), (20, 2), (20,)]
    assert {name: column.shape for name, column in table({"a": X, "b": Y.numpy()}).items()} == {
        "a": (20, 2),
        "b": (20,),
    }
    assert table(X) is not None and table(X).equal(X)
    assert table((X,)).equal(X) and table([X]).equal(X) and table(X.numpy()).equal(X)
    assert [column.shape for column in table(TensorDataset(X, Y))] == [(20, 2), (20,)]
    assert table(TensorDataset(X)).equal(X)


def test_a_dict_of_arrays_gives_batches_that_are_dicts() -> None:
    given = roles({"tokens": np.arange(20).reshape(10, 2), "length": list(range(10))}, batch_size=4, shuffle=False)
    assert [batch["length"].tolist() for batch in arrived(given)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert arrived(given)[1]["tokens"].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]


@pytest.mark.parametrize("data", [X, {"x": X}, (X,)], ids=["tensor", "dict", "tuple of one"])
def test_unlabelled_data_trains_with_a_step(data: Any) -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs = batch["x"] if isinstance(batch, dict) else batch
        return (model(inputs) - inputs).square().mean()

    task = hotloop.Task(
        model=lambda: nn.Linear(2, 2),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4),
        data=data,
        batch_size=8,
    )
    outcome = lower(task).advance(3)
    assert (outcome.steps, outcome.samples, outcome.ended) == (3, 20, True)


def test_a_list_of_samples_is_a_data_set_not_a_list_of_columns() -> None:
    samples = [(X[index], int(Y[index])) for index in range(20)]
    assert isinstance(bring(samples).source, Samples)
    batch = arrived(roles(samples, batch_size=5, shuffle=False))[0]
    assert batch[0].equal(X[:5]) and batch[1].equal(Y[:5])
    assert isinstance(bring([X, Y]).source, Table)
    assert isinstance(bring([X.tolist(), Y.tolist()]).source, Table)


# --- data sets that are loaded sample by sample


@pytest.mark.parametrize(
    "data", [Pairs(), Subset(Pairs(), range(20)), ConcatDataset([Pairs()]), Subset(TensorDataset(X, Y), range(20))]
)
def test_a_map_style_data_set_gives_the_same_batches_as_the_arrays(data: Dataset) -> None:
    assert isinstance(bring(data).source, Samples)
    for one, other in zip(arrived(roles(data, batch_size=6)), arrived(roles((X, Y), batch_size=6)), strict=True):
        assert one[0].equal(other[0]) and one[1].equal(other[1])


def test_anything_with_getitem_and_len_is_a_data_set() -> None:
    class Bare:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return X[index], index

    assert [batch[1].tolist() for batch in arrived(roles(Bare(), batch_size=2, shuffle=False))] == [[0, 1], [2]]


def test_collate_makes_the_batches() -> None:
    def pad(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor(
            [y for _, y in samples]
        )

    ragged = [(torch.ones(length), length) for length in (1, 2, 3, 4)]
    given = roles(ragged, batch_size=2, collate=pad, shuffle=False)
    assert [batch[0].shape for batch in arrived(given)] == [(2, 2), (2, 4)]


# --- DataLoaders


def test_a_dataloader_brings_batch_size_shuffle_drop_last_collate_and_workers() -> None:
    def own(samples: list) -> Any:
        return samples

    shuffled = bring(DataLoader(Pairs(), batch_size=7, shuffle=True, drop_last=True, num_workers=2, collate_fn=own))
    assert (shuffled.batch_size, shuffled.shuffle, shuffled.drop_last) == (7, True, True)
    assert (shuffled.source.collate, shuffled.source.workers) == (own, 2)
    plain = bring(DataLoader(Pairs(), batch_size=7))
    assert (plain.batch_size, plain.shuffle, plain.drop_last) == (7, False, False)
    own_collate = bring(DataLoader(Pairs(), batch_size=7, collate_fn=own), collate=len)
    assert own_collate.source.collate is len


def test_a_dataloaders_shuffle_becomes_the_tasks_order_and_its_absence_the_order_of_the_data() -> None:
    shuffled = roles(DataLoader(Pairs(), batch_size=5, shuffle=True))
    assert shuffled.order == Order(20, 5, 0) and shuffled.is_exact
    assert arrived(shuffled)[0][1].equal(Y[shuffled.order.epoch(0)[:5]])
    assert roles(DataLoader(Pairs(), batch_size=5)).order == Order(20, 5, 0, shuffle=False)
    assert roles(DataLoader(Pairs(), batch_size=6, drop_last=True)).order.batches == 3
    assert roles(DataLoader(Pairs(), batch_size=5), shuffle=True).order.shuffle
    assert not roles(DataLoader(Pairs(), batch_size=5, shuffle=True), shuffle=False).order.shuffle


def test_a_dataloader_over_tensors_is_cut_out_of_memory() -> None:
    given = roles(DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True))
    assert isinstance(given.train, Table)
    for one, other in zip(arrived(given), arrived(roles((X, Y), batch_size=5)), strict=True):
        assert one[0].equal(other[0]) and one[1].equal(other[1])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Pairs(), batch_size=5, sampler=WeightedRandomSampler([1.0] * 20, 20)),
        DataLoader(Pairs(), batch_size=5, sampler=RandomSampler(Pairs(), replacement=True)),
        DataLoader(Pairs(), batch_size=5, sampler=RandomSampler(Pairs(), num_samples=7)),
        DataLoader(Pairs(), batch_size=5, sampler=[3, 1, 2]),
        DataLoader(Pairs(), batch_sampler=[[1, 2], [3]]),
        DataLoader(Pairs(), batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(Pairs()), 2, False)),
        DataLoader(Endless(), batch_size=5),
        DataLoader(Endless(), batch_size=None),
    ],
    ids=["weighted", "replacement", "some", "list", "batches", "own batches", "iterable", "unbatched"],
)
def test_a_loader_with_an_order_of_its_own_is_run_as_it_is(loader: DataLoader) -> None:
    given = roles(loader)
    assert isinstance(given.train, Stream) and given.order is None and not given.is_exact
    feed = open_feed(given.train, None, BatchTransform(torch.device("cpu"), 0))
    with torch.random.fork_rng():
        first = [batch[1] for batch, _ in feed.epoch(0)]
        again = [batch[1] for batch, _ in feed.epoch(0)]
        late = [batch[1] for batch, _ in feed.epoch(0, 1)]
    assert len(first) == len(again) and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, again, strict=True)
    )
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first[1:], late, strict=True))


def test_a_dataloader_and_a_batch_size_must_agree() -> None:
    loader = DataLoader(Pairs(), batch_size=5)
    assert roles(loader, batch_size=5).batch_size == 5
    with pytest.raises(
        DataError, match=r"batch_size=4 but the DataLoader has batch_size=5; expected one .* Leave batch_size out"
    ):
        roles(loader, batch_size=4)


def test_the_batch_size_without_a_word_is_that_of_the_loader_or_32_or_all_there_is() -> None:
    assert roles(DataLoader(Pairs(), batch_size=5)).batch_size == 5
    assert roles((torch.zeros(100, 2), torch.zeros(100))).batch_size == 32
    assert roles((X, Y)).batch_size == 20


def test_an_iterable_data_set_is_cut_into_batches() -> None:
    given = roles(Endless(), batch_size=4)
    assert [len(batch[1]) for batch in arrived(given)] == [4, 4, 2]


# --- refused


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"train": Pairs(), "test": Pairs()},
            r"data is a mapping whose 'train' is a Pairs; expected arrays. Pass one of them",
        ),
        ((X, Y[:-1]), r"data\[0\] has 20 samples, data\[1\] has 19 samples; expected the same number"),
        ({"x": X, "y": Y[:-1]}, r"data\['x'\] has 20 samples, data\['y'\] has 19 samples"),
        ((), r"data is empty"),
        ([], r"data is empty"),
        ({}, r"data is empty"),
        ((X[:0], Y[:0]), r"data is empty; expected one sample or more"),
        ((X, np.array(["a"] * 20)), r"data\[1\] holds text; expected numbers"),
        ((X, np.array([None] * 20)), r"data\[1\] holds Python objects; expected numbers"),
        ((np.array(["2026-01-01"] * 20, "datetime64[D]"), Y), r"data\[0\] holds dates; expected numbers"),
        (([[1.0, 2.0], [3.0]], [0, 1]), r"data\[0\] is a list whose rows are of different lengths"),
        (3, r"data is an int; expected \(x, y\) arrays"),
        ("x.npy", r"data is a str, 'x.npy'; .* Load the file"),
        ((index for index in range(3)), r"data is a generator; expected"),
    ],
)
def test_what_is_no_data(data: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        roles(data)


@pytest.mark.parametrize("part", ["data", "validation", "test"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_found_in_each_part(part: str, value: float) -> None:
    bad = X.clone()
    bad[7, 1] = bad[9, 0] = value
    parts = {"data": (X, Y), "validation": (X, Y), "test": (X, Y)} | {part: (bad, Y)}
    with pytest.raises(DataError, match=rf"{part}\[0\] has NaN or infinity in 2 of 20 samples, first in sample 7"):
        roles(**parts)


def test_large_numbers_are_no_infinity() -> None:
    roles((torch.full((20, 2), 3e38), Y))
    roles((torch.full((20, 2), 6e4, dtype=torch.float16), Y))


def test_looking_for_them_takes_little_memory() -> None:
    """Summing all up in float64 at once would make a copy of twice the data's size, which was the peak of a training."""
    seen: list[int] = []

    class Summing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.overloadpacket is torch.ops.aten.sum:
                seen.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    wide = torch.zeros(1000, 3000)
    wide[-1, -1] = float("nan")
    with Summing(), pytest.raises(DataError, match=r"first in sample 999"):
        roles((wide, torch.zeros(1000)))
    assert max(seen) < wide.numel() / 2
