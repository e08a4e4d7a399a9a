"""The files of `deploy`: what they say is true of the product, and of each other.

There is no Docker, Kubernetes or running systemd here. What can be, is run: commands by the CLI's own parser and in
processes, settings by the configuration, the image's steps in a folder, and each format's own checker.
docs/deployment.md says which was run and which only checked. `test_deploy_aws.py` tries the policies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.support.cluster_process import eventually
from tests.support.compose import Document, bootstrap, compose, configuration, healthy, node
from tests.support.missing import lacking
from tests.support.ports import free_port
from tests.support.s3_servers import ROOT, S3Server, new_bucket
from tests.support.tidelog_process import READY_PREFIX
from tidelog.cli.main import EXIT_CODES, cli
from tidelog.cli.subcommands.serve import STOP_GRACE_S
from tidelog.config import Config, load, parse_set

pytestmark = pytest.mark.processes

DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "deployment.md"
ONE, THREE = DEPLOY / "compose.one.yml", DEPLOY / "compose.three.yml"
UNIT = DEPLOY / "systemd" / "tidelog.service"
NODES = ("tidelog-1", "tidelog-2", "tidelog-3")
USER_ID = 10001
LAST_RESORT_S = 30
"""After so long beyond its time-outs a process kills itself (docs/operations.md, Running)."""


def settings_of(path: Path, environment: dict[str, str] | None = None, *flags: str) -> Config:
    return load(path, environment or {}, [parse_set(text) for text in flags]).config


def stop_s(config: Config) -> float:
    """How long a node with this configuration may take to stop."""
    return (config.node.drain_timeout_ms + config.node.shutdown_timeout_ms) / 1000 + LAST_RESORT_S


# --- commands and settings in all files ---------------------------------------------------------------------------


def parse(words: Sequence[str]) -> click.Context:
    """Parse a command line of `tidelog` as it does. Raises what it would complain of."""
    command: click.Command = cli
    at = 0
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[at])
        assert found is not None, f"`tidelog {' '.join(words)}`: no command {words[at]}"
        command, at = found, at + 1
    try:
        return command.make_context(" ".join(words[:at]), list(words[at:]))
    except click.MissingParameter:
        assert at == len(words), f"`tidelog {' '.join(words)}` lacks an argument"
        return click.Context(command)  # only its name is mentioned


_MENTIONED = re.compile(r"`tidelog ([^`]+)`")
_RUN = re.compile(r"(?:ExecStart=\S*/|exec (?:tidelog )?|^    )tidelog ([^'`]+)", re.MULTILINE)
_PLACES = {"/etc/tidelog/tidelog.toml": str(DEPLOY / "systemd" / "tidelog.toml"), "FILE": "/dev/null", "ID": "104"}


def command_lines(text: str) -> Iterator[list[str]]:
    """The command lines of `tidelog` in a file: in backticks, and where they are run."""
    flowing = re.sub(r"\n(?:# | +)?", " ", text)
    for found in [*_MENTIONED.findall(flowing), *_RUN.findall(text)]:
        plain = re.sub(r"\$\(\(.*?\)\)|\{\{.*?\}\}", "1", found)
        yield [_PLACES.get(word, word) for word in shlex.split(plain.partition("\n")[0])]


def files() -> list[Path]:
    found = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json"]
    return sorted([*found, PAGE])


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_line_is_one_that_tidelog_takes(path: Path) -> None:
    for words in command_lines(path.read_text(encoding="utf-8")):
        parse(words)


def test_the_command_lines_are_found() -> None:
    found = [words for path in files() for words in command_lines(path.read_text(encoding="utf-8"))]
    assert {words[0] for words in found} >= {"serve", "cluster", "broker", "config"}
    assert len(found) >= 10
    with pytest.raises((click.UsageError, AssertionError)):
        parse(["broker", "remove", "--no-such-option"])


def test_every_setting_in_an_environment_exists() -> None:
    """Those of compose files are loaded below; here are those of the image, the unit and the pods."""
    names: set[str] = set()
    for path in files():
        names |= set(re.findall(r"\bTIDELOG_[A-Z0-9]+__[A-Z0-9_]+", path.read_text(encoding="utf-8")))
    assert len(names) > 10
    config = load(None, {}, []).config
    for name in names:
        section, _, key = name.removeprefix("TIDELOG_").lower().partition("__")
        assert hasattr(getattr(config, section), key), name


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.toml")), ids=lambda path: path.parent.name)
def test_every_configuration_file_is_one_that_a_node_takes(path: Path) -> None:
    config = settings_of(path)
    assert len(config.controller.members) == 3 and config.replication.total_replicas == 3
    assert config.s3.create_bucket is False, "the policy has no right to create a bucket"


# --- compose ------------------------------------------------------------------------------------------------------


def test_the_nodes_of_compose_have_a_quorum_and_places_of_their_own() -> None:
    services = compose(THREE)["services"]
    configs = {name: configuration(services[name]) for name in NODES}
    members = [f"{number}@{name}:9193" for number, name in enumerate(NODES, 1)]
    for number, (name, config) in enumerate(configs.items(), 1):
        assert (config.node.id, config.node.roles) == (number, ["controller", "broker"])
        assert config.controller.members == members
        assert (config.kafka.peer_advertised_host, config.kafka.peer_port) == (name, 9292)
        assert (config.wal.kind, config.replication.total_replicas) == ("disk", 3)
        assert f"data-{number}:/var/lib/tidelog" in services[name]["volumes"]
        assert f"http://127.0.0.1:{config.admin.port}/healthz" in services[name]["healthcheck"]["test"][-1]
        ports = {f"127.0.0.1:{port}:{port}" for port in (config.kafka.port, config.admin.port)}
        assert set(services[name]["ports"]) == ports
    assert len({config.kafka.port for config in configs.values()}) == 3
    told = services["cli"]["environment"]["TIDELOG_BOOTSTRAP"].split(",")
    assert told == [f"localhost:{config.kafka.port}" for config in configs.values()]


def test_the_single_node_of_compose_listens_where_clients_are_told() -> None:
    service = compose(ONE)["services"]["tidelog"]
    config = configuration(service)
    assert (config.kafka.advertised_host, config.kafka.port, config.wal.kind) == ("localhost", 9092, "disk")
    assert service["ports"] == ["127.0.0.1:9092:9092"]
    assert config.admin.host == "127.0.0.1", "without a secret its admin HTTP is for the container alone"
    assert config.admin.port == 9644, "the image's health check asks there"


@pytest.mark.parametrize("path", [ONE, THREE], ids=lambda path: path.name)
def test_containers_have_no_more_rights_than_they_need(path: Path) -> None:
    document = compose(path)
    ran = [service for service in document["services"].values() if service.get("command", [""])[0] == "serve"]
    assert len(ran) == (1 if path == ONE else 3)
    for service in ran:
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        config = configuration(service)
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        assert grace_s >= STOP_GRACE_S + (config.node.drain_timeout_ms + config.node.shutdown_timeout_ms) / 1000
        context = (path.parent / service["build"]["context"]).resolve()
        assert context == ROOT and (context / service["build"]["dockerfile"]).is_file()
    mounted = {each.split(":")[0] for service in document["services"].values() for each in service.get("volumes", ())}
    assert mounted == set(document["volumes"])


@pytest.mark.long
@pytest.mark.slow
def test_the_three_nodes_as_written_make_a_healthy_cluster(tmp_path: Path, minio_server: S3Server) -> None:
    services = compose(THREE)["services"]
    secret = str(tmp_path / "cluster.secret")
    (program,) = services["secret"]["command"]
    subprocess.run([sys.executable, "-c", program.replace("/secret/cluster.secret", secret)], check=True)
    common = {
        "/secret/cluster.secret": secret,
        "0.0.0.0": "127.0.0.1",
        "localhost": "127.0.0.1",
        "http://minio:9000": minio_server.endpoint,
        "S3_ACCESS_KEY": minio_server.access_key_id,
        "S3_SECRET_KEY": minio_server.secret_access_key,
        **{f"{name}:9193": f"127.0.0.1:{free_port()}" for name in NODES},
    }
    bucket = new_bucket()
    with ExitStack() as stack:
        processes = []
        for name in NODES:
            config = configuration(services[name])
            environment = services[name]["environment"]
            environment |= {"TIDELOG_S3__BUCKET": bucket, "TIDELOG_NODE__DATA_DIR": str(tmp_path / name)}
            environment["TIDELOG_KAFKA__PEER_PORT"] = "0"
            own = {
                f"host={name}": "host=127.0.0.1",
                f"kafka.port={config.kafka.port}": "kafka.port=0",
                f"admin.port={config.admin.port}": "admin.port=0",
            }
            processes.append(stack.enter_context(node(services[name], {**own, **common}, tmp_path / f"{name}.out")))
        addresses = [eventually(partial(bootstrap, tmp_path / f"{name}.out")) for name in NODES]
        status = eventually(lambda: healthy(",".join(addresses)))
        for name, row in zip(NODES, status["nodes"], strict=True):
            entry, *arguments = services[name]["healthcheck"]["test"][1:]
            assert entry == "python"
            wanted = f"http://127.0.0.1:{configuration(services[name]).admin.port}"
            check = [each.replace(wanted, row["admin_url"]) for each in arguments]
            subprocess.run([sys.executable, *check], check=True, timeout=30)
        for process in processes:
            process.terminate()
        assert [process.wait(90) for process in processes] == [0, 0, 0]


# --- the image ----------------------------------------------------------------------------------------------------


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of the Dockerfile by stage, `(name, rest)`, with lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    found: list[list[tuple[str, str]]] = []
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append((name, " ".join(rest.split())))
    return found


def image_environment() -> dict[str, str]:
    (text,) = [rest for name, rest in stages()[-1] if name == "ENV"]
    return dict(each.split("=", 1) for each in shlex.split(text))


def test_the_last_stage_has_nothing_to_build_with_and_no_rights() -> None:
    build, last = stages()
    assert [name for name, rest in last if name == "COPY" and "--from=build" not in rest] == []
    assert "pip uninstall --yes" in dict(last)["RUN"] and "--without-pip" in dict(build)["RUN"]
    assert dict(last)["USER"] == f"{USER_ID}:{USER_ID}"
    assert json.loads(dict(last)["ENTRYPOINT"]) == ["tidelog"]
    parse([*json.loads(dict(last)["CMD"])])
    config = load(None, image_environment(), []).config
    assert config.node.data_dir == dict(last)["VOLUME"] == "/var/lib/tidelog"
    defaults = load(None, {}, []).config
    check = dict(last)["HEALTHCHECK"]
    assert "http://127.0.0.1:9644/healthz" in check and defaults.admin.host == "127.0.0.1"
    assert "9644" in dict(last)["EXPOSE"].split() and str(defaults.kafka.port) in dict(last)["EXPOSE"].split()


@pytest.mark.long
def test_hadolint_finds_nothing(deploy_lint: Path) -> None:
    done = subprocess.run(
        [deploy_lint.parent / "hadolint", "--failure-threshold", "style", DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage leaves in /opt/tidelog, made by its own command in a folder."""
    base = tmp_path_factory.mktemp("image")
    base.chmod(0o755)
    source, target = base / "src", base / "opt" / "tidelog"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, source / name)
    maker = base / "maker"
    subprocess.run([python_for_all(), "-m", "venv", maker], check=True)
    command = dict(stages()[0])["RUN"].replace("/opt/tidelog", str(target)).replace("/src", str(source))
    environment = {"PATH": f"{maker / 'bin'}:/usr/bin:/bin", "HOME": str(base)}
    done = subprocess.run(["sh", "-ec", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


IDENTITY: dict[str, Any] = {"user": USER_ID, "group": USER_ID, "extra_groups": []} if os.geteuid() == 0 else {}
"""The image's user, where there is the right to become it; else this one."""


def python_for_all() -> str:
    """An interpreter that the image's user may run, too: one in somebody's home is not."""
    wanted = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"
    for found in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError):
            if (
                subprocess.run([found, "-c", wanted], cwd="/", capture_output=True, check=False, **IDENTITY).returncode
                == 0
            ):
                return found
    return lacking(f"a Python of 3.11 or later with venv that user {USER_ID} may run")


def as_user(command: Sequence[str | Path], environment: dict[str, str], output: Path, folder: Path) -> Any:
    """Start a process as the image's user."""
    with output.open("wb") as file:
        return subprocess.Popen(
            [str(each) for each in command], env=environment, stdout=file, stderr=file, cwd=folder, **IDENTITY
        )


@pytest.mark.long
def test_the_steps_of_the_image_make_a_server_that_can_write_its_data_only(image: Path, tmp_path: Path) -> None:
    parents = [tmp_path, *tmp_path.parents][: len(tmp_path.parts) - 2]
    for parent in parents:
        parent.chmod(parent.stat().st_mode | 0o011)  # the image's user passes through
    for parent in [image, *image.parents][: len(image.parts) - 2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(data, USER_ID, USER_ID)
    assert not list(image.glob("bin/pip*")) and not list(image.glob("lib/python*/site-packages/pip"))
    port = free_port()
    environment = {**image_environment(), "TIDELOG_NODE__DATA_DIR": str(data), "TIDELOG_KAFKA__PORT": str(port)}
    admin = free_port()
    environment |= {"PATH": f"{image / 'bin'}:/usr/bin:/bin", "TIDELOG_ADMIN__PORT": str(admin)}
    output = tmp_path / "output"
    before = {path: path.stat().st_mtime_ns for path in image.rglob("*")}
    process = as_user([image / "bin" / "tidelog", *json.loads(dict(stages()[-1])["CMD"])], environment, output, data)
    try:
        eventually(lambda: READY_PREFIX in output.read_text(), 60)
        check = json.loads(dict(stages()[-1])["HEALTHCHECK"].partition("CMD ")[2])
        asked = [each.replace("9644", str(admin)) for each in check]
        assert as_user(asked, environment, tmp_path / "check", data).wait(30) == 0, (tmp_path / "check").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, output.read_text()
        assert as_user(asked, environment, tmp_path / "check", data).wait(30) != 0
    finally:
        process.kill()
    assert {path: path.stat().st_mtime_ns for path in image.rglob("*")} == before


# --- systemd ------------------------------------------------------------------------------------------------------


def unit() -> dict[str, list[str]]:
    """The settings of the unit, all values of each."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        lacking("systemd-analyze of Debian's package systemd")
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )


def test_the_unit_gives_a_node_the_time_and_the_restarts_that_it_needs() -> None:
    found = unit()
    (command,) = found["ExecStart"]
    assert command == "/opt/tidelog/bin/tidelog serve --config /etc/tidelog/tidelog.toml"
    config = settings_of(DEPLOY / "systemd" / "tidelog.toml")
    assert int(found["TimeoutStopSec"][0]) >= stop_s(config)
    assert found["RestartForceExitStatus"] == ["11"] and "a restart was asked for" in EXIT_CODES[11]
    assert {int(code) for code in found["RestartPreventExitStatus"][0].split()} <= set(EXIT_CODES)
    assert config.kafka.max_connections < int(found["LimitNOFILE"][0])
    assert config.node.data_dir == load(None, {}, []).config.node.data_dir, "the unit says where the data are"
    assert "TIDELOG_NODE__DATA_DIR=/var/lib/tidelog" in found["Environment"][0]
    assert found["StateDirectory"] == ["tidelog"] and found["User"] == ["tidelog"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "tidelog.service"
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/tidelog/bin/tidelog", "/bin/true"))
    done = analyze("verify", "--man=no", copy)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_confines_a_node() -> None:
    done = analyze("security", "--offline=true", "--threshold=15", "--no-pager", UNIT)
    assert done.returncode == 0, done.stdout[-400:]


def forbid_writable_code() -> None:
    """As MemoryDenyWriteExecute= does: prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN), kept by what is executed."""
    if ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MDWE)")


@contextmanager
def serving(
    directory: Path, before: Sequence[str] = (), **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`tidelog serve` over a new directory, with its address."""
    output = directory / "output"
    command = [*before, sys.executable, "-m", "tidelog", "serve"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
    settings = {
        "TIDELOG_NODE__DATA_DIR": str(directory / "data"),
        "TIDELOG_KAFKA__PORT": "0",
        "TIDELOG_ADMIN__PORT": "0",
    }
    settings |= {"TIDELOG_LOG__CLEANER_INTERVAL_MS": "100", "TIDELOG_UPLOAD__AGE_MS": "200"}
    with output.open("wb") as file:
        process = subprocess.Popen(command, env={**environment, **settings}, stdout=file, stderr=file, **options)
    try:
        yield process, eventually(lambda: bootstrap(output).partition("\n")[0], 120)
    finally:
        process.kill()
        process.wait(30)


def use(address: str) -> None:
    """Write, read and look, as clients and operators do."""
    run = [sys.executable, "-m", "tidelog"]
    more = ["--bootstrap", address]
    subprocess.run([*run, "topic", "create", "t", "--partitions", "2", *more], check=True, capture_output=True)
    lines = "".join(f"record {number}\n" for number in range(1000)).encode()
    subprocess.run([*run, "produce", "t", *more], input=lines, check=True, capture_output=True)
    read = [*run, "consume", "t", "--from-beginning", "--max-records", "1000", *more]
    done = subprocess.run(read, check=True, capture_output=True)
    assert len(done.stdout.splitlines()) == 1000
    subprocess.run([*run, "status", *more], check=True, capture_output=True)


@pytest.mark.long
def test_a_node_runs_without_writable_and_executable_memory(tmp_path: Path) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)"],
        preexec_fn=forbid_writable_code,
        check=False,
        capture_output=True,
    )
    assert probe.returncode != 0 and b"PermissionError" in probe.stderr
    with serving(tmp_path, preexec_fn=forbid_writable_code) as (process, address):
        use(address)
        process.terminate()
        assert process.wait(90) == 0


def allowed_calls() -> set[str]:
    """The system calls that the unit's filter lets through."""
    sets: dict[str, set[str]] = {}
    name = ""
    for line in analyze("syscall-filter", "--no-pager").stdout.splitlines():
        if line.startswith("@"):
            name = line.strip()
            sets[name] = set()
        elif line.startswith("    ") and not line.strip().startswith("#"):
            sets[name].add(line.strip())

    def expanded(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        return {call for each in sets[name] for call in expanded(each)}

    found: set[str] = set()
    for value in unit()["SystemCallFilter"]:
        names = {call for each in value.removeprefix("~").split() for call in expanded(each)}
        found = found - names if value.startswith("~") else found | names
    return found


@pytest.mark.long
def test_a_node_makes_no_system_call_that_the_unit_forbids(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        lacking("strace of Debian's package strace")
    allowed = allowed_calls()
    assert {"epoll_wait", "fdatasync", "setpriority"} <= allowed and "mount" not in allowed
    trace = tmp_path / "trace"
    with serving(tmp_path, [strace, "-f", "-qq", "-o", str(trace), "-e", "signal=none"]) as (process, address):
        use(address)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(90) == 0
    made = {found[1] for line in trace.read_text().splitlines() if (found := re.match(r"\d+ +(\w+)\(", line))}
    assert len(made) > 40
    assert made - allowed == set()


# --- Kubernetes ---------------------------------------------------------------------------------------------------


def manifests() -> dict[tuple[str, str], Document]:
    found = {}
    folder = DEPLOY / "kubernetes"
    for name in (*(yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]), "hpa.yaml"):
        for document in yaml.safe_load_all((folder / name).read_text(encoding="utf-8")):
            found[document["kind"], document["metadata"]["name"]] = document
    return found


SETS = (("tidelog-controller", "controller", 1), ("tidelog", "broker", 101))
each_set = pytest.mark.parametrize(("name", "role", "first_id"), SETS, ids=[role for _, role, _ in SETS])


def pod_of(name: str) -> tuple[Document, Document, Document]:
    """A StatefulSet, the specification of its pods, and their container."""
    found = manifests()["StatefulSet", name]
    pod = found["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return found, pod, container


def pod_configuration(container: Document, pod_name: str) -> Config:
    """What the pod would run with: its command is run by sh, with `tidelog` as a program that prints its arguments."""
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    known = {"POD_NAME": pod_name, "POD_NAMESPACE": "tidelog"}
    for name, value in known.items():
        variables = {key: text.replace(f"$({name})", value) for key, text in variables.items()}
    shell, option, line = container["command"]
    script = line.replace("exec tidelog", "printf '%s\\n'")
    said = subprocess.run(
        [shell, option, script], env={**os.environ, **known}, capture_output=True, text=True, check=True
    )
    words = said.stdout.splitlines()
    toml = DEPLOY / "kubernetes" / "tidelog.toml"
    context = parse([str(toml) if word == "/etc/tidelog/tidelog.toml" else word for word in words])
    return settings_of(toml, {**image_environment(), **variables}, *context.params["assignments"])


@each_set
def test_a_pod_runs_the_node_that_its_name_says(name: str, role: str, first_id: int) -> None:
    found, pod, container = pod_of(name)
    service = found["spec"]["serviceName"]
    for number in range(3):
        config = pod_configuration(container, f"{name}-{number}")
        assert (config.node.id, config.node.roles) == (first_id + number, [role])
        assert config.controller.secret_file == "/secret/cluster.secret"
        if role == "controller":
            assert config.controller.members[number] == f"{number + 1}@{name}-{number}.{service}:9193"
            assert (config.controller.host, config.controller.port) == ("0.0.0.0", 9193)
        else:
            assert config.kafka.advertised_host == f"{name}-{number}.{service}.tidelog.svc"
            assert config.admin.advertised_host == config.kafka.advertised_host
        needed_s = stop_s(config) if role == "broker" else config.node.shutdown_timeout_ms / 1000 + LAST_RESORT_S
        assert pod["terminationGracePeriodSeconds"] >= needed_s
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    listening = {"rpc": config.controller.port} if role == "controller" else {
        "kafka": config.kafka.port, "peers": config.kafka.peer_port, "admin": config.admin.port
    }  # fmt: skip
    assert ports == listening


@each_set
def test_probes_services_and_budgets_are_of_these_pods(name: str, role: str, first_id: int) -> None:
    found, _, container = pod_of(name)
    labels = found["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"]["matchLabels"] == labels
    everything = manifests()
    service = everything["Service", found["spec"]["serviceName"]]["spec"]
    assert service["selector"] == labels and service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    names = {each["name"] for each in container["ports"]}
    assert {each["targetPort"] for each in service["ports"]} <= names
    budgets = [
        each["spec"] for (kind, _), each in everything.items()
        if kind == "PodDisruptionBudget" and each["spec"]["selector"]["matchLabels"] == labels
    ]  # fmt: skip
    assert [each["maxUnavailable"] for each in budgets] == [1]
    probes = [container[f"{each}Probe"] for each in ("startup", "readiness", "liveness")]
    for probe in probes:
        assert probe.get("httpGet", probe.get("tcpSocket"))["port"] in names
    if role == "broker":
        assert [probe["httpGet"]["path"] for probe in probes] == ["/healthz", "/readyz", "/healthz"]
    for policy in (each for (kind, _), each in everything.items() if kind == "NetworkPolicy"):
        if policy["spec"]["podSelector"]["matchLabels"] == labels:
            opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
            assert opened == names


@each_set
def test_pods_are_confined(name: str, role: str, first_id: int) -> None:
    _, pod, container = pod_of(name)
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == USER_ID
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
    for one in (container, *pod["initContainers"]):
        confined = one["securityContext"]
        assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
        assert confined["capabilities"] == {"drop": ["ALL"]}
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert writable == {"/var/lib/tidelog", "/tmp"}
    volumes = {each["name"] for each in pod["volumes"]} | {"data"}
    assert {each["name"] for one in (container, *pod["initContainers"]) for each in one["volumeMounts"]} <= volumes


def test_the_autoscaler_follows_the_metric_for_the_brokers() -> None:
    scaler = manifests()["HorizontalPodAutoscaler", "tidelog"]["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) in manifests()
    (metric,) = scaler["metrics"]
    wanted = metric["external"]["metric"]["name"]
    assert f"`{wanted}`" in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert scaler["minReplicas"] == manifests()["StatefulSet", "tidelog"]["spec"]["replicas"]


def test_the_secret_is_copied_so_that_only_its_owner_can_read_it(tmp_path: Path) -> None:
    _, pod, _ = pod_of("tidelog")
    (copying,) = pod["initContainers"]
    source, target = tmp_path / "from", tmp_path / "secret"
    source.mkdir()
    target.mkdir()
    (source / "cluster.secret").write_text("0123456789abcdef0123456789abcdef\n")
    (source / "cluster.secret").chmod(0o440)
    shell, option, line = copying["command"]
    subprocess.run([shell, option, line.replace("/from", str(source)).replace("/secret/", f"{target}/")], check=True)
    assert (target / "cluster.secret").stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_kubernetes_takes_the_manifests(deploy_lint: Path) -> None:
    folder = DEPLOY / "kubernetes"
    paths = [path for path in sorted(folder.glob("*.yaml")) if path.name != "kustomization.yaml"]
    done = subprocess.run(
        [deploy_lint.parent / "kubernetes-validate", "--strict", *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("passed for resource", done.stdout + done.stderr)) == len(manifests())
