"""Checkpoints in a folder: which are whole, which is the newest, which go."""

import logging

import pytest

from daskdl.callbacks import Checkpoint
from daskdl.data.stores.store import Store
from daskdl.errors import DataError, OptionError, SaveError
from daskdl.saving.checkpoints import (
    COMMON,
    CheckpointPlan,
    Part,
    Series,
    Stamp,
    complete_at,
)
from tests.support.written import damaged, put, put_part, write_part


def plan_of(series, keep_last=1, keep_every=None):
    rule = Checkpoint(series.store.url, keep_last=keep_last, keep_every=keep_every)
    return CheckpointPlan(rule.url, rule, "fit", "run", 1)


class TestWhole:
    def test_it_is_when_all_parts_are_there(self, series):
        stamp = put(series, 3, members=[0, 2], epoch=5)

        found = complete_at(series.folder(3))

        assert (found.stamp, found.members) == (stamp, [0, 2])
        assert found.header["epoch"] == 5
        assert found.store.url.endswith("checkpoint-000003")

    @pytest.mark.parametrize("name", ["common.json", "replica-0.json"])
    def test_without_one_of_its_parts_it_is_not(self, series, name):
        put(series, 3)
        series.folder(3).delete([name])

        assert complete_at(series.folder(3)) is None
        assert series.newest() is None

    def test_one_with_a_part_of_another_run_is_not(self, series):
        put(series, 3)
        put_part(series, Stamp("fit", "another run", 3), 1)

        assert complete_at(series.folder(3)) is None

    def test_parts_of_replicas_that_are_not_in_it_do_not_count(self, series):
        put(series, 3)
        put_part(series, Stamp("fit", "another run", 3), 2)

        assert complete_at(series.folder(3)).members == [0, 1]

    @pytest.mark.parametrize("name", ["common.json", "replica-1.json"])
    def test_one_that_is_damaged_is_an_error(self, series, name):
        put(series, 3)
        damaged(series.folder(3), name)

        with pytest.raises(SaveError, match=r"cannot read .*checkpoint-000003"):
            complete_at(series.folder(3))

    @pytest.mark.parametrize(
        "members",
        [None, [], 2, "01", ["0"], ["../../x"], [0, 0], [-1], [1.0], [True], [[0]]],
        ids=repr,
    )
    def test_replicas_that_cannot_be_are_refused(self, series, members):
        put(series, 3)
        said = {"members": members, "count": 3}
        write_part(Part(series.folder(3), COMMON), Stamp("fit", "run", 3), said, {})

        with pytest.raises(SaveError, match="is damaged: its replicas are"):
            complete_at(series.folder(3))

    @pytest.mark.parametrize("count", [None, "1", 0, True, 1.0], ids=repr)
    def test_a_count_that_cannot_be_is_refused(self, series, count):
        put(series, 3, count=count)

        with pytest.raises(SaveError, match="is damaged: it is number"):
            complete_at(series.folder(3))

    def test_a_folder_without_any_is_none(self, store):
        assert complete_at(store) is None

    def test_a_store_that_cannot_be_read_is_an_error(self, series, monkeypatch):
        def fails(self, name):
            raise DataError("no permission")

        monkeypatch.setattr(Store, "exists", fails)

        with pytest.raises(SaveError, match=r"cannot read .*: no permission"):
            complete_at(series.folder(1))


class TestNewest:
    def test_it_is_the_last_whole_one(self, series):
        for number in (9, 10, 11):
            put(series, number)
        series.folder(11).delete(["replica-1.json"])

        assert series.numbers() == [9, 10, 11]
        assert series.newest().stamp.number == 10

    def test_a_folder_that_is_not_there_has_none(self, series):
        assert series.numbers() == []
        assert series.newest() is None

    def test_other_folders_and_files_are_passed_over(self, series):
        for name in ("checkpoint-12/x", "checkpoint-000013x/x", "checkpoint-000014"):
            series.store.write(name, b"")
        put(series, 2)

        assert series.numbers() == [2]

    def test_numbers_are_not_in_the_order_of_the_alphabet(self, series):
        for number in (999_999, 1_000_000):
            put(series, number)

        assert series.newest().stamp.number == 1_000_000

    def test_an_older_one_does_not_take_the_place_of_a_damaged_one(self, series):
        put(series, 1)
        put(series, 2)
        damaged(series.folder(2), "common.json")

        with pytest.raises(SaveError, match="checkpoint-000002"):
            series.newest()
        assert complete_at(series.folder(1)) is not None

    def test_a_folder_that_cannot_be_listed_is_an_error(self, series, monkeypatch):
        def fails(self):
            raise DataError("no permission")

        monkeypatch.setattr(Store, "folders", fails)

        with pytest.raises(SaveError, match=r"cannot list .*: no permission"):
            series.numbers()

    @pytest.mark.parametrize("url", [None, 3, b"x", ["x"]], ids=repr)
    def test_what_is_no_url_is_refused(self, url):
        with pytest.raises(OptionError, match="url must be a URL or a path of a fold"):
            Series.at(url)


class TestPrune:
    def test_only_those_that_are_kept_stay(self, series):
        for number in range(1, 8):
            put(series, number)

        plan_of(series, keep_last=2, keep_every=3).prune()

        assert series.numbers() == [3, 6, 7]
        assert complete_at(series.folder(3)) is not None
        assert not [name for name in series.store.names() if "000005" in name]

    def test_it_counts_in_the_fit_and_not_in_the_folder(self, series):
        for number in range(11, 16):
            put(series, number, count=number - 10)

        plan_of(series, keep_every=2).prune()

        assert series.numbers() == [12, 14, 15]

    def test_those_of_other_fits_stay(self, series):
        for number in (1, 2):
            put(series, number, origin="another fit")
        for number in (3, 4):
            put(series, number)

        plan_of(series).prune()

        assert series.numbers() == [1, 2, 4]

    def test_those_of_earlier_runs_of_the_fit_go(self, series):
        for number in (1, 2):
            put(series, number, run="earlier run")
        put(series, 3)

        plan_of(series).prune()

        assert series.numbers() == [3]

    def test_one_that_was_broken_off_before_goes(self, series):
        put_part(series, Stamp("fit", "run", 1), 0)
        put(series, 2)

        plan_of(series, keep_last=None).prune()

        assert series.numbers() == [2]
        assert not [name for name in series.store.names() if "000001" in name]

    def test_one_that_is_being_written_stays(self, series):
        put(series, 2)
        put_part(series, Stamp("fit", "run", 3), 1)

        plan_of(series).prune()

        assert series.numbers() == [2, 3]

    def test_one_that_is_damaged_stays(self, series, caplog):
        for number in (1, 2):
            put(series, number)
        damaged(series.folder(1), "common.json")

        with caplog.at_level(logging.WARNING):
            plan_of(series).prune()

        assert series.numbers() == [1, 2]
        assert "is left where it is" in caplog.text

    def test_its_common_part_is_deleted_first(self, series, monkeypatch):
        for number in (1, 2):
            put(series, number)

        def dies(self):
            raise DataError("gone away")

        monkeypatch.setattr(Store, "delete_all", dies)

        with pytest.raises(SaveError, match=r"cannot delete .*000001: gone away"):
            plan_of(series).prune()
        assert complete_at(series.folder(1)) is None
        assert series.folder(1).exists("replica-0.json")
