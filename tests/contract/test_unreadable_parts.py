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

BAD = (
    *(DataError, ValueError, RuntimeError, KeyError, OSError, EOFError, SyntaxError),
    *(csv.Error, lzma.LZMAError, pickle.UnpicklingError, struct.error, zlib.error),
    *(tarfile.ReadError, zipfile.BadZipFile),
)
NOT_BAD = (OptionError, ModelError, ChannelError, WaitTimeoutError, LostPieceError)


@pytest.mark.parametrize("kind", BAD)
def test_what_readers_raise_is_about_the_data(kind):
    assert issubclass(kind, UNREADABLE)
    assert not issubclass(NameError, UNREADABLE)
    assert blames_data(kind("torn"))


@pytest.mark.parametrize("kind", NOT_BAD)
def test_what_is_about_something_else_is_never_left_out(kind):
    error = kind("slow")

    assert not is_left_out(error, "box 3", True)
    assert error.__notes__ == ["in box 3"]


def test_a_bad_part_is_left_out_if_it_may_be_else_its_error_names_it(caplog):
    assert is_left_out(EOFError("torn"), "box 3", True)
    assert caplog.messages == ["box 3 is left out: torn"]

    error = EOFError("torn")
    assert not is_left_out(error, "box 3", False)
    assert error.__notes__ == ["in box 3"]
