"""Certificates for loopback, made anew, by a CA that nobody else trusts."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway.settings import KeyPair


@dataclass(frozen=True)
class Identity:
    """The files of a certificate for 127.0.0.1 and localhost, of its key, and of the CA that signed it."""

    cert: Path
    key: Path
    ca: Path

    @property
    def pair(self) -> KeyPair:
        return KeyPair("--tls", self.cert, self.key)

    @property
    def trust(self) -> ssl.SSLContext:
        """What a client of it trusts."""
        return ssl.create_default_context(cafile=str(self.ca))

    @classmethod
    def make(
        cls, folder: Path, *, since_days: float = -1, until_days: float = 1, password: bytes | None = None
    ) -> Identity:
        """Valid from and until so many days from now; its key encrypted under `password`."""
        now = datetime.now(UTC)
        dates = now + timedelta(days=since_days), now + timedelta(days=until_days)
        ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        # Clients tell CAs apart by their names.
        issuer = f"CA of {folder}"[-64:]
        ca = _signed(issuer, ca_key, issuer, ca_key, dates)
        cert = _signed("127.0.0.1", key, issuer, ca_key, dates)
        encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        identity = cls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
        folder.mkdir(parents=True, exist_ok=True)
        identity.ca.write_bytes(ca.public_bytes(pem))
        identity.cert.write_bytes(cert.public_bytes(pem))
        identity.key.write_bytes(key.private_bytes(pem, form, encryption))
        return identity


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    dates: tuple[datetime, datetime],
) -> x509.Certificate:
    is_ca = name == issuer
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dates[0])
        .not_valid_after(dates[1])
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    if not is_ca:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
