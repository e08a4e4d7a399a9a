"""The pytest plugin: fixtures that run a real broker. It is loaded by pytest itself wherever Tidelog is installed.

Fixtures:

- `tidelog`: a `LocalBroker`.
- `tidelog_cluster`: a `LocalCluster` of three brokers, or `tidelog_brokers`.
- `tidelog_topic`: the name of a new topic, for this test alone, on the broker of `tidelog`, or on `tidelog_cluster` if
  the test uses that. `@pytest.mark.tidelog_topic(partitions=3, config={…})` changes it.
- `tidelog_settings`: what a project overrides to give its brokers settings, a dictionary by dotted key.

Settings (`pytest.ini`, `[tool.pytest.ini_options]`):

- `tidelog_scope`: scope of `tidelog` and `tidelog_cluster`: function, class, module, package or session (the default).
- `tidelog_child`: whether `tidelog` is a process of its own, which can be killed; false by default.
- `tidelog_cluster_child`: the same for `tidelog_cluster`; true by default.
- `tidelog_storage`: memory (the default) or disk.
- `tidelog_brokers`: brokers of `tidelog_cluster`; 3 by default.

Where brokers run in processes of their own, the process that they are forked from is started when the tests have been
collected, if one of them uses such a broker: it imports while others run.

After each test its faults are healed: the bucket and the clock are right, and brokers that were killed are started
again. The lines that brokers in processes of their own wrote during a test that failed are in its report; those of
brokers in this process are in pytest's own capture of `logging`.

Invariant: nothing else of Tidelog is imported before it is known that a test uses a fixture.

Entry: pytest, by the entry point `pytest11`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import uuid
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

if TYPE_CHECKING:
    from tidelog.testing.local import LocalBroker, LocalBrokers, LocalCluster
    from tidelog.testing.options import Storage, Value

Scope = Literal["session", "package", "module", "class", "function"]
SCOPES = ("session", "package", "module", "class", "function")
LONGEST_NAME = 200
"""Of a topic's 249 characters."""
LOG_LINES = 200
"""Of a broker's, in a report."""
MARKER = "tidelog_topic(partitions=1, config={}): the topic of the fixture `tidelog_topic`"
FIXTURES = ("tidelog", "tidelog_cluster")
_running = pytest.StashKey[list[tuple[str, "LocalBrokers"]]]()
"""The brokers of the fixtures: what a test got by `request.getfixturevalue` it has nowhere else."""
_log_began = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the settings."""
    parser.addini("tidelog_scope", f"scope of a test's brokers: {', '.join(SCOPES)}", default="session")
    parser.addini("tidelog_child", "run the broker in a process of its own", type="bool", default=False)
    parser.addini("tidelog_cluster_child", "run the cluster in processes of its own", type="bool", default=True)
    parser.addini("tidelog_storage", "where brokers keep their data: memory or disk", default="memory")
    parser.addini("tidelog_brokers", "brokers of `tidelog_cluster`", default="3")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and check the settings."""
    config.stash[_running] = []
    config.addinivalue_line("markers", MARKER)
    if config.getini("tidelog_scope") not in SCOPES:
        raise pytest.UsageError(f"tidelog_scope is {config.getini('tidelog_scope')!r}: one of {', '.join(SCOPES)}")
    if config.getini("tidelog_storage") not in ("memory", "disk"):
        raise pytest.UsageError(f"tidelog_storage is {config.getini('tidelog_storage')!r}: memory or disk")
    if not str(config.getini("tidelog_brokers")).isdecimal():
        raise pytest.UsageError(f"tidelog_brokers is {config.getini('tidelog_brokers')!r}: a number")


def _scope(fixture_name: str, config: pytest.Config) -> Scope:
    return cast(Scope, config.getini("tidelog_scope"))


def _storage(config: pytest.Config) -> Storage:
    return cast("Storage", config.getini("tidelog_storage"))


@pytest.fixture(scope="session")
def tidelog_settings() -> dict[str, Value]:
    """Settings of the brokers, by dotted key; override it."""
    return {}


@contextlib.contextmanager
def _noted(config: pytest.Config, fixture: str, brokers: LocalBrokers) -> Iterator[None]:
    """Have these running brokers healed after each test."""
    entry = fixture, brokers
    config.stash[_running].append(entry)
    try:
        yield
    finally:
        config.stash[_running].remove(entry)


@pytest.fixture(scope=_scope)
def tidelog(pytestconfig: pytest.Config, tidelog_settings: dict[str, Value]) -> Iterator[LocalBroker]:
    """A running broker."""
    from tidelog.testing import LocalBroker

    child = bool(pytestconfig.getini("tidelog_child"))
    new = LocalBroker(child=child, storage=_storage(pytestconfig), settings=tidelog_settings)
    with new as broker, _noted(pytestconfig, "tidelog", broker):
        yield broker


@pytest.fixture(scope=_scope)
def tidelog_cluster(pytestconfig: pytest.Config, tidelog_settings: dict[str, Value]) -> Iterator[LocalCluster]:
    """A running cluster."""
    from tidelog.testing import LocalCluster

    brokers, child = int(pytestconfig.getini("tidelog_brokers")), bool(pytestconfig.getini("tidelog_cluster_child"))
    storage = _storage(pytestconfig)
    new = LocalCluster(brokers, child=child, storage=storage, settings=tidelog_settings)
    with new as cluster, _noted(pytestconfig, "tidelog_cluster", cluster):
        yield cluster


@pytest.fixture
def tidelog_topic(request: pytest.FixtureRequest) -> str:
    """The name of a new topic."""
    place = "tidelog_cluster" if "tidelog_cluster" in request.fixturenames else "tidelog"
    brokers: LocalBrokers = request.getfixturevalue(place)
    marker = request.node.get_closest_marker("tidelog_topic")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:LONGEST_NAME].strip("-.")
    topic = f"{name}-{uuid.uuid4().hex[:8]}"
    brokers.create_topic(topic, **(marker.kwargs if marker is not None else {}))
    return topic


def _in_children(config: pytest.Config) -> set[str]:
    """The fixtures whose brokers run in processes of their own."""
    settings = {"tidelog": "tidelog_child", "tidelog_cluster": "tidelog_cluster_child"}
    return {fixture for fixture, setting in settings.items() if config.getini(setting)}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to start what brokers are forked from, if a test will use it."""
    fixtures = _in_children(session.config)
    if not session.config.option.collectonly and any(
        fixtures.intersection(getattr(item, "fixturenames", ())) for item in session.items
    ):
        from tidelog.testing.forking import warm_up

        warm_up()


def _used(item: pytest.Item) -> dict[str, LocalBrokers]:
    """The brokers that this test may have used; a project may have fixtures of these names that are something else."""
    local = sys.modules.get("tidelog.testing.local")
    if local is None:
        return {}
    given: dict[str, Any] = getattr(item, "funcargs", {})
    found = {name: given[name] for name in FIXTURES if isinstance(given.get(name), local.LocalBrokers)}
    running = item.config.stash[_running]
    return {**dict(running), **found}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Note where the test begins in its brokers' logs."""
    item.stash[_log_began] = {name: brokers.lines.count for name, brokers in _used(item).items()}
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the brokers wrote during a test that failed."""
    report = yield
    if report.failed and report.when == "call":
        for name, brokers in _used(item).items():
            new = brokers.lines.since(item.stash.get(_log_began, {}).get(name, 0))[-LOG_LINES:]
            if new:
                report.sections.append((f"Log of {name} during this test", "\n".join(new)))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """End the faults of this test, so that the next one on the same brokers begins without; then end its fixtures.

    Also if a broker cannot be healed: else the fixtures of this test would be in the way of the next one.
    """
    try:
        with contextlib.ExitStack() as healing:
            for brokers in _used(item).values() if _scope("", item.config) != "function" else ():
                healing.callback(brokers.heal)
    finally:
        result = yield
    return result
