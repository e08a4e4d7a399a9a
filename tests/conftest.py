"""Fixtures for all tests: S3 servers and tools that the project starts and installs itself.

What a machine cannot provide skips its tests with a reason that begins with "missing:", fails them where `CI` or
`TIDELOG_NOTHING_MISSING` is set, and is listed at the end of the run (`support/missing.py`).

A test that starts a process is marked `processes` or `servers` (all of `tests/e2e` is, and whoever uses a server
fixture); what starts one without that mark fails. `make unit` runs the others.

Where `TIDELOG_TESTS_FOR_S` is set, no test begins so many seconds after the start; the end of the run names what was
left.

- `moto_server`, `localstack_server`, `minio_server`: a running `S3Server` (`support/s3_servers.py`); `s3_server`: each.
- `kcat`: the path of a kcat that runs.
- `previous_release`: the path of a Python in whose environment the previous release is installed (`tests/releases`).
- `spark_kafka`: the path of a folder with Spark's own Kafka connector (`jars`) and its PySpark (`python`).
- `kafka`: the path of the folder of Apache Kafka's jars: its server, clients and tools (`support/kafka_tools.py`).
- `kafka_apps`: the path of the folder of the jars of Kafka Streams, Connect and MirrorMaker 2.
- `flink`: the path of the folder of the jars of Apache Flink and its Kafka connector.
- `nessie`: the path of the folder of a REST catalog, with the Java to run it.
- `promtool`: the path of Prometheus' checker of rules.
- `browser_tools`: the folder with Chromium, its WebDriver and axe-core.
- `deploy_lint`: the path of the Python beside which linters of deployment files are installed.
- `java`: compiles and runs the programs of `tests/clients/java` (`support/java.py`).
- `java_runtime`: the path of the `java` that Spark runs on.
- `go_programs`: builds the programs of `tests/clients/go`, each once (`support/golang.py`).
- `node_programs`: those of `tests/clients/js`, ready to run (`support/node.py`).
- `older_java_clients`: the path of a folder with the jars of Kafka's client of each of some older versions.
- `older_python_clients`: the path of the Python beside which older Python clients are installed.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from tests.support.examples import UNIT, WHOLE
from tests.support.external import Program
from tests.support.golang import go_program
from tests.support.java import Java, java_runtime_path
from tests.support.loops import ASYNCIO_LOOP, LoopFactories
from tests.support.missing import PREFIX, missing
from tests.support.node import node_program
from tests.support.s3_servers import INSTALLED_KINDS, KINDS, Missing, S3Server, ServerPool, install

# A machine that is busy is no defect. Where `CI` is set Hypothesis's own profile also has the examples depend on the
# test alone; elsewhere they are new each time.
hypothesis.settings.register_profile(
    "tidelog",
    hypothesis.settings(),
    deadline=None,
    max_examples=WHOLE,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("unit", hypothesis.settings.get_profile("tidelog"), max_examples=UNIT)
hypothesis.settings.load_profile("tidelog")

# What a shell starts in the background (`make test &`) ignores SIGINT, and so would the processes of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

T = TypeVar("T")
STARTED = time.monotonic()
LATE = "the time for tests was over"
E2E = Path(__file__).parent / "e2e"
TEARDOWN_S = 300
"""After so long a teardown hangs; those of module and session fixtures are in it."""
PROCESS_FIXTURES = {
    "server_pool",
    "moto_server",
    "localstack_server",
    "minio_server",
    "s3_server",
    "kcat",
    "previous_release",
    "spark_kafka",
    "kafka",
    "kafka_apps",
    "flink",
    "nessie",
    "promtool",
    "deploy_lint",
    "browser_tools",
    "java",
    "go_programs",
    "node_programs",
    "older_java_clients",
    "older_python_clients",
}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """End a process that hangs in the teardown of a test: pytest-timeout stops its clock when a test has failed."""
    faulthandler.dump_traceback_later(TEARDOWN_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def required(provide: Callable[[], T]) -> T:
    """What `provide` returns; if it raises `Missing`, the test is skipped, or fails where nothing may be missing."""
    try:
        return provide()
    except Missing as error:
        what = str(error)
    return missing(what)


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


@pytest.fixture(scope="session")
def previous_release() -> str:
    return required(lambda: install("previous_release"))


@pytest.fixture(scope="session")
def spark_kafka() -> Path:
    return Path(required(lambda: install("spark_kafka")))


@pytest.fixture(scope="session")
def kafka() -> Path:
    return Path(required(lambda: install("kafka")))


@pytest.fixture(scope="session")
def kafka_apps() -> Path:
    return Path(required(lambda: install("kafka_apps")))


@pytest.fixture(scope="session")
def flink() -> Path:
    return Path(required(lambda: install("flink")))


@pytest.fixture(scope="session")
def nessie() -> Path:
    return Path(required(lambda: install("nessie")))


@pytest.fixture(scope="session")
def promtool() -> Path:
    return Path(required(lambda: install("promtool")))


@pytest.fixture(scope="session")
def deploy_lint() -> Path:
    return Path(required(lambda: install("deploy_lint")))


@pytest.fixture(scope="session")
def browser_tools() -> Path:
    return Path(required(lambda: install("browser")))


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Java:
    return required(lambda: Java(tmp_path_factory.mktemp("classes")))


@pytest.fixture(scope="session")
def go_programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Program]:
    work = tmp_path_factory.mktemp("go")
    return cache(lambda name: required(lambda: go_program(name, work / name)))


@pytest.fixture(scope="session")
def node_programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Program]:
    clients = Path(required(lambda: install("node_clients")))
    return cache(lambda name: required(lambda: node_program(name, clients, tmp_path_factory.mktemp("node"))))


@pytest.fixture(scope="session")
def older_java_clients() -> Path:
    return Path(required(lambda: install("older_java_clients")))


@pytest.fixture(scope="session")
def java_runtime() -> str:
    return required(java_runtime_path)


@pytest.fixture(scope="session")
def older_python_clients() -> str:
    return required(lambda: install("older_python_clients"))


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """The loops that an async test runs on, each in turn: `LOOPS` of its module; else asyncio's own."""
    module = item.getparent(pytest.Module)
    loops: LoopFactories = getattr(module and module.obj, "LOOPS", ASYNCIO_LOOP)
    return loops


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes by where it is or what it uses, and as `long` the cases that the gate does not run."""
    cases: dict[str, set[str]] = {}
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if E2E in item.path.parents or fixtures & PROCESS_FIXTURES:
            item.add_marker("processes")
        chosen = item.get_closest_marker("gate_cases")
        if chosen is not None and isinstance(item, pytest.Function):
            case = item.callspec.id
            if case not in chosen.args:
                item.add_marker("long")
            cases.setdefault(item.nodeid.partition("[")[0], set(chosen.args)).discard(case)
    if not any("::" in arg for arg in config.args):
        for test, missing in cases.items():
            if missing:
                raise pytest.UsageError(f"{test} has no case {sorted(missing)} (pytest.mark.gate_cases)")


_unmarked: str | None = None
"""The running test, if it may start no process."""


def _refuse_processes(event: str, args: tuple[object, ...]) -> None:
    if _unmarked is not None and event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        raise RuntimeError(f"{_unmarked} starts a process and is not marked so (pytest.mark.processes): {args[:1]}")


sys.addaudithook(_refuse_processes)


def pytest_runtest_logstart(nodeid: str) -> None:
    global _unmarked
    _unmarked = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test after `TIDELOG_TESTS_FOR_S` seconds, and watch what starts processes."""
    global _unmarked
    if time.monotonic() - STARTED > float(os.environ.get("TIDELOG_TESTS_FOR_S", "inf")):
        pytest.skip(LATE)
    marked = any(item.get_closest_marker(name) for name in ("processes", "servers"))
    _unmarked = None if marked else item.nodeid


def pytest_runtest_logfinish(nodeid: str) -> None:
    global _unmarked
    _unmarked = None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Install what the collected tests need before the first starts: no test's time-out has to allow for it.

    The collected tests, half a GB with what they import, stay to the end: they are set aside, so that no collection of
    garbage goes through them. A test that asks for a full one would wait a second for each.
    """
    gc.collect()
    gc.freeze()
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
    """List what was missing, and what the time did not suffice for."""
    reasons: dict[str, int] = {}
    late: dict[str, int] = {}
    for outcome in ("skipped", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
            reason = text.removeprefix("Skipped: ")
            if reason == LATE:
                file = report.nodeid.partition("::")[0]
                late[file] = late.get(file, 0) + 1
            if reason.startswith(PREFIX):
                reason = reason.removeprefix(PREFIX).strip()
                reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        terminalreporter.section("missing on this machine", yellow=True)
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{reason} ({count} test{'s' if count > 1 else ''} not run)")
    if late:
        terminalreporter.section(f"not run: {LATE}", yellow=True)
        for file, count in sorted(late.items()):
            terminalreporter.line(f"{file} ({count} test{'s' if count > 1 else ''})")
