"""What the commands of `tidelog spark` share: their options, the session, Ctrl-C, and how results are shown.

A job runs in a thread, while the main thread waits: Spark's gateway gives each thread a connection of its own, and the
one that waits for a job cannot carry a request to cancel it.

pyspark and `pyspark_tidelog` are imported when a job begins, not with this module: they are the extra `spark`.

Entry: `spark_options`, `SparkRun`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tidelog.cli import output
from tidelog.cli.client import AdminTokenNeeded, ClusterConnection
from tidelog.cli.options import bootstrap_option, format_option, parse_pairs
from tidelog.runtime.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyspark_tidelog.jobs.frame import ClusterAccess

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Document = dict[str, Any]

EXTRA = ("pyspark", "pyarrow", "numba")
"""Some of what the extra brings: the first that is missing is named."""
END_S = 30.0
"""How long Ctrl-C waits for a job that it has cancelled, and for Spark to have started."""
_NAMES = ("bootstrap", "read_token_file", "source_options", "master", "conf", "dry_run", "style")


class SparkRun:
    """What the options of `spark_options` say; see `execute`."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.bootstrap: str = given["bootstrap"]
        self.dry_run: bool = given["dry_run"]
        self.style: str = given["style"]
        self._token_file: Path | None = given["read_token_file"]
        self._options = dict(parse_pairs("--option", given["source_options"]))
        self._master: str = given["master"]
        self._conf = dict(parse_pairs("--conf", given["conf"]))

    def need_extra(self) -> None:
        """Raise `ConfigError` where the extra `spark` is not installed: before anything of it is imported."""
        for module in EXTRA:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"this Python has no module {module}, which `tidelog spark` needs",
                    hint='pip install "tidelog[spark]"',
                )

    def access(self) -> ClusterAccess:
        """Return how jobs reach the cluster. Raises `ConfigError`, `Unavailable`, and what `need_extra` raises."""
        self.need_extra()
        from pyspark_tidelog.jobs.frame import cluster_access

        return cluster_access(self.bootstrap, self._token(), self._options)

    def _token(self) -> str:
        if self._token_file is None:
            try:
                return ClusterConnection(self.bootstrap).read_token
            except (AdminTokenNeeded, NotFound):
                return ""  # no secret, or one of another machine: the first request that needs the token says so
        try:
            return self._token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"cannot read --read-token-file {self._token_file}: {error.strerror}") from error

    def execute(
        self,
        name: str,
        plan: Callable[[], Any],
        run: Callable[[SparkSession], Any],
        *,
        render: Callable[[Document], str],
        render_plan: Callable[[Document], str],
    ) -> Any:
        """Show the plan with `--dry-run`, which starts no Spark; else run the job in a session and show its result.

        `plan` and `run` return a dataclass of plain data, which is shown by `render_plan` and `render`, and returned.
        Ctrl-C cancels what Spark does. Raises what they raise, and the errors of `open_session`.
        """
        self.need_extra()
        if self.dry_run:
            found = plan()
            output.show(self.style, lambda: dataclasses.asdict(found), render_plan)
            return found
        from pyspark_tidelog.jobs.frame import open_session

        spark = _opened(lambda: open_session(name, self._master, self._conf))
        try:
            found = _in_thread(lambda: run(spark), spark.sparkContext.cancelAllJobs)
        finally:
            spark.stop()
        output.show(self.style, lambda: dataclasses.asdict(found), render)
        return found


def _opened(open_spark: Callable[[], SparkSession]) -> SparkSession:
    """Return the session. Ctrl-C waits for it, and stops it: a gateway that is left while it starts never ends."""
    opened: list[SparkSession] = []
    try:
        _in_thread(lambda: opened.append(open_spark()), lambda: None)
    except KeyboardInterrupt:
        for spark in opened:
            spark.stop()
        raise
    return opened[0]


def _in_thread(work: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Return what `work` does; on Ctrl-C cancel it, and wait for its end."""
    results: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again by who waits
            problems.append(error)

    thread = threading.Thread(target=run, name="tidelog-job", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(1.0)
    except KeyboardInterrupt:
        cancel()
        thread.join(END_S)
        raise
    if problems:
        raise problems[0]
    return results[0]


def spark_options(function: F) -> F:
    """Add the options that every job has; the command gets them as its first argument, a `SparkRun`."""

    def command(**given: Any) -> Any:
        return function(SparkRun({name: given.pop(name) for name in _NAMES}), **given)

    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    command.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
    options = (
        click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing."),
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; may repeat."),
        click.option(
            "--master",
            default="local[*]",
            show_default=True,
            metavar="URL",
            help="Where Spark runs: local[N], spark://HOST:PORT, yarn, k8s://URL.",
        ),
        click.option(
            "--option",
            "source_options",
            multiple=True,
            metavar="NAME=VALUE",
            help="s3.… or kafka.…, as the data source has them (docs/spark.md); may repeat.",
        ),
        click.option(
            "--read-token-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="What `tidelog cluster read-token` printed [default: from the secret that a broker on this machine"
            " names].",
        ),
        format_option,
        bootstrap_option,
    )
    decorated: Any = command
    for option in options:
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]
