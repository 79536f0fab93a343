"""Parts that cannot be read: which errors say so, and what is done about such a part.

Whoever loads parts asks here, so that all leave out the same ones.
"""

import csv
import logging
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib

from daskdl.data.rehearsal import MISFITS
from daskdl.errors import DaskDLError, DataError, LostPieceError

logger = logging.getLogger(__name__)

# What reading raises, whoever does it. Not Exception: what is none of these says
# nothing about the data, and should be seen under its own name.
UNREADABLE = (
    *MISFITS,
    OSError,
    EOFError,
    SyntaxError,  # Pillow's, of a damaged PNG
    csv.Error,
    lzma.LZMAError,
    pickle.UnpicklingError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


def blames_data(error: BaseException) -> bool:
    """Whether it says that the data are bad, rather than what else is to be changed.

    Example:
        >>> blames_data(ValueError("torn")), blames_data(DataError("torn"))
        (True, True)
        >>> from daskdl.errors import OptionError
        >>> blames_data(OptionError("images are decoded with Pillow; install it"))
        False
    """
    if isinstance(error, DaskDLError):
        return isinstance(error, DataError) and not isinstance(error, LostPieceError)
    return True


def is_left_out(error: BaseException, name: str, skips: bool) -> bool:
    """Whether a part is done without; the log says so, else the error names it.

    Args:
        error: One of `UNREADABLE`; gets a note if it is to be raised again.
        name: Of the part.
        skips: Whether parts that cannot be read are left out.
    """
    if not skips or not blames_data(error):
        error.add_note(f"in {name}")
        return False
    logger.warning("%s is left out: %s", name, error)
    return True
