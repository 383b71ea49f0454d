"""Connections to rank 0 that nothing is ever said on: one that closes tells that its process has ended.

For ranks on other nodes, whose processes rank 0 cannot see. The operating system closes the
connection of a process that dies; if the whole node is lost, probes that go unanswered do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import select
import socket
import threading
from collections.abc import Callable

import torch.distributed as dist

_KEY = "line"
_TOKEN_BYTES = 16
CONNECT_SECONDS = 5.0
# A lost node is noticed after about 10 + 3 * 5 s.
_PROBES = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


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
        store.set(_KEY, pickle.dumps((list(hosts), self._server.getsockname()[1], self._token)))
        threading.Thread(target=self._listen, name="gtrainer-lines", daemon=True).start()

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._server, *self._ranks], [], [])
            for sock in ready:
                if sock is self._server:
                    self._take_in()
                elif not _has_data(sock):
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
    hosts, port, token = pickle.loads(store.get(_KEY))
    for host in hosts:
        with contextlib.suppress(OSError):
            sock = socket.create_connection((host, port), CONNECT_SECONDS)
            sock.settimeout(None)
            _probe(sock)
            sock.sendall(token + rank.to_bytes(4, "big"))
            return sock
    return None


def _has_data(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1))
    except OSError:
        return False


def _probe(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
