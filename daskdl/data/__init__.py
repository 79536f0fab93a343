"""Sources of data: files, packed files and images; normalizers; validation.

`Trainer.fit` also takes arrays, tables, Dask collections, torch datasets and
`DataLoader` objects directly; see the page on data.
"""

from daskdl.data.files import files
from daskdl.data.formats import Csv, Npy, Npz, Parquet, Safetensors
from daskdl.data.images import image_folder
from daskdl.data.inputs import dataset
from daskdl.data.normalize import MinMax, Normalization, Standardize
from daskdl.data.packing import pack
from daskdl.data.source import Facts, Source
from daskdl.data.torch_datasets import Stream
from daskdl.data.validate import Report, validate

__all__ = [
    "Csv",
    "Facts",
    "MinMax",
    "Normalization",
    "Npy",
    "Npz",
    "Parquet",
    "Report",
    "Safetensors",
    "Source",
    "Standardize",
    "Stream",
    "dataset",
    "files",
    "image_folder",
    "pack",
    "validate",
]
