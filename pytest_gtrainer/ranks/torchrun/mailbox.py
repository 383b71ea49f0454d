"""How the processes of a run reach each other, and notice that another one has ended.

A *mailbox* is a counter and numbered keys in the store that torchrun's rendezvous has made: who sends takes a number
and sets the key, the one reader takes the keys in order. Messages are pickled; all processes run the same code.

A *line* is a connection to rank 0 that nothing is ever said on, for ranks on other nodes, whose processes rank 0 cannot
see. The operating system closes the connection of a process that dies; if the whole node is lost, probes that go
unanswered do. Processes of the same node watch each other by their numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import queue
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pytest_gtrainer.ranks.team import readable

DRIVER = "driver"
FOREVER = timedelta(days=7)
CONNECT_SECONDS = 5.0
_LINE_KEY = "line"
_TOKEN_BYTES = 16
# linux/pidfd.h: the first form of struct pidfd_info, whose first field is a mask and whose last one the status
_PIDFD_GET_INFO, _PIDFD_INFO_BYTES, _PIDFD_INFO_EXIT = 0xC040FF0B, 64, 1 << 3
# A lost node is noticed after about 10 + 3 * 5 s.
_PROBES = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def connect() -> dist.Store:
    """The store of torchrun's rendezvous."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore("gtrainer", store)


def mailbox_of(rank: int) -> str:
    return f"rank{rank}"


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

    def __init__(self, store: dist.Store, name: str, sort: Callable[[object], bool], lost: Callable[[], None]) -> None:
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


class Lines:
    """Rank 0's end.

    Args:
        ended: called in a thread with the rank whose connection has closed.
    """

    def __init__(self, store: dist.Store, ended: Callable[[int], None]) -> None:
        self._ended, self._token = ended, secrets.token_bytes(_TOKEN_BYTES)
        self._server = socket.create_server(("", 0))
        self._ranks: dict[socket.socket, int] = {}
        hosts = dict.fromkeys((socket.gethostname(), os.environ.get("MASTER_ADDR", "localhost")))
        store.set(_LINE_KEY, pickle.dumps((list(hosts), self._server.getsockname()[1], self._token)))
        threading.Thread(target=self._listen, name="gtrainer-lines", daemon=True).start()

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._server, *self._ranks], [], [])
            for sock in ready:
                if sock is self._server:
                    self._take_in()
                    continue
                with contextlib.suppress(OSError):
                    if sock.recv(1):
                        continue
                self._ended(self._ranks.pop(sock))
                sock.close()

    def _take_in(self) -> None:
        sock, _ = self._server.accept()
        sock.settimeout(CONNECT_SECONDS)
        with contextlib.suppress(OSError):
            said = sock.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if said[:_TOKEN_BYTES] == self._token:
                _probe(sock)
                self._ranks[sock] = int.from_bytes(said[_TOKEN_BYTES:], "big")
                return
        sock.close()


def hold_line(store: dist.Store, rank: int) -> socket.socket | None:
    """A connection to rank 0, to be kept until the process ends; None if none can be had."""
    hosts, port, token = pickle.loads(store.get(_LINE_KEY))
    for host in hosts:
        with contextlib.suppress(OSError):
            sock = socket.create_connection((host, port), CONNECT_SECONDS)
            sock.settimeout(None)
            _probe(sock)
            sock.sendall(token + rank.to_bytes(4, "big"))
            return sock
    return None


def _probe(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def watch_neighbour(pid: int, tell: Callable[[int | None], None]) -> None:
    """Call ``tell`` from a thread when a process of this machine, no child of ours, ends.

    It gets the status as ``subprocess`` has it, None if nothing knows it any more; see ``ended_with``.
    """

    def wait() -> None:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            tell(None)
            return
        while not readable([fd], 3600.0):
            pass
        status = ended_with(fd, pid)
        os.close(fd)
        tell(status)

    threading.Thread(target=wait, name="gtrainer-neighbour", daemon=True).start()


def ended_with(fd: int, pid: int) -> int | None:
    """The status, as ``subprocess`` has it, of a process that has ended, from its pidfd and number.

    Its parent may forget it at any moment: torchrun looks every 0.1 s. Linux 6.15 and later tell by the pidfd even
    then; under an older one it is None.
    """
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _PIDFD_INFO_BYTES - 4)[0])
    return None
