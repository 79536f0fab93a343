import dask.array as da
import numpy as np
import pytest
import torch
from torch import nn

from daskdl.data.inputs import ReadOptions, source_of
from daskdl.data.tables import InMemory
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation.evaluate import Scoring
from daskdl.evaluation.evaluate import evaluate as evaluate_source
from daskdl.serialization import Packed, PackedModel
from tests.support.clusters import still_left_behind
from tests.support.recording import executed

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
    source = source_of(X, y, read)
    return evaluate_source(model, loss, source, read, client)


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
