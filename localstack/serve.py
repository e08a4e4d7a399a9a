#!/usr/bin/env python3
"""Run an S3 server on this machine, without a container: moto, MinIO or LocalStack.

    python localstack/serve.py {moto|minio|localstack} [--port P] [--dir D] [--while-locked FILE]

Installs the server if necessary (`install.py`), prints one line `ready endpoint=http://127.0.0.1:PORT` once it
responds, and serves until SIGTERM or SIGINT, until its parent ends, or until its stdin (if that is a pipe) is closed.
With `--while-locked FILE` it serves while any process holds a shared flock(2) on FILE instead: the kernel releases the
lock when that process ends, so many users can share a server and none has to stop it.

It listens on 127.0.0.1 only. Port 0 (the default) selects a free one. The data is in D (default: a temporary folder,
removed at the end; moto keeps it in memory), the server's output in `D/server.log`. The access key is
`$AWS_ACCESS_KEY_ID`, default `tidelog`; the secret `$AWS_SECRET_ACCESS_KEY`, default `tidelog-secret`.

Exit codes: 0 stopped on request; 1 the server could not be started or died; 3 it cannot be installed on this machine.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import importlib.util
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localstack import install
from tidelog.runtime.network import AddressInUse
from tidelog.runtime.ports import choose_port

HOST = "127.0.0.1"
START_TIMEOUT_S = 180
ANSWER_TIMEOUT_S = 30
STOP_TIMEOUT_S = 10
POLL_S = 0.2
PR_SET_PDEATHSIG = 1

HEALTH = {
    "moto": ["/moto-api/"],
    "minio": ["/minio/health/live"],
    "localstack": ["/_localstack/health", "/a-bucket-that-is-not-there"],  # loads its S3 with the first request for it
}


def command_for(kind: str, port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    """Return the server's command line and additional environment variables."""
    if kind == "moto":
        if importlib.util.find_spec("moto") is None:
            raise install.Missing("it is not among what `make up` installs; `make install` installs it")
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], {}
    if kind == "minio":
        binary = str(install.install("minio"))
        data = directory / "data"
        data.mkdir(exist_ok=True)
        return [binary, "server", str(data), "--address", f"{HOST}:{port}"], {
            "MINIO_ROOT_USER": os.environ.get("AWS_ACCESS_KEY_ID") or "tidelog",
            "MINIO_ROOT_PASSWORD": os.environ.get("AWS_SECRET_ACCESS_KEY") or "tidelog-secret",
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "HOME": str(directory),
        }
    return [str(install.install("localstack")), "-m", "localstack.runtime.main"], {
        "SERVICES": "s3",
        "OVERRIDE_IN_DOCKER": "0",  # otherwise it writes to system folders
        "FILESYSTEM_ROOT": str(directory / "fs"),
        "GATEWAY_LISTEN": f"{HOST}:{port}",
        "GATEWAY_SERVER": "hypercorn",  # the other variable binds all addresses
        "DNS_ADDRESS": "0",
        "DISABLE_EVENTS": "1",
        "SKIP_SSL_CERT_DOWNLOAD": "1",
        "PYTHONPATH": "",
    }


def end_with_parent() -> None:
    """Called between fork and exec: request SIGTERM for the child when this process dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def answers(url: str) -> bool:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=ANSWER_TIMEOUT_S) as response:
            return bool(response.status < 500)
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


def wait_until_ready(kind: str, child: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and child.poll() is None:
        if all(answers(f"http://{HOST}:{port}{path}") for path in HEALTH[kind]):
            return True
        time.sleep(POLL_S / 2)
    return False


class Lifetime:
    """Decides when to stop."""

    def __init__(self, lock: Path | None) -> None:
        self._lock = lock.open("a") if lock else None
        self._parent = os.getppid()
        self._stdin_is_pipe = stat.S_ISFIFO(os.fstat(0).st_mode)
        self.asked = False
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def _is_used(self) -> bool:
        """Whether another process holds the lock. If not, take and keep it: a new user waits until this server ends."""
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def over(self) -> bool:
        """Wait briefly, then return whether to stop."""
        if self._lock is not None:
            time.sleep(POLL_S)
            return self.asked or not self._is_used()
        if not self._stdin_is_pipe:
            time.sleep(POLL_S)
        elif select.select([0], [], [], POLL_S)[0] and not os.read(0, 4096):
            return True
        return self.asked or os.getppid() != self._parent


def stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def serve(kind: str, port: int, directory: Path, lifetime: Lifetime) -> int:
    command, extra = command_for(kind, port, directory)
    log_path = directory / "server.log"
    with log_path.open("ab") as log:
        child = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **extra},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=end_with_parent,  # safe: there are no threads here
        )
    try:
        if not wait_until_ready(kind, child, port):
            tail = " | ".join(log_path.read_text(errors="replace").strip().splitlines()[-3:])
            print(f"{kind} did not start on port {port}: {tail}", file=sys.stderr)
            return 1
        sys.stdout.write(f"ready endpoint=http://{HOST}:{port}\n")  # in one piece, even if stdout is unbuffered
        sys.stdout.flush()
        while not lifetime.over():
            if child.poll() is not None:
                print(f"{kind} ended by itself with {child.returncode}; see {log_path}", file=sys.stderr)
                return 1
        return 0
    finally:
        stop(child)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run an S3 server on 127.0.0.1.")
    parser.add_argument("kind", choices=sorted(HEALTH))
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--dir", type=Path, help="where its data and log are; default: a temporary folder")
    parser.add_argument("--while-locked", type=Path, metavar="FILE", help="serve while FILE is locked by anybody")
    options = parser.parse_args()
    lifetime = Lifetime(options.while_locked)
    directory = options.dir.absolute() if options.dir else Path(tempfile.mkdtemp(prefix=f"tidelog-{options.kind}-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return serve(options.kind, options.port or choose_port(HOST), directory, lifetime)
    except install.Missing as error:
        print(f"missing: {options.kind}: {error}", file=sys.stderr)
        return 3
    except AddressInUse as error:
        print(f"{options.kind}: {error}", file=sys.stderr)
        return 1
    finally:
        if options.dir is None:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
