"""Clipping needs no memory of the size of the gradients."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.problems import rows, trainer

X, Y = rows(64)
SIZE = 4 * 20 * 512  # bytes of the largest parameter


class New(TorchDispatchMode):
    """Keeps tensors of at least `SIZE` bytes that torch creates."""

    def __init__(self):
        super().__init__()
        self.memory = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        tensors = result if isinstance(result, list | tuple) else [result]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                memory = tensor.untyped_storage()
                if memory.nbytes() >= SIZE:
                    self.memory[memory.data_ptr()] = memory  # it is not given back
        return result


class Watched(torch.optim.SGD):
    """Counts them from the beginning of each step to the update."""

    allocations = ()  # how many, of each step

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.new = New()
        self.new.__enter__()

    def step(self, closure=None):
        self.new.__exit__(None, None, None)
        Watched.allocations += (len(self.new.memory),)
        return super().step(closure)


def test_clipping_allocates_no_tensors_of_the_gradients_size(monkeypatch):
    counts = []
    for norm in (None, 1e-3):
        monkeypatch.setattr(Watched, "allocations", ())
        trainer(
            False,
            model=lambda: nn.Sequential(nn.Linear(20, 512), nn.Linear(512, 4)),
            optimizer=lambda parameters: Watched(parameters, lr=0.1),
            clip_grad_norm=norm,
        ).fit(X, Y, batch_size=4)
        counts.append(Watched.allocations)

    assert counts[0] == counts[1]
    assert len(counts[0]) == 16
    assert min(counts[0]) >= 1  # the gradient itself
