"""Which parts are left out, and which end a run."""

import csv
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib

import pytest

from daskdl.data.checks import UNREADABLE, blames_data, is_left_out
from daskdl.errors import (
    ChannelError,
    DataError,
    LostPieceError,
    ModelError,
    OptionError,
    WaitTimeoutError,
)

BAD = [
    DataError("no rows"),
    ValueError("torn"),
    RuntimeError("torn"),
    KeyError("mine"),
    OSError("gone"),
    EOFError("torn"),
    SyntaxError("not a PNG file"),
    csv.Error("torn"),
    lzma.LZMAError("torn"),
    pickle.UnpicklingError("torn"),
    struct.error("torn"),
    tarfile.ReadError("torn"),
    zipfile.BadZipFile("torn"),
    zlib.error("torn"),
]
OF_SOMETHING_ELSE = [
    OptionError("images need Pillow"),
    ModelError("a module is missing here"),
    ChannelError("the run is over"),
    WaitTimeoutError("slow"),
    LostPieceError("its worker is gone"),
]


@pytest.mark.parametrize("error", BAD, ids=repr)
def test_what_readers_raise_is_about_the_data(error):
    assert isinstance(error, UNREADABLE)
    assert blames_data(error)


@pytest.mark.parametrize("error", OF_SOMETHING_ELSE, ids=repr)
@pytest.mark.parametrize("skips", [True, False])
def test_what_is_about_something_else_is_never_left_out(error, skips):
    assert not is_left_out(error, "box 3", skips)
    assert error.__notes__[-1] == "in box 3"


@pytest.mark.parametrize("error", [NameError("typo"), MemoryError()], ids=repr)
def test_a_mistake_in_a_program_says_nothing_about_the_data(error):
    assert not isinstance(error, UNREADABLE)


def test_a_bad_part_is_left_out_if_it_may_be_else_its_error_names_it(caplog):
    assert is_left_out(EOFError("torn"), "box 3", True)
    assert caplog.messages == ["box 3 is left out: torn"]

    error = EOFError("torn")
    assert not is_left_out(error, "box 3", False)
    assert error.__notes__ == ["in box 3"]
