"""Merged results of replicas, tensors of modules by name, and objectives."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.errors import OptionError
from daskdl.objective import OwnStep, objective_of
from daskdl.training.backend import in_pairs, merge
from daskdl.training.base import Parameters, load_tensors_, others_in, trained_in
from daskdl.training.replica import FitResult
from daskdl.training.tree_reduce import optimizer_arrays, rest_of

GRID = 2.0**-24
NOTHING = Parameters()


def shared(counts, mark=0.0):
    untrained = {"floating buffers": np.array([mark])}
    return Parameters(None, np.array(counts, np.int32), GRID, untrained)


def carried(steps=0, sent=None, residual=None):
    exchange = {"steps_made": steps, "sent": sent or {}}
    if residual is None:
        return exchange
    return {**exchange, "residual": torch.tensor(residual).int(), "grid": GRID}


def result(parameters, *, finished=True, optimizer=None, **fields):
    return FitResult(parameters, optimizer, carried(**fields), finished=finished)


def merged(*results):
    return merge(results)


def test_residuals_are_summed_and_the_agreed_parameters_kept():
    whole = merged(
        result(shared([10, 20, 30]), residual=[1, 0, -3]),
        result(shared([10, 20, 30]), residual=[0, -2, -4]),
    )

    assert whole.parameters.shared_N.tolist() == [10, 20, 30]
    assert whole.parameters.grid == whole.carried["grid"] == GRID
    assert whole.carried["residual"].tolist() == [1, -2, -7]
    assert whole.carried["residual"].dtype == torch.int32


def test_a_sum_of_residuals_stays_within_their_type():
    whole = merged(*[result(shared([0]), residual=[2**31 - 1])] * 2)

    assert whole.carried["residual"].tolist() == [2**31 - 1]


def test_residuals_of_zero_are_not_carried():
    whole = merged(*[result(shared([0]), residual=[r]) for r in (3, -3)])

    assert "residual" not in whole.carried


def test_the_best_epoch_is_taken_without_residuals():
    best = dataclasses.replace(result(shared([7])), restored=True)

    final = merged(result(shared([10]), residual=[1]), best, dataclasses.replace(best))

    assert final.parameters.shared_N.tolist() == [7]
    assert "residual" not in final.carried
    assert final.restored


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize(
    "kept", [shared([10]), Parameters({"weight": 0.5})], ids=["shared", "exact"]
)
def test_a_replica_that_failed_at_its_start_does_not_hide_the_agreed_state(kept, order):
    parts = [NOTHING, kept][::order]

    parameters = merged(
        *[result(part, finished=False) for n, part in enumerate(parts)]
    ).parameters

    assert (parameters.shared_N, parameters.exact) == (kept.shared_N, kept.exact)


def test_the_optimizer_state_is_the_sum_of_the_weighted_shares():
    def share(value, weight):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.grad = torch.full((2,), value)
        optimizer.step()
        return optimizer_arrays(optimizer, weight), rest_of(optimizer)

    final = merged(
        result(shared([1]), optimizer=share(1.0, 0.75)),
        result(shared([1]), optimizer=share(3.0, 0.25)),
    )

    ((key, momentum),) = final.optimizer[0].items()
    assert (key.name, momentum.tolist()) == ("momentum_buffer", [1.5, 1.5])


def test_thresholds_are_averaged_over_replicas_that_have_sent():
    final = merged(
        result(shared([1]), finished=False, steps=7, sent={"*": (1.0, 0.25)}),
        result(shared([1]), steps=5, sent={"*": (2.0, 0.75)}),
        result(shared([1]), steps=6),
        FitResult(NOTHING, finished=False),
    )

    assert final.carried == {"steps_made": 7, "sent": {"*": (1.5, 0.5)}}


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8, 13])
def test_results_that_are_merged_in_pairs_are_those_of_all_replicas(replicas):
    ended = [
        result(
            shared([7]),
            steps=n,
            sent={"*": (float(n), 0.5)} | ({"bias": (1.0 + n, 0.25)} if n % 3 else {}),
            residual=[n, -n * n],
            finished=n % 4 != 1,
        )
        for n in range(replicas)
    ]

    final = in_pairs(merge, ended)

    at_once = merge(ended)
    assert final.carried["sent"].keys() == at_once.carried["sent"].keys()
    for pattern, outcome in at_once.carried["sent"].items():
        assert final.carried["sent"][pattern] == pytest.approx(outcome)
    residuals = [
        f.carried.get("residual", torch.zeros(2)).tolist() for f in (final, at_once)
    ]
    assert residuals[0] == residuals[1]
    assert final.carried["steps_made"] == replicas - 1
    assert final.senders == at_once.senders


def test_no_worker_merges_more_than_two_results_at_once():
    most = []

    in_pairs(lambda some: most.append(len(some)) or some[0], list(range(100)))

    assert (max(most), len(most)) == (2, 99)


class Net(nn.Module):
    """A model with a frozen layer, tied weights and both kinds of buffers."""

    def __init__(self, width=3):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.register_buffer("kept", torch.arange(2.0))
        self.register_buffer("lost", torch.arange(3), persistent=False)


def test_trained_tensors_are_views_without_a_gradient():
    net = Net()

    weight = trained_in(net)["first.weight"]
    with torch.no_grad():
        net.first.weight.fill_(2.0)

    assert not weight.requires_grad
    assert weight.tolist() == [[2.0] * 3] * 3
    assert not others_in(net)["frozen.weight"].requires_grad


def test_loaded_tensors_stay_tied():
    first, second = Net(), Net()
    parameters = list(second.parameters())
    tensors = {**trained_in(first), **others_in(first)}
    first.lost += 5

    load_tensors_(second, tensors)

    for name, tensor in {**trained_in(second), **others_in(second)}.items():
        assert torch.equal(tensor, tensors[name]), name
    assert second.lost.tolist() == [5, 6, 7]
    assert second.last.weight is second.first.weight
    assert all(a is b for a, b in zip(parameters, second.parameters(), strict=True))


LOSS = nn.MSELoss()


def step(model, batch):
    x, y = batch
    return (model(x, shift=1.0) - y).square().mean()


def test_a_step_of_the_users_own_is_an_objective():
    assert objective_of(None, step) == OwnStep(step)


@pytest.mark.parametrize(
    ("loss", "columns", "message"),
    [
        (LOSS, step, "loss must be None with step=, which computes the loss, got "
         "MSELoss()"),
        (None, 3, "step must be a function of (model, (x, y)) that returns the batch's "
         "mean loss, got 3"),
    ],
    ids=["both", "no function"],
)  # fmt: skip
def test_other_objectives_are_refused(loss, columns, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        objective_of(loss, columns)
