"""A client of the admin API for the command line: where it is, with which key, and errors in one line."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from gateway.secret import Secret

TENANTS = "/admin/v1/tenants"
_TIMEOUT_SECONDS = 30.0


class AdminClientError(Exception):
    """One line for the terminal."""


class AdminClient:
    """Speaks to the URL and with the key that the environment names, else those that `serve` left in a directory.

    Raises `AdminClientError` from every method.
    """

    def __init__(self, url: str, key: Secret) -> None:
        # No proxy from the environment: the key goes to the URL that was named and nowhere else. Whom to trust is the
        # system's word, and that of SSL_CERT_FILE, which OpenSSL reads by itself.
        verify = ssl.create_default_context() if url.startswith("https://") else False
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS, trust_env=False, verify=verify)
        self._key = key

    @classmethod
    def open(cls, data_dir: Path) -> AdminClient:
        """
        Raises:
            AdminClientError: neither the environment nor `data_dir` names a URL and a key.
        """
        url = _setting("SALTERN_ADMIN_URL", data_dir / "admin-url")
        key = _setting("SALTERN_ADMIN_KEY", data_dir / "admin-key")
        # As `saltern serve` prints it, or without the path.
        root = url.rstrip("/").removesuffix("/admin/v1")
        if not root.startswith(("http://", "https://")):
            raise AdminClientError("SALTERN_ADMIN_URL must be a URL such as http://127.0.0.1:8001")
        try:
            return cls(root, Secret(key.encode("ascii")))
        except (httpx.InvalidURL, UnicodeEncodeError):
            raise AdminClientError("SALTERN_ADMIN_URL must be a URL and SALTERN_ADMIN_KEY an admin key") from None

    def request(self, method: str, path: str, body: object = None, query: dict[str, str] | None = None) -> Any:
        """The decoded answer; None where there is none."""
        headers = {"authorization": f"Bearer {self._key.reveal().decode('ascii')}"}
        try:
            response = self._client.request(method, path, json=body, params=query, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise AdminClientError(
                    f"{error}: set SSL_CERT_FILE to the certificate of the CA that signed it, and SALTERN_ADMIN_URL to "
                    "a name that it has"
                ) from None
            raise AdminClientError(
                f"no answer from {self._client.base_url} ({type(error).__name__}): start it with `saltern serve`, "
                "or set SALTERN_ADMIN_URL to where it runs"
            ) from None
        try:
            content: Any = response.json() if response.content else None
            if response.is_success:
                return content
            refusal = content["error"]
            message, param = refusal["message"], refusal["param"]
            if param and param not in message:
                message = f"{param}: {message}"
        except (ValueError, KeyError, TypeError):
            message = f"{self._client.base_url} is no admin API of Saltern"
        if response.status_code == 401:
            message = "the admin key is not valid: set SALTERN_ADMIN_KEY, or --data-dir to the server's directory"
        raise AdminClientError(f"{message} (HTTP {response.status_code})")

    def rows(self, path: str) -> Iterator[dict[str, Any]]:
        """All rows of a list, page by page."""
        query: dict[str, str] = {}
        while True:
            page = self.request("GET", path, query=query)
            yield from page["data"]
            if page["next_cursor"] is None:
                return
            query = {"cursor": page["next_cursor"]}

    def tenant_path(self, name_or_id: str) -> str:
        """The path of a tenant. A name never contains `_`, so it is never taken for an id."""
        if name_or_id.startswith("ten_"):
            return f"{TENANTS}/{quote(name_or_id, safe='')}"
        found = self.request("GET", TENANTS, query={"name": name_or_id})["data"]
        if not found:
            raise AdminClientError(f"there is no tenant {name_or_id!r}: see `saltern tenants list`")
        return f"{TENANTS}/{found[0]['id']}"

    def key_path(self, tenant: str, key_id: str) -> str:
        """The path of a tenant's key. An id is never `..`, which would make it the path of something else."""
        path = self.tenant_path(tenant)
        if not key_id.startswith("key_"):
            raise AdminClientError(f"there is no key {key_id!r}: see `saltern keys list`")
        return f"{path}/keys/{quote(key_id, safe='')}"


def default_data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "saltern"


def _setting(variable: str, file: Path) -> str:
    if value := os.environ.get(variable):
        return value
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII"
        raise AdminClientError(
            f"{file}: {reason}: start `saltern serve` with this data directory, or set {variable}"
        ) from None
