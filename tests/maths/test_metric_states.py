"""States of metrics: parts, in whatever order, give what the whole is."""

import itertools
import pickle
import warnings

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
)
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import ClasswiseWrapper, MultioutputWrapper

from daskdl.errors import DataError
from daskdl.evaluation.metric_state import States, restored, states_of, update_

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


def part_of(make, number, *given):
    collection = make()
    if len(given[0]):
        update_(collection, *given)
    return states_of(collection, len(given[0]), number)


def cut(values, at):
    edges = [0, *at, len(values)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def merged(make, at, *given, order=None):
    """What metrics that were updated apart give together."""
    parts = list(zip(*(cut(values, at) for values in given), strict=True))
    total = States()
    for number in order or range(len(parts)):
        total += part_of(make, number, *parts[number])
    return restored(make(), total)


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
        nothing = restored(live(), States())["own"]

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
        assert part_of(make, 0, SCORES, LABELS).metrics.keys() == places
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

        live = make()
        update_(live, right, torch.tensor([0, 1]))  # here both are 1
        update_(live, wrong, torch.zeros(9, dtype=torch.int64))

        computed = restored(make(), states_of(live, 11)).compute()
        assert computed["1"] < computed["2"] == 1

    def test_groups_that_are_given_are_updated_once_and_all_get_the_states(self):
        updates = []

        class Counted(MulticlassPrecision):
            def update(self, preds, target):
                updates.append(len(preds))
                super().update(preds, target)

        def make():
            return MetricCollection(
                {"each": Counted(3, average=None), "mean": Counted(3, average="macro")},
                compute_groups=[["each", "mean"]],
                prefix="test/",
            )

        computed = merged(make, [50], SCORES, LABELS).compute()

        assert updates == [50, 51]
        assert computed["test/mean"] == pytest.approx(computed["test/each"].mean())

    def test_a_collection_that_was_updated_by_its_own_way_is_read_too(self):
        live = classification()
        live.update(SCORES, LABELS)

        computed = restored(classification(), states_of(live, ROWS)).compute()

        assert computed == live.compute()


class TestOnTheWay:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_states_keep_their_dtype(self, dtype):
        def make():
            metrics = {"all": CatMetric(), "max": MaxMetric()}
            return MetricCollection(metrics).set_dtype(dtype)

        total = part_of(make, 0, WANTED[:60]) + part_of(make, 1, WANTED[60:])
        computed = restored(make(), pickle.loads(pickle.dumps(total))).compute()

        assert torch.equal(computed["all"], WANTED.to(dtype))
        assert torch.equal(computed["max"], WANTED.to(dtype).max())

    def test_what_dask_sent_can_be_computed_with(self):
        buffers = []
        total = part_of(live, 0, WANTED)
        sent = pickle.dumps(total, protocol=5, buffer_callback=buffers.append)
        read_only = [memoryview(bytes(buffer.raw())) for buffer in buffers]

        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of torch, about arrays that are read-only
            own = restored(live(), pickle.loads(sent, buffers=read_only))["own"]

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

        with pytest.raises(DataError, match=r"shape \(40,\) in one part .* \(61,\)"):
            merged(lambda: MetricCollection([Shaped()]), [40], WANTED)
