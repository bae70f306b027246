"""The files of a certificate: which are taken, which are refused, and what is said of them."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from gateway.settings import KeyPair, SettingsError
from gateway.tls import server_context
from tests.gateway.certificates import Identity


def refusal(pair: KeyPair | None) -> str:
    with pytest.raises(SettingsError) as raised:
        server_context(pair)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_pair_that_belongs_together_is_taken_and_none_is_plain_http(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = server_context(Identity.make(tmp_path).pair)
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert server_context(None) is None
    assert caplog.messages == []


def test_one_file_without_the_other_is_refused() -> None:
    assert KeyPair.of("--tls", None, None) is None
    for option in ("--tls", "--admin-tls"):
        with pytest.raises(SettingsError, match=f"{option}-cert is without {option}-key: give both"):
            KeyPair.of(option, Path("a"), None)
        with pytest.raises(SettingsError, match=f"{option}-key is without {option}-cert: give both"):
            KeyPair.of(option, None, Path("a"))


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    good, missing = Identity.make(tmp_path), tmp_path / "missing.pem"
    said = "can't be read (No such file or directory): make it readable, or choose another"
    assert refusal(KeyPair("--tls", missing, good.key)) == f"--tls-cert {missing} {said}"
    assert refusal(KeyPair("--admin-tls", good.cert, missing)) == f"--admin-tls-key {missing} {said}"
    assert "(Is a directory)" in refusal(KeyPair("--tls", tmp_path, good.key))


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    good, other = Identity.make(tmp_path / "good"), Identity.make(tmp_path / "other")
    assert refusal(KeyPair("--tls", good.cert, other.key)) == (
        f"--tls-key {other.key} is not the key of {good.cert}: give those that belong together"
    )
    assert "is no certificate: give a PEM file" in refusal(KeyPair("--tls", good.key, good.key))
    assert f"--tls-key {good.cert} can't be used" in refusal(KeyPair("--tls", good.cert, good.cert))
    (tmp_path / "empty").touch()
    assert "is no certificate" in refusal(KeyPair("--tls", tmp_path / "empty", good.key))
    assert f"--tls-key {tmp_path / 'empty'} can't be used" in refusal(KeyPair("--tls", good.cert, tmp_path / "empty"))


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(tmp_path: Path) -> None:
    encrypted = Identity.make(tmp_path, password=b"canary")
    assert refusal(encrypted.pair) == (
        f"--tls-key {encrypted.key} is encrypted: decrypt it into a file that only this user can read"
    )


@pytest.mark.parametrize(
    ("days", "said"), [((-2, -1), "expired at"), ((1, 2), "is not valid before")], ids=["expired", "not yet valid"]
)
def test_a_certificate_out_of_its_time_is_told_and_served(
    days: tuple[float, float], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = Identity.make(tmp_path, since_days=days[0], until_days=days[1])
    assert server_context(late.pair) is not None
    ((name, level, message),) = caplog.record_tuples
    assert (name, level) == ("saltern.gateway", logging.WARNING)
    assert message.startswith(f"--tls-cert {late.cert} {said} ")
