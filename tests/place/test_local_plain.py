"""One replica is plain PyTorch, bit for bit, whatever the master and the machine."""

import functools

import numpy as np
import pytest
from torch import nn

from daskdl import ParameterAveraging
from tests.support.problems import (
    adam,
    kept,
    mlp,
    parameters_of,
    plain_loop,
    rows,
    sgd,
    trainer,
)

X, Y = rows(count=330)  # the last batch of 16 has 10
MASTERS = {
    "sharing": kept(),
    "averaging": ParameterAveraging(frequency=3),
    "compressed": ParameterAveraging(frequency=3, compression="dense8"),
}


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("master", MASTERS.values(), ids=MASTERS)
def test_equals_a_plain_loop_with_as_many_threads(master, optimizer, threads):
    own = trainer(False, master=master, optimizer=optimizer)

    own.fit(X, Y, epochs=2, batch_size=16, shuffle=False)

    loop = {"seed": 0, "epochs": 2, "batch_size": 16, "x": X, "y": Y}
    expected = plain_loop(mlp, optimizer, **loop, threads=threads)
    for name, value in parameters_of(own.model_).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


class Looking(nn.Linear):
    """Notes the memory in which its parameters lie."""

    seen = frozenset()

    def forward(self, x):
        for parameter in self.parameters():
            memory = parameter.untyped_storage().nbytes()
            Looking.seen |= {(parameter.nbytes, memory)}
        return super().forward(x)


@pytest.mark.parametrize("master", MASTERS.values(), ids=MASTERS)
def test_parameters_stay_where_torch_has_put_them(master, monkeypatch):
    """Products with views that are not aligned may differ."""
    monkeypatch.setattr(Looking, "seen", frozenset())
    own = trainer(False, master=master, model=functools.partial(Looking, 20, 4))

    own.fit(X, Y, batch_size=16)

    assert Looking.seen == {(320, 320), (16, 16)}  # each has its own
