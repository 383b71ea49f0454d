"""Connections between the processes under torchrun: signed messages that cannot execute anything.

torchrun's store is open to everybody who reaches it. It holds one thing: the port at which rank 0
listens. All else goes through *lines*, connections of rank 0 to each other process of the run.
Both ends of a line first prove that they have the key of the run.

A message is JSON, in which tuples, bytes and the classes of ``wire`` have names. Its signature
covers its number and random bytes of both ends of the connection. So a message of another
connection, or a message that is repeated, has a wrong signature.
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
    """A message, or the key that would verify it, cannot be trusted; the text says why."""


def shared_key() -> bytes:
    """Return ``GT_TORCHRUN_KEY``, else a file below the home directory, made at first use.

    Raises:
        Refused: the file cannot be trusted.
    """
    if os.environ.get(KEY_VARIABLE):
        return os.environ[KEY_VARIABLE].encode()
    try:
        file = private_folder(Path.home() / ".cache" / "pytest-gtrainer") / "torchrun.key"
        made = file.with_name(f"{secrets.token_hex(8)}.new")
        made.touch(0o600)
        made.write_text(secrets.token_hex(32))
        # Processes of one node race here. A link appears with its whole content, and fails if
        # another process was first.
        with contextlib.suppress(FileExistsError):
            os.link(made, file)
        made.unlink()
        with file.open("rb") as opened:
            status, key = os.fstat(opened.fileno()), opened.read()
    except (OSError, RuntimeError) as error:
        raise Refused(
            f"there is no file for the key that signs messages of a run ({error}): {_ADVICE}"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or len(key) < _SIGNATURE_BYTES:
        raise Refused(
            f"{file} is another user's, can be written by others, or is too short: remove it, or "
            f"{_ADVICE}"
        )
    return key


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256")


class Line:
    """A connection between rank 0 and another process of the run."""

    def __init__(self, sock: socket.socket, key: bytes, *, rank_0: bool) -> None:
        """Prove to the other end that this one has the key. ``rank_0`` says which end this is.

        Raises:
            Refused: the other end does not have the key.
        """
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        # Rank 0 answers when it first needs this node, which may take hours.
        sock.settimeout(HANDSHAKE_SECONDS if rank_0 else None)
        own_nonce = secrets.token_bytes(_SIGNATURE_BYTES)
        sock.sendall(own_nonce)
        other_nonce = _read_exactly(sock, _SIGNATURE_BYTES)
        nonces = own_nonce + other_nonce if rank_0 else other_nonce + own_nonce

        # The two ends sign with different keys, so that neither can be sent its own messages.
        connection = os.environ.get("TORCHELASTIC_RUN_ID", "").encode() + nonces
        rank_0_key, node_key = _sign(key, b"rank 0", connection), _sign(key, b"node", connection)
        self._own, self._other = node_key, rank_0_key
        if rank_0:
            self._own, self._other = rank_0_key, node_key
        self._sent = self._received = 0
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.sendall(_sign(self._own, b"key"))
        proof = _read_exactly(sock, _SIGNATURE_BYTES)
        if not hmac.compare_digest(proof, _sign(self._other, b"key")):
            raise Refused(
                f"{sock.getpeername()[0]} does not have the key of this run, and is not heard; "
                f"{_ADVICE}"
            )
        sock.settimeout(None)
        self._channel = wire.Channel(os.dup(sock.fileno()), sock.detach())

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, message: object) -> None:
        """Sign a message and send it.

        Raises:
            TypeError: the message holds a value that cannot be sent.
            OSError: the connection is closed.
        """
        data = encode(message)
        self._sent += 1
        self._channel.send(_sign(self._own, b"%d" % self._sent, data) + data)

    def take(self) -> list[Any]:
        """Return the messages that have come completely; wait only while nothing has come.

        Raises:
            Refused: a signature is wrong.
        """
        self._channel.read()
        messages = []
        while self._channel.has_message():
            signed = self._channel.receive()
            self._received += 1
            signature, data = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
            expected = _sign(self._other, b"%d" % self._received, data)
            if not hmac.compare_digest(signature, expected):
                raise Refused(
                    "a message on a connection between nodes is not signed with the key of this run"
                )
            messages.append(decode(data))
        return messages


_CLASSES: dict[str, Any] = {
    name: kind for name, kind in vars(wire).items() if hasattr(kind, "__match_args__")
}
_BUILTINS: dict[str, Any] = {
    "tuple": tuple,
    "dict": dict,
    "bytes": base64.b64decode,
    "int": lambda text: int(text, 16),
}


def encode(message: object) -> bytes:
    """Return a message as bytes.

    Raises:
        TypeError: it holds something else than builtin types and classes of ``wire``.

    >>> decode(encode(wire.FromRank(1, 2, {"a": (1, b"x", None)})))
    FromRank(team=1, rank=2, message={'a': (1, b'x', None)})
    """
    return json.dumps(_tagged(message)).encode()


def _tagged(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        # JSON allows any size, but Python refuses to parse more than 4,300 digits.
        return value if abs(value) < 2**63 else {"int": hex(value)}
    if kind is list:
        return [_tagged(each) for each in value]
    if kind is tuple:
        return {"tuple": [_tagged(each) for each in value]}
    if kind is dict:
        return {"dict": [[_tagged(key), _tagged(content)] for key, content in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if _CLASSES.get(kind.__name__) is not kind:
        raise TypeError(
            f"{kind.__qualname__}, the type of {value!r:.80}, cannot be sent to another node"
        )
    return {kind.__name__: [_tagged(getattr(value, name)) for name in kind.__match_args__]}


def decode(data: bytes) -> Any:
    """Return the message that ``encode`` was given; raise Refused if ``data`` is none."""
    try:
        return json.loads(data, object_hook=_untagged)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(
            f"what came from another node is no message ({error}): {data[:80]!r}"
        ) from error


def _untagged(content: dict[str, Any]) -> Any:
    ((name, value),) = content.items()
    if name in _BUILTINS:
        return _BUILTINS[name](value)
    return _CLASSES[name](*value)
