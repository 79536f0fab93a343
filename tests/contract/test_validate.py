"""What is wrong with data is counted row by row, and named, of every kind of data."""

import sys
import zlib

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch

from daskdl.data import Csv, Parquet, Report, files, image_folder, pack
from daskdl.data.batching import leaves_by_name
from daskdl.data.storage import Store
from daskdl.data.validate import KINDS, Offender, validate
from daskdl.errors import DataError, OptionError
from tests.support import s3
from tests.support.pictures import encoded, folder, pixels
from tests.support.sources import Parts, Streamed

MODULE = sys.modules["daskdl.data.validate"]  # the package has the function
NONE = dict.fromkeys(KINDS, 0)
X3, Y3 = np.zeros((4, 2), np.float32), np.array([0, 1, 2, 3])


def validated(*parts, kind=Parts, **options):
    return validate(kind(*parts), client=False, **options)


def changed(value, *places, like=X3):
    array = like.astype(float)
    for place in places:
        array[place] = value
    return array


def counted(report):
    """What is wrong, and how often."""
    return {kind: count for kind, count in report.counts.items() if count}


class TestReport:
    COUNTS = (("missing", 0), ("unreadable", 1), ("non-finite", 120))
    OFFENDERS = (
        Offender("s3://x/a", None, "unreadable", "torn"),
        Offender("s3://x/bcd", 7, "non-finite", "x is nan"),
    )

    def test_it_is_a_table(self):
        report = Report(3, 12, 1, dict(self.COUNTS), self.OFFENDERS)

        assert not report.ok
        assert report.to_pandas()["part"].tolist() == ["s3://x/a", "s3://x/bcd"]
        assert str(Report(1, None, 5, {})) == "1 part, 5 rows\nnothing is wrong"
        assert str(report).splitlines() == [
            "12 files in 3 parts, 1 row",
            "missing     0 files",
            "unreadable  1 file",
            "non-finite  120 rows",
            "",
            "part        row  kind        message",
            "s3://x/a         unreadable  torn",
            "s3://x/bcd  7    non-finite  x is nan",
            "... and more, 2 shown",
        ]


class TestExpectations:
    @pytest.mark.parametrize(
        ("rows", "options"),
        [
            ((X3, Y3), {}),
            ((X3, None), {}),
            ((X3, Y3), {"shapes": {"x": (2,), "y": ()}, "labels": 4}),
            ((X3, Y3), {"dtypes": {"x": "float32", "y": torch.int64}}),
            ((X3, Y3), {"shapes": (-1,), "labels": range(3, -1, -1)}),
            ((X3.astype(">f4"), Y3 / 1), {"dtypes": "float32", "labels": {0, 1, 2, 3}}),
            (
                ({"a": X3, "b": Y3}, (Y3, Y3)),
                {"shapes": {"a": [2], "b": ()}, "labels": (4, np.arange(4))},
            ),
            ((X3 > 0, Y3 > 0), {"labels": 2}),
            ((X3, Y3 > 0), {"labels": {True, False}}),
            ((X3, Y3 * 0 + 5), {"labels": np.array(5)}),
            ((X3[:0], Y3[:0]), {"shapes": (2,), "labels": 4}),
            ((X3, Y3), {"shapes": (np.int64(2),), "labels": np.uint8(4)}),
            ((X3, Y3.astype(np.uint8)), {"labels": 10**18}),  # not written out
        ],
        ids=range(13),
    )
    def test_nothing_is_wrong_with_what_is_as_expected(self, rows, options):
        report = validated(rows, **options)

        assert report == Report(
            1, None, len(next(iter(leaves_by_name(rows).values()))), NONE
        )

    @pytest.mark.parametrize(
        ("rows", "options", "kind", "message"),
        [
            ((X3, Y3), {"shapes": (3, None)}, "shape", "of x .* expected (3, any)"),
            ((X3, X3), {"shapes": {"y": ()}}, "shape", "rows of y .* expected ()"),
            (({"a": X3}, Y3), {"shapes": {"b": (2,)}}, "shape", "x['a'], expected x["),
            ((X3, Y3[:3]), {}, "shape", "different numbers of rows: 4 of x, 3 of"),
            ((np.ones(()), Y3), {}, "shape", "x has no rows"),
            ((X3, Y3), {"dtypes": "f8"}, "dtype", "x is float32, expected float64"),
            ((np.array(["a"] * 4), Y3), {}, "dtype", "x is <U1, expected real numbers"),
            ((X3.astype(complex), Y3), {}, "dtype", "x is complex128, expected real"),
        ],
        ids=range(8),
    )
    def test_a_wrong_shape_or_dtype_counts_once(self, rows, options, kind, message):
        report = validated(rows, **options)

        (offender,) = report.offenders
        assert counted(report) == {f"wrong {kind}": 1}
        assert all(text in offender.message for text in message.split(" .* "))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"shapes": {"y": 3}}, "shapes must have .* got 3 for y"),
            ({"shapes": (3, -2)}, r"got 3 for x\[0\]"),
            ({"dtypes": "number"}, "dtypes must be dtypes .*, got 'number' for x"),
            ({"labels": 0}, "labels must be a number of classes, .* got 0"),
            ({"labels": ["cat"]}, "labels must be"),
            ({"labels": {None, 1}}, "labels must be"),
            ({"labels": [0, [1, 2]]}, "labels must be"),
            ({"labels": [[0, 1], [2, 3]]}, "labels must be"),
        ],
    )
    def test_what_cannot_be_expected_is_refused_before_loading(self, options, message):
        with pytest.raises(OptionError, match=message):
            validated(AssertionError(), **options)


class TestRows:
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_are_found_once_a_row(self, value):
        x = {"a": changed(value, (1, 0), (1, 1)), "b": changed(value, (1, 0), (3, 1))}

        report = validated((x, Y3))

        assert counted(report) == {"non-finite": 2}
        assert [(offender.row, offender.message) for offender in report.offenders] == [
            (1, f"x['a'] is {value}"),
            (3, f"x['b'] is {value}"),
        ]

    def test_labels_that_are_nan_are_missing_and_not_invalid(self):
        report = validated((X3, changed(np.nan, 2, like=Y3)), labels=4)

        assert report.offenders == (Offender("box 0", 2, "missing label", "y is nan"),)

    @pytest.mark.parametrize(
        "options",
        [{"labels": 4}, {"shapes": {"y": ()}}, {"dtypes": {"y": int}}],
    )
    @pytest.mark.parametrize("kind", [Parts, Streamed])
    def test_labels_that_are_not_there_are_missing_from_every_row(self, options, kind):
        report = validated((X3, None), kind=kind, **options)

        (offender,) = report.offenders
        assert counted(report) == {"missing label": 4}
        assert offender[1:] == (None, "missing label", "it has no labels")

    @pytest.mark.parametrize(
        ("y", "labels", "rows", "message"),
        [
            (Y3, 2, [2, 3], "y is 2, allowed are 0 to 1"),
            (Y3, range(1, 4), [0], "y is 0, allowed are 1 to 3"),
            (Y3, {0, 3}, [1, 2], "y is 1, allowed are 0, 3"),
            (changed(np.inf, 1, like=Y3), None, [1], "y is inf"),
            ({"a": Y3, "b": Y3}, {"a": 3, "b": {0, 2, 3}}, [1, 3], "y['b'] is 1, all"),
            ((Y3, Y3[::-1]), 3, [0, 3], "y[1] is 3, allowed are 0 to 2"),
            (Y3[:, None, None] * [[0, 1], [2, 0]], 5, [3], "y is 6, allowed are 0 t"),
            (Y3.astype(np.uint8), range(9, 0, -1), [0], "y is 0, allowed"),
            (Y3, {True, False}, [2, 3], "y is 2, allowed are False, True"),
            (Y3, {0.0, 0.5, 2.0}, [1, 3], "y is 1, allowed are 0.0, 0.5, 2.0"),
            (Y3, range(0, 4, 3), [1, 2], "y is 1, allowed are 0, 3"),
            (Y3, 1, [1, 2, 3], "y is 1, allowed are 0"),
            (Y3 / 2, 10**18, [1, 3], "y is 0.5, allowed are 0 to 9"),
            (changed(np.inf, 1, like=Y3).astype(np.float16), 10**5, [1], "y is inf"),
        ],
        ids=range(14),
    )
    def test_labels_that_are_not_allowed_are_found(self, y, labels, rows, message):
        report = validated((X3, y), labels=labels)

        assert counted(report) == {"invalid label": len(rows)}
        assert [offender.row for offender in report.offenders] == rows
        assert report.offenders[0].message.startswith(message)

    def test_rows_of_a_stream_are_numbered_through_and_its_shape_counts_once(self):
        x = changed(np.nan, 3)

        report = validated((x, Y3), kind=Streamed, shapes=(3,))

        assert counted(report) == {"wrong shape": 1, "non-finite": 1}
        assert [(offender.row, offender.kind) for offender in report.offenders] == [
            (None, "wrong shape"),
            (3, "non-finite"),
        ]

    def test_beyond_a_hundred_offenders_the_counts_are_exact(self):
        part = np.full((60, 1), np.nan), None

        report = validated(part, part, part)

        assert counted(report) == {"non-finite": 180}
        assert [offender.row for offender in report.offenders] == [
            *range(60),
            *range(40),
        ]


def missing():
    error = DataError("cannot read s3://x: there is no such file")
    error.__cause__ = FileNotFoundError()
    return error


class TestParts:
    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (missing(), "missing", "cannot read s3://x: there is no such file"),
            (FileNotFoundError("a"), "missing", "FileNotFoundError: a"),
            (DataError("torn"), "unreadable", "torn"),
            (KeyError("label"), "unreadable", "KeyError: 'label'"),
            (EOFError(), "unreadable", "EOFError"),
            (zlib.error("torn"), "unreadable", "error: torn"),
        ],
        ids=repr,
    )
    def test_one_that_cannot_be_read_is_an_offender(self, error, kind, message):
        report = validated((X3, Y3), error)

        (offender,) = report.offenders
        assert (report.rows, counted(report)) == (4, {kind: 1})
        assert offender[:3] == ("box 1", None, kind)
        assert offender.message.startswith(message)
        with pytest.raises(OptionError, match="pip install"):  # not about the data
            validated(OptionError("pip install"))

    def test_what_came_before_a_stream_broke_counts(self):
        class Breaking(Streamed):
            def stream(self, part, rows):
                yield from super().stream(part, rows)
                raise OSError("torn")

        report = validated((changed(np.nan, 1), Y3), kind=Breaking)

        assert (report.rows, counted(report)) == (
            4,
            {"non-finite": 1, "unreadable": 1},
        )

    def test_offenders_are_sorted_whatever_the_order_in_which_parts_come(
        self, monkeypatch
    ):
        both = changed(np.nan, 2, 0), Y3
        source = Parts(both, (X3, Y3), DataError("torn"), (changed(np.nan, 1), Y3))

        def each(source, function, client):
            return [(part, function(source, part)) for part in (2, 3, 1, 0)]

        monkeypatch.setattr(MODULE, "map_parts", each)
        monkeypatch.setattr(MODULE, "SHOWN", 6)
        report = validate(source, labels=3, client=False)

        assert [
            (offender.part, offender.row, offender.kind)
            for offender in report.offenders
        ] == [
            ("box 0", 0, "non-finite"),
            ("box 0", 2, "non-finite"),
            ("box 0", 3, "invalid label"),
            ("box 1", 3, "invalid label"),
            ("box 2", None, "unreadable"),
            ("box 3", 1, "non-finite"),
        ]


# Of 100 rows in parts of 40, 40 and 20: two labels are missing, three are no classes.
ROWS = 100
X = np.arange(2.0 * ROWS).reshape(ROWS, 2)
MISSING, INVALID = (3, 50), (4, 41, 99)
Y = np.arange(ROWS) % 3.0
Y[list(MISSING)] = np.nan
Y[list(INVALID)] = 3, -1, 0.5
PARTS = 3


def lazy(values):
    return da.from_array(values, chunks=(40, *values.shape[1:]))


def cut(values):
    return [values[:40], values[40:80], values[80:]]


def frames(labels):
    """As ``dask.dataframe`` with the same parts."""
    divisions = [0, 40, 80, ROWS - 1]
    x, y = pd.DataFrame(X, columns=["a", "b"]), pd.Series(labels)
    whole = dd.from_pandas(x, npartitions=1), dd.from_pandas(y, npartitions=1)
    return tuple(collection.repartition(divisions=divisions) for collection in whole)


def bag():
    rows = list(zip(X, Y, strict=True))
    return db.Bag({("b", i): part for i, part in enumerate(cut(rows))}, "b", PARTS)


MASKED = pd.Series(Y).astype("Float64")
DATA = {
    "numpy": (X, Y),
    "torch": (torch.from_numpy(X), torch.from_numpy(Y)),
    "trees": ({"a": X, "b": X}, {"y": Y, "z": np.zeros(ROWS)}),
    "pandas": (pd.DataFrame(X), pd.Series(Y)),
    "pandas with a mask": (pd.DataFrame(X), MASKED),
    "dask.array": (lazy(X), lazy(Y)),
    "trees of dask.array": ({"a": lazy(X)}, (lazy(Y), lazy(np.zeros(ROWS)))),
    "dask.bag": (bag(), None),
    "delayed": ([dask.delayed(p) for p in zip(cut(X), cut(Y), strict=True)], None),
    "dask.dataframe": frames(Y),
    "dask.dataframe with a mask": frames(MASKED),
}


def assert_found(report, names):
    """The wrong labels, and nothing else, in parts of these names."""
    size = 40 if len(names) > 1 else ROWS
    places = [
        (names[row // size], row % size, kind)
        for row, kind in sorted(
            [(row, "missing label") for row in MISSING]
            + [(row, "invalid label") for row in INVALID]
        )
    ]
    assert (report.parts, report.rows) == (len(names), ROWS)
    assert counted(report) == {"missing label": 2, "invalid label": 3}
    assert [offender[:3] for offender in report.offenders] == places


@pytest.mark.parametrize("kind", DATA)
def test_rows_have_the_numbers_of_their_parts_or_of_memory(kind):
    x, y = DATA[kind]
    whole = kind in ("numpy", "torch", "trees") or "pandas" in kind

    report = validate(x, y, labels=3, client=False)

    assert_found(report, [f"part {i}" for i in range(1 if whole else PARTS)])


@pytest.mark.parametrize(
    ("write", "loader"),
    [
        (pd.DataFrame.to_csv, Csv(label="y", label_dtype="float32")),
        (pd.DataFrame.to_parquet, Parquet(label="y")),
    ],
    ids=["csv", "parquet"],
)
def test_rows_of_files_are_numbered_in_each(tmp_path, write, loader):
    for part, rows in enumerate(cut(pd.DataFrame({"a": X[:, 0], "y": Y}))):
        write(rows, tmp_path / f"{part}", index=False)

    report = validate(files(tmp_path, loader), labels=3, client=False)

    assert_found(report, [f"{tmp_path}/{i}" for i in range(PARTS)])
    assert report.files == PARTS


NAMES = [f"{label}/{i}.png" for label in ("ant", "bee") for i in range(6)]


class TestImages:
    """Several files in a part: each is named by itself."""

    @pytest.fixture(params=["loose", "packed"])
    def damage(self, request, tmp_path):
        """Makes some images of a folder unreadable, and gives its URL."""

        def damage(count):
            store = folder(tmp_path / "images", NAMES)
            for name in sorted(NAMES)[:count]:
                store.write(name, store.read(name)[:60])
            if request.param == "loose":
                return store.url
            url = str(tmp_path / "packed")
            pack(store.url, url=url, per_file=4, client=False)
            return url

        return damage

    @pytest.mark.parametrize(("count", "size"), [(1, None), (7, None), (12, 8)])
    def test_damaged_ones_are_named(self, damage, count, size):
        source = image_folder(damage(count), seed=None, size=size)

        report = validate(source, client=False)

        urls = [g.url(i) for g in source.groups for i in range(len(g.names))]
        wrong = {u for u in urls if any(n in u for n in sorted(NAMES)[:count])}
        assert counted(report) == {"unreadable": count}
        assert {offender.part for offender in report.offenders} == wrong
        assert (report.rows, report.files) == (len(NAMES) - count, len(NAMES))

    def test_one_of_another_size_is_named(self, tmp_path):
        store = folder(tmp_path, NAMES)
        store.write("bee/1.png", encoded(pixels(1, (9, 9, 3))))

        report = validate(image_folder(store.url), client=False)

        (offender,) = report.offenders
        assert offender[:3] == (store.url_of("bee/1.png"), None, "wrong shape")
        assert counted(report) == {"wrong shape": 1}


def test_packed_files_that_are_damaged_or_gone_are_named(tmp_path):
    options = {"url": tmp_path, "per_file": 40, "shuffle": False}
    pack(lazy(X), lazy(Y), **options, client=False)
    store = Store(str(tmp_path))
    names = store.names("*.safetensors")
    assert_found(
        validate(store.url, labels=3, client=False), [*map(store.url_of, names)]
    )
    store.delete(names[:1])
    store.write(names[1], b"torn")

    report = validate(store.url, labels=3, client=False)

    assert [offender[:3] for offender in report.offenders] == [
        (store.url_of(names[0]), None, "missing"),
        (store.url_of(names[1]), None, "unreadable"),
        (store.url_of(names[2]), 19, "invalid label"),
    ]


def test_files_on_a_server_are_read_with_the_options(s3_endpoint, bucket):
    store = Store(f"{bucket}/x", s3.options(s3_endpoint))
    store.write("a.csv", b"a,y\n1,0\n2,1\n")
    store.write("b.csv", b"a,y\n1,7\n")
    packed = f"{store.url}-packed"
    pack(store.url, url=packed, per_file=1, client=False, storage_options=store.options)

    for url in (store.url, packed):
        rows = files(url, Csv(label="y"), storage_options=store.options)
        report = validate(rows, labels=2, client=False)

        assert (report.rows, counted(report)) == (3, {"invalid label": 1})
