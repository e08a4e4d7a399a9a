"""Checks of a broker's listeners before any state of the process is changed.

Entry: `fit_connections`, `reserve_port`, `warn_of_admin_address`.
"""

from __future__ import annotations

import logging

from tidelog.broker.settings import AdminSettings, KafkaSettings
from tidelog.process.node_base import LOOPBACK
from tidelog.runtime.network import AddressInUse
from tidelog.runtime.open_files import connections_that_fit, raise_open_files
from tidelog.runtime.ports import check_free, choose_port

logger = logging.getLogger(__name__)

ANY_ADDRESS = ("0.0.0.0", "::")


def fit_connections(kafka: KafkaSettings) -> None:
    """Raise the limit of open files, and bound the listener's connections by it."""
    open_files = raise_open_files()
    fitting = connections_that_fit(open_files, kafka.max_connections)
    if fitting < kafka.max_connections:
        logger.warning(
            "kafka.max_connections lowered to fit the limit of open files (ulimit -n)",
            extra={"max_connections": fitting, "configured": kafka.max_connections, "open_files": open_files},
        )
        kafka.max_connections = fitting


def warn_of_admin_address(kafka: KafkaSettings, admin: AdminSettings) -> None:
    """Warn if clients on other hosts are told an address of the broker, but none of its admin HTTP."""
    told = admin.advertised_host or admin.host
    if (kafka.advertised_host or kafka.host) not in LOOPBACK and told in LOOPBACK + ANY_ADDRESS:
        logger.warning(
            "other hosts cannot use this broker's admin address: set admin.host, or admin.advertised_host",
            extra={"admin": told, "kafka": kafka.advertised_host or kafka.host},
        )


def reserve_port(host: str, port: int) -> int:
    """Return the port if it is free (for 0, any free port), before any state is changed. Raises `AddressInUse`."""
    if port == 0:
        return choose_port(host)
    try:
        check_free(host, port, lingering=True)
    except OSError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint=f"`ss -tanp 'sport = :{port}'` shows the process that does; choose another port with --kafka-port",
        ) from error
    return port
