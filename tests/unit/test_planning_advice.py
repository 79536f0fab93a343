"""One sentence, and only what the numbers say."""

import re

import pytest

from daskdl.planning.cost_model import Network
from daskdl.planning.plan import Question, advise
from daskdl.training.gradient_sharing import GradientSharing
from tests.support.planned import FAST, measured

UP_TO_64 = tuple(range(1, 65))


def advice(workers=UP_TO_64, link=FAST, master=None, **changes):
    master = GradientSharing() if master is None else master
    return advise(Question(measured(**changes), master, link, workers))


def number_of(text, before):
    return int(re.search(rf"(\d+){before}", text)[1])


def test_one_worker_is_no_question():
    assert advice((1,)) == (
        "One worker sends nothing: ask for more to see whether they pay."
    )


def test_where_all_pay_nothing_is_to_be_changed():
    assert advice((1, 2, 4)) == (
        "Pays up to 4 workers, 3.2 times as fast as one; nothing was asked about more."
    )


def test_one_that_is_asked_about_alone_pays_too():
    assert advice((4,)).startswith("Pays up to 4 workers, ")


def test_where_it_ends_the_first_that_does_not_pay_is_named_with_its_limit():
    said = advice()

    last = number_of(said, " workers, ")
    assert 8 < last < 64
    assert f"at {last + 1} workers" in said
    assert "the limit is 'messages', and the efficiency 4" in said


def test_a_step_that_is_short_does_not_pay():
    said = advice(gradients_s=0.0005, optimizer_s=0.0001)

    assert said.startswith("Does not pay: ")
    assert "64 times" not in said


def test_what_helps_is_named_with_how_far():
    said = advice(gradients_s=0.001, optimizer_s=0.0, apply_s=0.0, decode_s=0.0)

    assert said.startswith("Does not pay: 64 workers, 0.43 times as fast as one at ")
    assert re.search(
        r"It would pay up to \d+ with 16 times the batch \(accumulate=16\)\.$", said
    )


def test_faster_than_one_is_not_yet_paid_for():
    said = advice(encode_s=0.5)

    assert said.startswith("Hardly pays: 64 workers, ")
    assert "with 16 times the batch (accumulate=16)." in said


def test_the_mildest_change_that_helps_is_named():
    said = advice(encode_s=0.15)

    assert "with exchange_every=4," in said
    assert "with 4 times the batch (accumulate=4)." in said
    assert "=16" not in said


def test_applying_is_not_saved_by_exchanging_less():
    said = advice(apply_s=0.06, encode_s=0.0, request_s=0.0)

    assert "exchange_every" not in said
    assert "times the batch" in said


def test_a_slow_link_is_helped_by_sending_less():
    mesh, slow = GradientSharing(routing="mesh"), Network(3e6, 0.0)
    said = advice(link=slow, master=mesh, encode_s=0.0, request_s=0.0)

    paying = number_of(said, " workers, ")
    assert "the limit is 'link'" in said
    assert number_of(said, " with a density of 1e-04 instead of 1e-03") > 2 * paying


def test_where_nobody_waits_too_few_exchanges_do_not_pay():
    unbounded = GradientSharing(max_staleness=None)
    said = advice((1, 2, 3), Network(1e5, 0.0), unbounded)

    assert said.startswith("Hardly pays: 3 workers, ")
    assert "the link carries 6% of the exchanges at 2 workers" in said


def test_where_nothing_helps_it_says_so():
    said = advice((1, 2), gradients_s=1e-5, optimizer_s=0.0, encode_s=0.9)

    assert said.endswith(
        "Neither exchange_every=16 nor 16 times the batch nor a tenth of the density "
        "would change that."
    )


def test_an_interval_of_the_masters_own_is_made_longer():
    said = advice(encode_s=0.5, master=GradientSharing(exchange_every=2))

    assert "with exchange_every=8," in said


@pytest.mark.parametrize("encode_s", [0.099, 0.11], ids=["below", "above"])
def test_it_pays_from_half_of_each_worker_on(encode_s):
    costs = {"apply_s": 0.0, "decode_s": 0.0, "item_s": 0.0, "request_s": 0.0}

    said = advice((1, 2), encode_s=encode_s, **costs)

    assert said.startswith("Pays" if encode_s < 0.1 else "Does not pay: 2 workers, 0.9")
