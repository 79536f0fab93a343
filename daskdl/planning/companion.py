"""A process beside another one that measures.

It is started by :mod:`daskdl.planning.company`, reads what to rehearse from its
standard input, says when it is ready, and ends with the input.
"""

import os
import sys
import threading

import numpy as np

from daskdl.packed import Packed
from daskdl.planning.company import READY
from daskdl.planning.rehearsal import prepared
from daskdl.planning.scene import Script


def main() -> None:
    """Rehearse until the input ends."""
    heard, told = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what the user's code prints is not meant for the other
    nbytes = int.from_bytes(heard.read(8), "little")
    payload = np.frombuffer(heard.read(nbytes), np.uint8)

    def listen() -> None:
        # Not the buffered reader: its lock would be in the way of an end by an error.
        while os.read(heard.fileno(), 1):
            pass
        os._exit(0)  # at once, also in the middle of a long step: nobody waits for it

    threading.Thread(target=listen, daemon=True).start()
    script: Packed[Script] = Packed.of(payload, "model")
    with prepared(script) as scene:
        told.write(READY)
        told.flush()
        while True:
            scene.step()


if __name__ == "__main__":
    main()
