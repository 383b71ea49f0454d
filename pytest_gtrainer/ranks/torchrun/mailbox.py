"""Messages between the processes of a run, through the store that torchrun's rendezvous has made.

A *mailbox* is a counter and numbered keys: who sends takes a number and sets the key, the one
reader takes the keys in order. Messages are pickled; all processes run the same code.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

FOREVER = timedelta(days=7)


class Mailbox:
    """A mailbox of that name, on a connection of its own to the store.

    A connection serves one request at a time, so each thread that waits needs one.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store.clone(), name
        self._next = 1

    def put(self, message: object) -> None:
        number = self._store.add(f"{self._name}/count", 1)
        self._store.set(f"{self._name}/{number}", pickle.dumps(message))

    def take(self) -> object:
        """Wait for the next message; a process reads only its own mailbox, from one thread."""
        key = f"{self._name}/{self._next}"
        self._store.wait([key], FOREVER)  # a limit that is reached would make torch write warnings
        data = self._store.get(key)
        self._store.delete_key(key)
        self._next += 1
        return pickle.loads(data)


class Reader:
    """A thread that takes the messages of a mailbox.

    Args:
        sort: called in the thread with every message; what it returns True for is not kept.
        lost: called in the thread if the store has gone.
    """

    def __init__(
        self, store: dist.Store, name: str, sort: Callable[[object], bool], lost: Callable[[], None]
    ) -> None:
        self.messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._box, self._sort, self._lost = Mailbox(store, name), sort, lost
        self._to_itself = Mailbox(store, name)
        self._closed = False
        self._thread = threading.Thread(target=self._read, name=f"gtrainer-{name}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._closed:
            try:
                message = self._box.take()
            except RuntimeError:  # all of torch's errors of a store that is gone
                if not self._closed:
                    self._lost()
                return
            if message is not None and not self._sort(message):
                self.messages.put(message)

    def close(self) -> None:
        self._closed = True
        self._to_itself.put(None)
        self._thread.join(5.0)
