"""Sources of parts that a test writes down; results of a cluster without one."""

from dask._task_spec import TaskRef
from distributed import Future

from daskdl.data import batching
from daskdl.data.source import Source


class Parts(Source):
    """Pairs (x, y), one for each part; an exception is raised when it is loaded."""

    lengths = None
    first_rows = None

    def __init__(self, *pairs):
        self.pairs = pairs
        self.parts = len(pairs)

    def load(self, part):
        pair = self.pairs[part]
        if isinstance(pair, BaseException):
            raise pair
        return pair

    def name(self, part):
        return f"box {part}"


class Streamed(Parts):
    """The same, of which a part comes a few rows at a time."""

    sequential = True

    def __init__(self, *pairs, step=2):
        super().__init__(*pairs)
        self.step = step

    def load(self, part):
        raise AssertionError("a part that may not fit into memory was loaded")

    def stream(self, part, rows):
        x, y = super().load(part)
        for start in range(0, batching.length(x), self.step):
            few = slice(start, start + self.step)
            yield batching.rows(x, few), None if y is None else batching.rows(y, few)


def unlabelled(*arrays, kind=Parts):
    """Parts of x alone."""
    return kind(*((x, None) for x in arrays))


class Held(Future):
    """As much of a future of Dask's as data made of results need."""

    def __init__(self, key, value):
        TaskRef.__init__(self, key)  # without a client
        self._value = value
        self.asked = 0

    def __del__(self):
        pass

    def __reduce__(self):
        raise AssertionError("a future must not travel")

    def result(self):
        self.asked += 1
        return self._value


def future_of(value, key):
    """A future that has its value already."""
    return Held(key, value)
