"""Both implementations of block naming, and the published vectors, say the same."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.align import name_blocks, u32le
from gateway.prompt.block_keys import ChainKey, Context
from gateway.secret import Secret
from gateway.tenants import api_keys
from gateway.tenants.vault import Place, kek_id
from policies.encoding import TOKENIZER_FILES, encode, tokenizer_fingerprint
from tests.gateway import second_naming as second

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "block_keys.json").read_text())


def unhex(field: Any) -> Any:
    return bytes.fromhex(field["hex"]) if isinstance(field, dict) else field


def context_of(fields: dict[str, Any]) -> Context:
    raw = {name: bytes.fromhex(fields[name]) for name in ("model_fingerprint", "tokenizer_fingerprint")}
    return Context(**fields | raw | {"scope": fields["scope"].encode()})


@pytest.mark.parametrize("vector", VECTORS["encode"], ids=str)
def test_encoding_vectors(vector: dict[str, Any]) -> None:
    assert encode(vector["label"], *map(unhex, vector["fields"])).hex() == vector["encoded"]


@pytest.mark.parametrize("vector", VECTORS["block_keys"], ids=lambda vector: vector["name"])
def test_block_key_vectors(vector: dict[str, Any]) -> None:
    context, expected = context_of(vector["context"]), vector["expected"]
    chain = ChainKey(Secret(bytes.fromhex(vector["salt"])), context)
    assert context.digest().hex() == expected["context"]
    assert chain.reveal().hex() == expected["chain_key"]
    assert chain.root.hex() == expected["root"]
    aligned = anyio.run(name_blocks, array("I", vector["tokens"]), chain)
    assert [key.hex() for key in aligned.keys] == expected["keys"]


@pytest.mark.parametrize("vector", VECTORS["tokenizer_fingerprint"], ids=lambda vector: vector["name"])
def test_tokenizer_fingerprint_vectors(vector: dict[str, Any]) -> None:
    files = {name: text.encode() for name, text in vector["files"].items() if name in TOKENIZER_FILES}
    assert tokenizer_fingerprint(files).hex() == vector["fingerprint"]


@pytest.mark.parametrize("vector", VECTORS["wrap_aad"], ids=str)
def test_wrapping_vectors(vector: dict[str, Any]) -> None:
    place = Place(vector["purpose"], vector["tenant_id"], vector["epoch"])
    assert place.aad(vector["kek_id"]).hex() == vector["aad"]


@pytest.mark.parametrize("vector", VECTORS["kek_id"], ids=str)
def test_kek_id_vectors(vector: dict[str, Any]) -> None:
    assert kek_id(Secret(bytes.fromhex(vector["key"]))) == vector["kek_id"]


@pytest.mark.parametrize("vector", VECTORS["api_key"], ids=str)
def test_api_key_vectors(vector: dict[str, Any]) -> None:
    kind = "admin" if vector["admin"] else "tenant"
    minted = api_keys.mint(kind, vector["id"], bytes.fromhex(vector["secret_bytes"]))
    assert minted.reveal().decode() == vector["api_key"]


counts = st.integers(0, 2**63)
fingerprints = st.binary(min_size=32, max_size=32)
contexts = st.builds(
    second.Context,
    model_fingerprint=fingerprints,
    tokenizer_fingerprint=fingerprints,
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    kv_dtype=st.sampled_from(["fp32", "bf16", "fp16", "int8", "fp8"]),
    block_tokens=st.sampled_from([8, 16, 32, 64, 128]),
    layers=counts,
    kv_heads=counts,
    key_dim=counts,
    value_dim=counts,
    layout_version=counts,
    rope_context_tokens=counts,
    scope=st.text(max_size=64),
)


@given(contexts, fingerprints, st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_both_implementations_name_blocks_alike(context: second.Context, salt: bytes, tokens: list[int]) -> None:
    ours = Context(**asdict(context) | {"scope": context.scope.encode()})
    digest = second.context_digest(context)
    assert ours.digest() == digest
    chain = ChainKey(Secret(salt), ours)
    theirs = second.chain_key(salt, digest)
    assert chain.reveal() == theirs
    whole = len(tokens) // context.block_tokens * context.block_tokens
    keys = chain.extend(chain.root, u32le(array("I", tokens[:whole])))
    assert keys == second.block_keys(theirs, tokens, context.block_tokens)


labels = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map("saltern/v1/".__add__)


@given(labels, st.lists(st.binary(max_size=40) | st.text(max_size=20) | st.integers(0, 2**64 - 1), max_size=6))
def test_both_implementations_encode_alike(label: str, fields: list[bytes | str | int]) -> None:
    assert encode(label, *fields) == second.E(label, *fields)
