import numpy as np
import pytest
import torch
from torch import nn

from daskdl.compression.flat import FlatParameters
from daskdl.training.tree_reduce import Shares, add


class Case:
    """A module and an optimizer that has made a step, in a direction of its own."""

    def __init__(self, seed, optimizer=None, dtype=torch.float32):
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(dtype)
        make = optimizer or (lambda p: torch.optim.Adam(p, lr=0.1))
        self.optimizer = make(list(self.module.parameters()))
        groups = FlatParameters(self.module).groups
        self.shares = Shares(self.module, groups, self.optimizer)
        for _ in range(seed + 1):
            self.module(torch.randn(8, 3, dtype=dtype)).pow(3).sum().backward()
            self.optimizer.step()

    def everything(self):
        """All that is shared, by name."""
        state = self.optimizer.state_dict()["state"]
        return {
            **self.module.state_dict(),
            **{f"{n} {k}": v for n, own in state.items() for k, v in own.items()},
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_share_of_all_is_the_state_itself(dtype):
    case, other = Case(0, dtype=dtype), Case(1, dtype=dtype)

    other.shares.load_(case.shares.take(1.0))

    expected = case.everything()
    for name, value in other.everything().items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def test_shares_add_up_to_the_weighted_mean_and_counters_to_the_largest():
    first, second, target = Case(0), Case(1), Case(2)

    target.shares.load_(add([first.shares.take(0.25), second.shares.take(0.75)]))

    one, two = first.everything(), second.everything()
    for name, value in target.everything().items():
        mean = 0.25 * one[name] + 0.75 * two[name]
        largest = torch.maximum(one[name], two[name])
        counts = "step" in name or "tracked" in name
        torch.testing.assert_close(value, largest if counts else mean)


def test_one_that_has_made_no_step_takes_over_the_optimizer_of_others():
    case, fresh = Case(0), Case(-1)
    assert fresh.optimizer.state_dict()["state"] == {}

    fresh.shares.load_(case.shares.take(1.0))

    assert fresh.everything().keys() == case.everything().keys()


def test_the_groups_of_the_optimizer_stay_its_own():
    case, other = Case(0), Case(1)
    other.optimizer.param_groups[0]["lr"] = 0.5

    other.shares.load_(case.shares.take(1.0))

    assert other.optimizer.param_groups[0]["lr"] == 0.5


def test_without_an_optimizer_only_the_module_is_shared():
    case = Case(0)
    own = Shares(case.module, FlatParameters(case.module).groups, None)

    assert not [name for name in own.take(1.0) if "optimizer" in name]


def test_what_was_taken_does_not_change_with_the_module():
    case = Case(0)
    taken = case.shares.take(1.0)
    before = {name: array.copy() for name, array in taken.items()}

    with torch.no_grad():
        for value in case.everything().values():
            value += 1

    for name, array in taken.items():
        np.testing.assert_array_equal(array, before[name])


def test_adding_changes_no_share():
    one, two = {"sum a": np.ones(2)}, {"sum a": np.ones(2), "sum b": np.ones(1)}

    total = add([one, two])

    assert {name: array.tolist() for name, array in total.items()} == {
        "sum a": [2, 2],
        "sum b": [1],
    }
    assert one["sum a"].tolist() == two["sum a"].tolist() == [1, 1]
