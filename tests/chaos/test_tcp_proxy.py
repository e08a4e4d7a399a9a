"""The TCP proxy: no connection outlives its path."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tidelog.chaos.tcp_proxy import Path, Proxies


def is_closed(client: socket.socket) -> bool:
    client.settimeout(60)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("turns", range(8))
def test_a_connection_that_comes_when_its_path_closes_is_closed_with_it(turns: int) -> None:
    async def close(path: Path) -> socket.socket:
        client = socket.create_connection((path.host, path.port))
        for _ in range(turns):  # the loop has accepted it, made its protocol, connects to the target
            await asyncio.sleep(0)
        await path.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return client

    with socket.create_server(("127.0.0.1", 0)) as target, Proxies() as proxies:
        path = proxies.path(*target.getsockname())
        with proxies.run(close(path)) as client:
            assert is_closed(client)


def test_a_reset_closes_connections_whose_ends_do_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as target, Proxies() as proxies:
        path = proxies.path(*target.getsockname())
        with socket.create_connection((path.host, path.port), timeout=60) as client:
            onward, _ = target.accept()
            with onward:
                onward.settimeout(0.2)
                client.settimeout(0.2)
                for end in (onward, client):
                    with pytest.raises(TimeoutError):
                        end.sendall(bytes(1 << 26))
                path.reset()
                for end in (onward, client):
                    end.settimeout(60)
                    with pytest.raises(ConnectionError):
                        while True:
                            end.sendall(bytes(1 << 20))
