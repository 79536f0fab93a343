"""Six parts of the tests that `make test` leaves out: ``make test-part N`` runs one.

Each part takes less than 15 minutes on two idle cores. A test belongs to the first part
that has a pattern for its file, or else to the last part, so that the parts together
are what ``make test-all`` adds to ``make test``.
"""

from fnmatch import fnmatchcase

PARTS = {
    1: ["tests/examples/*"],
    2: ["tests/network/*", "tests/learning/*", "tests/chaos/*"],
    3: [
        "tests/cluster/test_kills.py",
        "tests/cluster/test_all_lost.py",
        "tests/cluster/test_lost_while_reading.py",
        "tests/cluster/test_elastic.py",
        "tests/cluster/test_starting.py",
        "tests/cluster/test_waits.py",
    ],
    4: [
        "tests/cluster/test_channel_*.py",
        "tests/cluster/test_mesh.py",
        "tests/cluster/test_tls.py",
        "tests/cluster/test_runs.py",
        "tests/cluster/test_clusters.py",
        "tests/cluster/test_installed.py",
        "tests/cluster/test_dashboard.py",
        "tests/cluster/test_command_line.py",
    ],
    5: [
        "tests/cluster/test_checkpoints.py",
        "tests/cluster/test_kinds_alike.py",
        "tests/cluster/test_data_passes.py",
        "tests/cluster/test_*export*.py",
        "tests/cluster/test_fit_from_stores.py",
        "tests/cluster/test_scattered_parts.py",
        "tests/cluster/test_shuffled_data.py",
        "tests/cluster/test_packing.py",
        "tests/cluster/test_lazy_data.py",
        "tests/cluster/test_bigger_than_memory.py",
        "tests/cluster/test_predict*.py",
        "tests/cluster/test_evaluation.py",
        "tests/cluster/test_example_scores.py",
    ],
    6: ["*"],
}


def part_of(node_id: str) -> int:
    """The part of a test."""
    path = node_id.partition("::")[0]
    return next(
        number
        for number, patterns in PARTS.items()
        if any(fnmatchcase(path, pattern) for pattern in patterns)
    )
