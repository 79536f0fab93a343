import re
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, Dataset, Subset, TensorDataset

from daskdl.data.torch_datasets import Collation, MapStyle, is_map_style
from daskdl.errors import DataError


class Squares(Dataset):
    """Item i is (i, i * i), and says so in as many bytes as asked for."""

    def __init__(self, items, item_bytes=8):
        self.items = items
        self.item_bytes = item_bytes

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        assert type(index) is int
        if not 0 <= index < self.items:
            raise IndexError(index)
        return torch.full((self.item_bytes // 8,), index, dtype=torch.int64), index**2


class Fetched(Squares):
    """Several at a time, as Hugging Face's do; not one by one."""

    def __getitem__(self, index):
        pytest.fail("asked for one item")

    def __getitems__(self, indices):
        return [Squares.__getitem__(self, index) for index in indices]


def tensors(items):
    return TensorDataset(torch.arange(items)[:, None], torch.arange(items) ** 2)


def padded(items):
    longest = max(int(x[0]) for x, _ in items)
    return torch.zeros(len(items), longest + 1), torch.tensor([y for _, y in items])


def everything(source):
    loaded = [source.load(part) for part in range(source.parts)]
    assert [len(x) for x, _ in loaded] == [len(y) for _, y in loaded] == source.lengths
    return np.concatenate([x[:, 0] for x, _ in loaded]).tolist()


@pytest.mark.parametrize(
    "dataset",
    [
        Squares(150),
        Fetched(150),
        tensors(150),
        Subset(Squares(300), range(150)),
        Subset(Subset(tensors(400), range(300)), range(150)),
    ],
    ids=["items", "several", "tensors", "subset", "subset-of-tensors"],
)
class TestEveryDataset:
    def test_gives_all_items_in_order(self, dataset):
        assert everything(MapStyle(dataset)) == list(range(150))

    def test_keeps_labels_with_their_items_when_shuffled(self, dataset):
        source = MapStyle(dataset, shuffle_seed=3)

        x, y = source.load(1)

        assert (x[:, 0] ** 2).tolist() == y.tolist()
        assert sorted(everything(source)) == list(range(150))
        assert everything(source) != list(range(150))

    def test_gives_the_same_parts_where_it_has_been_sent(self, dataset):
        source = MapStyle(dataset, shuffle_seed=3)

        there = cloudpickle.loads(cloudpickle.dumps(source))

        assert everything(there) == everything(source)

    def test_shows_its_first_rows(self, dataset):
        x, y = MapStyle(dataset).first

        assert (x.tolist(), y.tolist()) == ([[0], [1]], [0, 1])


@pytest.mark.parametrize(
    ("dataset", "lengths"),
    [
        (Squares(1), [1]),
        (Squares(64), [64]),
        (Squares(65), [64, 1]),
        (Squares(64 * 64), [64] * 64),
        (Squares(64 * 100), [100] * 64),
        (Squares(10**6), [4096] * 244 + [576]),
        (Squares(20, 8 * 2**20), [3] * 6 + [2]),
        (Squares(3, 64 * 2**20), [1, 1, 1]),
    ],
    ids=["one", "few", "rest", "least", "64th", "many", "heavy", "heaviest"],
)
def test_parts_are_64ths_that_load_at_once(dataset, lengths):
    source = MapStyle(dataset)

    assert source.lengths == lengths
    assert source.parts == len(lengths)


def test_a_seed_draws_other_items_for_a_part():
    one, other = (MapStyle(Squares(150), shuffle_seed=seed) for seed in (3, 4))

    assert everything(one) != everything(other)


def test_a_part_is_one_call_of_the_users_collate_function():
    source = MapStyle(Squares(10), Collation(padded, batch_size=4))

    shapes = [source.load(part)[0].shape for part in range(source.parts)]

    assert source.lengths == [4, 4, 2]
    assert shapes == [(4, 4), (4, 8), (2, 10)]


def test_tensors_in_memory_are_not_copied():
    dataset = tensors(150)

    x, _ = MapStyle(dataset).load(1)

    assert np.shares_memory(x, dataset.tensors[0].numpy())


def test_the_users_collate_function_gets_the_items_of_tensors_too():
    source = MapStyle(tensors(10), Collation(padded, batch_size=4))

    assert source.load(2)[0].shape == (2, 10)


def test_a_subclass_of_a_tensor_dataset_is_asked_for_its_items():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return 2 * x, y

    x, _ = MapStyle(Doubled(*tensors(2).tensors)).load(0)

    assert x.tolist() == [[0], [2]]


def test_one_thread_at_a_time_asks_a_dataset():
    class Watched(Squares):
        def __getitem__(self, index):
            if index == 64:
                asked.set()
                assert go_on.wait(30)
            seen.append(index)
            return super().__getitem__(index)

    seen, asked, go_on = [], threading.Event(), threading.Event()
    source = MapStyle(Watched(192))
    seen.clear()

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(source.load, 1)
        assert asked.wait(30)
        other = pool.submit(source.load, 2)
        wait([other], timeout=0.1)  # it must not get anywhere
        go_on.set()
        wait([one, other])

    assert seen == list(range(64, 192))


def test_x_alone_is_enough_without_labels():
    source = MapStyle(TensorDataset(torch.arange(3)), Collation(labelled=False))

    x, y = source.load(0)

    assert x.tolist() == [0, 1, 2]
    assert y is None


def test_a_part_is_called_after_its_items():
    in_order, shuffled = MapStyle(Squares(65)), MapStyle(Squares(65), shuffle_seed=0)

    assert in_order.name(1) == "items 64 to 64 of the dataset"
    assert shuffled.name(0) == "items 0 to 63 of the shuffled dataset"


class Endless(Dataset):
    def __getitem__(self, index):
        return index, index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Squares(0), "the dataset is empty: len(Squares) is 0"),
        (Endless(), "a map-style dataset must have __len__, Endless has none"),
        (TensorDataset(torch.ones(2)), "must give pairs (x, y), got a tuple of 1"),
        (TensorDataset(*[torch.ones(2)] * 3), "must give pairs (x, y), got a tuple"),
    ],
    ids=["empty", "endless", "one", "three"],
)
def test_what_cannot_be_trained_on_is_refused_at_once(dataset, message):
    with pytest.raises(DataError, match=re.escape(message)):
        MapStyle(dataset)


def test_what_the_dataset_raises_comes_out():
    dataset = Subset(Squares(70), range(80))

    source = MapStyle(dataset)

    with pytest.raises(IndexError, match="70"):
        source.load(1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Squares(1), True),
        (Endless(), True),
        (ChainDataset([]), False),
        ([(1, 2)], False),
        (np.zeros(2), False),
        ({"a": 1}, False),
    ],
    ids=["dataset", "endless", "iterable", "list", "array", "dict"],
)
def test_it_is_known_from_other_kinds(value, expected):
    assert is_map_style(value) is expected


def test_one_that_is_not_of_torch_is_known_by_its_fetching():
    class Foreign:
        __len__ = Squares.__len__
        __getitems__ = Fetched.__getitems__

    assert is_map_style(Foreign())
