"""The way of process 0's decisions to the other processes of a group, while an engine runs: messages over sockets.

`processes.from_first` is a collective: all processes enter it together, and it waits on a device. An engine's processes wait
for hours from one request to the next, and must learn at once that another one has ended, so they have sockets.

Trust: a message is its length, a MAC (HMAC-SHA-256 over its number and its JSON), and JSON. Who only reaches the port can
neither send a message nor change, repeat or leave out one. The key goes to the processes through their group, whose own
connections have no such guard (`processes`), and nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from icejax.checks.errors import InputError
from icejax.runtime import processes
from icejax.runtime.processes import LOST_LINE, GroupError

HEADER = struct.Struct("<I32s")  # length of the JSON, and the MAC
MOST_BYTES, HELLO_BYTES = 2**30, 64  # of a message, and of the first one, before which anybody may send
CONNECT_S, HELLO_S = 60.0, 5.0  # seconds for all connections, and for the first message of one
HELLO = 2**64 - 1  # number of the message with which a process names itself


class Channel:
    """An end of the connections between process 0 and the others; `agree` is called on both ends in the same order.

    Attributes:
        ends: whether the others are told to end, so that `watch` takes no end of theirs for a loss.
    """

    def __init__(self, sockets: Sequence[socket.socket], key: bytes, *, is_first: bool) -> None:
        """Takes connected sockets: in process 0 one for each of the others, there one."""
        self.is_first, self._sockets, self._key, self._number = is_first, sockets, key, 0
        self.ends = False
        for each in sockets:
            each.settimeout(None)
            if each.family != socket.AF_UNIX:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a message waits for the last one's receipt

    def agree(self, value: Any = None) -> Any:
        """Returns process 0's `value`, which JSON can hold, in all processes.

        Raises:
            GroupError: another process has ended, or a message is not process 0's.
        """
        number, self._number = self._number, self._number + 1
        if not self.is_first:
            with processes.at_rest():  # process 0 has a watchdog of its own
                return _received(self._sockets[0], self._key, number)
        frame = _frame(value, self._key, number)
        for each in self._sockets:
            try:
                each.sendall(frame)
            except OSError:
                raise GroupError(LOST_LINE) from None
        return value

    def watch(self, lost: Callable[[], None]) -> None:
        """Calls `lost` in another thread when another process has ended; in process 0, to which nobody sends."""

        def look(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                connection.recv(1)
            if self.ends:
                return
            self.close()  # which tells the rest
            lost()

        for each in self._sockets:
            threading.Thread(target=look, args=(each,), name="icejax-group", daemon=True).start()

    def close(self) -> None:
        """Ends the connections."""
        for each in self._sockets:
            _shut(each)
            each.close()


def open_channel() -> Channel:
    """Connects process 0 with the others; all processes of the group call it together.

    Raises:
        InputError: process 0 cannot listen at the coordinator's address.
        GroupError: not all processes connect within `CONNECT_S` seconds.
    """
    if processes.is_first():
        with _listening(processes.coordinator_host(binds=True)) as listening:
            key = secrets.token_bytes(32)
            processes.from_first(dict(port=listening.getsockname()[1], key=key.hex()))
            return Channel(_accepted(listening, key, processes.count() - 1), key, is_first=True)
    fields = processes.from_first(None)
    key = bytes.fromhex(fields["key"])
    try:
        connection = socket.create_connection((processes.coordinator_host(), fields["port"]), timeout=CONNECT_S)
        connection.sendall(_frame(processes.number(), key, HELLO))
    except OSError as error:
        raise GroupError(f"process 0 cannot be reached at port {fields['port']}: {error.strerror or error}") from None
    return Channel([connection], key, is_first=False)


def _listening(host: str) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InputError(f"process 0 cannot listen at {host}, the coordinator's address: {error.strerror}") from None


def _accepted(listening: socket.socket, key: bytes, count: int) -> list[socket.socket]:
    """Returns a connection from each of `count` other processes; one that sends no valid greeting is dropped."""
    connections, end = dict[int, socket.socket](), time.monotonic() + CONNECT_S
    while len(connections) < count:
        listening.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            raise GroupError(f"{len(connections)} of {count} processes have connected in {CONNECT_S:.0f} s") from None
        late = threading.Timer(HELLO_S, _shut, (connection,))  # a timeout would start over with every byte
        late.start()
        try:
            connections[_received(connection, key, HELLO, most=HELLO_BYTES)] = connection
        except GroupError:
            connection.close()
        late.cancel()
    return [*connections.values()]


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _mac(text: bytes, key: bytes, number: int) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + text, "sha256")


def _frame(value: Any, key: bytes, number: int) -> bytes:
    text = json.dumps(value).encode()
    return HEADER.pack(len(text), _mac(text, key, number)) + text


def _received(connection: socket.socket, key: bytes, number: int, *, most: int = MOST_BYTES) -> Any:
    """Returns the message with this number, of at most `most` bytes.

    Raises:
        GroupError: the other end has closed, or the message is another.
    """
    size, mac = HEADER.unpack(_bytes(connection, HEADER.size))
    text = _bytes(connection, size) if size <= most else b""
    if not hmac.compare_digest(mac, _mac(text, key, number)):
        raise GroupError("a message between the processes of the group was not sent by one of them, or was changed on its way")
    return json.loads(text)


def _bytes(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 2**20))
        except OSError:
            part = b""
        if not part:
            raise GroupError(LOST_LINE)
        parts += part
    return bytes(parts)
