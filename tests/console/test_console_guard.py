"""Which requests of a browser the console answers."""

from __future__ import annotations

import pytest

from tidelog.console.guard import HEADER, SECURITY_HEADERS, is_known_host, refusal

OURS = {"Host": "10.0.0.1:9644", HEADER: "1"}


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9644", "localhost:1", "LOCALHOST", "[::1]:9644", "10.0.0.1", "Broker-1:80"]
)
def test_addresses_and_known_names_are_answered(host: str) -> None:
    assert is_known_host(host, {"broker-1"})


@pytest.mark.parametrize(
    "host",
    ["evil.example:9644", "", "127.0.0.1.evil.example", "localhost.evil.example", "evil@127.0.0.1", "127.0.0.1/x",
     "[::1", "127.0.0.1:port", ":9644", "broker-2"],
)  # fmt: skip
def test_a_page_that_made_its_own_name_resolve_to_the_console_is_refused(host: str) -> None:
    assert not is_known_host(host, {"broker-1"})
    assert refusal({"Host": host, HEADER: "1"}, {"broker-1"}, is_api=False)


def test_the_consoles_own_requests_pass() -> None:
    assert refusal(OURS, (), is_api=True) is None
    assert refusal({**OURS, "Origin": "http://10.0.0.1:9644", "Sec-Fetch-Site": "same-origin"}, (), is_api=True) is None
    assert refusal({"Host": "10.0.0.1:9644"}, (), is_api=False) is None


@pytest.mark.parametrize(
    "more",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://10.0.0.1:9645"},
        {"Origin": "file://10.0.0.1:9644"},
        {"Origin": "http://10.0.0.1:9644.evil.example"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "none"},
        {HEADER: ""},
    ],
)
def test_requests_of_other_pages_are_refused(more: dict[str, str]) -> None:
    assert refusal({**OURS, **more}, (), is_api=True)


def test_without_the_header_nothing_of_the_api_is_answered() -> None:
    assert HEADER in (refusal({"Host": "127.0.0.1:1"}, (), is_api=True) or "")


def test_the_policy_lets_a_page_load_its_own_files_and_nothing_else() -> None:
    policy = dict(
        part.strip().split(" ", 1) for part in SECURITY_HEADERS["Content-Security-Policy"].split(";") if part.strip()
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "'none'")
