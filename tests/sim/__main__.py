"""See `tests.sim.seeds`."""

import sys

from tests.sim.seeds import main

if __name__ == "__main__":
    sys.exit(main())
