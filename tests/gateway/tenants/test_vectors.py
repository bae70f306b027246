"""What is written to disk and handed to clients, byte for byte, against a second implementation."""

import base64
import json
import os
from pathlib import Path

import pytest

from gateway.secret import Secret
from gateway.tenants import api_keys
from gateway.tenants.vault import KekFile, Place, VaultError, Wrapped, kek_id
from tests.gateway import second_naming

pytestmark = pytest.mark.anyio

VECTORS = Path(__file__).parents[1] / "vectors"
NAMING = json.loads((VECTORS / "block_keys.json").read_text())
SECRETS = json.loads((VECTORS / "secrets.json").read_text())
KEK = bytes.fromhex(SECRETS["kek"])


@pytest.fixture
def keys(tmp_path: Path) -> KekFile:
    path = tmp_path / "kek"
    path.write_text(f"{SECRETS['kek_id']} {base64.b64encode(KEK).decode()}\n")
    path.chmod(0o600)
    return KekFile.open(path)


def test_published_kek_ids() -> None:
    for vector in NAMING["kek_id"]:
        assert kek_id(Secret(bytes.fromhex(vector["key"]))) == vector["kek_id"]


def test_published_additional_data() -> None:
    for vector in NAMING["wrap_aad"]:
        place = Place(vector["purpose"], vector["tenant_id"], vector["epoch"])
        assert place.aad(vector["kek_id"]).hex() == vector["aad"]


async def test_published_wrapped_secrets_open(keys: KekFile) -> None:
    for vector in SECRETS["wrapped"]:
        place = Place(vector["purpose"], vector["tenant_id"], vector["epoch"])
        wrapped = Wrapped(SECRETS["kek_id"], bytes.fromhex(vector["wrapped"]))
        assert (await keys.unwrap(place, wrapped)).reveal().hex() == vector["secret"]


def test_published_api_keys() -> None:
    for vector in NAMING["api_key"]:
        kind: api_keys.Kind = "admin" if vector["admin"] else "tenant"
        text = api_keys.mint(kind, vector["id"], bytes.fromhex(vector["secret_bytes"]))
        assert text.reveal().decode() == vector["api_key"]
        parsed = api_keys.parse(kind, text.reveal())
        assert parsed is not None
        assert parsed.id == "key_" + vector["id"]


def test_published_api_key_digests() -> None:
    for vector in SECRETS["api_key_digests"]:
        parsed = api_keys.parse("admin" if vector["admin"] else "tenant", vector["api_key"].encode())
        assert parsed is not None
        pepper = Secret(bytes.fromhex(vector["pepper"]))
        assert api_keys.digest(pepper, parsed.secret).hex() == vector["digest"]


def test_random_keys_agree_with_the_second_implementation() -> None:
    for _ in range(200):
        secret = os.urandom(32)
        ours = api_keys.mint("tenant", "0a1b2c3d4e5f", secret).reveal().decode()
        assert ours == second_naming.api_key("0a1b2c3d4e5f", secret)


async def test_any_flipped_byte_of_a_wrapped_secret_is_an_error(keys: KekFile) -> None:
    home = Place("salt", "ten_a", 1)
    wrapped = await keys.wrap(home, Secret(b"s" * 32))
    assert len(wrapped.blob) == 12 + 32 + 16
    for index in range(len(wrapped.blob)):
        damaged = bytearray(wrapped.blob)
        damaged[index] ^= 1
        with pytest.raises(VaultError):
            await keys.unwrap(home, Wrapped(wrapped.kek_id, bytes(damaged)))
    for cut in (b"", wrapped.blob[:11], wrapped.blob[:-1]):
        with pytest.raises(VaultError):
            await keys.unwrap(home, Wrapped(wrapped.kek_id, cut))
    assert await keys.unwrap(home, wrapped) == Secret(b"s" * 32)


async def test_wrapping_twice_gives_different_bytes(keys: KekFile) -> None:
    home = Place("salt", "ten_a", 1)
    assert (await keys.wrap(home, Secret(b"s"))).blob != (await keys.wrap(home, Secret(b"s"))).blob
