import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.thresholds import Sent
from daskdl.training.backend import FitResult, merge
from daskdl.training.base import CompressionState as Left
from daskdl.training.base import Parameters
from daskdl.training.optimizer_step import OptimizerState, weigh

GRID = 2.0**-24
MOST = 2**31 - 1
NOTHING = Parameters()


def shared(counts, residual=None, mark=0.0):
    residual_N = None if residual is None else np.array(residual, np.int32)
    untrained = {"floating buffers": np.array([mark])}
    return Parameters(None, np.array(counts, np.int32), residual_N, GRID, untrained)


def result(parameters, *, finished=True, outcome=None, optimizer=None):
    return FitResult(parameters, optimizer, outcome, finished=finished)


def merged(*results):
    return merge(results)


def test_all_residuals_are_added_up_and_shared_is_as_agreed():
    parameters = merged(
        result(shared([10, 20, 30], [1, 0, -3])),
        result(shared([10, 20, 30], [0, -2, -4])),
    ).parameters

    assert parameters.shared_N.tolist() == [10, 20, 30]
    assert parameters.residual_N.tolist() == [1, -2, -7]
    assert parameters.residual_N.dtype == parameters.shared_N.dtype == np.int32
    assert parameters.grid == GRID


def test_a_sum_that_leaves_int32_on_its_way_is_exact_in_the_end():
    parameters = merged(
        result(shared([0, 0], [MOST, -MOST])),
        result(shared([0, 0], [MOST, -MOST])),
        result(shared([0, 0], [-MOST, MOST - 1])),
    ).parameters

    assert parameters.residual_N.tolist() == [MOST, -MOST - 1]


def test_a_sum_outside_int32_stays_at_its_edge():
    parameters = merged(
        result(shared([0, 0], [MOST, -MOST])), result(shared([0, 0], [5, -5]))
    ).parameters

    assert parameters.residual_N.tolist() == [MOST, -MOST - 1]


def test_residuals_that_cancel_out_leave_nothing():
    parameters = merged(
        result(shared([10, 20], [3, 0])), result(shared([10, 20], [-3, 0]))
    ).parameters

    assert parameters.residual_N is None


def test_the_best_epoch_comes_back_from_the_first_that_has_it_and_nothing_is_added():
    best = dataclasses.replace(result(shared([7])), restored=True)

    final = merged(result(shared([10], [1])), best, dataclasses.replace(best))

    assert final.parameters.shared_N.tolist() == [7]
    assert final.parameters.residual_N is None
    assert final.restored


def test_one_that_did_not_come_to_its_end_brings_nothing_back():
    best = dataclasses.replace(result(shared([7]), finished=False), restored=True)

    final = merged(result(shared([10], [1])), best)

    assert final.parameters.shared_N.tolist() == [10]
    assert final.parameters.residual_N.tolist() == [1]
    assert not final.restored


def test_buffers_are_those_on_which_all_agreed():
    parameters = merged(
        result(shared([1], [0], mark=0.25)), result(shared([1], [0], mark=0.25))
    ).parameters

    assert parameters.untrained["floating buffers"].tolist() == [0.25]


def test_a_replica_without_a_residual_adds_nothing():
    parameters = merged(
        result(shared([10], None)), result(shared([10], [4]))
    ).parameters

    assert parameters.residual_N.tolist() == [4]


def test_replicas_that_did_not_finish_add_nothing():
    parameters = merged(
        result(shared([1], [100]), finished=False),
        result(shared([10], [4])),
        result(shared([10], [5])),
    ).parameters

    assert parameters.shared_N.tolist() == [10]
    assert parameters.residual_N.tolist() == [9]


def test_if_none_finished_the_agreed_state_is_what_is_left():
    parameters = merged(
        result(shared([10]), finished=False), result(shared([10]), finished=False)
    ).parameters

    assert parameters.shared_N.tolist() == [10]


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize(
    "kept", [shared([10]), Parameters({"weight": 0.5})], ids=["shared", "exact"]
)
def test_one_that_failed_at_its_start_does_not_hide_what_the_others_agreed_on(
    kept, order
):
    parts = [NOTHING, kept][::order]

    parameters = merged(
        *[result(part, finished=False) for n, part in enumerate(parts)]
    ).parameters

    assert (parameters.shared_N, parameters.exact) == (kept.shared_N, kept.exact)


def test_a_replica_that_did_not_finish_has_no_share_of_the_optimizer():
    def state(value):
        return OptimizerState({(0, "m"): np.array([value])}, {}, {}, [])

    final = merged(
        result(shared([1]), finished=False, optimizer=state(64.0)),
        result(shared([1], [0]), optimizer=state(1.0)),
    )

    assert final.optimizer.parts[0, "m"].tolist() == [1.0]


def test_if_nobody_has_anything_the_result_is_empty():
    final = merged(result(NOTHING, finished=False))

    assert final.parameters == NOTHING
    assert (final.optimizer, final.compression) == (None, None)


@pytest.mark.parametrize("finished", [True, False])
def test_a_lone_replica_keeps_its_exact_parameters(finished):
    exact = {"weight": torch.tensor([0.1, float("nan")], dtype=torch.bfloat16)}

    parameters = merged(result(Parameters(exact), finished=finished)).parameters

    weight = parameters.exact["weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.view(torch.int16), exact["weight"].view(torch.int16))


def test_the_optimizer_state_is_the_sum_of_the_weighted_shares():
    def share(value, weight):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.grad = torch.full((2,), value)
        optimizer.step()
        return weigh(optimizer, weight)

    final = merged(
        result(shared([1], [0]), optimizer=share(1.0, 0.75)),
        result(shared([1], [0]), optimizer=share(3.0, 0.25)),
    )

    assert final.optimizer.parts[0, "momentum_buffer"].tolist() == [1.5, 1.5]


def test_the_threshold_goes_on_from_the_mean_of_all_that_have_sent():
    final = merged(
        result(
            shared([1]),
            finished=False,
            outcome=Left({"*": Sent(1.0, 0.25)}, 7),
        ),
        result(shared([1], [0]), outcome=Left({"*": Sent(2.0, 0.75)}, 5)),
        result(shared([1], [0]), outcome=Left({}, 6)),
        result(NOTHING, finished=False),
    )

    assert final.compression == Left({"*": Sent(1.5, 0.5)}, steps=7)


def test_each_pattern_goes_on_from_those_that_have_sent_it():
    final = merged(
        result(
            shared([1], [0]),
            outcome=Left({"a": Sent(1.0, 0.25), "b": Sent(4.0, 0.5)}, 1),
        ),
        result(shared([1], [0]), outcome=Left({"a": Sent(2.0, 0.75)}, 1)),
    )

    assert final.compression.sent == {"a": Sent(1.5, 0.5), "b": Sent(4.0, 0.5)}
