"""Fixtures for all tests: S3 servers and tools that the project starts and installs itself.

What a machine cannot provide skips its tests with a reason that begins with "missing:", fails them where `CI` is set,
and is listed at the end of the run.

- `moto_server`, `localstack_server`, `minio_server`: a running `S3Server` (`support/s3_servers.py`); `s3_server`: each.
- `kcat`: the path of a kcat that runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import hypothesis
import pytest

from tests.support.s3_servers import INSTALLED_KINDS, KINDS, Missing, S3Server, ServerPool, install

# A machine that is busy is no defect. Where `CI` is set Hypothesis's own profile also has the examples depend on the
# test alone; elsewhere they are new each time.
hypothesis.settings.register_profile(
    "tidelog",
    hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tidelog")

T = TypeVar("T")
PREFIX = "missing: "


def required(provide: Callable[[], T]) -> T:
    """What `provide` returns; if it raises `Missing`, the test is skipped, or fails in CI."""
    try:
        return provide()
    except Missing as error:
        reason = f"{PREFIX}{error}"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    base = tmp_path_factory.getbasetemp()
    shared = "PYTEST_XDIST_WORKER" in os.environ
    pool = ServerPool(base.parent if shared else base, shared=shared)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def moto_server(server_pool: ServerPool) -> S3Server:
    return required(lambda: server_pool.get("moto"))


@pytest.fixture(scope="session")
def localstack_server(server_pool: ServerPool) -> S3Server:
    return required(lambda: server_pool.get("localstack"))


@pytest.fixture(scope="session")
def minio_server(server_pool: ServerPool) -> S3Server:
    return required(lambda: server_pool.get("minio"))


@pytest.fixture(scope="session", params=[pytest.param(kind, marks=pytest.mark.servers(kind)) for kind in KINDS])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    return server


@pytest.fixture(scope="session")
def kcat() -> str:
    return required(lambda: install("kcat"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Install what the collected tests need before the first starts: no test's time-out has to allow for it."""
    if session.config.option.collectonly:
        return
    needed: set[str] = set()
    for item in session.items:
        needed.update(str(kind) for marker in item.iter_markers("servers") for kind in marker.args)
        needed.update(name.removesuffix("_server") for name in getattr(item, "fixturenames", ()))
    for kind in sorted(needed.intersection(INSTALLED_KINDS)):
        try:
            install(kind)
        except Missing:
            continue  # the fixture says so, test by test


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was missing."""
    reasons: dict[str, int] = {}
    for outcome in ("skipped", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
            reason = text.removeprefix("Skipped: ")
            if reason.startswith(PREFIX):
                reason = reason.removeprefix(PREFIX).strip()
                reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        terminalreporter.section("missing on this machine", yellow=True)
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{reason} ({count} test{'s' if count > 1 else ''} not run)")
