"""States of metrics: parts in any order merge to the state of all rows."""

import pickle
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanAbsoluteError,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MinMaxMetric,
    R2Score,
)
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassROC,
)
from torchmetrics.wrappers import ClasswiseWrapper

import daskdl
from daskdl.errors import DataError, ModelError
from daskdl.evaluation import metric_state
from daskdl.evaluation.metric_state import (
    StateMerger,
    states_of,
    update_,
)
from tests.support.metric_parts import merged
from tests.support.sources import Parts

ROWS = 101  # a prime
generator = np.random.default_rng(0)
SCORES = torch.from_numpy(generator.dirichlet(np.ones(3), ROWS))
# Sorted, so that parts differ: most have one class only.
LABELS = torch.from_numpy(np.sort(generator.integers(0, 3, ROWS)))
WANTED = torch.from_numpy(generator.normal(size=ROWS))
GUESSED = WANTED + torch.from_numpy(generator.normal(size=ROWS))


class Own(Metric):
    """One state of each kind."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("sum", zero.clone(), dist_reduce_fx="sum")
        self.add_state("mean", zero.clone(), dist_reduce_fx="mean")
        self.add_state("max", zero - 7, dist_reduce_fx="max")
        self.add_state("min", zero - 7, dist_reduce_fx="min")
        self.add_state("last", zero - 7, dist_reduce_fx=None)
        self.add_state("norm", zero.clone(), dist_reduce_fx=lambda s: s.norm(dim=0))
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("grown", torch.zeros(0), dist_reduce_fx="cat")
        self.add_state("names", [], dist_reduce_fx=None)
        self.add_state("spans", [], dist_reduce_fx=lambda all_of_them: all_of_them[:1])

    def update(self, rows, _=None):
        first = not self.count
        before, more = int(self.count), len(rows)
        self.count = self.count + more
        self.sum = self.sum + rows.sum()
        self.mean = (self.mean * before + rows.sum()) / (before + more)
        self.max = rows.max() if first else torch.maximum(self.max, rows.max())
        self.min = rows.min() if first else torch.minimum(self.min, rows.min())
        self.last = rows[-1]
        self.norm = (self.norm**2 + (rows**2).sum()).sqrt()
        self.rows.append(rows)
        self.grown = torch.cat([self.grown, rows])
        self.names.append(f"{rows[0]:.3f}")
        self.spans.append((float(rows[0]), float(rows[-1])))

    def compute(self):
        return self.metric_state


def live():
    return MetricCollection({"own": Own()})


cuts = st.lists(st.integers(0, ROWS), max_size=6).map(sorted)


def test_each_kind_of_state_is_merged_by_its_own_rule():
    # Of parts of 40, 0, 1 and 60 rows, in disorder.
    section = merged(live, [40, 40, 41], WANTED, order=[3, 1, 0, 2])["own"]

    assert (section.count, section.update_count) == (ROWS, 3)
    assert section.sum == pytest.approx(WANTED.sum().item(), rel=1e-14)
    assert section.mean == pytest.approx(WANTED.mean().item(), rel=1e-13)  # by rows
    assert (section.max, section.min) == (
        WANTED.max(),
        WANTED.min(),
    )  # no default is data
    assert section.last.tolist() == [WANTED[39], WANTED[40], WANTED[100]]
    assert section.norm == pytest.approx(WANTED.norm().item(), rel=1e-13)
    assert section.rows.tolist() == section.grown.tolist() == WANTED.tolist()
    assert section.names == [f"{WANTED[i]:.3f}" for i in (0, 40, 41)]
    assert section.spans == [(WANTED[0], WANTED[39])]  # what its function left of it


def test_without_parts_states_are_the_defaults():
    nothing = StateMerger(live()).merged()["own"]

    assert (nothing.count, nothing.max, nothing.rows) == (0, -7, [])
    assert not nothing.update_called


@settings(max_examples=25)
@given(at=cuts, seed=st.integers(0, 5))
def test_the_order_of_arrival_changes_no_bit(at, seed):
    order = np.random.default_rng(seed).permutation(len(at) + 1).tolist()

    state = merged(live, at, WANTED, order=order)["own"].metric_state
    expected = merged(live, at, WANTED)["own"].metric_state

    assert plain(state) == plain(expected)


def plain(value):
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


class TestMetricsInMetrics:
    def test_compositions_merge_all_terms(self):
        def make():
            both = MeanSquaredError() + MeanAbsoluteError() * 10
            return MetricCollection({"both": both})

        value = merged(make, [3, 50], GUESSED, WANTED).compute()["both"].item()

        error = (GUESSED - WANTED).numpy()
        expected = (error**2).mean() + 10 * abs(error).mean()
        assert value == pytest.approx(expected, rel=1e-6)

    def test_wrappers(self):
        def make():
            return MetricCollection(
                {
                    "each": ClasswiseWrapper(MulticlassAccuracy(3, average=None)),
                    "range": MinMaxMetric(MulticlassAccuracy(3, average="micro")),
                }
            )

        computed = merged(make, [3, 50, 50], SCORES, LABELS).compute()

        right = (SCORES.argmax(1) == LABELS).double()
        places = {"each.metric", "range._base_metric"}  # nothing is there twice
        live = make()
        update_(live, SCORES, LABELS)
        assert states_of(live, ROWS).keys() == places
        for i in range(3):
            expected = right[torch.eq(LABELS, i)].mean().item()
            assert computed[f"multiclassaccuracy_{i}"] == pytest.approx(expected)
        assert computed["raw"] == pytest.approx(right.mean().item())


def test_states_that_agree_by_chance_are_not_shared():
    right, wrong = torch.eye(3)[[0, 1]], torch.tensor([[0.4, 0.6, 0.0]] * 9)

    def make():
        metrics = {f"{k}": MulticlassAccuracy(3, top_k=k) for k in (1, 2)}
        return MetricCollection(metrics)

    # In the first part both are 1.
    rows = torch.cat([right, wrong]), torch.tensor([0, 1] + [0] * 9)
    computed = merged(make, [2], *rows, order=[0, 1]).compute()

    assert computed["1"] < computed["2"] == 1


class TestOnTheWay:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_states_of_any_dtype_are_exact(self, dtype):
        def make():
            metrics = {"all": CatMetric(), "max": MaxMetric()}
            return MetricCollection(metrics).set_dtype(dtype)

        computed = merged(make, [60], WANTED).compute()

        # Numpy has no bfloat16, so that such states become float32.
        rows = WANTED.to(dtype).to(torch.promote_types(dtype, torch.float32))
        assert torch.equal(computed["all"], rows)
        assert torch.equal(computed["max"], rows.max())

    def test_states_in_read_only_buffers_can_be_merged(self):
        buffers = []
        metrics, merger = live(), StateMerger(live())
        update_(metrics, WANTED)
        states = states_of(metrics, ROWS)
        sent = pickle.dumps(states, protocol=5, buffer_callback=buffers.append)
        read_only = [memoryview(bytes(buffer.raw())) for buffer in buffers]

        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of torch, about arrays that are read-only
            merger.add_(0, pickle.loads(sent, buffers=read_only))
            section = merger.merged()["own"]

        assert len(sent) < 5000  # the arrays are not in it
        assert torch.equal(section.rows, WANTED)


class TestTotals:
    def test_a_sum_does_not_depend_on_the_order(self):
        terms = [1e16, 1.0, -1e16, 3.0, 1e-9]

        each = torch.tensor(terms, dtype=torch.float64)
        for order in ([0, 1, 2, 3, 4], [4, 0, 3, 2, 1], [2, 1, 4, 0, 3]):
            section = merged(live, [1, 2, 3, 4], each, order=order)["own"]
            assert section.sum.item() == 4.000000001

    @pytest.mark.parametrize("bad", [np.inf, np.nan])
    def test_sums_of_infinity_and_nan_stay_so(self, bad):
        rows = torch.tensor([1.0, bad, 2.0], dtype=torch.float64)

        total = merged(live, [1, 2], rows)["own"].sum.item()

        assert total == bad or np.isnan([total, bad]).all()

    def test_sums_of_different_shapes_are_refused(self):
        class Shaped(Own):
            def update(self, rows, _=None):
                super().update(rows)
                self.sum = rows

        with pytest.raises(DataError, match=r"shape \(61,\) in one part .* \(40,\)"):
            merged(lambda: MetricCollection([Shaped()]), [40], WANTED)


def evaluate(metrics, output, y, batch_size=10, model=None):
    source = Parts((output.numpy(), y.numpy()))
    source.first_rows = output[:2].numpy(), y[:2].numpy()
    options = {"metrics": metrics, "batch_size": batch_size, "client": False}
    return daskdl.evaluate(model or nn.Identity(), source, **options)


class Watched(MeanSquaredError):
    """Keeps what each update was called with."""

    updates: ClassVar = []

    def update(self, preds, target):
        self.updates.append(preds)
        super().update(preds, target)


@pytest.fixture
def updates(monkeypatch):
    monkeypatch.setattr(Watched, "updates", [])
    return Watched.updates


@pytest.mark.parametrize(
    ("limit", "value", "rows"),
    [
        ("UPDATE_ROWS", 32, [40, 40, 21]),
        ("UPDATE_BYTES", 20 * 2 * 3 * 4, [20] * 5 + [1]),  # both, of 20 rows
    ],
)
def test_updates_collect_batches_up_to_a_limit(
    updates, monkeypatch, limit, value, rows
):
    monkeypatch.setattr(metric_state, limit, value)
    scores = SCORES.float()

    evaluate(Watched(), scores, scores)

    assert [len(preds) for preds in updates] == [2, *rows]  # a trial on two first


def test_rows_of_different_shapes_are_updated_separately(updates):
    def cut(batch):  # as a collate function that pads each batch
        length = 2 + int(batch[0][0, 0] > 0.5)
        return tuple(rows[:, :length] for rows in batch)

    source = Parts((SCORES.numpy(), SCORES.numpy()))
    source.first_rows = SCORES[:2].numpy(), SCORES[:2].numpy()
    options = {"metrics": Watched(), "batch_size": 5, "client": False}
    daskdl.evaluate(nn.Identity(), source, transform=cut, **options)

    assert {preds.shape[1] for preds in updates} == {2, 3}


def test_short_floats_become_float32(updates):
    class Short(nn.Module):
        def forward(self, x):
            return x.bfloat16()

    evaluate(Watched(), SCORES, SCORES.float(), model=Short())

    assert {preds.dtype for preds in updates} == {torch.float32}


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("gathered", [1, 4096])
def test_logits_are_logits_however_rows_are_cut(batch_size, gathered, monkeypatch):
    """Torchmetrics takes scores for logits if one at hand is not in [0, 1]."""
    monkeypatch.setattr(metric_state, "UPDATE_ROWS", gathered)
    scores = torch.tensor([0.1, 0.2, 0.4, 0.6, 3.0, 0.3, 0.2, 0.1])
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1])

    values = evaluate(BinaryAccuracy(), scores, labels, batch_size)

    assert values == {"BinaryAccuracy": 5 / 8}  # every logit is above 0


def test_values_are_numbers_and_numpy_arrays():
    metrics = {"roc": MulticlassROC(3, thresholds=4), "top": MulticlassAccuracy(3)}

    values = evaluate(metrics, SCORES, LABELS)

    assert type(values["top"]) is float
    assert [type(each).__name__ for each in values["roc"]] == ["ndarray"] * 3


def test_rows_that_a_metric_refuses_are_named():
    wrong = LABELS.clone()
    wrong[57] = 3

    with pytest.raises(DataError, match=r"on rows 0 to 100 of box 0: .* \[?3\]?"):
        evaluate(MulticlassAccuracy(3), SCORES, wrong)


@pytest.mark.parametrize(
    "metrics", ["classification", MulticlassAccuracy(3)], ids=["preset", "own"]
)
def test_scores_that_are_no_numbers_are_an_error_that_says_where(metrics, monkeypatch):
    monkeypatch.setattr(metric_state, "UPDATE_ROWS", 50)
    scores = SCORES.clone()
    scores[[60, 61], [0, 2]] = np.nan

    with pytest.raises(ModelError, match="2 of 50 outputs are NaN") as caught:
        evaluate(metrics, scores, LABELS)

    assert caught.value.__notes__[0] == "in rows 50 to 99 of box 0"


def test_metrics_that_cannot_be_computed_are_an_error():
    with pytest.raises(
        DataError, match=r"failed when computed from all rows.* two samples"
    ):
        evaluate(R2Score(), SCORES[:1, 0], SCORES[:1, 0])
