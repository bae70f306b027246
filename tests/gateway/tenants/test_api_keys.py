import pytest

from gateway.tenants import api_keys

KEY = api_keys.mint("tenant", "0123456789ab", bytes(range(32))).reveal()
ADMIN = api_keys.mint("admin", "0123456789ab", bytes(range(32))).reveal()
OTHER = api_keys.mint("tenant", "0123456789ab", bytes(32)).reveal()


def test_a_key_parses_as_its_own_kind_only() -> None:
    assert api_keys.parse("tenant", KEY) is not None
    assert api_keys.parse("admin", KEY) is None
    assert api_keys.parse("admin", ADMIN) is not None
    assert api_keys.parse("tenant", ADMIN) is None


def test_a_typo_anywhere_is_refused_without_a_look_up() -> None:
    assert api_keys.parse("tenant", KEY) is not None
    for index in range(len(KEY)):
        typo = bytearray(KEY)
        typo[index] = ord("1") if typo[index] != ord("1") else ord("2")
        assert api_keys.parse("tenant", bytes(typo)) is None


@pytest.mark.parametrize("text", [b"", KEY + b"\n", b" " + KEY, KEY[:-1], KEY + b"0", KEY * 2, b"\xe9", "é".encode()])
def test_what_only_resembles_a_key_is_malformed(text: bytes) -> None:
    assert api_keys.parse("tenant", text) is None


def test_a_key_that_is_parsed_does_not_show_its_secret() -> None:
    parsed = api_keys.parse("tenant", KEY)
    assert parsed is not None
    assert parsed.secret.reveal() in KEY
    assert parsed.secret.reveal().decode() not in repr(parsed)


def test_mint_refuses_short_randomness() -> None:
    with pytest.raises(ValueError, match="12 id digits and 32 secret bytes"):
        api_keys.mint("tenant", "0123456789ab", b"short")


def test_bearer_and_x_api_key_each_carry_a_credential() -> None:
    assert api_keys.credential([(b"authorization", b"Bearer " + KEY)]) == KEY
    assert api_keys.credential([(b"authorization", b"bearer " + KEY)]) == KEY
    assert api_keys.credential([(b"x-api-key", KEY)]) == KEY
    assert api_keys.credential([(b"authorization", b"Bearer " + KEY), (b"x-api-key", KEY)]) == KEY


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Basic " + KEY)],
        [(b"authorization", KEY)],
        [(b"authorization", b"Bearer " + KEY)] * 2,
        [(b"x-api-key", KEY)] * 2,
        [(b"authorization", b"Bearer " + KEY), (b"x-api-key", OTHER)],
        [(b"authorization", b"Basic " + KEY), (b"x-api-key", KEY)],
        [(b"authorization", b"Bearer \xe9"), (b"x-api-key", KEY)],
    ],
)
def test_no_credential_and_two_credentials_are_none(headers: list[tuple[bytes, bytes]]) -> None:
    assert api_keys.credential(headers) is None
