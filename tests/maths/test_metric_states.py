"""States of metrics: parts, in whatever order, give what the whole is."""

import logging
import pickle
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanAbsoluteError,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MinMaxMetric,
    PearsonCorrCoef,
    R2Score,
)
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassROC,
)
from torchmetrics.wrappers import ClasswiseWrapper, MultioutputWrapper

from daskdl.errors import DataError, ModelError
from daskdl.evaluation import metric_state
from daskdl.evaluation.metric_sets import metric_sets
from daskdl.evaluation.metric_state import (
    MetricAccumulator,
    StateMerger,
    metric_section,
    metric_spec,
    states_of,
    update_,
)
from daskdl.metrics import ClassificationMetrics
from tests.support.metric_parts import merged, sample_of

ROWS = 101  # a prime
generator = np.random.default_rng(0)
SCORES = torch.from_numpy(generator.dirichlet(np.ones(3), ROWS))
# Sorted, so that parts differ: most have one class only.
LABELS = torch.from_numpy(np.sort(generator.integers(0, 3, ROWS)))
WANTED = torch.from_numpy(generator.normal(size=ROWS))
GUESSED = WANTED + torch.from_numpy(generator.normal(size=ROWS))


class Own(Metric):
    """One state of each kind; rows are told by their predictions."""

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


class TestEachKindOfState:
    @pytest.fixture
    def own(self):
        """Of parts of 40, 0, 1 and 60 rows, in disorder."""
        return merged(live, [40, 40, 41], WANTED, order=[3, 1, 0, 2])["own"]

    def test_sums(self, own):
        assert own.count == ROWS
        assert own.update_count == 3
        assert own.sum == pytest.approx(WANTED.sum().item(), rel=1e-14)

    def test_a_mean_weighs_parts_by_their_rows(self, own):
        assert own.mean == pytest.approx(WANTED.mean().item(), rel=1e-13)

    def test_the_defaults_of_an_empty_part_are_no_data(self, own):
        assert (own.max, own.min) == (WANTED.max(), WANTED.min())

    def test_without_a_reduction_parts_are_stacked_in_order(self, own):
        assert own.last.tolist() == [WANTED[39], WANTED[40], WANTED[100]]

    def test_a_function_gets_what_is_stacked(self, own):
        assert own.norm == pytest.approx(WANTED.norm().item(), rel=1e-13)

    def test_lists_are_joined_in_the_order_of_the_parts(self, own):
        assert own.rows.tolist() == WANTED.tolist()
        assert own.grown.tolist() == WANTED.tolist()

    def test_lists_of_anything_are_one_list(self, own):
        assert own.names == [f"{WANTED[i]:.3f}" for i in (0, 40, 41)]
        assert own.spans == [(WANTED[0], WANTED[39])]  # what its function left of it

    def test_of_one_part_all_is_as_it_was(self):
        alone = merged(live, [], WANTED)["own"]

        assert alone.last.shape == ()
        assert alone.norm == pytest.approx(WANTED.norm().item())
        assert len(alone.spans) == 1

    def test_of_nothing_all_is_as_it_began(self):
        nothing = StateMerger(live()).merged()["own"]

        assert (nothing.count, nothing.max, nothing.rows) == (0, -7, [])
        assert not nothing.update_called


@settings(max_examples=25)
@given(at=cuts, seed=st.integers(0, 5))
def test_any_cut_in_any_order_gives_the_bits_that_its_order_gives(at, seed):
    order = np.random.default_rng(seed).permutation(len(at) + 1).tolist()

    own = merged(live, at, WANTED, order=order)["own"].metric_state
    expected = merged(live, at, WANTED)["own"].metric_state

    assert plain(own) == plain(expected)


def plain(value):
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def classification():
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3, average="micro"),
            "top 2": MulticlassAccuracy(3, top_k=2, average="micro"),
            "precision": MulticlassPrecision(3, average="macro"),
            "f1": MulticlassF1Score(3, average="macro"),
            "auc": MulticlassAUROC(3),
        }
    )


@settings(max_examples=25)
@given(at=cuts)
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
def test_classification_is_that_of_the_whole(at):
    chosen = SCORES.argmax(1)

    computed = merged(classification, at, SCORES, LABELS).compute()

    assert {name: value.item() for name, value in computed.items()} == {
        "accuracy": pytest.approx(sklearn_metrics.accuracy_score(LABELS, chosen)),
        "top 2": pytest.approx(
            sklearn_metrics.top_k_accuracy_score(LABELS, SCORES, k=2)
        ),
        "precision": pytest.approx(
            sklearn_metrics.precision_score(LABELS, chosen, average="macro")
        ),
        "f1": pytest.approx(sklearn_metrics.f1_score(LABELS, chosen, average="macro")),
        "auc": pytest.approx(
            sklearn_metrics.roc_auc_score(LABELS, SCORES, multi_class="ovr"), rel=1e-6
        ),
    }


def test_a_metric_that_is_merged_by_itself_is_not_spoilt_by_empty_parts():
    def make():
        return MetricCollection([PearsonCorrCoef().set_dtype(torch.float64)])

    computed = merged(make, [0, 30, 30, 90], GUESSED, WANTED).compute()

    expected = np.corrcoef(GUESSED, WANTED)[0, 1]
    assert computed["PearsonCorrCoef"].item() == pytest.approx(expected, rel=1e-9)


class TestMetricsInMetrics:
    def test_of_compositions_all_terms_are_merged(self):
        def make():
            return MetricCollection(
                {"both": MeanSquaredError() + MeanAbsoluteError() * 10}
            )

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

    def test_wrappers_of_several(self):
        def make():
            return MetricCollection([MultioutputWrapper(MeanSquaredError(), 3)])

        computed = merged(make, [40], SCORES, SCORES * 2).compute()

        expected = (SCORES**2).mean(0).tolist()
        assert computed["MultioutputWrapper"].tolist() == pytest.approx(expected)


class TestSharedStates:
    def test_what_agrees_by_chance_is_not_shared(self):
        right, wrong = torch.eye(3)[[0, 1]], torch.tensor([[0.4, 0.6, 0.0]] * 9)

        def make():
            return MetricCollection(
                {f"{k}": MulticlassAccuracy(3, top_k=k) for k in (1, 2)}
            )

        # In the first part both are 1.
        rows = torch.cat([right, wrong]), torch.tensor([0, 1] + [0] * 9)
        computed = merged(make, [2], *rows, order=[0, 1]).compute()
        assert computed["1"] < computed["2"] == 1


class TestOnTheWay:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_states_keep_their_dtype(self, dtype):
        def make():
            metrics = {"all": CatMetric(), "max": MaxMetric()}
            return MetricCollection(metrics).set_dtype(dtype)

        merger = StateMerger(make())
        for part, rows in enumerate(WANTED.split(60)):
            own = make()
            update_(own, rows)
            merger.add_(part, pickle.loads(pickle.dumps(states_of(own, len(rows)))))
        computed = merger.merged().compute()

        assert torch.equal(computed["all"], WANTED.to(dtype))
        assert torch.equal(computed["max"], WANTED.to(dtype).max())

    def test_what_dask_sent_can_be_computed_with(self):
        buffers = []
        metrics, merger = live(), StateMerger(live())
        update_(metrics, WANTED)
        states = states_of(metrics, ROWS)
        sent = pickle.dumps(states, protocol=5, buffer_callback=buffers.append)
        read_only = [memoryview(bytes(buffer.raw())) for buffer in buffers]

        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of torch, about arrays that are read-only
            merger.add_(0, pickle.loads(sent, buffers=read_only))
            own = merger.merged()["own"]

        assert len(sent) < 5000  # the arrays are not in it
        assert torch.equal(own.rows, WANTED)


class TestTotals:
    def test_a_sum_does_not_depend_on_the_order(self):
        terms = [1e16, 1.0, -1e16, 3.0, 1e-9]

        class Sum(Metric):
            def __init__(self):
                super().__init__()
                zero = torch.zeros(1, dtype=torch.float64)
                self.add_state("sum", zero, dist_reduce_fx="sum")

            def update(self, rows):
                self.sum = self.sum + rows.sum()

            def compute(self):
                return self.sum

        def make():
            return MetricCollection([Sum()])

        each = torch.tensor(terms, dtype=torch.float64)
        for order in ([0, 1, 2, 3, 4], [4, 0, 3, 2, 1], [2, 1, 4, 0, 3]):
            computed = merged(make, [1, 2, 3, 4], each, order=order).compute()
            assert computed["Sum"].item() == 4.000000001

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    def test_what_is_not_finite_stays_so(self, bad):
        rows = torch.tensor([1.0, bad, 2.0], dtype=torch.float64)

        own = merged(live, [1, 2], rows)["own"]

        assert torch.equal(own.sum.isnan(), torch.tensor(np.isnan(bad)))
        assert own.sum.item() == bad or np.isnan(bad)

    def test_shapes_that_differ_are_no_sum(self):
        class Shaped(Own):
            def update(self, rows, _=None):
                super().update(rows)
                self.sum = rows

        with pytest.raises(DataError, match=r"shape \(61,\) in one part .* \(40,\)"):
            merged(lambda: MetricCollection([Shaped()]), [40], WANTED)


def spec_of(metrics, output=SCORES, y=LABELS, **facts):
    (own,) = metric_sets(metrics)
    return metric_spec(own, sample_of(output, y, **facts))


def told(spec, output, y, batch_size=10, cuts=()):
    """What parts come to, each of which is told batch by batch."""
    merger = StateMerger(spec.collection)
    bounds = [0, *cuts, len(y)]
    for part in range(len(cuts) + 1):
        accumulator = MetricAccumulator([spec], f"part {part}")
        for rows in torch.arange(*bounds[part : part + 2]).split(batch_size):
            accumulator.add_(output[rows], y[rows])
        (states,) = accumulator.states()
        merger.add_(part, states)
    return metric_section(spec, merger).values


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


class TestUpdates:
    @pytest.mark.parametrize(
        ("limit", "value", "rows"),
        [
            ("GATHERED_ROWS", 32, [40, 40, 21]),
            ("GATHERED_BYTES", 20 * 2 * 3 * 8, [20] * 5 + [1]),  # both, of 20 rows
        ],
    )
    def test_batches_wait_for_each_other(
        self, updates, monkeypatch, limit, value, rows
    ):
        monkeypatch.setattr(metric_state, limit, value)
        spec = spec_of(Watched(), SCORES, SCORES)
        updates.clear()  # of the trial

        told(spec, SCORES, SCORES)

        assert [len(preds) for preds in updates] == rows

    def test_rows_of_another_shape_do_not_come_together(self, updates):
        spec = spec_of(Watched(), SCORES, SCORES)
        updates.clear()
        accumulator = MetricAccumulator([spec], "part 0")

        for length in (2, 2, 3, 2):
            rows = SCORES[:5, :length]
            accumulator.add_(rows, rows + 1)
        accumulator.states()

        assert [preds.shape for preds in updates] == [(10, 2), (5, 3), (5, 2)]

    def test_short_floats_are_told_as_long_ones(self, updates):
        spec = spec_of(Watched(), SCORES.float(), SCORES.float())
        updates.clear()

        told(spec, SCORES.bfloat16(), SCORES.float())

        assert [preds.dtype for preds in updates] == [torch.float32]

    @pytest.mark.parametrize("batch_size", [1, 2, 8])
    @pytest.mark.parametrize("gathered", [1, 4096])
    def test_logits_are_logits_however_rows_are_cut(
        self, batch_size, gathered, monkeypatch
    ):
        """Torchmetrics takes scores for logits if one at hand is not in [0, 1]."""
        monkeypatch.setattr(metric_state, "GATHERED_ROWS", gathered)
        scores = torch.tensor([0.1, 0.2, 0.4, 0.6, 3.0, 0.3, 0.2, 0.1])
        labels = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1])

        values = told(
            spec_of(BinaryAccuracy(), scores, labels), scores, labels, batch_size
        )

        assert values == {"BinaryAccuracy": 5 / 8}  # every logit is above 0

    def test_metrics_of_ones_own_are_scikit_learns(self):
        spec = spec_of(
            {
                "roc": MulticlassROC(3, thresholds=4),
                "top": MulticlassAccuracy(3, average="micro"),
            }
        )

        values = told(spec, SCORES, LABELS, cuts=[30])

        expected = sklearn_metrics.accuracy_score(LABELS, SCORES.argmax(1))
        assert values["top"] == pytest.approx(expected)
        assert type(values["top"]) is float
        assert [type(each).__name__ for each in values["roc"]] == ["ndarray"] * 3

    def test_outputs_that_are_classes_are_left_as_they_are(self):
        chosen = SCORES.argmax(1)
        spec = spec_of({"top": MulticlassAccuracy(3, average="micro")}, chosen)

        values = told(spec, chosen, LABELS)

        right = (chosen == LABELS).double().mean().item()
        assert values["top"] == pytest.approx(right)


class TestTrouble:
    @pytest.mark.parametrize(
        ("metrics", "output", "message"),
        [
            (MeanSquaredError(), SCORES, r"failed on 2 rows, .*\(2, 3\) .*float64"),
            (ClassificationMetrics(), SCORES[:, 0], "must be one score per class"),
        ],
    )
    def test_what_does_not_fit_is_seen_on_two_rows(self, metrics, output, message):
        with pytest.raises(ModelError, match=message):
            spec_of(metrics, output)

    def test_rows_that_a_metric_refuses_are_named(self):
        wrong = LABELS.clone()
        wrong[57] = 3

        with pytest.raises(DataError, match=r"on rows 0 to 100 of part 0: .* \[?3\]?"):
            told(spec_of(MulticlassAccuracy(3)), SCORES, wrong)

    @pytest.mark.parametrize(
        "metrics", ["classification", MulticlassAccuracy(3)], ids=["preset", "own"]
    )
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_scores_that_are_no_numbers_are_an_error_that_says_where(
        self, metrics, bad, monkeypatch
    ):
        monkeypatch.setattr(metric_state, "GATHERED_ROWS", 50)
        scores = SCORES.clone()
        scores[[60, 61], [0, 2]] = bad

        with pytest.raises(ModelError, match="2 of 50 outputs are NaN") as caught:
            told(spec_of(metrics, SCORES.log()), scores, LABELS)

        assert caught.value.__notes__ == ["in rows 50 to 99 of part 0"]

    def test_of_numbers_nan_is_what_comes_out(self):
        wrong = SCORES.clone()
        wrong[3] = np.nan

        values = told(spec_of(MeanSquaredError(), SCORES, SCORES), wrong, SCORES)

        assert str(values) == "{'MeanSquaredError': nan}"

    def test_what_cannot_be_computed_is_said(self):
        spec = spec_of(R2Score(), SCORES[:, 0], SCORES[:, 0])

        with pytest.raises(DataError, match=r"could not be computed .* two samples"):
            told(spec, SCORES[:1, 0], SCORES[:1, 0])

    def test_warnings_go_to_the_log(self, caplog):
        caplog.set_level(logging.INFO, metric_state.__name__)

        told(spec_of(MulticlassAUROC(3)), SCORES[:5], torch.zeros(5, dtype=torch.int64))

        assert any("positive samples in targets" in m for m in caplog.messages)
