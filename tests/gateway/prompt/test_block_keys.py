from __future__ import annotations

import copy
import hashlib
import hmac
import pickle
import random
from array import array
from dataclasses import fields, replace

import pytest

from gateway.prompt.align import SLICE_BLOCKS, name_blocks, u32le
from gateway.prompt.block_keys import ChainKey, Context
from gateway.secret import Secret
from policies.encoding import encode

SALT_A, SALT_B = Secret(bytes(range(32))), Secret(bytes(range(1, 33)))
CONTEXT = Context(
    model_fingerprint=b"m" * 32,
    tokenizer_fingerprint=b"t" * 32,
    dtype="fp32",
    kv_dtype="bf16",
    block_tokens=16,
    layers=30,
    kv_heads=3,
    key_dim=64,
    value_dim=65,
    layout_version=1,
    rope_context_tokens=0,
    scope=b"",
)


def packed(*ids: int) -> bytes:
    return u32le(array("I", ids))


def keys(salt: Secret, context: Context, tokens: bytes) -> list[bytes]:
    chain = ChainKey(salt, context)
    return chain.extend(chain.root, tokens)


def test_every_link_is_an_hmac_of_its_parent_and_its_tokens() -> None:
    chain = ChainKey(SALT_A, CONTEXT)
    secret = chain.reveal()
    parent = hmac.digest(secret, b"saltern/v1/root\0", "sha256")
    assert chain.root == parent
    tokens = packed(*range(32))
    first = hmac.digest(secret, parent + tokens[:64], "sha256")
    assert chain.extend(chain.root, tokens) == [first, hmac.digest(secret, first + tokens[64:], "sha256")]


def test_extending_in_steps_is_extending_at_once() -> None:
    chain = ChainKey(SALT_A, CONTEXT)
    tokens = packed(*range(48))
    first = chain.extend(chain.root, tokens[:64])
    assert first + chain.extend(first[-1], tokens[64:]) == chain.extend(chain.root, tokens)
    assert chain.extend(chain.root, b"") == []


def test_part_of_a_block_has_no_name() -> None:
    chain = ChainKey(SALT_A, CONTEXT)
    with pytest.raises(ValueError, match="blocks of 64"):
        chain.extend(chain.root, packed(*range(15)))
    with pytest.raises(ValueError, match="parent of 32 bytes"):
        chain.extend(b"", packed(*range(16)))


def test_line_1_tenants_share_no_key() -> None:
    tokens = packed(*range(160))
    assert keys(SALT_A, CONTEXT, tokens) == keys(Secret(SALT_A.reveal()), CONTEXT, tokens)
    assert not set(keys(SALT_A, CONTEXT, tokens)) & set(keys(SALT_B, CONTEXT, tokens))


def test_b002_only_the_right_salt_names_the_block() -> None:
    tokens = packed(*range(1, 17))
    (stored,) = keys(SALT_A, CONTEXT, tokens)
    (again,) = keys(Secret(SALT_A.reveal()), CONTEXT, tokens)
    (other,) = keys(SALT_B, CONTEXT, tokens)
    unsalted = {
        hashlib.sha256(prefix + tokens).digest()
        for prefix in (b"", CONTEXT.digest(), hashlib.sha256(b"saltern/v1/root\0").digest())
    }
    assert again == stored
    assert other != stored
    assert stored not in unsalted


def test_b009_every_key_binds_its_parent() -> None:
    straight, swapped = packed(*range(1, 33)), packed(*range(17, 33), *range(1, 17))
    first = keys(SALT_A, CONTEXT, straight)
    assert first == keys(SALT_A, CONTEXT, straight)
    assert first[1] != keys(SALT_B, CONTEXT, straight)[1]
    assert not set(first) & set(keys(SALT_A, CONTEXT, swapped))


@pytest.mark.parametrize("name", [field.name for field in fields(Context)])
def test_line_3_changing_any_single_field_changes_every_key(name: str) -> None:
    value = getattr(CONTEXT, name)
    changed = {
        int: lambda: value + 1,
        str: lambda: {"fp32": "fp16", "bf16": "int8"}[value],
        bytes: lambda: b"\1" + value[1:],
    }[type(value)]()
    other = replace(CONTEXT, **{name: changed})
    # With other blocks the same tokens make other numbers of keys; no key may be equal all the same.
    tokens = packed(*range(16 * 17))
    assert keys(SALT_A, replace(CONTEXT), tokens) == keys(SALT_A, CONTEXT, tokens)
    assert not set(keys(SALT_A, CONTEXT, tokens)) & set(keys(SALT_A, other, tokens))


def test_fields_that_swap_values_are_not_confused() -> None:
    swapped = replace(CONTEXT, key_dim=CONTEXT.value_dim, value_dim=CONTEXT.key_dim)
    assert swapped.digest() != CONTEXT.digest()
    mixed = replace(CONTEXT, dtype=CONTEXT.kv_dtype, kv_dtype=CONTEXT.dtype)
    assert mixed.digest() != CONTEXT.digest()


def test_b167_scopes_with_separators_are_hashed_and_never_meet() -> None:
    tokens = packed(*range(16))
    scopes = [b"", b"b/c", b"c", b"a/b", b"/", b"@", b"\0", b"../", b"b", b"b\0"]
    named = [keys(salt, replace(CONTEXT, scope=scope), tokens)[0] for salt in (SALT_A, SALT_B) for scope in scopes]
    assert len(set(named)) == len(named)
    assert keys(SALT_A, replace(CONTEXT, scope=b"b/c"), tokens)[0] == named[1]


def test_line_4_the_encoding_is_injective_over_a_million_random_field_tuples() -> None:
    # Short fields over few bytes, so that tuples are equal when their concatenations are, as often as can be.
    choose = random.Random(4)
    alphabet = [bytes(item) for item in ([], [0], [1], [0, 0], [0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [49])]
    seen: dict[int, tuple[bytes, ...]] = {}
    joined: set[bytes] = set()
    distinct = 0
    for _ in range(1_000_000):
        choice = tuple(choose.choices(alphabet, k=choose.randrange(7)))
        encoded = hash(encode("saltern/v1/test", *choice))
        if encoded in seen:
            assert seen[encoded] == choice
        else:
            seen[encoded] = choice
            joined.add(b"".join(choice))
            distinct += 1
    assert distinct == len(set(seen.values()))
    # The positive control: written one after the other, many of these tuples are the same bytes.
    assert len(joined) < distinct / 2


def test_a_chain_key_refuses_to_be_shown_or_moved() -> None:
    chain = ChainKey(SALT_A, CONTEXT)
    assert repr(chain) == "<ChainKey>"
    for attempt in (str, format, pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            attempt(chain)


@pytest.mark.anyio
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 16 * SLICE_BLOCKS, 16 * (2 * SLICE_BLOCKS + 1) + 3])
async def test_every_full_block_of_a_prompt_is_named(count: int) -> None:
    tokens = array("I", range(count))
    aligned = await name_blocks(tokens, ChainKey(SALT_A, CONTEXT))
    assert aligned.tokens == packed(*range(count))
    assert aligned.keys == keys(SALT_A, CONTEXT, aligned.tokens[: count // 16 * 64])


@pytest.mark.anyio
async def test_naming_a_long_prompt_lets_the_loop_run_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    async def turn(_: float) -> None:
        order.append(-1)

    class Counting(ChainKey):
        def extend(self, parent: bytes, tokens: bytes) -> list[bytes]:
            order.append(len(tokens) // self.block_bytes)
            return super().extend(parent, tokens)

    monkeypatch.setattr("asyncio.sleep", turn)
    await name_blocks(array("I", range(16 * 1200)), Counting(SALT_A, CONTEXT))
    assert order == [500, -1, 500, -1, 200]


def test_the_bytes_of_a_token_are_little_endian() -> None:
    assert packed(1, 0x01020304) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
