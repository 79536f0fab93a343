"""Results on a cluster, without one."""

from dask._task_spec import TaskRef


class Held(TaskRef):
    """As much of a future of Dask's as data made of results need."""

    __module__ = "distributed.client"  # by which they are told

    def __init__(self, key, value):
        super().__init__(key)
        self._value = value
        self.asked = 0

    def __reduce__(self):
        raise AssertionError("a future must not travel")

    def result(self):
        self.asked += 1
        return self._value


def future_of(value, key):
    """A future that has its value already."""
    return Held(key, value)
