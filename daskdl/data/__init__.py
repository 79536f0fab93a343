"""Data where they are: files, batch files, images, normalisers, checks.

What `Trainer.fit` takes without any of these, arrays, tables, Dask's collections and
datasets of torch, is on the page on data.
"""

from daskdl.data.checking.report import Report
from daskdl.data.checking.validation import validate
from daskdl.data.datasets.iterable_style import Sharded
from daskdl.data.exports.export import export
from daskdl.data.exports.manifest import Manifest
from daskdl.data.exports.source import BatchFiles
from daskdl.data.files import Files
from daskdl.data.formats.csv import Csv
from daskdl.data.formats.loaders import FromBytes, OneExample
from daskdl.data.formats.npy import Npy
from daskdl.data.formats.npz import Npz
from daskdl.data.formats.parquet import Parquet
from daskdl.data.formats.safetensors import Safetensors
from daskdl.data.images.image_folder import image_folder
from daskdl.data.normalising.normalisation import Normalisation, normaliser_from_dict
from daskdl.data.normalising.normalisers import MinMax, Standardize
from daskdl.data.shards.packing import file_batches
from daskdl.data.shards.source import Shards
from daskdl.data.source import Facts, Source

__all__ = [
    "BatchFiles",
    "Csv",
    "Facts",
    "Files",
    "FromBytes",
    "Manifest",
    "MinMax",
    "Normalisation",
    "Npy",
    "Npz",
    "OneExample",
    "Parquet",
    "Report",
    "Safetensors",
    "Sharded",
    "Shards",
    "Source",
    "Standardize",
    "export",
    "file_batches",
    "image_folder",
    "normaliser_from_dict",
    "validate",
]
