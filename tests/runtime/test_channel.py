"""The messages from process 0 to the others: what is sent is what comes, and nobody else can send."""

import contextlib
import socket
import threading
import time

import pytest

from icejax.runtime import channel
from icejax.runtime.channel import Channel
from icejax.runtime.processes import LOST_LINE, GroupError

KEY = bytes(range(32))


def connected() -> list[socket.socket]:
    """Returns both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return [socket.create_connection(server.getsockname()), server.accept()[0]]


@pytest.fixture
def ends():
    """Process 0's channel to two others, and theirs."""
    pairs = [connected() for _ in range(2)]
    first = Channel([pair[0] for pair in pairs], KEY, is_first=True)
    others = [Channel([pair[1]], KEY, is_first=False) for pair in pairs]
    yield first, others
    for each in (first, *others):
        each.close()


def test_all_processes_have_the_value_of_the_first(ends):
    first, others = ends
    values = [["step", 3], {"tokens": [1, 2], "text": "\ud800 é"}, True, None, "x" * 10**5]
    assert [first.agree(value) for value in values] == values
    for other in others:
        assert [other.agree("its own") for _ in values] == values


def test_the_end_of_a_process_is_told_on_both_sides(ends):
    first, (left, stays) = ends
    lost = threading.Event()
    first.watch(lost.set)
    assert not lost.wait(0.05)
    left.close()
    assert lost.wait(10)
    for end in (first, stays):  # the rest ends too
        with pytest.raises(GroupError) as error:
            end.agree(1)
        assert str(error.value) == LOST_LINE


def test_a_process_that_ends_as_told_is_no_loss_to_the_rest(ends):
    """It may be gone before the last one has the message."""
    first, (left, stays) = ends
    lost = threading.Event()
    first.watch(lost.set)
    first.ends = True
    left.close()
    assert not lost.wait(0.2)
    with contextlib.suppress(GroupError):  # nobody is there to whom the first message could go
        first.agree("close")
    first._sockets = first._sockets[1:]
    first._number = 0
    first.agree("close")
    assert stays.agree() == "close"


@pytest.mark.parametrize("fault", ["changed", "repeated", "left out", "another key", "too long"])
def test_a_message_of_another_is_refused(fault):
    ours, theirs = connected()
    messages = [channel._frame(value, KEY, number) for number, value in enumerate(("a", "b"))]
    sent = {
        "changed": messages[0][:-2] + b'z"',
        "repeated": messages[0] * 2,
        "left out": messages[1],
        "another key": channel._frame("a", KEY[::-1], 0),
        "too long": channel.HEADER.pack(2**31, bytes(32)),
    }[fault]
    ours.sendall(sent)
    other = Channel([theirs], KEY, is_first=False)
    if fault == "repeated":
        assert other.agree() == "a"
    with pytest.raises(GroupError, match="^a message between the processes of the group was not sent by one of them"):
        other.agree()
    for end in (ours, theirs):
        end.close()


def test_a_stranger_is_no_process_of_the_group(monkeypatch):
    monkeypatch.setattr(channel, "HELLO_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger, silent, slow, large, known = (socket.create_connection(server.getsockname()) for _ in range(5))
        stranger.sendall(channel._frame(1, KEY[::-1], channel.HELLO))
        large.sendall(channel._frame("a" * channel.HELLO_BYTES, KEY, channel.HELLO))
        known.sendall(channel._frame(1, KEY, channel.HELLO))
        over = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.4):
                    slow.send(b"\0")

        dripping, started = threading.Thread(target=drip), time.monotonic()
        dripping.start()
        [connection] = channel._accepted(server, KEY, 1)
        over.set()
        dripping.join()
        assert time.monotonic() - started < 7  # a header that comes byte by byte would take 14
        assert connection.getpeername() == known.getsockname()
        assert stranger.recv(1) == silent.recv(1) == b""
        monkeypatch.setattr(channel, "CONNECT_S", 0.0)
        with pytest.raises(GroupError, match="^0 of 1 processes have connected in 0 s$"):
            channel._accepted(server, KEY, 1)
    for end in (stranger, silent, slow, large, known, connection):
        end.close()


def test_processes_meet_at_the_coordinators_address(monkeypatch):
    """The port and the key go through the group; here the processes are threads."""
    told, here, sent = threading.Event(), threading.local(), {}

    def from_first(value):
        if here.number == 0:
            sent.update(value)
            told.set()
        assert told.wait(10)
        return sent

    for name, value in {
        "from_first": from_first,
        "count": lambda: 2,
        "number": lambda: here.number,
        "is_first": lambda: here.number == 0,
        "coordinator_host": lambda *, binds=False: "127.0.0.1",
    }.items():
        monkeypatch.setattr(channel.processes, name, value)
    ends = {}

    def run(number: int) -> None:
        here.number = number
        ends[number] = channel.open_channel()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    ends[0].agree("hello")
    assert ends[1].agree() == "hello" and len(sent["key"]) == 64
    for end in ends.values():
        end.close()
    here.number = 1
    with pytest.raises(GroupError, match=f"^process 0 cannot be reached at port {sent['port']}: "):
        channel.open_channel()
    monkeypatch.setattr(channel.processes, "coordinator_host", lambda *, binds=False: "192.0.2.1")
    here.number = 0
    with pytest.raises(channel.InputError, match="^process 0 cannot listen at 192.0.2.1, the coordinator's address: "):
        channel.open_channel()
