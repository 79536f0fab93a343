"""The loss of an example is that of a batch which has only it."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from daskdl.evaluation import per_example
from daskdl.evaluation.per_example import example_losses, has_rows
from daskdl.keras import CrossEntropyOfProbabilities
from daskdl.objective import OwnStep

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
    "plain": (nn.CrossEntropyLoss, {}, LOGITS, LABELS),
    "sequence": (nn.CrossEntropyLoss, {}, LONG_LOGITS, LONG_LABELS),
    "weighted": (nn.CrossEntropyLoss, {"weight": WEIGHT}, LOGITS, LABELS),
    "weighted sequence": (
        *(nn.CrossEntropyLoss, {"weight": WEIGHT}),
        *(LONG_LOGITS, LONG_LABELS),
    ),
    "ignored": (nn.CrossEntropyLoss, {"ignore_index": 1}, LOGITS, LABELS),
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
    "smoothed and ignored": (
        *(nn.CrossEntropyLoss, {"label_smoothing": 0.1, "ignore_index": 3}),
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


def one_by_one(loss, output, y):
    """The loss of each batch of one, in a loop."""
    return torch.stack([loss(output[i : i + 1], y[i : i + 1]) for i in range(len(y))])


def scores(loss, output, y):
    batch = (output, y)
    return example_losses(nn.Identity(), loss, batch, by_rows=True).losses


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loss_of_a_batch_of_one(case, reduction):
    kind, options, output, y = CASES[case]
    loss = kind(**options, reduction=reduction)

    found = scores(loss, output, y)

    assert found.dtype == torch.float64
    # 1e-12: the same float64 numbers, which may be added up in another order.
    torch.testing.assert_close(
        found, one_by_one(loss, output, y).double(), rtol=1e-12, atol=0, equal_nan=True
    )


def test_batchmean_is_the_sum_within_an_example():
    loss = nn.KLDivLoss(reduction="batchmean")
    _, _, output, y = OF_NUMBERS["divergence"]

    torch.testing.assert_close(scores(loss, output, y), one_by_one(loss, output, y))


SLOW = {  # because rows may share something
    "logits, a weight with an axis of rows",
    "many labels of one axis",
    "classes of one axis",
}


@pytest.mark.parametrize("case", CASES)
def test_all_rows_are_computed_at_once_where_that_is_the_same(case, monkeypatch):
    kind, options, output, y = CASES[case]
    loops = []
    plain = per_example._plain
    monkeypatch.setattr(
        per_example, "_plain", lambda each: loops.append(1) or plain(each)
    )

    scores(kind(**options), output, y)

    assert bool(loops) == (case in SLOW)


# In all others a batch weighs its labels, or takes its rows for classes.
ALIKE = OF_NUMBERS.keys() - SLOW | {"plain", "sequence", "logarithms"}


@pytest.mark.parametrize("case", sorted(ALIKE))
def test_the_mean_is_the_loss_of_the_batch_where_all_labels_count_alike(case):
    kind, options, output, y = CASES[case]

    torch.testing.assert_close(
        scores(kind(**options), output, y).mean(),
        kind(**options)(output, y).double(),
    )


def test_weights_of_classes_cancel_in_an_example_and_not_in_a_batch():
    weighted, plain = nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss()
    output, y = LOGITS[:2], torch.tensor([0, 3])

    found = scores(weighted, output, y)

    torch.testing.assert_close(found, scores(plain, output, y))
    assert not torch.isclose(found.mean(), weighted(output, y))


def test_an_example_of_which_the_loss_ignores_everything_has_no_score():
    y = LABELS.clone()
    y[[1, 3]] = -100

    found = scores(nn.CrossEntropyLoss(), LOGITS, y)

    assert found.isnan().tolist() == [False, True, False, True, False]


class Focal(nn.CrossEntropyLoss):
    """Of one's own, whose rows weigh by what all of them are together."""

    def forward(self, output, y):
        return super().forward(output, y) * len(y) ** 0.5


LIKE = [
    Focal(),
    lambda output, y: functional.cross_entropy(output, y) / output.norm(),
    functools.partial(functional.cross_entropy, ignore_index=1),
    functional.cross_entropy,
]


@pytest.mark.parametrize("loss", LIKE, ids=["class", "lambda", "partial", "function"])
def test_what_may_look_at_several_rows_gets_one_at_a_time(loss):
    found = scores(loss, LOGITS, LABELS)

    expected = one_by_one(loss, LOGITS, LABELS)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_step_gets_one_row_at_a_time():
    seen = []

    def step(model, batch):
        seen.append(batch["x"] if isinstance(batch, dict) else batch)
        x, y = batch
        return (model(x["a"]) - y).square().mean() * len(y)

    batch = ({"a": normal(*FLAT)}, normal(*FLAT))

    found = example_losses(nn.Identity(), OwnStep(step), batch, by_rows=False)

    assert [len(y) for _, y in seen] == [1] * ROWS
    assert found.output is None
    torch.testing.assert_close(
        found.losses, (batch[0]["a"] - batch[1]).square().mean(1)
    )


def test_a_step_may_need_gradients():
    def step(model, batch):
        with torch.enable_grad():
            return model(batch[0].requires_grad_()).sum()

    batch = (torch.ones(2, 3), None)
    found = example_losses(nn.Linear(3, 1), OwnStep(step), batch, by_rows=False)

    assert not found.losses.requires_grad


def test_a_step_without_labels_gets_none():
    step = OwnStep(lambda model, batch: model(batch[0]).sum() + (batch[1] is None))

    found = example_losses(nn.Identity(), step, (LOGITS, None), by_rows=False)

    torch.testing.assert_close(found.losses, LOGITS.sum(1) + 1)


def test_several_outputs_are_cut_together():
    class Two(nn.Module):
        def forward(self, x):
            return {"twice": 2 * x, "sum": x.sum(1)}

    def loss(output, y):
        return (output["twice"].sum() - output["sum"].sum() + y[0].sum()).square()

    y = (normal(ROWS),)
    found = example_losses(Two(), loss, (LOGITS, y), by_rows=True)

    torch.testing.assert_close(found.losses, (LOGITS.sum(1) + y[0]).square())


class Together(nn.Module):
    """Returns something that has no row for each example."""

    def forward(self, x):
        return x, x.sum()


def test_a_model_whose_outputs_cannot_be_cut_gets_one_row_at_a_time():
    def loss(output, y):
        return output[1] + y.sum()

    by_rows = has_rows(Together(), LOGITS[:2])
    found = example_losses(Together(), loss, (LOGITS, LABELS), by_rows=by_rows)

    assert not by_rows
    torch.testing.assert_close(found.losses, LOGITS.sum(1) + LABELS)


class States(nn.Module):
    """Returns as many states as there are rows in a batch of two, but not of them."""

    def forward(self, x):
        return x, x.new_zeros(2, len(x))


class Pairs(dict):
    """A mapping of a class of its own, which a plain one is not."""


class Mapping(nn.Module):
    def forward(self, x):
        return Pairs(x=x)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Identity(), True),
        (nn.Flatten(0), False),
        (States(), False),
        (Mapping(), False),
        (nn.LSTM(CLASSES, 2), False),
    ],
    ids=["rows", "one long row", "states", "mapping", "nested"],
)
def test_outputs_are_cut_only_where_they_follow_the_rows(module, expected):
    assert has_rows(module.double(), LOGITS[:2]) == expected


def test_a_loss_that_threads_share_is_left_as_it_is():
    loss = nn.CrossEntropyLoss()

    scores(loss, LOGITS, LABELS)

    assert loss.reduction == "mean"


def test_half_precision_becomes_double():
    found = scores(nn.MSELoss(), LOGITS.bfloat16(), LOGITS.bfloat16() + 1)

    assert found.dtype == torch.float64


@given(
    cuts=st.lists(st.integers(0, ROWS), max_size=4),
    case=st.sampled_from(sorted(CASES)),
)
def test_any_cut_into_batches_gives_the_same(cuts, case):
    kind, options, output, y = CASES[case]
    loss = kind(**options)
    edges = [0, *sorted(set(cuts) - {0, ROWS}), ROWS]
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]

    found = torch.cat([scores(loss, output[part], y[part]) for part in parts])

    torch.testing.assert_close(found, scores(loss, output, y), equal_nan=True)
