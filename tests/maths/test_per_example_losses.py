"""The loss of an example is the loss of a batch with only this example."""

import functools

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

from daskdl import OptionError, Trainer
from daskdl.keras import CrossEntropyOfProbabilities
from daskdl.keras.module import as_module, library
from daskdl.objective import Penalized

ROWS, CLASSES, STEPS = 5, 4, 3
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def uniform(*shape):
    return torch.rand(*shape, generator=GENERATOR, dtype=torch.float64)


def classes(*shape):
    return torch.randint(0, CLASSES, shape, generator=GENERATOR)


def signs(*shape):
    return classes(*shape) % 2 * 2.0 - 1


FLAT, LONG = (ROWS, CLASSES), (ROWS, CLASSES, STEPS)
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 3.0], dtype=torch.float64)
LOGITS, LONG_LOGITS = normal(*FLAT), normal(*LONG)
LABELS = torch.tensor([0, 1, 2, 3, 1])
LONG_LABELS = torch.tensor([[0, 1, 3], [3, 3, 3], [1, 1, 0], [1, 2, 3], [3, 3, 1]])

# Each is evaluated with the mean and with the sum of a batch.
OF_CLASSES = {
    "sequence": (nn.CrossEntropyLoss, {}, LONG_LOGITS, LONG_LABELS),
    "weighted sequence": (
        *(nn.CrossEntropyLoss, {"weight": WEIGHT}),
        *(LONG_LOGITS, LONG_LABELS),
    ),
    "ignored in a sequence": (
        *(nn.CrossEntropyLoss, {"ignore_index": 3}),
        *(LONG_LOGITS, LONG_LABELS),
    ),
    "ignored and no class": (
        *(nn.CrossEntropyLoss, {"weight": WEIGHT}),
        *(LONG_LOGITS, LONG_LABELS.where(LONG_LABELS != 3, -100)),
    ),
    "ignored beyond the classes": (
        *(nn.CrossEntropyLoss, {"weight": WEIGHT, "ignore_index": 255}),
        *(LONG_LOGITS, LONG_LABELS.where(LONG_LABELS != 3, 255)),
    ),
    "smoothed": (
        *(nn.CrossEntropyLoss, {"label_smoothing": 0.1, "weight": WEIGHT}),
        *(LONG_LOGITS, LONG_LABELS),
    ),
    "probabilities of classes": (
        *(nn.CrossEntropyLoss, {"weight": WEIGHT, "label_smoothing": 0.1}),
        *(LONG_LOGITS, normal(*LONG).softmax(1)),
    ),
    "logarithms": (nn.NLLLoss, {}, LOGITS.log_softmax(1), LABELS),
    "weighted logarithms": (
        *(nn.NLLLoss, {"weight": WEIGHT, "ignore_index": 0}),
        *(LONG_LOGITS.log_softmax(1), LONG_LABELS),
    ),
    "keras": (
        *(CrossEntropyOfProbabilities, {"ignore_index": 3}),
        *(LONG_LOGITS.softmax(1), LONG_LABELS),
    ),
    "margins": (nn.MultiMarginLoss, {"weight": WEIGHT}, LOGITS, LABELS),
}
OF_NUMBERS = {
    "squares": (nn.MSELoss, {}, normal(*LONG), normal(*LONG)),
    "one axis": (nn.MSELoss, {}, normal(ROWS), normal(ROWS)),
    "absolute": (nn.L1Loss, {}, normal(*FLAT), normal(*FLAT)),
    "smooth": (nn.SmoothL1Loss, {"beta": 0.5}, normal(*FLAT), normal(*FLAT)),
    "huber": (nn.HuberLoss, {"delta": 0.5}, normal(*FLAT), normal(*FLAT)),
    "binary": (nn.BCELoss, {}, uniform(*FLAT), uniform(*FLAT)),
    "binary, weighted": (
        *(nn.BCELoss, {"weight": WEIGHT}),
        *(uniform(*FLAT), uniform(*FLAT)),
    ),
    "logits, a weight with an axis of rows": (
        *(nn.BCEWithLogitsLoss, {"weight": WEIGHT[None]}),
        *(normal(*FLAT), uniform(*FLAT)),
    ),
    "logits": (
        *(nn.BCEWithLogitsLoss, {"weight": WEIGHT, "pos_weight": 2 * WEIGHT}),
        *(normal(*FLAT), uniform(*FLAT)),
    ),
    "logits of one axis": (
        *(nn.BCEWithLogitsLoss, {"pos_weight": torch.tensor([3.0])}),
        *(normal(ROWS), uniform(ROWS)),
    ),
    "poisson": (nn.PoissonNLLLoss, {"full": True}, normal(*FLAT), uniform(*FLAT)),
    "divergence": (nn.KLDivLoss, {}, normal(*LONG), uniform(*LONG)),
    "divergence of logarithms": (
        *(nn.KLDivLoss, {"log_target": True}),
        *(normal(*LONG), normal(*LONG)),
    ),
    "hinge": (nn.HingeEmbeddingLoss, {"margin": 0.5}, normal(*FLAT), signs(*FLAT)),
    "soft margins": (nn.SoftMarginLoss, {}, normal(*LONG), signs(*LONG)),
    "many labels": (
        *(nn.MultiLabelSoftMarginLoss, {"weight": WEIGHT}),
        *(normal(*FLAT), uniform(*FLAT).round()),
    ),
    "many labels of one axis": (
        *(nn.MultiLabelSoftMarginLoss, {}),
        *(normal(ROWS), uniform(ROWS).round()),
    ),
    "margins of many labels": (
        *(nn.MultiLabelMarginLoss, {}),
        *(normal(*FLAT), torch.tensor([[3, 0, -1, 1]] * ROWS)),
    ),
    "classes of one axis": (nn.CrossEntropyLoss, {}, normal(ROWS), uniform(ROWS)),
}
CASES = {**OF_CLASSES, **OF_NUMBERS}
# torch says that it should be "batchmean"; it may still be asked for.
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")


class Passing(nn.Module):
    """Returns its input, in float64."""

    def __init__(self):
        super().__init__()
        self.dtype = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return x


def trainer(model=None, loss=None, **options):
    """Return a trainer with a model that was not trained."""
    fitted = Trainer(model or Passing(), loss, optim.SGD, client=False, **options)
    fitted.model_ = fitted.model
    return fitted


def scores(loss, output, y, **options):
    return trainer(loss=loss).score_examples(output, y, **options)


def one_by_one(loss, output, y):
    """The loss of each batch of one, in a loop."""
    return torch.stack([loss(output[i : i + 1], y[i : i + 1]) for i in range(len(y))])


SLOW = {  # because rows may share something
    "logits, a weight with an axis of rows",
    "many labels of one axis",
    "classes of one axis",
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loss_of_a_batch_of_one(case, reduction, monkeypatch):
    kind, options, output, y = CASES[case]
    loss = kind(**options, reduction=reduction)
    expected = one_by_one(loss, output, y).double()
    calls, forward = [], kind.forward

    def counted(self, *tensors):
        calls.append(tensors)
        return forward(self, *tensors)

    monkeypatch.setattr(kind, "forward", counted)

    whole = scores(loss, output, y)

    # Without rows one by one: the dry run, the trial of both, and the batch.
    assert (len(calls) > 3) == (case in SLOW)
    for values in (whole, scores(loss, output, y, batch_size=2)):
        assert values.dtype == torch.float64
        # 1e-12: the same float64 numbers, which may be added up in another order.
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=0, equal_nan=True)
    assert loss.reduction == reduction  # threads share it


class Focal(nn.CrossEntropyLoss):
    """A user's loss, whose rows depend on each other."""

    def forward(self, output, y):
        return super().forward(output, y) * len(y) ** 0.5


@pytest.mark.parametrize(
    "loss",
    [
        Focal(),
        lambda out, y: functional.cross_entropy(out, y) / out.norm(),
        functools.partial(functional.cross_entropy, ignore_index=1),
    ],
    ids=["class", "function", "partial"],
)
def test_other_losses_get_one_row_at_a_time(loss):
    values = scores(loss, LOGITS, LABELS)

    expected = one_by_one(loss, LOGITS, LABELS)
    torch.testing.assert_close(values, expected, equal_nan=True)


def test_a_step_gets_one_row_at_a_time_and_may_need_gradients():
    def step(model, batch):
        x, y = batch
        assert y is None
        with torch.enable_grad():
            return model(x["a"].requires_grad_()).square().mean() * len(x["a"])

    unfitted = trainer(step=step)

    torch.testing.assert_close(
        unfitted.score_examples({"a": LOGITS}), LOGITS.square().mean(1)
    )


class Returning(Passing):
    """Returns a function of its input."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output(x)


class Pairs(dict):
    """A mapping with a method, which slices of it would lack."""

    def total(self):
        return self["x"].sum()


OUTPUTS = {
    "rows": (
        lambda x: {"twice": 2 * x, "sum": x.sum(1)},
        lambda out, y: out["twice"].sum() - out["sum"].sum() + y.sum(),
    ),
    "one number": (lambda x: (x, x.sum()), lambda out, y: out[1] + y.sum()),
    "states": (  # two of them, as many as the dry run has rows
        lambda x: (x, x.new_zeros(2, len(x)) + x.sum()),
        lambda out, y: out[1].mean() + y.sum(),
    ),
    "mapping": (
        lambda x: Pairs(x=x),
        lambda out, y: out.total() + y.sum(),
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_several_outputs_are_cut_only_where_they_follow_the_rows(case):
    output, loss = OUTPUTS[case]
    model = Returning(output)

    values = trainer(model, loss).score_examples(LOGITS, LABELS)

    torch.testing.assert_close(values, LOGITS.sum(1) + LABELS)


def test_a_row_is_ignored_if_all_its_labels_are():
    y = LONG_LABELS.clone()
    y[2] = 9
    y[3, 0] = 9
    loss = nn.CrossEntropyLoss(ignore_index=9)

    assert scores(loss, LONG_LOGITS, y).isnan().tolist() == [
        i == 2 for i in range(ROWS)
    ]


# ---- the penalty


def linear():
    return nn.Linear(3, 2).double()


def penalty(model, optimizer):
    unfitted = trainer(model, nn.MSELoss())
    unfitted.optimizer_ = optimizer
    rows = torch.zeros(2, 3), torch.zeros(2, 2)
    plain, total = (
        unfitted.score_examples(*rows, regularization=on) for on in (False, True)
    )
    assert torch.equal((total - plain)[:1], (total - plain)[1:])
    return (total - plain)[0].item()


KINDS = [
    *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_gradient_of_the_penalty_is_what_the_optimizer_adds(kind):
    """Of a loss that is zero, the step is the one with the penalty as the loss."""
    penalized, reference = linear(), linear()
    reference.load_state_dict(penalized.state_dict())
    decaying = kind(penalized.parameters(), lr=0.1, weight_decay=0.5)
    plain = kind(reference.parameters(), lr=0.1, weight_decay=0.0)
    start = penalty(penalized, decaying)

    for p in penalized.parameters():
        p.grad = torch.zeros_like(p)
    decaying.step()
    loss = sum(0.25 * p.square().sum() for p in reference.parameters())
    loss.backward()
    plain.step()

    assert start == pytest.approx(loss.item())
    for mine, expected in zip(
        penalized.parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.AdamW(p, weight_decay=0.1), "decoupled from the gradient"),
        (
            lambda p: optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
            "weight_decay=0.1, which is decoupled",
        ),
        (lambda p: optim.Adafactor(p, weight_decay=0.1), "decoupled from"),
        (lambda p: optim.SGD(linear().parameters()), "that do not belong to model_"),
    ],
    ids=["AdamW", "NAdam", "Adafactor", "another model"],
)
def test_decoupled_weight_decay_is_refused(make, message):
    module = linear()

    with pytest.raises(OptionError, match=message):
        penalty(module, make(module.parameters()))


class Ridge(nn.Linear, Penalized):
    def penalty(self):
        return self.weight.square().sum()


def test_penalties_of_the_model_are_added():
    ridge = Ridge(3, 2).double()

    groups = [{"params": [ridge.weight], "weight_decay": 0.5}, {"params": [ridge.bias]}]

    value = penalty(ridge, optim.SGD(groups, weight_decay=2.0))

    expected = 1.25 * ridge.weight.square().sum() + ridge.bias.square().sum()
    assert value == pytest.approx(expected.item())
    undecayed = optim.AdamW(ridge.parameters(), weight_decay=0.0)
    assert penalty(ridge, undecayed) == pytest.approx(ridge.penalty().item())


def test_the_regularizers_of_a_keras_model_are_added():
    keras = library()
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l1")
    module = as_module(keras.Sequential([keras.Input((3,)), dense]))
    module(torch.ones(5, 3))  # what its outputs add is no penalty of the weights

    value = penalty(module, optim.SGD(module.parameters(), lr=0.1))

    kernel = dense.kernel.value.detach()
    assert value == pytest.approx(0.01 * kernel.square().sum().item())
