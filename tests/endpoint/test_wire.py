"""Messages between the two processes arrive whole, however the system cuts them, and an end is seen at once."""

import socket
import threading

import pytest

from meshwright.endpoint.seam import EngineFacts, EngineSpec, Prompted
from meshwright.endpoint.wire import LENGTH, Built, EngineSide, Orders, Start, frame, read_answer


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, EngineSide(theirs)


MESSAGES = [
    Start(EngineSpec(folder="here", plan="tp2")),
    Orders((Prompted(number=1, prompt=tuple(range(500)), limit=3),), (7, 8)),
    Orders((), (1,)),
]


@pytest.mark.parametrize("size", [1, 3, 100, 10_000])
def test_messages_arrive_whole_however_they_are_cut(pair, size):
    ours, side = pair
    data, found = b"".join(frame(message) for message in MESSAGES), []
    for at in range(0, len(data), size):
        ours.sendall(data[at : at + size])
        found += side.received(wait=False)
    assert found == MESSAGES and side.received(wait=False) == []


def test_a_message_larger_than_what_is_read_at_a_time_is_waited_for(pair):
    ours, side = pair
    long = Orders((Prompted(number=1, prompt=(300,) * 500_000, limit=3),))
    sender = threading.Thread(target=ours.sendall, args=(frame(long),))
    sender.start()
    assert side.received(wait=True) == [long]
    sender.join()


def test_the_end_of_the_other_process_is_an_end_of_file(pair):
    ours, side = pair
    ours.close()
    with pytest.raises(EOFError):
        side.received(wait=True)


def test_what_an_engine_sends_is_read_by_the_front(pair):
    ours, side = pair
    side.send(Built(EngineFacts(context=8, vocabulary=9, room=10)))
    (length,) = LENGTH.unpack(ours.recv(LENGTH.size))
    assert read_answer(ours.recv(length)) == Built(EngineFacts(context=8, vocabulary=9, room=10))
