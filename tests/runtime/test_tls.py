"""Files for TLS: what is wrong with them is said at the start, and a change of them is taken up, or refused."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from tests.support.certificates import SERVER_ONLY, Authority
from tidelog.runtime.errors import ConfigError
from tidelog.runtime.tls import EXPIRY_WARNING_S, MutualTls, TlsFiles


class HandClock:
    """Moved by hand; the wall clock is right at the start."""

    def __init__(self) -> None:
        self.now = 100.0
        self._wall = time.time() - self.now

    def monotonic(self) -> float:
        return self.now

    def time_ms(self) -> int:
        return int((self._wall + self.now) * 1000)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(files: TlsFiles) -> str:
    with pytest.raises(ConfigError) as caught:
        MutualTls(files, HandClock())
    assert caught.value.hint
    return str(caught.value)


def test_all_three_files_are_named_or_none(tmp_path: Path) -> None:
    assert TlsFiles.of("replication", "", "", "", check_host_names=True) is None
    assert TlsFiles.of("replication", "a", "b", "c", check_host_names=False) == (
        Path("a"),
        Path("b"),
        Path("c"),
        "replication",
        False,
    )
    with pytest.raises(ConfigError, match=r"replication\.tls_key_file and replication\.tls_ca_file are not set"):
        TlsFiles.of("replication", "cert", "", "", check_host_names=True)
    with pytest.raises(ConfigError, match=r"replication\.tls_ca_file is not set"):
        TlsFiles.of("replication", "cert", "key", "", check_host_names=True)


@pytest.mark.parametrize("setting", ["cert_file", "key_file", "ca_file"])
@pytest.mark.parametrize("fault", ["missing", "a directory", "not PEM", "empty", "garbage in PEM"])
def test_a_file_that_cannot_be_used_is_named(authority: Authority, tmp_path: Path, setting: str, fault: str) -> None:
    path = tmp_path / "wrong"
    if fault == "a directory":
        path.mkdir()
    elif fault != "missing":
        begin = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        path.write_text({"not PEM": "secret", "empty": "", "garbage in PEM": begin}[fault])
    files = authority.issue("one")
    wrong = {
        "cert_file": files._replace(cert_file=path),
        "key_file": files._replace(key_file=path),
        "ca_file": files._replace(ca_file=path),
    }
    said = refusal(wrong[setting])
    assert f"tls_{setting}" in said and str(path) in said


def test_a_key_that_belongs_to_another_certificate_is_refused(authority: Authority) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    said = refusal(one._replace(key_file=other.key_file))
    assert "cannot be used together" in said and str(other.key_file) in said


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(authority: Authority) -> None:
    assert "has a password" in refusal(authority.issue("one", password=b"open"))


def test_a_certificate_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    said = refusal(authority.issue("one")._replace(ca_file=other.ca_file))
    assert "unable to get local issuer certificate" in said and str(other.ca_file) in said


@pytest.mark.parametrize(
    ("dates", "why"), [((-3.0, -1.0), "certificate has expired"), ((1.0, 3.0), "certificate is not yet valid")]
)
def test_a_certificate_that_is_not_valid_now_is_refused(
    authority: Authority, dates: tuple[float, float], why: str
) -> None:
    assert why in refusal(authority.issue("one", begins_days=dates[0], days=dates[1]))


def test_a_certificate_for_servers_alone_is_refused_because_brokers_are_clients_too(authority: Authority) -> None:
    said = refusal(authority.issue("one", usages=SERVER_ONLY))
    assert "a listener that trusts" in said and "client authentication" in said


def test_a_key_that_others_can_read_is_a_problem(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    files = authority.issue("one")
    files.key_file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        tls = MutualTls(files, clock := HandClock())
    assert "can be read by other users" in caplog.text
    assert [each for each in tls.problems() if "chmod 600" in each]
    for mode in (0o600, 0o640):
        files.key_file.chmod(mode)
        clock.now += 2
        assert bool(tls.problems()) == bool(mode & 0o077)


def test_a_certificate_that_ends_soon_is_a_problem(authority: Authority) -> None:
    clock = HandClock()
    tls = MutualTls(authority.issue("one", days=EXPIRY_WARNING_S / 86_400 + 1), clock)
    assert tls.problems() == []
    clock.now += 2 * 86_400
    (soon,) = tls.problems()
    assert "expires in 13.0 days" in soon
    assert tls.certificate_left_s() == pytest.approx(13 * 86_400, abs=60)
    clock.now += EXPIRY_WARNING_S
    (over,) = tls.problems()
    assert "has expired" in over and tls.certificate_left_s() < 0


def test_files_that_change_are_used_for_later_connections(authority: Authority) -> None:
    clock = HandClock()
    tls = MutualTls(authority.issue("one"), clock)
    before = tls.server(), tls.client()
    clock.now += 2
    assert (tls.server(), tls.client()) == before, "nothing has changed"
    authority.issue("one")
    assert (tls.server(), tls.client()) == before, "it was looked at just now"
    clock.now += 2
    assert tls.server() is not before[0] and tls.client() is not before[1]
    assert tls.problems() == []


def test_changed_files_that_do_not_fit_are_a_problem_and_those_before_go_on(authority: Authority) -> None:
    clock = HandClock()
    files = authority.issue("one")
    tls = MutualTls(files, clock)
    before = tls.server()
    files.cert_file.write_bytes(authority.issue("other").cert_file.read_bytes())  # its key comes a moment later
    clock.now += 2
    assert tls.server() is before
    (problem,) = tls.problems()
    assert "are not used" in problem and "cannot be used together" in problem
    files.key_file.write_bytes((authority.directory / "other.key").read_bytes())
    clock.now += 2
    assert tls.problems() == [] and tls.server() is not before
    files.ca_file.unlink()
    clock.now += 2
    (problem,) = tls.problems()
    assert str(files.ca_file) in problem
