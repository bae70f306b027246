"""The certificate of a listener: read and checked before anything starts."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from gateway.settings import KeyPair, SettingsError

log = logging.getLogger("saltern.gateway")


class _Encrypted(Exception):
    pass


def server_context(pair: KeyPair | None) -> ssl.SSLContext | None:
    """What a listener encrypts with, TLS 1.2 and newer; None for plain HTTP.

    A certificate that has expired, or is not valid yet, is told in the log and served all the same: it is for clients
    to refuse it, and neither a wrong clock nor a late renewal keeps the server from starting again.

    Raises:
        SettingsError: a file can't be read, or holds something else, or the two don't belong together.
    """
    if pair is None:
        return None
    for option, path in ((f"{pair.option}-cert", pair.cert), (f"{pair.option}-key", pair.key)):
        _check_readable(option, path)
    _check_dates(f"{pair.option}-cert {pair.cert}", pair.cert)

    def ask_nobody() -> bytes:
        raise _Encrypted

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    key = f"{pair.option}-key {pair.key}"
    try:
        context.load_cert_chain(pair.cert, pair.key, ask_nobody)
    except _Encrypted:
        raise SettingsError(f"{key} is encrypted: decrypt it into a file that only this user can read") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"{key} is not the key of {pair.cert}: give those that belong together") from None
        reason = f" ({error.reason})" if error.reason else ""
        raise SettingsError(f"{key} can't be used with {pair.cert}{reason}: give an unencrypted PEM file") from None
    return context


def _check_readable(option: str, path: Path) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        remedy = "make it readable, or choose another"
        raise SettingsError(f"{option} {path} can't be read ({error.strerror}): {remedy}") from None


def _check_dates(name: str, path: Path) -> None:
    try:
        leaf = x509.load_pem_x509_certificates(path.read_bytes())[0]
    except ValueError:
        raise SettingsError(f"{name} is no certificate: give a PEM file, the chain after the certificate") from None
    now = datetime.now(UTC)
    if leaf.not_valid_after_utc < now:
        log.warning("%s expired at %s: clients refuse it; renew it and start again", name, leaf.not_valid_after_utc)
    elif leaf.not_valid_before_utc > now:
        log.warning("%s is not valid before %s: clients refuse it until then", name, leaf.not_valid_before_utc)
