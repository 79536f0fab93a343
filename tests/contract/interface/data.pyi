class Source:
    def load(self, part): ...

class Csv:
    def __init__(
        self,
        features=None,
        label=None,
        *,
        dtype="float32",
        label_dtype="int64",
        classes=None,
        header=True,
        delimiter=",",
    ): ...

class Facts(tuple):
    def __init__(self, rows, first): ...

class MinMax:
    def __init__(self, low=0.0, high=1.0, *, per="feature", only=None): ...
    def fit(self, X, y=None, *, client=None, loader=None, storage_options=None): ...

class Normalization:
    def __call__(self, batch): ...
    def transform(self, batch): ...
    def inverse(self, x): ...
    def to_dict(self): ...
    @classmethod
    def from_dict(cls, plain): ...

class Npy:
    def __init__(self, label_column=None): ...

class Npz:
    def __init__(self, x="x", y="y"): ...

class Parquet:
    def __init__(
        self,
        features=None,
        label=None,
        *,
        dtype="float32",
        label_dtype=None,
        classes=None,
    ): ...

class Report:
    def __init__(self, parts, files, rows, counts, offenders=()): ...
    def summary(self): ...
    def to_pandas(self): ...

class Safetensors:
    def __init__(self, x="x", y="y"): ...

class Stream:
    def __init__(self, function, parts=None): ...

class Standardize:
    def __init__(self, epsilon=0.0, *, per="feature", only=None): ...
    def fit(self, X, y=None, *, client=None, loader=None, storage_options=None): ...

def files(
    url,
    loader=None,
    *,
    pattern=None,
    one_example=False,
    classes=None,
    files_per_part=None,
    storage_options=None,
): ...
def image_folder(
    url,
    *,
    size=None,
    channels=3,
    scale=0.00392156862745098,
    split=None,
    labels=None,
    classes=None,
    extensions=...,
    files_per_part=64,
    seed=0,
    storage_options=None,
): ...
def pack(
    X,
    y=None,
    *,
    url,
    per_file,
    shuffle=True,
    seed=0,
    transform=None,
    classes=None,
    root=None,
    client=None,
    storage_options=None,
    overwrite=False,
): ...
def validate(
    X,
    y=None,
    *,
    shapes=None,
    dtypes=None,
    labels=None,
    loader=None,
    client=None,
    storage_options=None,
): ...
