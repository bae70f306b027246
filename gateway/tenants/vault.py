"""Secrets at rest: wrapped under a key-encryption key (KEK) that lies in a file beside the database.

    wrapped = nonce (12) ‖ AES-256-GCM(KEK, nonce, secret, AAD) ‖ tag (16)
    AAD     = E("saltern/v1/wrap", purpose, tenant_id, epoch, kek_id)

The AAD is the place the secret belongs to: a row moved to another tenant, epoch or purpose does not open. What
does not open is an error, never an empty value.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.secret import Secret
from gateway.tenants.private_file import write_beside
from policies.encoding import encode

log = logging.getLogger("saltern.gateway")

Purpose = Literal["salt", "offload_key", "apikey-pepper", "boot-canary"]

KEY_BYTES = 32
NONCE_BYTES = 12
_MAX_FILE_BYTES = 1 << 16


class VaultError(Exception):
    """A wrapped secret does not open, or the key that would open it is missing or not kept safely."""


class UnknownKey(VaultError):
    """The KEK that would open a secret is not there: the wrong file, or the row was re-wrapped after it was read."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a secret belongs. Secrets of the instance: `tenant_id` is empty, `epoch` a version."""

    purpose: Purpose
    tenant_id: str
    epoch: int

    def aad(self, kek_id: str) -> bytes:
        return encode("saltern/v1/wrap", self.purpose, self.tenant_id, self.epoch, kek_id)

    def __str__(self) -> str:
        return f"the {self.purpose} of tenant {self.tenant_id!r}, epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Wrapped:
    kek_id: str
    blob: bytes


class KeyProvider(Protocol):
    """Who holds the KEK: a file, or a key management service."""

    @property
    def key_id(self) -> str:
        """The KEK that new secrets are wrapped under."""

    async def wrap(self, place: Place, secret: Secret) -> Wrapped:
        """Raises `VaultError` if the KEK cannot be had now."""

    async def unwrap(self, place: Place, wrapped: Wrapped) -> Secret:
        """Raises `VaultError` if it does not open."""

    async def health(self) -> None:
        """Raises `VaultError` if the KEK cannot be had now."""


class KekFile:
    """A KEK in a file of lines `kek_id base64(32 bytes)`: the first is current, the others only open."""

    def __init__(self, path: Path, keys: dict[str, Secret]) -> None:
        self._path = path
        self._keys = keys

    @classmethod
    def open(cls, path: Path) -> KekFile:
        """
        Raises:
            VaultError: the file is missing, open to others, or not lines of keys.
        """
        return cls(path, _read(path))

    @classmethod
    def open_or_create(cls, path: Path) -> KekFile:
        """For a first start only: with secrets already wrapped, a new key would open none of them."""
        if not path.exists():
            _create(path)
        return cls.open(path)

    @property
    def key_id(self) -> str:
        return next(iter(self._keys))

    @property
    def old_key_ids(self) -> list[str]:
        return list(self._keys)[1:]

    async def wrap(self, place: Place, secret: Secret) -> Wrapped:
        # Another process may have put a new key in front of the one that is known here: see `kek_rotation`.
        self._keys = _read(self._path)
        nonce = os.urandom(NONCE_BYTES)
        key = AESGCM(self._keys[self.key_id].reveal())
        return Wrapped(self.key_id, nonce + key.encrypt(nonce, secret.reveal(), place.aad(self.key_id)))

    async def unwrap(self, place: Place, wrapped: Wrapped) -> Secret:
        if wrapped.kek_id not in self._keys:
            self._keys = _read(self._path)  # another process may have added a key
        if wrapped.kek_id not in self._keys:
            raise UnknownKey(
                f"{place} was wrapped under key {wrapped.kek_id!r}, {self._path} holds "
                f"{', '.join(self._keys)}: restore the file that belongs to this database"
            )
        nonce, ciphertext = wrapped.blob[:NONCE_BYTES], wrapped.blob[NONCE_BYTES:]
        try:
            key = AESGCM(self._keys[wrapped.kek_id].reveal())
            return Secret(key.decrypt(nonce, ciphertext, place.aad(wrapped.kek_id)))
        except (InvalidTag, ValueError):
            remedy = ", or rotate the tenant's salts" if place.tenant_id else ""
            raise VaultError(
                f"{place} does not open: the row was damaged or moved; restore it from a backup{remedy}"
            ) from None

    async def health(self) -> None:
        self._keys = _read(self._path)

    def prepend_new_key(self) -> None:
        """From now on every process wraps under a new key, and the others still open.

        Raises:
            VaultError: the file cannot be written anew with its owner and mode.
        """
        key = Secret(os.urandom(KEY_BYTES))
        self._replace({kek_id(key): key, **_read(self._path)})

    def remove_old_keys(self) -> None:
        """Only the current key stays. Raises as `prepend_new_key`."""
        self._replace({self.key_id: self._keys[self.key_id]})

    def _replace(self, keys: dict[str, Secret]) -> None:
        path = self._path.resolve()  # a link goes on pointing at it
        try:
            kept = path.stat()
            temporary = write_beside(path, _lines(keys))
            try:
                # By its owner only, unless root does it: nobody else may give files away.
                os.chown(temporary, kept.st_uid, kept.st_gid)
                os.chmod(temporary, stat.S_IMODE(kept.st_mode))
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise
            _sync_directory(path.parent)
        except OSError as error:
            raise VaultError(f"the key-encryption key {path} cannot be written anew: {error.strerror}") from None
        self._keys = keys

    def __repr__(self) -> str:
        return f"<KekFile {self._path}>"


def kek_id(key: Secret) -> str:
    """The public name of a KEK: 16 hex digits."""
    return hashlib.sha256(encode("saltern/v1/kek-id", key.reveal())).hexdigest()[:16]


def _read(path: Path) -> dict[str, Secret]:
    try:
        # Not blocking on a pipe; links are followed, and what is checked is the file that was opened.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise VaultError(
            f"the key-encryption key {path} is missing, and this database's secrets need it: restore it from "
            "the backup, or name it with --kek-file; it is never made anew"
        ) from None
    except OSError as error:
        raise VaultError(f"the key-encryption key {path} does not open: {error.strerror}") from None
    try:
        _check_permissions(path, os.fstat(descriptor))
        content = os.read(descriptor, _MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MAX_FILE_BYTES:
        raise VaultError(f"{path} is over {_MAX_FILE_BYTES} bytes: not a file of keys")
    keys: dict[str, Secret] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            name, encoded = line.decode("ascii").split()
            key = Secret(base64.b64decode(encoded, validate=True))
        except (ValueError, binascii.Error):
            raise VaultError(f"line {number} of {path} is not `kek_id base64(32 bytes)`") from None
        if len(key.reveal()) != KEY_BYTES or kek_id(key) != name:
            raise VaultError(f"line {number} of {path} is damaged: its id does not belong to its key")
        keys[name] = key
    if not keys:
        raise VaultError(f"{path} holds no key")
    return keys


def _check_permissions(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise VaultError(f"{path} is not a regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise VaultError(f"{path} belongs to uid {status.st_uid}: it must be root's or uid {os.geteuid()}'s")
    if mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH):
        raise VaultError(f"{path} has mode {mode:04o}, open to others: chmod 600 {path}")


def _lines(keys: dict[str, Secret]) -> bytes:
    return b"".join(f"{name} {base64.b64encode(key.reveal()).decode()}\n".encode() for name, key in keys.items())


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _create(path: Path) -> None:
    key = Secret(os.urandom(KEY_BYTES))
    try:
        temporary = write_beside(path, _lines({kek_id(key): key}))
        try:
            os.link(temporary, path)  # unlike a rename, never over a key that somebody else made meanwhile
        except FileExistsError:
            return
        finally:
            os.unlink(temporary)
        _sync_directory(path.parent)
    except OSError as error:
        raise VaultError(f"the key-encryption key {path} cannot be made: {error.strerror}") from None
    log.warning(
        "made the key-encryption key %s; a backup of its directory may hold both it and the secrets that it opens", path
    )
