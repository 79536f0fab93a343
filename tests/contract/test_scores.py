"""What a model does on batches, as numbers that can be added up, part by part."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl.data import batching as cutting
from daskdl.data.tables import InMemory
from daskdl.errors import DataError, OptionError
from daskdl.evaluation.evaluate import PartScorer, Score, evaluate, score_batches
from daskdl.objective import OwnStep
from daskdl.serialization import Packed, PackedModel
from tests.support.sources import Parts, Streamed

ROWS = 101  # a prime: no batch size divides it
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
# Sorted, so that each part of the data has another loss than the others.
Y = np.sort(np.random.default_rng(1).integers(0, 3, ROWS))


@pytest.fixture
def model():
    """Sensitive to its mode: dropout and batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    return model.train()


def batches(parts, batch_size):
    return cutting.batches(map(cutting.whole, parts), batch_size)


class TestScore:
    def test_parts_add_up_to_the_whole(self, model):
        loss = nn.CrossEntropyLoss()
        parts = [slice(0, 9), slice(9, 11), slice(11, ROWS)]

        scores = [
            score_batches(model, loss, batches([(X[part], Y[part])], 4), "cpu")
            for part in parts
        ]

        total = scores[2] + scores[0] + scores[1]
        with torch.no_grad():
            output = model.eval()(torch.from_numpy(X))
        # 1e-6: float32 losses of batches, summed in another order.
        assert total.metrics() == {
            "loss": pytest.approx(loss(output, torch.from_numpy(Y)).item(), rel=1e-6),
            "accuracy": (output.argmax(1).numpy() == Y).mean(),
        }
        assert (total.examples, total.labels) == (ROWS, ROWS)

    def test_it_travels_as_a_list_of_numbers(self):
        score = Score(1.5, 2, 3, 4, -0.5)

        assert list(score) == [1.5, 2, 3, 4, -0.5]
        assert Score(*score) == score

    def test_of_nothing_there_is_no_mean(self):
        with pytest.raises(DataError, match="no examples were scored"):
            Score().metrics()


class TestScoreBatches:
    def test_each_submodule_gets_its_own_mode_back(self, model):
        model[1].eval()

        score_batches(model, nn.CrossEntropyLoss(), batches([(X, Y)], 50), "cpu")

        assert [part.training for part in model] == [True, False, True, True]

    def test_the_mode_comes_back_after_an_error_too(self, model):
        def fail(output, labels):
            raise OSError

        with pytest.raises(OSError):  # noqa: PT011 there is no message
            score_batches(model, fail, batches([(X, Y)], 50), "cpu")

        assert model.training

    def test_what_a_live_module_caches_can_still_be_trained_on(self):
        class Caching(nn.Linear):
            cached = None

            def forward(self, x):
                if self.cached is None:
                    self.cached = torch.ones(1) * 2
                return super().forward(x) * self.cached

        module = Caching(4, 3)

        score_batches(module, nn.CrossEntropyLoss(), batches([(X, Y)], 50), "cpu")

        module(torch.from_numpy(X)).sum().backward()
        assert module.weight.grad is not None

    def test_no_gradients_are_recorded(self, model):
        seen = []

        def loss(output, labels):
            seen.append(output.requires_grad)
            return output.mean()

        score_batches(model, loss, batches([(X, Y)], 60), "cpu")

        assert seen == [False, False]

    def test_of_a_step_of_ones_own_there_is_the_loss_only(self):
        step = OwnStep(lambda model, batch: model(batch[0]).mean())
        x, y = torch.tensor([[1.0], [2.0], [6.0]]), torch.zeros(3, dtype=torch.int64)

        score = score_batches(
            nn.Identity(), step, [(x[:2], y[:2]), (x[2:], y[2:])], "cpu"
        )

        assert score.metrics() == {"loss": 3.0}

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_a_mean_is_weighed_by_its_rows_and_a_sum_is_not(self, reduction):
        x = torch.tensor([[1.0], [1.0], [3.0]])
        both = [(x[:2], torch.zeros(2, 1)), (x[2:], torch.zeros(1, 1))]

        score = score_batches(
            nn.Identity(), nn.MSELoss(reduction=reduction), both, "cpu"
        )

        assert (score.loss_sum, score.examples) == (11.0, 3)

    def test_whoever_measures_the_outputs_is_told_them_instead(self):
        told = []
        rows = [(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))]

        score = score_batches(
            nn.Identity(), None, rows, "cpu", lambda *both: told.append(both)
        )

        assert score == Score(examples=1)
        assert [(o.tolist(), y.tolist()) for o, y in told] == [([[0.0, 1.0]], [1])]

    def test_ignored_labels_count_neither_as_right_nor_as_wrong(self):
        loss = functools.partial(functional.cross_entropy, ignore_index=1)
        x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        y = torch.tensor([0, 1, 0])  # right, right but ignored, wrong

        score = score_batches(nn.Identity(), loss, [(x, y)], "cpu")

        assert (score.correct, score.labels, score.examples) == (1, 2, 3)

    @pytest.mark.parametrize("batch_size", [1, 7, ROWS])
    @pytest.mark.parametrize(
        "loss",
        [
            nn.CrossEntropyLoss(ignore_index=1),
            nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.1])),
            nn.CrossEntropyLoss(torch.tensor([1.0, 0.0, 0.5]), ignore_index=2),
            nn.CrossEntropyLoss(ignore_index=1, reduction="sum"),
            functools.partial(functional.cross_entropy, ignore_index=1),
            functools.partial(
                functional.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.1])
            ),
        ],
        ids=["ignored", "weights", "both", "sum", "partial", "partial weights"],
    )
    def test_the_loss_is_that_of_all_rows_at_once(self, model, loss, batch_size):
        score = score_batches(model, loss, batches([(X, Y)], batch_size), "cpu")

        with torch.no_grad():
            whole = loss(model.eval()(torch.from_numpy(X)), torch.from_numpy(Y)).item()
        if getattr(loss, "reduction", "mean") == "sum":
            whole /= ROWS
        # 1e-6: float32 losses of batches, summed in another order.
        assert score.metrics()["loss"] == pytest.approx(whole, rel=1e-6)

    def test_steps_of_a_sequence_that_are_ignored_weigh_nothing(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(9, 3, 5, generator=generator)
        y = torch.randint(0, 3, (9, 5), generator=generator)
        y[:4] = y[6, 2:] = -100
        loss = nn.CrossEntropyLoss()
        rows = [(x[i : i + 1], y[i : i + 1]) for i in range(9)]

        score = score_batches(nn.Identity(), loss, rows, "cpu")

        assert score.metrics()["loss"] == pytest.approx(loss(x, y).item(), rel=1e-6)

    def test_the_loss_of_rows_that_are_all_ignored_is_not_a_number(self):
        x, y = torch.zeros(2, 3), torch.tensor([-100, -100])

        score = score_batches(nn.Identity(), nn.CrossEntropyLoss(), [(x, y)], "cpu")

        assert np.isnan(score.metrics()["loss"])

    def test_pixels_count_as_labels_and_images_as_examples(self):
        x = torch.zeros(2, 3, 4, 4)
        x[:, 1] = 1
        y = torch.ones(2, 4, 4, dtype=torch.int64)
        y[0, 0, 0] = 2

        score = score_batches(nn.Identity(), nn.CrossEntropyLoss(), [(x, y)], "cpu")

        assert (score.correct, score.labels, score.examples) == (31, 32, 2)

    @pytest.mark.parametrize(
        ("x", "y"),
        [
            (torch.ones(2, 3), torch.ones(2, 3)),
            (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)),
            (torch.ones(2, 3, 5), torch.ones(2, 4, dtype=torch.int64)),
            (torch.ones(2, 3), torch.ones(2)),
            (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        ],
        ids=["floats", "one output each", "positions", "one float each", "no scores"],
    )
    def test_without_one_score_per_class_there_is_no_accuracy(self, x, y):
        score = score_batches(nn.Identity(), lambda out, y: out.mean(), [(x, y)], "cpu")

        assert not score.has_accuracy
        assert score.metrics() == {"loss": 1.0}


ONES, TWOS = (
    (np.full((rows, 1), value, np.float32), np.zeros((rows, 1), np.float32))
    for rows, value in ((2, 1), (6, 2))
)


def loss_of(*pairs, kind=Parts, model=None, **options):
    source = kind(*pairs)
    source.first = TWOS
    options |= {"loss": nn.MSELoss(), "batch_size": 4, "client": False}
    return evaluate(model or nn.Identity(), source, **options)["loss"]


@pytest.mark.parametrize("kind", [Parts, Streamed])
def test_parts_weigh_by_their_rows(kind):
    assert loss_of(ONES, TWOS, kind=kind) == pytest.approx((2 * 1 + 6 * 4) / 8)


@pytest.mark.parametrize("error", [DataError("bad"), EOFError("torn")], ids=repr)
def test_a_part_that_cannot_be_read_is_named_or_left_out(error, caplog):
    with pytest.raises(type(error)) as caught:
        loss_of(ONES, error)

    assert caught.value.__notes__[-1] == "in box 1"
    assert loss_of(ONES, error, TWOS, on_bad_batch="skip") == pytest.approx(3.25)
    assert caplog.messages == [
        f"box 1 is left out: {error}",
        "1 parts gave nothing to score: [1]",
    ]


def test_what_is_not_about_the_data_is_never_left_out():
    with pytest.raises(OptionError, match="pillow is missing"):
        loss_of(ONES, OptionError("pillow is missing"), on_bad_batch="skip")


def test_a_part_with_a_label_that_is_missing_is_left_out_too():
    wrong = ONES[0], np.full((2, 1), np.nan, np.float32)

    with pytest.raises(DataError, match=r"y of box 1\[0, 0\] is nan"):
        loss_of(ONES, wrong)
    assert loss_of(ONES, wrong, on_bad_batch="skip") == 1.0


def test_if_nothing_can_be_read_there_is_no_score():
    with pytest.raises(DataError, match="no examples were scored"):
        loss_of(DataError("bad"), on_bad_batch="skip")


def test_the_model_is_as_it_was():
    model = nn.Linear(1, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    loss_of(TWOS, model=model.train())

    assert model.training
    assert all(torch.equal(before[n], own) for n, own in model.state_dict().items())


def test_the_copy_that_threads_share_never_changes_its_mode(model):
    """One thread would otherwise put it back into training under another."""
    packed, loss = PackedModel(model), Packed(nn.CrossEntropyLoss(), "loss")
    kinds = cutting.kinds((X, Y))

    PartScorer(packed, loss, 50, None, None, False, kinds, None)(InMemory(X, Y, 50), 0)

    assert not any(part.training for part in packed.module().modules())
