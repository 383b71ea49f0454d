"""What the processes under torchrun tell each other: data that cannot execute, signed with a key
that they share.

torchrun's store is open to everybody who reaches it. It says one thing: the port at which rank 0
listens. All else goes through *lines*, connections of rank 0 to each other process of the run,
whose two ends show each other the key first. A message is JSON, in which tuples, bytes and the
classes of ``wire`` have names. Its signature covers its number and what both ends drew at random
for this connection, so that one of another connection, or said again, does not fit.
"""

import base64
import contextlib
import hmac
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from pytest_gtrainer.environment import private_folder
from pytest_gtrainer.ranks import wire

KEY_VARIABLE = "GT_TORCHRUN_KEY"
HANDSHAKE_SECONDS = 5.0
_ADVICE = f"set {KEY_VARIABLE} to the same secret on all nodes"
_SIGNATURE_BYTES = 32
# A lost node is noticed after about 10 + 3 * 5 s.
_PROBES = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Refused(Exception):
    """What came, or the key that would judge it, is not to be trusted; the message says why."""


def shared_key() -> bytes:
    """``GT_TORCHRUN_KEY``, else a file below the home directory, made at first use; Refused if it
    cannot be trusted.
    """
    if os.environ.get(KEY_VARIABLE):
        return os.environ[KEY_VARIABLE].encode()
    try:
        file = private_folder(Path.home() / ".cache" / "pytest-gtrainer") / "torchrun.key"
        made = file.with_name(f"{secrets.token_hex(8)}.new")
        made.touch(0o600)
        made.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(made, file)  # whole, and only where there is none
        made.unlink()
        with file.open("rb") as opened:
            lies, key = os.fstat(opened.fileno()), opened.read()
    except (OSError, RuntimeError) as error:
        raise Refused(
            f"there is no file for the key that signs messages of a run ({error}): {_ADVICE}"
        ) from error
    if lies.st_uid != os.getuid() or lies.st_mode & 0o022 or len(key) < _SIGNATURE_BYTES:
        raise Refused(
            f"{file} is another user's, can be written by others, or is too short: remove it, or "
            f"{_ADVICE}"
        )
    return key


def _received(sock: socket.socket) -> bytes:
    data = b""
    while len(data) < _SIGNATURE_BYTES:
        if not (more := sock.recv(_SIGNATURE_BYTES - len(data))):
            raise EOFError
        data += more
    return data


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256")


class Line:
    """A connection between rank 0, at the end ``rank_0``, and another node; Refused if that does
    not have the key.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, rank_0: bool) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.settimeout(
            HANDSHAKE_SECONDS if rank_0 else None
        )  # rank 0 answers when it first needs this node
        drawn = secrets.token_bytes(_SIGNATURE_BYTES)
        sock.sendall(drawn)
        other = _received(sock)
        both = os.environ.get("TORCHELASTIC_RUN_ID", "").encode()
        both += drawn + other if rank_0 else other + drawn
        keys = [_sign(key, who, both) for who in (b"rank 0", b"node")]
        self._own, self._other = keys if rank_0 else keys[::-1]
        self._sent = self._heard = 0
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.sendall(_sign(self._own, b"key"))
        if not hmac.compare_digest(_received(sock), _sign(self._other, b"key")):
            raise Refused(
                f"{sock.getpeername()[0]} does not have the key of this run, and is not heard; "
                f"{_ADVICE}"
            )
        sock.settimeout(None)
        self._channel = wire.Channel(os.dup(sock.fileno()), sock.detach())

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, message: object) -> None:
        """Send a message: TypeError if it holds what cannot be sent, OSError if the connection is
        closed.
        """
        data = encode(message)
        self._sent += 1
        self._channel.send(_sign(self._own, b"%d" % self._sent, data) + data)

    def take(self) -> list[Any]:
        """The messages that are whole; waits only if there is nothing. Refused if one is not
        signed, or said again.
        """
        self._channel.read()
        messages = []
        while self._channel.has_message():
            said = self._channel.receive()
            self._heard += 1
            signature, data = said[:_SIGNATURE_BYTES], said[_SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, _sign(self._other, b"%d" % self._heard, data)):
                raise Refused(
                    "a message on a connection between nodes is not signed with the key of this run"
                )
            messages.append(decode(data))
        return messages


_CLASSES: dict[str, Any] = {
    name: kind for name, kind in vars(wire).items() if hasattr(kind, "__match_args__")
}
_READ: dict[str, Any] = {
    "tuple": tuple,
    "dict": dict,
    "bytes": base64.b64decode,
    "int": lambda text: int(text, 16),
}


def encode(message: object) -> bytes:
    """A message as bytes; TypeError if it holds something else than builtin types and classes of
    ``wire``.

    >>> decode(encode(wire.FromRank(1, 2, {"a": (1, b"x", None)})))
    FromRank(team=1, rank=2, message={'a': (1, b'x', None)})
    """
    return json.dumps(_named(message)).encode()


def _named(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if abs(value) < 2**63 else {"int": hex(value)}
    if kind is list:
        return [_named(each) for each in value]
    if kind is tuple:
        return {"tuple": [_named(each) for each in value]}
    if kind is dict:
        return {"dict": [[_named(key), _named(content)] for key, content in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if _CLASSES.get(kind.__name__) is not kind:
        raise TypeError(
            f"{kind.__qualname__}, the type of {value!r:.80}, cannot be sent to another node"
        )
    return {kind.__name__: [_named(getattr(value, name)) for name in kind.__match_args__]}


def decode(data: bytes) -> Any:
    """The message that ``encode`` was given; Refused if it is none."""
    try:
        return json.loads(data, object_hook=_unnamed)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(
            f"what came from another node is no message ({error}): {data[:80]!r}"
        ) from error


def _unnamed(content: dict[str, Any]) -> Any:
    ((name, value),) = content.items()
    return _READ[name](value) if name in _READ else _CLASSES[name](*value)
