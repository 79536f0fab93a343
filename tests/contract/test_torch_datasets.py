"""Map-style and iterable datasets of torch, and streams, as sources."""

import functools
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import (
    ChainDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.worker import WorkerInfo

import daskdl
from daskdl.data import Stream
from daskdl.data import dataset as collated
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.data.torch_datasets import Collation, worker_info
from daskdl.errors import DataError, OptionError


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


class Endless(Dataset):
    def __getitem__(self, index):
        return index, index


def tensors(items):
    return TensorDataset(torch.arange(items)[:, None], torch.arange(items) ** 2)


def padded(items):
    longest = max(int(x.flatten()[0]) for x, _ in items)
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
        Subset(tensors(300), torch.arange(150)),
        Subset(Subset(tensors(400), np.arange(300)), np.arange(150)),
    ],
    ids=[
        *("items", "several", "tensors", "subset", "subset-of-tensors"),
        *("tensor of indices", "numpy indices"),
    ],
)
def test_items_keep_their_order_or_are_dealt_by_a_seed(dataset):
    in_order, dealt = source_of(dataset), source_of(dataset, shuffle_seed=3)

    x, y = dealt.load(1)
    there = cloudpickle.loads(cloudpickle.dumps(dealt))
    assert everything(in_order) == list(range(150))
    assert [leaf.tolist() for leaf in in_order.first_rows] == [[[0], [1]], [0, 1]]
    assert (x[:, 0] ** 2).tolist() == y.tolist()
    assert sorted(everything(dealt)) == list(range(150))
    assert everything(dealt) == everything(there)
    assert everything(dealt) != everything(source_of(dataset, shuffle_seed=4))
    assert in_order.name(2) == "items 128 to 149 of the dataset"
    assert dealt.name(0) == "items 0 to 63 of the shuffled dataset"


@pytest.mark.parametrize(
    ("dataset", "lengths"),
    [
        (Squares(1), [1]),
        (Squares(65), [64, 1]),
        (Squares(64 * 100), [100] * 64),
        (Squares(10**6), [4096] * 244 + [576]),
        (Squares(20, 8 * 2**20), [3] * 6 + [2]),
        (Squares(3, 64 * 2**20), [1, 1, 1]),
    ],
    ids=["one", "rest", "64th", "many", "heavy", "heaviest"],
)
def test_parts_are_64ths_that_load_at_once(dataset, lengths):
    assert source_of(dataset).lengths == lengths


@pytest.mark.parametrize("dataset", [Squares(10), tensors(10)], ids=["items", "tensor"])
def test_a_part_is_one_call_of_the_users_collate_function(dataset):
    source = source_of(collated(dataset, padded), read=ReadOptions(4))

    assert source.lengths == [4, 4, 2]
    assert [source.load(part)[0].shape for part in range(3)] == [
        (4, 4),
        (4, 8),
        (2, 10),
    ]


def test_tensors_are_not_copied_but_a_subclass_is_asked_for_its_items():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return 2 * x, y

    dataset = tensors(150)

    x, _ = source_of(dataset).load(1)

    assert np.shares_memory(x, dataset.tensors[0].numpy())
    assert source_of(Doubled(*dataset.tensors)).first_rows[0].tolist() == [[0], [2]]


def test_one_thread_at_a_time_asks_a_dataset():
    class Watched(Squares):
        def __getitem__(self, index):
            if index == 64:
                asked.set()
                assert go_on.wait(30)
            seen.append(index)
            return super().__getitem__(index)

    seen, asked, go_on = [], threading.Event(), threading.Event()
    source = source_of(Watched(192))
    seen.clear()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(source.load, 1)
        assert asked.wait(30)
        second = pool.submit(source.load, 2)
        wait([second], timeout=0.1)  # it must not get anywhere
        go_on.set()
        wait([first, second])

    assert seen == list(range(64, 192))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Squares(0), "the dataset is empty: len(Squares) is 0"),
        (Endless(), "a map-style dataset must have __len__, Endless has none"),
        (TensorDataset(torch.ones(2)), "must give pairs (x, y), got a tuple of 1"),
    ],
    ids=["empty", "endless", "one"],
)
def test_a_dataset_that_cannot_be_trained_on_is_refused_at_once(dataset, message):
    with pytest.raises(DataError, match=re.escape(message)):
        source_of(dataset)


def test_what_the_dataset_raises_is_passed_on_and_x_alone_needs_no_labels():
    with pytest.raises(IndexError, match="70"):
        source_of(Subset(Squares(70), range(80))).load(1)
    x, y = source_of(TensorDataset(torch.arange(3)), labelled=False).load(0)
    assert (x.tolist(), y) == ([0, 1, 2], None)


# ---- collation


class Point(NamedTuple):
    left: object
    right: object


def shown(tree):
    """With lists for arrays, so that it can be compared."""
    if isinstance(tree, dict):
        return {key: shown(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(shown(value) for value in tree)
    assert tree is None or isinstance(tree, np.ndarray)
    return None if tree is None else tree.tolist()


@pytest.mark.parametrize(
    ("labelled", "items", "x", "y"),
    [
        (True, [(torch.ones(2), 3), (torch.zeros(2), 4)], [[1, 1], [0, 0]], [3, 4]),
        (True, [((1, 2.5), True), ((3, 4.5), False)], ([1, 3], [2.5, 4.5]),
         [True, False]),
        (True, [[[1, 2], 5]], ([1], [2]), [5]),
        (True, [({"a": 1, "b": (2, 3)}, {"c": 2})], {"a": [1], "b": ([2], [3])},
         {"c": [2]}),
        (True, [(Point(1, 2.0), 0)], ([1], [2.0]), [0]),
        (False, [(1, 2, 3)], ([1], [2], [3]), None),
        (False, [(1,), (2,)], [1, 2], None),
        (False, [(1, 2)], [1], [2]),
    ],
    ids=["tensors", "tuple", "list", "nested", "named", "three", "alone", "pair"],
)  # fmt: skip
def test_items_become_trees_of_arrays_as_torch_collates_them(labelled, items, x, y):
    assert shown(Collation(labelled=labelled).rows(items)) == (x, y)


def test_dtypes_are_those_of_torch():
    (a, b, c), y = Collation().rows([((1.5, np.float32(1), torch.ones(1).half()), 1)])

    assert [leaf.dtype for leaf in (a, b, c, y)] == ["f8", "f4", "f2", "i8"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"x": 1, "y": 2}], "must give pairs (x, y), got a dict with the keys "
         "['x', 'y']; say which key has the labels, label=..."),
        ([("cat", 1)], "x of a dataset's items is text, such as 'cat'; make numbers of "
         "it in the dataset"),
        ([({"a": ()}, 1)], "x['a'] of a dataset's items must be made of"),
        ([(1, None)], "items of the dataset cannot be collated: TypeError"),
        ([(torch.ones(2), 0), (torch.ones(3), 0)], "of equal shapes in tuples and "
         "dicts, or use daskdl.data.dataset(X, collate_fn=...)"),
        ([({"a": 1}, 0), ({"b": 1}, 0)], "cannot be collated: KeyError"),
        ([(torch.tensor(1j), 0)], "x must hold real numbers"),
    ],
    ids=["dict", "string", "nothing", "none", "ragged", "keys", "complex"],
)  # fmt: skip
def test_items_that_are_no_pairs_of_numbers_are_refused(items, message):
    with pytest.raises(DataError, match=re.escape(message)):
        Collation().rows(items)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda items: padded(items[1:]), "must return one row for each item, got 1 "
         "rows of x for 2 items"),
        (lambda items: ({"a": torch.ones(2), "b": torch.ones(5)}, torch.ones(2)),
         "got 5 rows of x['b'] for 2 items"),
        (lambda items: (torch.ones(2), torch.ones(3)), "3 rows of y for 2 items"),
        (lambda items: (torch.ones(2), [1, 2]), "y[0] of a dataset's items must be"),
    ],
    ids=["fewer", "dict", "labels", "list"],
)  # fmt: skip
def test_collated_rows_must_be_those_of_the_items(function, message):
    items = [(torch.ones(3), 0), (torch.ones(1), 1)]

    with pytest.raises(DataError, match=re.escape(message)):
        Collation(function, 2).rows(items)


def test_no_shared_memory_is_taken_while_another_thread_reads_a_stream(monkeypatch):
    def refuse(*_, **__):
        pytest.fail("took shared memory")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    items = [(torch.ones(2), np.ones(2))]

    with worker_info(WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)):
        with pytest.raises(pytest.fail.Exception):
            default_collate(items)  # what would be
        x, _ = Collation().rows(items)

    assert x.tolist() == [[1, 1]]


# ---- streams


class Counted(IterableDataset):
    """Items of the worker, as in PyTorch's own documentation."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id, self.items, info.num_workers):
            assert get_worker_info() is info
            yield torch.tensor([i]), i + 100


class ItsOwnIterator(Counted):
    """Asks in `__iter__` itself, and is its own iterator."""

    def __iter__(self):
        self.left = list(super().__iter__())
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class Careless(IterableDataset):
    """Gives all items to each worker."""

    def __iter__(self):
        return iter([(1.0, 0), (2.0, 1)])


def counted(items):
    return Stream(
        lambda k, n: [(torch.tensor([i]), i + 100) for i in range(k, items, n)]
    )


def split(dataset, parts):
    with warnings.catch_warnings(action="error"):
        return source_of(dataset).divided(parts)


def streamed(source, part, rows=3):
    return [x[:, 0].tolist() for x, _ in source.stream(part, rows)]


@pytest.mark.parametrize(
    "make",
    [Counted, ItsOwnIterator, lambda items: ChainDataset([Counted(items)]), counted],
    ids=["get_worker_info", "iterator", "chain", "Stream"],
)
class TestEveryStream:
    def test_each_part_is_what_one_worker_sees_also_again_and_elsewhere(self, make):
        source = split(make(9), 2)

        there = cloudpickle.loads(cloudpickle.dumps(source))

        assert (source.sequential, source.lengths, source.parts) == (True, None, 2)
        for each in (source, source, there):
            assert streamed(each, 0) == [[0, 2, 4], [6, 8]]
            assert streamed(each, 1) == [[1, 3, 5], [7]]
        assert [leaf.tolist() for leaf in source.first_rows] == [[[0], [2]], [100, 102]]
        assert source.name(1) == "part 1 of 2"

    def test_parts_may_be_read_in_turns_and_by_many_threads(self, make):
        source, together = split(make(10), 5), threading.Barrier(5)
        turns = zip(source.stream(0, 1), source.stream(1, 1), strict=True)

        def items_of(part):
            together.wait(30)
            return streamed(source, part, 9)

        assert [(a[0, 0], b[0, 0]) for (a, _), (b, _) in turns] == [(0, 1), (5, 6)]
        assert get_worker_info() is None
        with ThreadPoolExecutor(5) as pool:
            assert list(pool.map(items_of, range(5))) == [
                [[i, i + 5]] for i in range(5)
            ]

    def test_parts_may_be_empty_but_not_all(self, make):
        few, none = split(make(1), 3), source_of(make(0))

        assert [streamed(few, part) for part in range(3)] == [[[0]], [], []]
        with pytest.raises(DataError, match="empty: none of its 1 parts has an item"):
            _ = none.first_rows


@pytest.mark.parametrize("trained", [None, {}], ids=["untrained", "on arrays"])
def test_items_are_asked_for_when_they_are_needed_and_checked(trained):
    asked = []

    def items(k, n):
        for i in range(100):
            asked.append(i)
            yield i, i

    read = ReadOptions(columns=trained)
    next(source_of(Stream(items, 2), read=read).stream(0, 3))

    assert asked == [0, 1, 2]
    with pytest.raises(DataError, match=re.escape("must give pairs (x, y)")):
        list(source_of(Stream(lambda k, n: [{"a": 1}], 1)).stream(0, 2))
    with pytest.raises(NotImplementedError, match="is sequential"):
        source_of(Careless()).load(0)


def test_the_users_collate_function_gets_its_batch_size():
    stream = Stream(lambda k, n: [(torch.tensor(i), 0) for i in range(1, 6)], 1)

    source = source_of(collated(stream, padded), read=ReadOptions(2))

    assert [x.shape for x, _ in source.stream(0, 100)] == [(2, 3), (2, 5), (1, 6)]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Careless(), r"in 2 parts.*get_worker_info\(\) which part.* used 2 times"),
        (
            Stream(lambda k, n: [({"a": np.ones(2)}, 1)]),
            r"in 2 parts.*same items.*2 t",
        ),
        (Stream(lambda k, n: [(1.0, 0)], 3), "in 3 parts.*same items"),
    ],
    ids=["get_worker_info", "Stream", "fixed"],
)
def test_parts_that_begin_alike_are_warned_of(dataset, message):
    source = source_of(dataset)
    _ = source.first_rows

    with pytest.warns(UserWarning, match=message):
        source.divided(2)


def test_one_part_may_have_everything_and_other_shapes_are_not_alike():
    assert split(Careless(), 1).first_rows[0].tolist() == [1, 2]
    unlike = split(Stream(lambda k, n: [(np.ones(k + 1), 0)]), 2)
    assert unlike.first_rows[0].shape == (1, 1)
    later = source_of(Stream(lambda k, n: [(k, 0)] * k, 3))
    assert later.first_rows[0].tolist() == [1]
    assert split(Stream(lambda k, n: [(k, 0)], 3), 2).parts == 3


@pytest.mark.parametrize("parts", [0, -1, 1.5, True, "2"])
def test_parts_that_cannot_be_are_refused(parts):
    with pytest.raises(OptionError, match=f">= 1, got {parts!r}"):
        Stream(lambda k, n: [], parts)
    with pytest.raises(OptionError, match=r"function\(part, parts\), got \[1\]"):
        Stream([1], 2)


def test_a_dataset_takes_no_step_while_another_does():
    first_in, second_in, looked = (threading.Event() for _ in range(3))

    class Slow(IterableDataset):
        def __iter__(self):
            if get_worker_info().id == 0:
                first_in.set()
                second_in.wait(0.1)  # it must not come in
                seen = get_worker_info().id
                looked.set()
            else:
                second_in.set()
                looked.wait(30)
                seen = get_worker_info().id
            yield seen, 0

    source = source_of(Slow())
    source.parts = 2

    def read(part):
        return [x.tolist() for x, _ in source.stream(part, 1)]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(read, 0)
        assert first_in.wait(30)
        second = pool.submit(read, 1)

    assert (first.result(), second.result()) == ([[0]], [[1]])


def test_each_pass_goes_through_a_copy_with_a_seed_of_its_own():
    class Own(IterableDataset):
        def __iter__(self):
            assert get_worker_info().dataset is self
            self.marked = True
            yield get_worker_info().seed, 0

    dataset = Own()
    first, again = source_of(dataset), source_of(dataset)
    first.parts = again.parts = 3

    def seeds(source):
        return [next(source.stream(part, 1))[0].item() for part in (0, 1, 2, 0, 1, 2)]

    drawn = seeds(first)
    assert len(set(drawn)) == 6
    assert drawn == seeds(again)
    assert not hasattr(dataset, "marked")


@pytest.mark.parametrize("where", ["begin", "middle"])
def test_an_error_of_the_dataset_is_passed_on_and_leaves_no_worker(where):
    class Broken(IterableDataset):
        def __iter__(self):
            if where == "begin":
                raise OSError("mine")
            return self

        def __next__(self):
            raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        list(source_of(Broken()).stream(0, 1))

    assert get_worker_info() is None


class TensorImage(torch.Tensor):
    """A subclass of Tensor, as torchvision's transforms return it."""


class Pictures(Dataset):
    """Pixels and labels in the form of torchvision's data sets."""

    def __init__(self, transform=None):
        self.data = np.arange(12 * 4 * 4 * 3).reshape(12, 4, 4, 3).astype(np.uint8)
        self.targets = [i % 3 for i in range(12)]
        self.classes = ["ant", "bee", "cat"]
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, target = Image.fromarray(self.data[index]), self.targets[index]
        return self.transform(image) if self.transform else image, target


def as_tensor(image):
    pixels = torch.from_numpy(np.array(image)).movedim(2, 0) / 255
    return pixels.as_subclass(TensorImage)


def test_a_data_set_of_torchvision_trains_like_its_arrays():
    dataset = Pictures(as_tensor)
    X = dataset.data.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    y = np.array(dataset.targets)
    trained = []
    for data, labels in ((dataset, None), (X, y)):
        trainer = daskdl.Trainer(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 3)),
            nn.CrossEntropyLoss(),
            functools.partial(torch.optim.SGD, lr=0.1),
            client=False,
        )
        trainer.fit(data, labels, epochs=2, batch_size=4, shuffle=False)
        trained.append((trainer.evaluate(data, labels), trainer.predict(data)))

    assert trained[0][0] == trained[1][0]
    np.testing.assert_array_equal(trained[0][1], trained[1][1])


def test_a_data_set_of_torchvision_needs_a_transform_to_tensors():
    with pytest.raises(DataError, match=r"found <class 'PIL\.Image\.Image'>; make "):
        source_of(Pictures(), None, ReadOptions(4))
