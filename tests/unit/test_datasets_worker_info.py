import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from daskdl.data.torch_datasets import LoaderWorkers


class Counted(IterableDataset):
    """Numbers below 10: those of the worker, as in PyTorch's own documentation."""

    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id, 10, info.num_workers):
            assert get_worker_info() is info
            yield i


class ItsOwnIterator(IterableDataset):
    """Asks in `__iter__` itself, and is its own iterator."""

    def __iter__(self):
        info = get_worker_info()
        self.left = list(range(info.id, 10, info.num_workers))
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class Seeds(IterableDataset):
    def __iter__(self):
        yield get_worker_info().seed


DATASETS = [Counted(), ItsOwnIterator(), ChainDataset([Counted()])]


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda d: type(d).__name__)
class TestEveryDataset:
    def test_a_shard_is_what_a_worker_sees(self, dataset):
        shards = LoaderWorkers(dataset)

        seen = [list(shards(shard, 3)) for shard in range(3)]

        assert seen == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]

    def test_shards_can_be_gone_through_in_turns(self, dataset):
        shards = LoaderWorkers(dataset)

        pairs = list(zip(shards(0, 2), shards(1, 2), strict=True))

        assert pairs == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]

    def test_there_is_no_worker_between_the_items(self, dataset):
        items = LoaderWorkers(dataset)(0, 2)

        next(items)

        assert get_worker_info() is None

    def test_many_threads_see_their_own_shards(self, dataset):
        shards = LoaderWorkers(dataset)
        together = threading.Barrier(5)

        def items_of(shard):
            together.wait(30)
            return list(shards(shard, 5))

        with ThreadPoolExecutor(5) as pool:
            seen = list(pool.map(items_of, range(5)))

        assert seen == [[i, i + 5] for i in range(5)]


def test_nobody_takes_a_step_while_another_does():
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
            yield seen

    shards = LoaderWorkers(Slow())

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(list, shards(0, 2))
        assert first_in.wait(30)
        second = pool.submit(list, shards(1, 2))

    assert (first.result(), second.result()) == ([0], [1])


def test_the_dataset_of_the_worker_is_a_copy_of_its_own():
    class Own(IterableDataset):
        def __iter__(self):
            assert get_worker_info().dataset is self
            self.marked = True
            yield 1

    dataset = Own()

    assert list(LoaderWorkers(dataset)(0, 1)) == [1]
    assert not hasattr(dataset, "marked")


def test_each_pass_and_each_shard_has_a_seed_of_its_own():
    shards = LoaderWorkers(Seeds())

    seeds = [next(shards(shard, 3)) for _ in range(2) for shard in range(3)]

    assert len(set(seeds)) == 6


def test_passes_are_repeatable():
    one, other = (LoaderWorkers(Seeds()) for _ in range(2))

    assert list(one(1, 3)) == list(other(1, 3))


@pytest.mark.parametrize("where", ["begin", "middle"])
def test_what_the_dataset_raises_comes_out_and_nobody_is_left_a_worker(where):
    class Broken(IterableDataset):
        def __iter__(self):
            if where == "begin":
                raise OSError("mine")
            return self

        def __next__(self):
            raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        list(LoaderWorkers(Broken())(0, 1))

    assert get_worker_info() is None
    assert list(LoaderWorkers(Counted())(4, 5)) == [4, 9]
