"""The bundle: bounded, and without any secret, in whatever form it is written."""

from __future__ import annotations

import base64
import json
import tarfile
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.certificates import Authority
from tests.support.examples import examples
from tidelog.cli.main import cli
from tidelog.config import load
from tidelog.controller.rpc.secret import admin_token, read_token
from tidelog.doctor import bundle as bundle_module
from tidelog.doctor.bundle import Bundle
from tidelog.doctor.masking import LEAST_CHARACTERS, MASK, Masker, known_secrets, shown_settings
from tidelog.doctor.parts import listing, tail
from tidelog.runtime.errors import AlreadyExists, StorageFailed
from tidelog.runtime.facts.node import SettingFacts

S3_ID = "AKIDEXAMPLE-of-the-bucket"
S3_KEY = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
CLUSTER_SECRET = "5d3f0c9a7be14c6688d1f0a2e4b7c901"
SASL_PASSWORD = "correct horse battery staple"
SCRAM_SALT = "QSXCR+Q6sek8bf92ZQ=="
STORED_KEY = "v0X8v3Bz2T0CJGbJQyF0X+HI4Ts="
SESSION = "FwoGZXIvYXdzEJr//////////example"


def unpacked(file: Path) -> bytes:
    """Every byte of the archive, names included."""
    with tarfile.open(file) as archive:
        parts = []
        for member in archive.getmembers():
            opened = archive.extractfile(member)
            assert opened is not None
            parts += [member.name.encode(), opened.read()]
    return b"\n".join(parts)


def forms(secret: str) -> list[bytes]:
    raw = secret.encode()
    shown = [
        secret,
        quote(secret, safe=""),
        base64.b64encode(raw).decode().rstrip("="),
        raw.hex(),
        json.dumps(secret)[1:-1],
    ]
    return [each.encode() for each in shown]


def test_no_secret_is_in_a_bundle_wherever_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the configuration, in files, variables, the command line, log files, and names that look like one."""
    data = tmp_path / "data"
    data.mkdir()
    secret, key, flag_secret = tmp_path / "cluster.secret", tmp_path / "s3-key", tmp_path / "flag.secret"
    secret.write_text(CLUSTER_SECRET + "\n")
    key.write_text(S3_KEY + "\n")
    flag_secret.write_text("another-secret-of-the-cluster-99")
    files = Authority(tmp_path / "tls").issue("broker-1")
    pem = files.key_file.read_text()
    for file in (secret, key, flag_secret):
        file.chmod(0o600)
    config = tmp_path / "t.toml"
    config.write_text(
        f"[controller]\nsecret_file = '{secret}'\n[s3]\nbucket = 'b'\nendpoint = 'http://127.0.0.1:1'\n"
        f"access_key_id = '{S3_ID}'\nsecret_access_key_file = '{key}'\nretry_budget_ms = 100\n"
        f"[replication]\ntls_cert_file = '{files.cert_file}'\ntls_key_file = '{files.key_file}'\n"
        f"tls_ca_file = '{files.ca_file}'\n"
    )
    (data / "broker.log").write_text(
        "\n".join(
            [
                f"started with {S3_KEY} and {S3_ID}",
                f'sasl.jaas.config=org.apache.ScramLoginModule required username="u" password="{SASL_PASSWORD}";',
                f"SCRAM-SHA-256=[salt={SCRAM_SALT},stored_key={STORED_KEY},iterations=4096]",
                f"client-final c=biws,r=nonce,p={STORED_KEY}",
                f"GET /x?X-Amz-Signature=deadbeefdeadbeef&X-Amz-Security-Token={quote(SESSION, safe='')}",
                f"Authorization: Bearer {admin_token(CLUSTER_SECRET.encode())}",
                f"token again {read_token(CLUSTER_SECRET.encode())}",
                json.dumps({"event": "config", "sasl.password": SASL_PASSWORD, "pem": pem}),
                pem,
                base64.b64encode(CLUSTER_SECRET.encode()).decode(),
                quote(S3_KEY, safe=""),
                "a line that says nothing",
            ]
        )
    )
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION)
    monkeypatch.setenv("TIDELOG_S3__PREFIX", "the-prefix")
    monkeypatch.setenv("KAFKA_SASL_PASSWORD", SASL_PASSWORD)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bundle.tar.gz"
    arguments = ["debug", "bundle", "--offline", "-o", str(file), "--config", str(config), "--data-dir", str(data)]
    arguments += ["--secret-file", str(flag_secret)]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = unpacked(file)
    secrets = [S3_ID, S3_KEY, CLUSTER_SECRET, SASL_PASSWORD, SCRAM_SALT, STORED_KEY, SESSION, flag_secret.read_text()]
    secrets += [admin_token(CLUSTER_SECRET.encode()), read_token(CLUSTER_SECRET.encode()), "deadbeefdeadbeef"]
    secrets += [line for line in pem.splitlines() if not line.startswith("-----")]
    assert [each for each in secrets for form in forms(each) if form in content] == []
    for shown in (b"a line that says nothing", b"the-prefix", str(secret).encode(), b"s3.secret_access_key_file"):
        assert shown in content


def test_a_secret_that_is_no_text_is_not_in_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, file = tmp_path / "t.toml", tmp_path / "bundle.tar.gz"
    config.write_text("[s3]\nbucket = 'b'\nsecret_access_key = 8675309001\n")
    arguments = ["debug", "bundle", "--offline", "-o", str(file), "--config", str(config), "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = unpacked(file)
    assert b"Expected `str`, got `int`" in content and b"8675309001" not in content


SHOWN = [
    "controller.secret_file = /etc/tidelog/secret (file x)",
    '{"tokens": {"a": 1}, "token": 12, "secrets": [1], "password": null}',
    "rpc/secret.py:30 read_secret",
    "the secret of the cluster is not set",
    "tidelog_connections 3",
    "/var/lib/tidelog/0123456789/data/wal/00000000000000000001.wal",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
]


@pytest.mark.parametrize("text", SHOWN)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert Masker().mask(text) == text


HIDDEN = [
    ("password=abc", "abc"),
    ("user_password: 'ab c'", "ab c"),
    ('{"s3.secret_access_key": "x y"}', "x y"),
    (r"{\"password\": \"inner\"}", "inner"),
    (r'{"password": "a \"quoted\" word"}', "quoted"),
    (r"{\"password\": \"a \\\"quoted\\\" end\"}", "end"),
    (r'{"password": "a backslash at its end\\"}', "backslash"),
    ("https://user:pa55@host/", "pa55"),
    ("https://:pa55@host/", "pa55"),
    ("x-api-key: 0123abcd", "0123abcd"),
    ("https://host/v1/traces?api-key=0123abcd&x=1", "0123abcd"),
    ("--private-key=0123abcd", "0123abcd"),
    ("the passphrase: 0123abcd", "0123abcd"),
    ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("key AKIAIOSFODNN7EXAMPLE there", "AKIAIOSFODNN7EXAMPLE"),
    ("a line alone: MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgTcRNt52U+k1yL+Pl", "MIGHAgEAMBMGByqGSM49AgEG"),
    ("['wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY']", "wJalrXUtnFEMI"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nAAAA", "MIIE"),
    ("MIIEowIBAAKC\nAAAA==\n-----END RSA PRIVATE KEY-----", "MIIEowIBAAKC"),
]


@pytest.mark.parametrize(("text", "secret"), HIDDEN)
def test_what_looks_like_a_secret_is_hidden(text: str, secret: str) -> None:
    hidden = Masker().mask(text)
    assert secret not in hidden and MASK in hidden
    assert Masker().mask(hidden) == hidden


LONG = 16_000


@pytest.mark.parametrize(
    "text",
    [
        "a" * LONG,
        "-" * LONG,
        "token" * (LONG // 5),
        "deadbeef " * (LONG // 9) + "\n-----END OF THE REPORT-----",
        "deadbeef  " * (LONG // 10) + "-----END RSA PRIVATE KEY-----" + " deadbeef" * (LONG // 9),
    ],
    ids=["word", "line", "names", "words", "key"],
)
def test_the_time_to_hide_secrets_does_not_grow_with_the_square_of_a_line(text: str) -> None:
    """Clients choose names of 32 KB, such as transactional ids, and logs have long lines."""
    masker, began = Masker(["the-secret"]), time.process_time()
    masker.mask(text)
    assert time.process_time() - began < 1


def test_the_lines_of_a_key_before_its_end_are_hidden_however_many_there_are() -> None:
    key = "\n".join(["MIIEowIBAAKC"] * 1_000 + ["AAAA=="])
    hidden = Masker().mask(f"it begins: x.\n{key}\n-----END RSA PRIVATE KEY-----\nthe end")
    assert hidden == f"it begins: x.\n{MASK}\nthe end"


@settings(max_examples=examples(200), deadline=None)
@given(
    secret=st.text(min_size=LEAST_CHARACTERS, max_size=40).filter(lambda text: "*" not in text),
    before=st.text(max_size=40),
    after=st.text(max_size=40),
)
def test_a_known_secret_is_hidden_in_every_form_it_is_written_in(secret: str, before: str, after: str) -> None:
    masker = Masker([secret])
    for form in forms(secret):
        text = before + form.decode() + after
        assert form.decode() not in masker.mask(text)


def test_known_secrets_are_those_of_settings_files_and_variables() -> None:
    config = load(flags=[("s3.secret_access_key", S3_KEY), ("s3.access_key_id", S3_ID)]).config
    variables = {"DB_PASSWORD": "hunter2hunter2", "HOME": "/home/user", "SECRET_FILE": "/etc/secret"}
    found = known_secrets(config, [b"line-one-secret\nline-two-secret\n", b"x"], variables)
    assert {S3_KEY, S3_ID, "line-one-secret", "line-two-secret", "hunter2hunter2"} <= found
    assert admin_token(b"line-one-secret\nline-two-secret") in found
    assert not {"/home/user", "/etc/secret", "x"} & found


def test_settings_of_other_nodes_are_hidden_by_their_names() -> None:
    rows = [SettingFacts("s3.access_key_id", S3_ID, "file"), SettingFacts("s3.access_key_id_file", "/x", "file")]
    assert [each["value"] for each in shown_settings(rows)] == [MASK, "/x"]


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_bundle_is_bounded_and_says_what_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "MAX_ENTRY_BYTES", 1_000)
    monkeypatch.setattr(bundle_module, "MAX_BUNDLE_BYTES", 1_800)
    made = Bundle(Masker(["the-secret-at-the-cut"]))
    made.add_text("first.txt", "x" * 990 + "the-secret-at-the-cut" + "y" * 500)
    made.add_text("second.txt", "begin " + "z" * 900 + " end", keeps_end=True)
    made.add_text("third.txt", "no room")
    made.lack("nodes/3", "it is dead, password=abcdef")
    file = tmp_path / "b.tar.gz"
    made.write(file, 1_000)
    content = unpacked(file)
    assert b"the-secret" not in content and b"abcdef" not in content
    manifest = made.manifest(1_000)
    assert [each["bytes"] for each in manifest["entries"]] == [1_000, 800]
    assert [each["left_out_bytes"] for each in manifest["entries"]] == [498, 110]
    assert set(manifest["missing"]) == {"third.txt", "nodes/3"}
    assert b" end" in content and b"begin" not in content
    with pytest.raises(AlreadyExists):
        made.write(file, 1_000)
    with pytest.raises(StorageFailed, match="cannot write"):
        made.write(tmp_path / "no-such-folder" / "b.tar.gz", 1_000)


def test_a_file_whose_name_is_no_text_has_its_place(tmp_path: Path) -> None:
    made = Bundle(Masker([]))
    made.add_text("logs/\udcff.log", "a line\n")
    made.lack("logs/\udcfe.log", "it cannot be read")
    file = tmp_path / "b.tar.gz"
    made.write(file, 1_000)
    content = unpacked(file)
    assert b"a line" in content and rb"\udcff.log" in content and rb"\udcfe.log" in content


def test_the_end_of_a_log_has_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(1_000)))
    kept = tail(log, 100)
    assert kept.startswith("line 9") and kept.endswith("line 999\n") and len(kept) <= 100
    assert tail(log, 1 << 20).startswith("line 0\n")


def test_a_listing_names_files_by_size_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "wal").mkdir()
    (tmp_path / "wal" / "1.wal").write_bytes(b"x" * 7)
    (tmp_path / "loop").symlink_to(tmp_path)
    lines = list(listing(tmp_path))
    assert len(lines) == 1 and lines[0].endswith("/wal/1.wal") and " 7 " in lines[0]
