"""Adds contexts to a store until it is killed, over and over; stdout says which were acknowledged. Arguments: FOLDER ROUNDS."""

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from dodo.serving.store import Store
from tests.serving.contexts import made_up


def add_without_end(folder: Path, start: int, said: int) -> None:
    """Each is acknowledged by a line of its own, written at once."""
    store = Store(folder)
    for seed in range(start, start + 1_000_000):
        context = store.add(made_up(seed=seed, states=200, tokens=800, width=64))
        os.write(said, f"{context.id} {context.sha256}\n".encode())
        if seed % 3 == 0:
            store.delete(context.id)
            os.write(said, f"-{context.id}\n".encode())


def main() -> None:
    """Kill a process at a random moment, so many times."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(0)
    for i in range(rounds):
        heard, said = os.pipe()
        child = os.fork()
        if child == 0:
            add_without_end(folder, 1_000 * i, said)
        if i % 4:  # one in four may be killed while it opens the store
            select.select([heard], [], [], 60)
        time.sleep(chance.random() * 0.15)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(said)
        while lines := os.read(heard, 2**16):
            os.write(1, lines)
        os.close(heard)


if __name__ == "__main__":
    main()
