"""The published vectors against the second implementation, and the second implementation against RFC 5869."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import second_naming as second

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "vectors" / "block_keys.json").read_text("utf-8")
)
BLOCK_KEYS = {vector["name"]: vector for vector in VECTORS["block_keys"]}

RFC_5869 = {
    "A.1": (
        b"\x0b" * 22,
        bytes(range(13)),
        bytes(range(0xF0, 0xFA)),
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    "A.2": (
        bytes(range(0x50)),
        bytes(range(0x60, 0xB0)),
        bytes(range(0xB0, 0x100)),
        "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    "A.3": (
        b"\x0b" * 22,
        b"",
        b"",
        "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
}

each = pytest.mark.parametrize


def named(kind: str) -> list[Any]:
    return [pytest.param(vector, id=vector["name"]) for vector in VECTORS[kind]]


def context_of(vector: dict[str, Any]) -> second.Context:
    digests = ("model_fingerprint", "tokenizer_fingerprint")
    return second.Context(
        **vector["context"] | {key: bytes.fromhex(vector["context"][key]) for key in digests}
    )


def keys_of(name: str) -> list[str]:
    keys: list[str] = BLOCK_KEYS[name]["expected"]["keys"]
    return keys


def fingerprint_of(data: bytes) -> bytes:
    return second.model_fingerprint({}, {"w": ("U8", [len(data)], data)})


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@each("case", RFC_5869)
def test_hkdf_answers_the_sha256_cases_of_rfc_5869(case: str) -> None:
    ikm, salt, info, prk, okm = RFC_5869[case]
    assert second.hkdf_extract(salt, ikm).hex() == prk
    assert second.hkdf_expand(bytes.fromhex(prk), info, len(okm) // 2).hex() == okm


def test_kdf_is_hkdf_without_salt_cut_to_32_bytes() -> None:
    ikm, _, info, _, okm = RFC_5869["A.3"]
    assert second.kdf(ikm, info) == bytes.fromhex(okm)[:32]


def test_hkdf_ends_at_255_blocks() -> None:
    assert len(second.hkdf_expand(bytes(32), b"", 255 * 32)) == 8160
    with pytest.raises(ValueError, match="8160"):
        second.hkdf_expand(bytes(32), b"", 255 * 32 + 1)


@each("vector", VECTORS["encode"])
def test_encoding_is_as_published(vector: dict[str, Any]) -> None:
    parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in vector["fields"]]
    assert second.E(vector["label"], *parts).hex() == vector["encoded"]


def test_encoding_laid_out_by_hand() -> None:
    by_hand = (
        b"saltern/v1/x\x00" + b"\x00\x00\x00\x02\xc3\xa9" + b"\x00\x00\x00\x08" + b"\0\0\0\0\0\0\x01\x02"
    )
    assert second.E("saltern/v1/x", "é", 258) == by_hand


def test_fields_that_join_alike_encode_apart() -> None:
    assert "org_1" + "2345" == "org_12345" + ""
    assert second.E("saltern/v1/x", "org_1", "2345") != second.E("saltern/v1/x", "org_12345", "")
    assert len({vector["encoded"] for vector in VECTORS["encode"]}) == len(VECTORS["encode"])


@each("label", ["saltern/v2/x", "salt", "saltern/v1/é", "saltern/v1/x\0"])
def test_label_outside_the_family_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="must be ASCII"):
        second.E(label)


@each("number", [-1, 2**64])
def test_integer_beyond_eight_bytes_is_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        second.E("saltern/v1/x", number)


@each("vector", VECTORS["kdf"])
def test_derived_key_is_as_published(vector: dict[str, Any]) -> None:
    derived = second.kdf(bytes.fromhex(vector["secret"]), bytes.fromhex(vector["info"]))
    assert derived.hex() == vector["key"]


@each("vector", named("block_keys"))
def test_block_keys_are_as_published(vector: dict[str, Any]) -> None:
    context, expected = context_of(vector), vector["expected"]
    digest = second.context_digest(context)
    chain = second.chain_key(bytes.fromhex(vector["salt"]), digest)
    assert digest.hex() == expected["context"]
    assert chain.hex() == expected["chain_key"]
    assert second.root(chain).hex() == expected["root"]
    keys = second.block_keys(chain, vector["tokens"], context.block_tokens)
    assert [key.hex() for key in keys] == expected["keys"]
    assert len(keys) == len(vector["tokens"]) // context.block_tokens


def test_partial_last_block_has_no_key() -> None:
    assert keys_of("plain, three full blocks and a partial one") == keys_of("three full blocks exactly")
    assert keys_of("one token short of a block") == []


def test_changed_token_changes_its_block_and_all_after_it() -> None:
    plain = keys_of("plain, three full blocks and a partial one")
    other = keys_of("one token of the second block differs")
    assert plain[0] == other[0]
    assert not set(plain[1:]) & set(other[1:])


@each("other", ["another salt", "scope in ASCII", "scope beyond ASCII", "scope of 256 bytes"])
def test_salt_and_scope_share_nothing_with_the_plain_chain(other: str) -> None:
    plain = BLOCK_KEYS["plain, three full blocks and a partial one"]
    apart = BLOCK_KEYS[other]
    shorter = len(apart["tokens"])
    assert plain["tokens"][:shorter] == apart["tokens"]
    assert plain["expected"]["root"] != apart["expected"]["root"]
    assert apart["expected"]["keys"]
    assert not set(plain["expected"]["keys"]) & set(apart["expected"]["keys"])


def test_equal_blocks_at_other_places_have_other_keys() -> None:
    assert len(set(keys_of("four equal blocks have four keys, blocks of 4"))) == 4


def test_each_field_of_the_context_changes_it() -> None:
    context = context_of(BLOCK_KEYS["plain, three full blocks and a partial one"])
    change: dict[type, Callable[[Any], Any]] = {
        bytes: lambda value: changed(value, 31),
        int: lambda value: value + 1,
        str: lambda value: value + "x",
    }
    digests = {second.context_digest(context)}
    for field in fields(context):
        value = getattr(context, field.name)
        digests.add(second.context_digest(replace(context, **{field.name: change[type(value)](value)})))
    assert second.context_digest(replace(context)) in digests
    assert len(digests) == 1 + 12


def test_fingerprint_in_hex_is_refused() -> None:
    context = context_of(BLOCK_KEYS["no tokens"])
    with pytest.raises(ValueError, match="64"):
        second.context_digest(replace(context, model_fingerprint=context.model_fingerprint.hex().encode()))


@each("token", [-1, 2**32])
def test_token_beyond_four_bytes_is_refused(token: int) -> None:
    assert len(second.block_keys(bytes(32), [2**32 - 1], 1)) == 1
    with pytest.raises(OverflowError):
        second.block_keys(bytes(32), [token], 1)


@each("vector", named("tokenizer_fingerprint"))
def test_tokenizer_fingerprint_is_as_published(vector: dict[str, Any]) -> None:
    files = {name: text.encode("utf-8") for name, text in vector["files"].items()}
    assert second.tokenizer_fingerprint(files).hex() == vector["fingerprint"]


def test_tokenizer_files_count_and_their_neighbours_do_not() -> None:
    published = {vector["name"]: vector["fingerprint"] for vector in VECTORS["tokenizer_fingerprint"]}
    assert published["files in another order and one that is not counted"] == published.pop("all four files")
    assert len(set(published.values())) == len(published)


@each("vector", named("model_fingerprint"))
def test_model_fingerprint_is_as_published(vector: dict[str, Any]) -> None:
    tensors = {
        tensor["name"]: (
            tensor["dtype"],
            tensor["dims"],
            hashlib.shake_256(tensor["name"].encode("utf-8")).digest(tensor["length_bytes"]),
        )
        for tensor in vector["tensors"]
    }
    assert second.model_fingerprint(vector["config"], tensors).hex() == vector["fingerprint"]


def test_model_fingerprint_laid_out_by_hand() -> None:
    tensor = second.E("saltern/v1/tensor", "w", "F32", 1, b"\x01\x02\x03\x04")
    by_hand = hashlib.sha256(b'{"a":{"b":2,"c":1},"d":null}' + tensor).digest()
    config = {"d": None, "dtype": "float32", "a": {"c": 1, "b": 2}}
    assert second.model_fingerprint(config, {"w": ("F32", [1], b"\x01\x02\x03\x04")}) == by_hand


def test_config_keys_that_describe_the_copy_do_not_count() -> None:
    published = {vector["name"]: vector["fingerprint"] for vector in VECTORS["model_fingerprint"]}
    assert published["the four keys left out change nothing"] == published.pop("config alone")
    assert len(set(published.values())) == len(published)


def test_every_byte_of_a_small_tensor_counts() -> None:
    data = bytes(12 * 1024 - 1)
    assert len({fingerprint_of(changed(data, at)) for at in (0, 4096, 8190, 8191, 12286)}) == 5
    assert fingerprint_of(changed(data, 8191)) != fingerprint_of(data)


def test_large_tensor_counts_by_its_first_middle_and_last_4_kib() -> None:
    data = bytes(20_001)
    middle = (20_001 - 4096) // 2
    inside = (0, 4095, middle, middle + 4095, 20_001 - 4096, 20_000)
    outside = (4096, middle - 1, middle + 4096, 20_001 - 4097)
    assert len({fingerprint_of(data)} | {fingerprint_of(changed(data, at)) for at in inside}) == 7
    assert {fingerprint_of(changed(data, at)) for at in outside} == {fingerprint_of(data)}


@each("vector", VECTORS["wrap_aad"])
def test_what_wrapping_authenticates_is_as_published(vector: dict[str, Any]) -> None:
    aad = second.wrap_aad(vector["purpose"], vector["tenant_id"], vector["epoch"], vector["kek_id"])
    assert aad.hex() == vector["aad"]


def test_no_two_wrapped_secrets_authenticate_alike() -> None:
    assert len({vector["aad"] for vector in VECTORS["wrap_aad"]}) == len(VECTORS["wrap_aad"])


@each("vector", VECTORS["kek_id"])
def test_kek_id_is_as_published(vector: dict[str, Any]) -> None:
    assert second.kek_id(bytes.fromhex(vector["key"])) == vector["kek_id"]
    assert re.fullmatch("[0-9a-f]{16}", vector["kek_id"])


@each("vector", VECTORS["api_key"])
def test_api_key_is_as_published(vector: dict[str, Any]) -> None:
    make = second.admin_api_key if vector["admin"] else second.api_key
    assert make(vector["id"], bytes.fromhex(vector["secret_bytes"])) == vector["api_key"]
    prefix = "sk-saltern-admin-" if vector["admin"] else "sk-saltern-"
    assert re.fullmatch(re.escape(prefix) + "[0-9a-z]{12}-[0-9A-Za-z]{49}", vector["api_key"])


def test_base62_counts_digits_then_capitals_then_small_letters() -> None:
    assert [second.base62(number, 2) for number in (0, 9, 10, 35, 36, 61, 62)] == [
        "00", "09", "0A", "0Z", "0a", "0z", "10",
    ]  # fmt: skip
    assert second.base62(62**2 - 1, 2) == "zz"
    with pytest.raises(ValueError, match="does not fit 2"):
        second.base62(62**2, 2)


def test_check_digits_are_crc_32_of_all_before_them() -> None:
    # 0xCBF43926 is CRC-32's published check value, that of "123456789".
    assert second.api_key_crc("123456789") == second.base62(0xCBF43926, 6)


def test_typo_anywhere_changes_the_check_digits() -> None:
    text = VECTORS["api_key"][0]["api_key"]
    body, crc = text[:-6], text[-6:]
    assert second.api_key_crc(body) == crc
    for at in range(len(body)):
        wrong = body[:at] + ("x" if body[at] != "x" else "y") + body[at + 1 :]
        assert second.api_key_crc(wrong) != crc
