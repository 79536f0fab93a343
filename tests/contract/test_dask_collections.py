"""Arrays, dataframes, bags, Delayed and futures as sources: parts that tasks make."""

import logging
import re
import threading
from collections import namedtuple

import cloudpickle
import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from dask.highlevelgraph import HighLevelGraph

from daskdl.data.dask_collections import Partitions, pair
from daskdl.data.inputs import infer_metadata, merge_small_parts, source_of
from daskdl.data.source import Facts, facts_of, is_known
from daskdl.data.tables import InMemory
from daskdl.errors import DataError, OptionError
from tests.support.sources import Parts, Streamed, future_of

X = np.arange(46.0, dtype=np.float32).reshape(23, 2)
Y = np.repeat([0, 1], [12, 11])
TABLE = pd.DataFrame({"a": np.arange(23), "b": np.arange(23) + 0.5})
NAMES = pd.Series(["ant", "bee", "cat"] * 7 + ["ant", "bee"], dtype="category")
Both = namedtuple("Both", "left right")


def lazy(values=X, rows=10):
    return da.from_array(values, chunks=(rows, *values.shape[1:]))


def unknown(values=X, rows=10, keep=lambda block: block):
    """The same with lengths of blocks that Dask does not know."""
    whole = lazy(values, rows)
    chunks = ((np.nan,) * whole.numblocks[0], *whole.chunks[1:])
    return whole.map_blocks(keep, chunks=chunks, dtype=values.dtype)


def frame(values=TABLE, partitions=3):
    return dd.from_pandas(values, npartitions=partitions)


def bag(examples, partitions=1):
    return dask.bag.from_sequence(examples, npartitions=partitions)


def parts(*values):
    return [dask.delayed(value, traverse=False, pure=False) for value in values]


def loaded(source):
    rows = [source.load(part) for part in range(source.parts)]
    return [x.tolist() for x, _ in rows], [None if y is None else y.tolist() for _, y in
                                           rows]  # fmt: skip


def persisted(*blocks):
    """A dask.array whose blocks are on a cluster, and their futures."""
    held = [future_of(block, ("held", i, 0)) for i, block in enumerate(blocks)]
    graph = HighLevelGraph.from_collections("held", {node.key: node for node in held})
    chunks = (tuple(map(len, blocks)), (blocks[0].shape[1],))
    return da.Array(graph, "held", chunks, meta=blocks[0][:0]), held


class TestArraysAndDataframes:
    def test_trees_are_cut_like_the_first_array(self):
        x = {"a": lazy(rows=(10, 0, 13)), "b": (lazy(Y, rows=7),)}

        source = source_of(x, (lazy(Y, rows=5),))

        inputs, labels = source.load(2)
        assert source.lengths == (10, 0, 13)
        assert inputs["a"].tolist() == X[10:].tolist()
        assert inputs["b"][0].tolist() == labels[0].tolist() == Y[10:].tolist()

    def test_arrays_and_tables_go_together_if_they_are_partitioned_alike(self):
        table = frame()
        rows = tuple(len(part) for part in table.partitions)

        source = source_of({"table": table, "array": lazy(rows=rows)}, table["a"])

        inputs, labels = source.load(1)
        assert source.lengths == rows
        np.testing.assert_array_equal(inputs["array"][:, 0] / 2, labels)
        np.testing.assert_array_equal(inputs["table"], TABLE.loc[labels])

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (lazy(), lazy(Y[1:]), "X and y must have the same length, got 23 and 22"),
            ({"a": lazy(), "b": (lazy(X[:4]),)}, None, "X['a'] and X['b'][0] must have "
             "the same length, got 23 and 4"),
            (lazy(), Y[1:], "X and y must have the same length, got 23 and 22"),
            (unknown(), Y, "y is in memory, and is divided like the partitions of X, "
             "but Dask does not know their lengths: call X.compute_chunk_sizes() fir"),
            (frame(), Y, "make it a column of the dataframe that label= names, or pass "
             "X.to_dask_array(lengths=True)"),
            ((frame(), X), None, "X[1] is in memory, and is divided like the "
             "partitions of X[0], but"),
            (X, frame()["a"], "lengths: pass y.to_dask_array(lengths=True)"),
            (lazy(X.astype(complex)), lazy(Y), "X must hold real numbers"),
            (lazy(X[:0]), lazy(Y[:0]), "X must not be empty, got the shape (0, 2)"),
            (da.from_array(X, chunks=(5, 1)), lazy(Y), "X must be chunked along its "
             "first axis only, got the blocks (5, 2); use X.rechunk({1: -1})"),
            (frame(), frame(partitions=2)["a"], "Dask collections of unknown length "
             "must have equally many partitions, got 3 of X, 2 of y partitions; take"),
            (unknown(), lazy(Y, rows=5), "got 3 of X, 5 of y partitions"),
            (frame(TABLE.assign(b="text")), None, "column 'b' of X holds strings"),
            (frame(), frame(NAMES).cat.as_unknown(), "y is categorical with categories "
             "that are not known yet; use y.cat.as_known()"),
            (lazy(), {}, "y must not be empty, got no array at all"),
        ],
        ids=["lengths", "tree", "labels in memory", "unknown beside labels",
             "table beside labels", "table beside inputs", "labels of a table",
             "complex", "empty", "chunks", "partitions", "unknown", "strings",
             "categories", "no"],
    )  # fmt: skip
    def test_that_do_not_go_together_are_refused_by_name(self, x, y, message):
        with pytest.raises(DataError, match=re.escape(message)):
            source_of(x, y)

    def test_lengths_that_dask_does_not_know_are_counted(self):
        source = source_of(unknown(keep=lambda block: block[block[:, 0] >= 10]))

        assert source.lengths is None
        assert infer_metadata(source, False).lengths == [5, 10, 3]

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (unknown(keep=lambda block: block[1:]), unknown(Y),
             "arrays of part 2 must have equally many rows, got 2 of X, 3 of y; give"),
            (unknown(keep=lambda block: block[1:]), lazy(Y), "2 of X, 3 of y"),
            (lazy().map_blocks(lambda block: block[1:], dtype=X.dtype), None,
             "part 2 has 2 rows, but the chunks promise 3; call compute_chunk_sizes()"),
            (frame(TABLE.where(TABLE["a"] != 20, TABLE["a"], axis=0).assign(
                b=TABLE["b"].where(TABLE["a"] != 20))), None,
             "column 'b' of X of part 2 has 1 missing values"),
        ],
        ids=["both unknown", "one known", "promise", "missing"],
    )  # fmt: skip
    def test_a_part_that_cannot_be_used_is_named(self, x, y, message):
        with pytest.raises(DataError, match=re.escape(message)):
            source_of(x, y).load(2)

    def test_the_first_rows_are_zeros_and_nothing_is_computed(self):
        def never(*arguments):
            raise AssertionError

        source = source_of(lazy().map_blocks(never, dtype="f4", meta=X[:0]), lazy(Y))
        x, y = source_of(frame(), frame()["a"]).first_rows

        assert is_known(source)
        assert [leaf.tolist() for leaf in source.first_rows] == [[[0.0, 0.0]], [0]]
        assert [leaf.dtype for leaf in source.first_rows] == [np.float32, Y.dtype]
        assert (x.shape, x.dtype, y.shape, y.dtype) == ((1, 2), "f8", (1,), "i8")

    def test_of_rows_whose_shape_is_unknown_there_are_no_first_ones(self):
        x = lazy().map_blocks(
            lambda block: block, chunks=((10, 10, 3), (np.nan,)), dtype=X.dtype
        )

        assert not is_known(source_of(x, lazy(Y)))

    def test_names_of_labels_become_numbers_of_which_some_may_be_missing(self):
        source = source_of(frame(), frame(NAMES))
        gaps = infer_metadata(source_of(frame(), frame(NAMES.where(TABLE["a"] != 5))),
                              False)  # fmt: skip

        assert source.classes == ("ant", "bee", "cat")
        numbers = [number for part in loaded(source)[1] for number in part]
        assert numbers == NAMES.cat.codes.tolist()
        assert np.flatnonzero(np.isnan(gaps.load(0)[1])).tolist() == [5]
        assert gaps.first_rows[1].dtype == source.first_rows[1].dtype

    def test_only_the_part_that_is_asked_for_is_computed_in_this_thread(self):
        computed = []

        def noting(block, block_info):
            where = block_info[None]["chunk-location"][0]
            computed.append((where, threading.get_ident()))
            return block

        source = source_of(lazy().map_blocks(noting, dtype=X.dtype), lazy(Y))
        with dask.config.set(scheduler=lambda *arguments, **options: 1 / 0):
            source.load(1)

        assert computed == [(1, threading.get_ident())]


class TestTasks:
    def test_a_part_is_sent_with_its_own_optimized_tasks_only(self):
        source = source_of((((lazy() + 1) * 2) - 1) / 3)

        graphs = [source.content(part) for part in range(3)]

        sent = cloudpickle.loads(cloudpickle.dumps(graphs[1]))
        np.testing.assert_allclose(sent.rows({})[0], ((X[10:20] + 1) * 2 - 1) / 3)
        assert not set(graphs[0].graph) & set(graphs[2].graph)
        assert len(graphs[0].graph) < 4

    def test_results_on_a_cluster_are_needed_and_not_carried(self):
        array, held = persisted(X[:2], X[2:])

        alone, further = source_of(array), source_of(array * 10)

        assert alone.needs(1) == further.needs(1) == (held[1].key,)
        assert held[1].key not in {**alone.content(1).graph, **further.content(1).graph}
        assert [node.asked for node in held] == [0, 0]
        assert loaded(further)[0] == [(X[:2] * 10).tolist(), (X[2:] * 10).tolist()]
        x, _ = further.content(1).rows({held[1].key: -X[2:]})
        assert x.tolist() == (X[2:] * -10).tolist()

    @pytest.mark.parametrize(
        "part",
        [
            lambda held: held,
            lambda held: dask.delayed(np.negative)(dask.delayed(np.negative)(held)),
            lambda held: dask.delayed(lambda values: values["a"][0])({"a": [held, 1]}),
            lambda held: dask.delayed(lambda *, values: values[0])(values=[held]),
        ],
        ids=["alone", "argument", "nested", "keyword"],
    )
    def test_a_future_in_a_list_is_a_result_wherever_it_is(self, part):
        source = source_of([part(future_of(X, "held")), *parts(X[:1])])

        graph = cloudpickle.loads(cloudpickle.dumps(source.content(0)))

        assert (source.needs(0), source.needs(1)) == (("held",), ())
        assert graph.rows({"held": X})[0].tolist() == X.tolist()
        assert source.load(0)[0].tolist() == X.tolist()

    def test_a_result_that_only_the_cluster_knows_cannot_be_fetched(self):
        with pytest.raises(DataError, match=r"is a result on a cluster .* client="):
            Partitions(parts(1)).result("there")

    @pytest.mark.parametrize(
        "value", ["b", ("b", 0), {"b": "b"}, (len, "abc"), None], ids=repr
    )
    def test_a_result_that_looks_like_a_key_or_a_task_is_not_touched(self, value):
        graph = source_of([dask.delayed(lambda value: value)(future_of(1, "held"))])
        (member,) = graph.content(0).members
        graph = graph.content(0)
        changed = member._replace(finish=lambda values: (values[0], None))

        x, _ = graph.__class__("part", graph.graph, graph.needs, (changed,)).rows(
            {"held": value}
        )

        assert x is value

    def test_tasks_that_x_and_y_share_run_once_for_a_part(self):
        computed = []

        def noting(block):
            computed.append(len(block))
            return block

        rows = lazy().map_blocks(noting, dtype=X.dtype, meta=X[:0])
        table = frame().map_partitions(lambda table: noting(table), meta=TABLE[:0])

        source_of(rows[:, :1], rows[:, 1]).load(2)
        source_of({"a": table[["a"]], "b": lazy(rows=(8, 8, 7))}, table["b"]).load(1)

        assert computed == [3, 8]

    @pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame")  # of Dask's
    def test_only_the_columns_of_x_and_y_are_read_from_parquet(self, tmp_path):
        paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
        for path in paths:
            TABLE.assign(c=0, d=1).to_parquet(path, index=False)
        table = dd.read_parquet(tmp_path)[["a", "b", "c"]] + 1

        source = source_of(table[["a"]], table["b"])
        for path in paths:  # from here on, the others cannot be read
            TABLE.to_parquet(path, index=False)

        x, y = source.load(1)
        np.testing.assert_array_equal(x[:, 0], TABLE["a"] + 1)
        np.testing.assert_array_equal(y, TABLE["b"] + 1)

    def test_peer_to_peer_tasks_are_refused_without_a_cluster(self):
        with dask.config.set({"dataframe.shuffle.method": "p2p"}):
            table = frame().shuffle("a")

            with pytest.raises(
                DataError, match=r"a cluster .* or persist\(\) the data"
            ):
                source_of(table, table["a"]).load(0)

    def test_parts_of_one_collection_share_its_tasks(self):
        numbers = dask.delayed([dask.delayed(abs)(-i) for i in range(3)])
        array = dask.delayed(np.array)

        source = source_of([array(numbers), array(numbers)])

        assert loaded(source)[0] == [[0, 1, 2]] * 2


class TestBagsAndLists:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ((1, 2), (1, 2)),
            ((1, None), (1, None)),
            ((1, 2, 3), ((1, 2, 3), None)),
            (Both(1, 2), (Both(1, 2), None)),
            ({"a": 1}, ({"a": 1}, None)),
        ],
        ids=["both", "none", "three", "named", "dict"],
    )
    def test_a_tuple_of_two_is_both_and_all_else_is_x_alone(self, value, expected):
        assert pair(value) == expected

    def test_the_examples_of_a_partition_are_stacked(self):
        source = source_of(bag(list(zip(X, Y, strict=True)), 2))
        trees = [({"a": row, "b": (torch.tensor(row[0]), 7)}, 1.5) for row in X]

        x, y = source_of(bag(trees)).load(0)

        assert (source.lengths, source.first_rows) == (None, None)
        assert loaded(source) == ([X[:12].tolist(), X[12:].tolist()], [[0] * 12,
                                  [1] * 11])  # fmt: skip
        assert x["a"].tolist() == X.tolist()
        assert [leaf.tolist() for leaf in x["b"]] == [X[:, 0].tolist(), [7] * 23]
        assert y.tolist() == [1.5] * 23

    def test_a_partition_without_examples_has_no_rows(self):
        examples = bag(list(zip(X, Y, strict=True)), 3).filter(lambda row: row[1])

        whole = infer_metadata(source_of(examples), False)

        assert whole.lengths[0] == 0
        assert sum(whole.lengths) == 11
        assert whole.first_rows[1].tolist() == [1, 1]

    def test_each_item_of_a_list_is_a_part_of_several_rows(self):
        called = []

        @dask.delayed
        def make(start):
            called.append(start)
            return X[start : start + 2], Y[start : start + 2]

        _, y = source_of([make(start) for start in (0, 11, 2)]).load(1)
        tables = source_of(
            parts((TABLE, TABLE["a"].mask(TABLE["a"] == 3)), X, (X, None))
        )

        assert (called, y.tolist()) == ([11], [0, 1])
        x, labels = tables.load(0)
        np.testing.assert_array_equal(x, TABLE)
        assert np.flatnonzero(np.isnan(labels)).tolist() == [3]
        assert tables.load(1)[1] is None is tables.load(2)[1]

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (bag([(X[0], 1), (X[0, :1], 1)]), "the examples of part 0 must all have one"
             " shape for X: "),
            (bag([(X[0], X[0]), (X[0], 1)]), "one shape for y: "),
            (bag([({"a": 1}, 1), ({"b": 1}, 1)]), "one shape for X: trees must have the"
             " same structure, got {'a': .}, {'b': .}"),
            (bag([(1, 2), (3, None), 4]), "the examples of part 0 must all be pairs (x,"
             " y), or all x alone, got 2 of 3 without y"),
            (bag([("text", 1)]), "X of part 0 must hold real numbers"),
            (parts((X, Y[1:])), "arrays of part 0 must have equally many rows, got 23 "
             "of X, 22 of y; give X and y the same partitions"),
            (parts(({"a": X, "b": X[:3]}, Y)), "23 of X['a'], 3 of X['b'], 23 of y"),
            (parts((X.tolist(), Y)), "X of part 0 must be a numpy array, a torch ten"),
            (parts((X, np.array(3.0))), "y of part 0 must have examples along its first"
             " axis, got 0 dimensions"),
        ],
        ids=["inputs", "labels", "structure", "mixed", "text", "lengths", "tree",
             "list", "one value"],
    )  # fmt: skip
    def test_a_part_that_cannot_be_used_is_named(self, data, message):
        with pytest.raises(DataError, match=re.escape(message)):
            source_of(data).load(0)


class Changing:
    """Makes a part of another length from the second time on."""

    def __init__(self, *lengths):
        self.lengths = list(lengths)

    def __call__(self):
        rows = self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]
        return np.zeros((rows, 2), np.float32), np.zeros(rows, np.int64)

    def __dask_tokenize__(self):
        return id(self)


def changing(*lengths):
    return [dask.delayed(Changing(*lengths), pure=False)()]


class TestPartsThatChange:
    @pytest.mark.parametrize("now", [13, 27], ids=["fewer", "more"])
    def test_are_refused(self, now):
        source = source_of(changing(20, 20, now))
        source.load(0)
        known = infer_metadata(source, False)

        with pytest.raises(
            DataError, match=f"part 0 has {now} rows, but 20 were counted"
        ):
            known.load(0)


class TestSmallParts:
    def test_are_merged_and_stay_separable(self):
        array, held = persisted(*np.split(np.arange(256.0).reshape(128, 2), 128))

        source = merge_small_parts(source_of(array * 10))

        graph = source.content(1)
        assert source.parts == 64
        assert source.lengths == [2] * 64
        assert source.name(1) == "part 2 and 1 more"
        assert source.needs(1) == graph.needs == (held[2].key, held[3].key)
        values = {key: np.full((1, 2), i) for i, key in enumerate(graph.needs)}
        assert graph.rows(values)[0].tolist() == [[0, 0], [10, 10]]
        pieces = [graph.pieces(values), source.pieces(1)]
        names = [[name for name, _ in loaders] for loaders in pieces]
        assert names == [["part 2", "part 3"]] * 2
        loads = [loaders[1][1]()[0].tolist() for loaders in pieces]
        assert loads == [[[10, 10]], [[60.0, 70.0]]]

    def test_that_dask_counted_are_still_checked(self):
        whole = infer_metadata(source_of(changing(2, 2, 3) * 128), False)

        with pytest.raises(DataError, match="part 0 has 3 rows, but 2 were counted"):
            merge_small_parts(whole).load(0)


X6 = np.arange(12.0).reshape(6, 2)
TORN = EOFError("torn")


class TestInferringMetadata:
    def test_finds_lengths_and_first_rows_and_logs_the_pass(self, caplog):
        source = Parts((X6[:0], None), (X6[:4], None), (X6[4:], None))

        with caplog.at_level(logging.INFO, logger="daskdl.data.inputs"):
            whole = infer_metadata(source, False)

        assert whole.lengths == [0, 4, 2]
        assert whole.first_rows[0].tolist() == X6[:2].tolist()
        assert caplog.messages == [
            "counting the rows of 3 parts",
            "there are 6 rows in 3 parts",
        ]

    def test_loads_nothing_that_is_known_or_cheaper_to_find(self):
        class Cheap(Parts):
            def facts(self, part):
                return Facts(5, (X6[:1], None))

            def load(self, part):
                raise AssertionError

        streamed = Streamed((X6, None))
        streamed.first_rows = X6[:1], None
        in_memory = InMemory(X6, None, batch_size=2)

        assert infer_metadata(in_memory, False) is in_memory
        assert infer_metadata(streamed, False) is streamed
        assert infer_metadata(Cheap(1, 2), False).lengths == [5, 5]

    @pytest.mark.parametrize("error", [DataError("bad"), OSError("gone"), TORN])
    def test_a_bad_part_is_an_error_or_left_out(self, error, caplog):
        with pytest.raises(type(error)) as caught:
            infer_metadata(Parts((X6, None), error), False)
        caplog.clear()
        whole = infer_metadata(Parts(error, (X6, None), error), False, skips=True)

        assert caught.value is error
        assert (whole.lengths, whole.left_out) == ([0, 6, 0], 2)
        assert caplog.messages[-1] == (
            "2 parts cannot be read and are left out: [0, 2]"
        )

    def test_refuses_data_without_rows_and_errors_that_are_not_of_the_data(self):
        none = X6[:0], None
        with pytest.raises(DataError, match=r"got no rows in 2 parts$"):
            infer_metadata(Parts(none, none), False)
        with pytest.raises(DataError, match=r"in 2 parts, of which 1 cannot be read$"):
            infer_metadata(Parts(TORN, none), False, skips=True)
        with pytest.raises(OptionError, match="pillow is missing"):
            infer_metadata(Parts(none, OptionError("pillow is missing")), False,
                           skips=True)  # fmt: skip

    def test_facts_keep_nothing_of_a_part(self):
        facts = facts_of(({"a": np.zeros((1000, 2))}, np.zeros(1000)))

        assert facts.first_rows[0]["a"].base is None is facts.first_rows[1].base
        assert facts.rows == 1000

    def test_a_source_may_know_its_lengths_but_not_its_first_rows(self):
        source = Parts((X6[:4], None), (X6[4:], None))
        source.lengths = [4, 2]

        known = infer_metadata(source, False)

        assert known.lengths == [4, 2]
        assert known.first_rows[0].tolist() == X6[:2].tolist()
        assert source.first_rows is None
