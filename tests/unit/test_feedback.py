import numpy as np

from daskdl.training.tree_reduce import Feedback

ONE, TWO = {"a": np.ones(2)}, {"a": np.full(2, 2.0)}


def with_one():
    feedback = Feedback()
    feedback.propose(1, ONE)
    feedback.settle_(1)
    return feedback


def test_what_was_left_counts_once_the_mean_exists():
    feedback = Feedback()
    feedback.propose(3, ONE)
    assert feedback.residual == {}

    feedback.settle_(3)

    assert feedback.residual is ONE


def test_what_was_left_of_a_mean_that_nobody_has_is_forgotten():
    feedback = with_one()

    feedback.propose(2, TWO)
    feedback.settle_(1)
    feedback.settle_(2)

    assert feedback.residual is ONE


def test_a_mean_that_exists_counts_once():
    feedback = with_one()

    feedback.propose(2, {})
    feedback.settle_(2)
    feedback.propose(3, TWO)
    feedback.settle_(2)

    assert feedback.residual == {}


def test_where_nothing_was_proposed_the_residual_stays():
    feedback = with_one()

    feedback.settle_(2)

    assert feedback.residual is ONE


def test_a_residual_is_restored():
    feedback = with_one()
    feedback.propose(2, {})

    feedback.restore_(TWO)
    feedback.settle_(2)

    assert feedback.residual is TWO
