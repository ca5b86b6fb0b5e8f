"""Sockets of servers on this machine, and the names that they are called by."""

import socket

import pytest

from meshwright.endpoint.hosts import address, bind, is_own, own_names
from meshwright.errors import MeshwrightError


def test_a_taken_port_is_an_error_when_it_was_asked_for_and_replaced_when_not():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeshwrightError) as refused:
            bind("127.0.0.1", port, 0)
        assert [d.code for d in refused.value.diagnostics] == ["I010"]
        with bind("127.0.0.1", None, port) as free:
            assert free.getsockname()[1] not in (0, port)


def test_pieces_of_an_answer_do_not_wait_for_one_another():
    with bind("127.0.0.1", 0, 0) as made, socket.create_connection(made.getsockname()), made.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_host_that_is_none_is_an_error():
    with pytest.raises(MeshwrightError) as refused:
        bind("256.1.1.1", 0, 0)
    assert [d.code for d in refused.value.diagnostics] == ["I010"]


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")]
)
def test_the_address_is_one_that_this_machine_opens(host, shown):
    with bind(host, 0, 0) as made:
        assert address(made, host) == f"http://{shown}:{made.getsockname()[1]}/"


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *(("localhost:80", True), ("127.0.0.1", True), ("[::1]:9", True), ("10.0.0.7:1", True), ("box:7", True)),
        *(("evil.example", False), ("", False), ("[::1", False), ("localhost.evil.example", False)),
    ],
)
def test_addresses_and_names_of_this_machine_are_its_own(host, own):
    assert is_own(host, own_names("Box")) == own
