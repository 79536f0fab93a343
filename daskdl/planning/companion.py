"""A process that measures at the same time as others.

It is started by :mod:`daskdl.planning.company`, reads what to rehearse from its
standard input, says when it is ready, measures when it is told to, and goes on
rehearsing until the input ends, so that others are not measured alone.
"""

import dataclasses
import json
import os
import sys
import threading

import numpy as np

from daskdl.planning.company import GO, READY
from daskdl.planning.rehearsal import measure, prepared
from daskdl.planning.scene import Script
from daskdl.serialization import Packed


def main() -> None:
    """Rehearse until the input ends."""
    heard, told = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What the user's code prints, or a library of C's, is not meant for the other.
    os.dup2(2, 1)
    nbytes = int.from_bytes(heard.read(8), "little")
    payload = np.frombuffer(heard.read(nbytes), np.uint8)
    going = threading.Event()

    def listen() -> None:
        # Not the buffered reader: its lock would be in the way of an end by an error.
        while os.read(heard.fileno(), len(GO)):
            going.set()
        os._exit(0)  # at once, also in the middle of a long step: nobody waits for it

    threading.Thread(target=listen, daemon=True).start()
    script: Packed[Script] = Packed.of(payload, "model")
    with prepared(script) as scene:
        told.write(READY)
        told.flush()
        while not going.is_set():
            scene.step()
        costs = dataclasses.asdict(measure(scene))
        told.write(json.dumps(costs).encode() + b"\n")
        told.flush()
        while True:
            scene.step()


if __name__ == "__main__":
    main()
