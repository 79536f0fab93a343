"""Datasets that are gone through from the beginning, of the small problem's rows."""

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.support.problems import rows


class Stream(IterableDataset):
    """Gives all rows to whoever goes through it, in an order of the pass's own."""

    def __init__(self, count, shuffled=False):
        self.count = count
        self.shuffled = shuffled

    def __iter__(self):
        x, y = rows(self.count)
        order = torch.randperm(self.count) if self.shuffled else range(self.count)
        return ((x[i], int(y[i])) for i in order)


class ShardedStream(Stream):
    """Gives each worker rows of its own."""

    def __iter__(self):
        info = get_worker_info()
        for i, row in enumerate(super().__iter__()):
            if i % info.num_workers == info.id:
                yield row
