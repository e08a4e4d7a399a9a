"""Ports that last: outside what the system gives to outgoing connections, and free."""

from __future__ import annotations

import socket

import pytest

from tidelog.chaos.ports import free_port
from tidelog.runtime.network import AddressInUse
from tidelog.runtime.ports import PREFERRED, check_free, choose_port, ephemeral_ports, lasting_ports

HOST = "127.0.0.1"


def test_no_connection_of_this_system_can_be_given_a_chosen_port() -> None:
    ephemeral = ephemeral_ports()
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        assert probe.getsockname()[1] in ephemeral
    assert choose_port(HOST) not in ephemeral


@pytest.mark.parametrize(
    ("ephemeral", "first", "last"),
    [
        (range(32_768, 61_000), 20_000, 29_999),
        (range(25_000, 65_536), 20_000, 24_999),
        (range(15_000, 65_001), 1_024, 65_535),
        (range(1_024, 65_536), 20_000, 29_999),  # there is no better port
    ],
)
def test_what_there_is_to_choose_from(ephemeral: range, first: int, last: int) -> None:
    found = lasting_ports(ephemeral)
    assert (found[0], found[-1]) == (first, last)
    assert found == PREFERRED or not set(ephemeral).intersection(found)


def test_a_port_somebody_listens_on_or_that_is_given_out_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr("tidelog.runtime.ports.lasting_ports", lambda: [port])
    assert choose_port(HOST) == port
    with pytest.raises(AddressInUse, match="no port"):
        choose_port(HOST, {port})
    with socket.socket() as other:
        other.bind(("0.0.0.0", port))
        other.listen()
        with pytest.raises(AddressInUse, match="no port"):
            choose_port(HOST)
        with pytest.raises(OSError, match="in use"):
            check_free(HOST, port, lingering=True)


def test_an_address_of_another_machine_is_refused_as_such() -> None:
    with pytest.raises(AddressInUse, match=r"cannot listen on 192\.0\.2\.1"):
        choose_port("192.0.2.1")


def test_connections_of_a_listener_that_ended_are_no_hindrance_to_its_successor() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = free_port()
        listener.bind((HOST, port))
        listener.listen()
        with socket.create_connection((HOST, port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # first, so that its end of the connection lingers
            assert client.recv(1) == b""
    with pytest.raises(OSError, match="in use"):
        check_free(HOST, port)
    check_free(HOST, port, lingering=True)
