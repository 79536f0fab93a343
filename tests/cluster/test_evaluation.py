import functools

import dask.array as da
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl.data import batches as cutting
from daskdl.data.in_memory import InMemory
from daskdl.data.options import ReadOptions
from daskdl.data.sources import source_of
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation import Score, Scoring, score_batches
from daskdl.evaluation import evaluate as evaluate_source
from daskdl.objective import OwnStep
from daskdl.packed import Packed, PackedModel
from tests.cluster.leftovers import still_left_behind
from tests.cluster.recording import executed

ROWS = 101  # a prime: no batch size or number of workers divides it


@pytest.fixture
def model():
    """Sensitive to its mode: dropout and batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    return model.train()


X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
# Sorted, so that each part of the data has another loss than the others.
Y = np.sort(np.random.default_rng(1).integers(0, 3, ROWS))


def evaluate(model, loss, X, y, client, batch_size=64):
    """As a trainer does it."""
    read = ReadOptions(batch_size)
    source = source_of(X, y, read.source(None, labelled=True))
    return evaluate_source(model, loss, source, read, client)


def batches(parts, batch_size):
    return cutting.batches(map(cutting.whole, parts), batch_size)


def whole(model, loss, X=X, y=Y):
    """Loss and accuracy in one pass over everything, in this process."""
    was_training = model.training
    with torch.no_grad():
        output = model.eval()(torch.as_tensor(X))
    model.train(was_training)
    labels = torch.as_tensor(y)
    right = (output.argmax(1) == labels).double().mean().item()
    return {"loss": loss(output, labels).item(), "accuracy": right}


def lazy(rows):
    return {"X": da.from_array(X, (rows, 4)), "y": da.from_array(Y, rows + 3)}


@pytest.mark.parametrize(
    "given",
    [
        {"X": X, "y": Y},
        {"X": torch.from_numpy(X), "y": torch.from_numpy(Y)},
        {"X": X, "y": Y.astype(np.uint8)},
        lazy(40),
    ],
    ids=["numpy", "torch", "small labels", "dask"],
)
@pytest.mark.parametrize("batch_size", [7, 1000])
def test_any_cut_gives_what_one_pass_gives(client, model, given, batch_size):
    loss = nn.CrossEntropyLoss()

    metrics = evaluate(model, loss, **given, client=client, batch_size=batch_size)

    # 1e-6: float32 losses of batches, summed in another order.
    assert metrics == pytest.approx(whole(model, loss), rel=1e-6)
    assert list(metrics) == ["loss", "accuracy"]


def test_the_model_is_left_in_its_mode_with_its_statistics(client, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()

    evaluate(model, nn.CrossEntropyLoss(), X, Y, client)

    assert model.training
    assert model[2].training
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sum_is_not_weighted_again(client, model):
    total = nn.CrossEntropyLoss(reduction="sum")

    metrics = evaluate(model, total, X, Y, client, batch_size=7)

    assert metrics == pytest.approx(whole(model, nn.CrossEntropyLoss()), rel=1e-6)


def test_a_regression_has_no_accuracy(client, model):
    y = X[:, :3].astype(np.float64)

    metrics = evaluate(model, nn.MSELoss(), X, y, client, batch_size=7)

    with torch.no_grad():
        output = model.eval()(torch.from_numpy(X)).double().numpy()
    assert metrics == {"loss": pytest.approx(((output - y) ** 2).mean(), rel=1e-6)}


def test_a_loss_with_weights_and_a_model_in_bfloat16_travel(client, model):
    loss = nn.CrossEntropyLoss(weight=torch.ones(3).bfloat16())

    metrics = evaluate(model.bfloat16(), loss, X, Y, client)

    # bfloat16 has 8 bits, and each batch's loss is rounded to it.
    expected = whole(model.float(), nn.CrossEntropyLoss())
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=2e-2)


@pytest.mark.parametrize("given", [{"X": X, "y": Y}, lazy(7)], ids=["numpy", "dask"])
def test_every_worker_does_a_part_and_nothing_stays(client, model, given):
    before = executed(client)

    evaluate(model, nn.CrossEntropyLoss(), **given, client=client, batch_size=4)

    after = executed(client)
    assert all(after[worker] > before[worker] for worker in after)
    assert still_left_behind(client) == {}


def test_a_wrong_label_in_a_block_is_named(client, model):
    y = np.zeros(ROWS, int)
    y[60] = 3
    x = da.from_array(X, chunks=(40, 4))

    with pytest.raises(DataError, match=r"y of part 1\[20\] is 3, but the model gi"):
        evaluate(model, nn.CrossEntropyLoss(), x, da.from_array(y, 40), client)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"X": X.tolist()}, DataError, "X must be a numpy array"),
        ({"y": Y[1:]}, DataError, "same length, got 101 and 100"),
        ({"X": X[:0], "y": Y[:0]}, DataError, "X must not be empty"),
        ({"model": "resnet"}, ModelError, "model must be a torch.nn.Module"),
        ({"loss": nn.NLLLoss}, ModelError, "loss is the class NLLLoss"),
        ({"X": X[:, 1:]}, ModelError, r"rows of X, shape \(2, 3\)"),
        ({"loss": nn.NLLLoss(reduction="none")}, ModelError, r"got shape \(2,\)"),
        ({"batch_size": 0}, OptionError, "batch_size must be"),
        ({**lazy(40), "batch_size": 2.5}, OptionError, "batch_size must be .* got 2.5"),
    ],
    ids=[
        *("kind", "length", "empty", "model", "loss", "shape", "reduction", "batch"),
        "lazy batch",
    ],
)
def test_what_cannot_be_evaluated_is_refused_on_the_client(
    client, model, arguments, error, message
):
    usual = {"model": model, "loss": nn.CrossEntropyLoss(), "X": X, "y": Y}

    with pytest.raises(error, match=message):
        evaluate(client=client, **(usual | arguments))


def test_the_copy_that_threads_share_never_changes_its_mode(model):
    """One thread would otherwise put it back into training under another."""
    packed, loss = PackedModel(model), Packed(nn.CrossEntropyLoss(), "loss")

    Scoring(packed, loss, 50, None, None)(InMemory(X, Y, 50), 0)

    assert not any(part.training for part in packed.module().modules())


class TestScore:
    def test_parts_add_up_to_the_whole(self, model):
        loss = nn.CrossEntropyLoss()
        parts = [slice(0, 9), slice(9, 11), slice(11, ROWS)]

        scores = [
            score_batches(model, loss, batches([(X[part], Y[part])], 4), "cpu")
            for part in parts
        ]

        total = scores[2] + scores[0] + scores[1]
        assert total.metrics() == pytest.approx(whole(model, loss), rel=1e-6)
        assert (total.examples, total.labels) == (ROWS, ROWS)

    def test_it_travels_as_a_list_of_numbers(self):
        score = Score(1.5, 2, 3, 4)

        assert list(score) == [1.5, 2, 3, 4]
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

    def test_ignored_labels_count_neither_as_right_nor_as_wrong(self):
        loss = functools.partial(functional.cross_entropy, ignore_index=1)
        x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        y = torch.tensor([0, 1, 0])  # right, right but ignored, wrong

        score = score_batches(nn.Identity(), loss, [(x, y)], "cpu")

        assert (score.correct, score.labels, score.examples) == (1, 2, 3)

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
