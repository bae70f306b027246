"""Who is let in, with which epoch and secrets."""

import asyncio
import stat
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.http.errors import Unauthorized
from gateway.secret import Secret
from gateway.tenants import api_keys
from gateway.tenants.directory import ADMIN_SCOPES, Headers
from gateway.tenants.keyring import SaltUnavailable
from tests.gateway.tenants.opened import SCOPES, Opened, bearer, opened

pytestmark = pytest.mark.anyio


async def refusal(door: Opened, headers: Headers) -> bytes:
    with pytest.raises(Unauthorized) as caught:
        await door.directory.authenticate(headers)
    assert caught.value.status == 401
    return caught.value.encode()


async def sql(door: Opened, statement: str, **values: object) -> None:
    async with door.directory.database.write() as session:
        await session.execute(text(statement), values)


async def test_a_key_speaks_for_its_tenant_and_stands_while_both_are_active(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        a, b = await door.tenant("a"), await door.tenant("b")
        row, key = await door.key(a)
        principal = await door.directory.authenticate(bearer(key))
        assert (principal.key_id, principal.tenant_id, principal.scopes) == (row.id, a.id, SCOPES)
        assert principal.account == a.account != b.account
        assert len(a.account) == 16
        assert await door.directory.authenticate([(b"x-api-key", key)]) == principal
        standing = await door.directory.standing(principal)
        assert (standing.account, standing.epoch) == (a.account, 1)


async def test_b159_a_deleted_key_is_refused_at_once_everywhere(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door, opened(tmp_path, database_url) as other_gateway:
        tenant = await door.tenant("a")
        row, key = await door.key(tenant)
        _, kept = await door.key(tenant)
        for gateway in (door, other_gateway):
            principal = await gateway.directory.authenticate(bearer(key))
            await gateway.directory.standing(principal)
        assert await door.registry.delete_key(tenant.id, row.id)
        for gateway in (door, other_gateway):
            await refusal(gateway, bearer(key))
            with pytest.raises(Unauthorized):
                await gateway.directory.standing(principal)
            await gateway.directory.standing(await gateway.directory.authenticate(bearer(kept)))


async def test_a_suspended_tenant_a_disabled_and_an_expired_key_lose_their_standing(
    tmp_path: Path, database_url: str
) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        _, key = await door.key(tenant, expires_at=door.clock.now + timedelta(seconds=60))
        principal = await door.directory.authenticate(bearer(key))

        async def stands() -> bool:
            try:
                await door.directory.standing(principal)
            except Unauthorized:
                await refusal(door, bearer(key))
                return False
            await door.directory.authenticate(bearer(key))
            return True

        assert await stands()
        await sql(door, "UPDATE tenants SET status = 'suspended'")
        assert not await stands()
        await sql(door, "UPDATE tenants SET status = 'active'")
        assert await stands()
        await sql(door, "UPDATE api_keys SET status = 'disabled'")
        assert not await stands()
        await sql(door, "UPDATE api_keys SET status = 'active'")
        door.clock.advance(seconds=59)
        assert await stands()
        door.clock.advance(seconds=1)
        assert not await stands()


async def test_b200_odd_authorization_values_are_401(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        _, key = await door.key(await door.tenant("a"))
        await door.directory.authenticate(bearer(key))
        odd: list[Headers] = [
            [(b"authorization", b"Bearer \xe9")],
            [(b"authorization", b"Bearer \xc3\xa9")],
            [(b"authorization", b"Bearer")],
            [(b"authorization", b"")],
            [(b"authorization", b"Bearer " + key), (b"authorization", b"Bearer " + key)],
            [(b"authorization", b"Bearer " + b"x" * 100_000)],
            [(b"authorization", b"Bearer " + key[:-1] + b"\xe9")],
            [(b"authorization", b"Bearer " + key), (b"x-api-key", b"\xe9")],
        ]
        assert len({await refusal(door, headers) for headers in odd}) == 1


async def test_b204_wrong_deleted_and_disabled_keys_get_one_generic_answer(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        deleted_row, deleted = await door.key(tenant)
        await door.registry.delete_key(tenant.id, deleted_row.id)
        disabled_row, disabled = await door.key(tenant)
        await sql(door, "UPDATE api_keys SET status = 'disabled' WHERE id = :id", id=disabled_row.id)
        row, key = await door.key(tenant)
        wrong = api_keys.mint("tenant", row.id.removeprefix("key_"), bytes(32)).reveal()
        unknown = api_keys.mint("tenant", "000000000000", bytes(32)).reveal()
        await door.directory.authenticate(bearer(key))
        presented = [deleted, disabled, wrong, unknown, b"nonsense"]
        answers = {await refusal(door, bearer(text)) for text in presented} | {await refusal(door, [])}
        assert len(answers) == 1
        answer = answers.pop().decode().lower()
        assert "invalid_api_key" in answer
        for leak in ("api_keys", "tenants", "sql", "hmac", "digest", "pepper", row.id, "key_"):
            assert leak not in answer
        for text_ in presented[:-1]:
            assert text_.decode()[-20:].lower() not in answer
            assert api_keys.digest(Secret(bytes(32)), Secret(text_)).hex()[:16] not in answer


async def test_line_28_an_unknown_key_runs_the_same_comparison(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, database_url) as door:
        row, key = await door.key(await door.tenant("a"))
        wrong = api_keys.mint("tenant", row.id.removeprefix("key_"), bytes(32)).reveal()
        unknown = api_keys.mint("tenant", "000000000000", bytes(32)).reveal()
        hashed: list[int] = []
        digest = api_keys.digest

        def counting(pepper: Secret, secret: Secret) -> bytes:
            hashed.append(len(secret.reveal()))
            return digest(pepper, secret)

        monkeypatch.setattr(api_keys, "digest", counting)
        await door.directory.authenticate(bearer(key))
        await refusal(door, bearer(wrong))
        await refusal(door, bearer(unknown))
        # Each with the secret of now and with the one before it.
        assert hashed == [43] * 6


async def test_line_45_sql_in_the_bearer_token_changes_no_query(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        _, key = await door.key(await door.tenant("a"))
        for text_ in (b"' OR 1=1 --", b"sk-saltern-' OR '1'='1-x", b'"; DROP TABLE api_keys; --'):
            await refusal(door, bearer(text_))
        await door.directory.authenticate(bearer(key))


async def test_line_46_tenant_keys_and_admin_keys_do_not_open_each_others_door(
    tmp_path: Path, database_url: str
) -> None:
    async with opened(tmp_path, database_url) as door:
        _, tenant_key = await door.key(await door.tenant("a"))
        admin_key = (await door.directory.ensure_first_admin_key(tmp_path)).read_bytes().strip()
        await door.directory.authenticate(bearer(tenant_key))
        admin = await door.directory.authenticate_admin(bearer(admin_key))
        assert admin.scopes == ADMIN_SCOPES
        await refusal(door, bearer(admin_key))
        with pytest.raises(Unauthorized):
            await door.directory.authenticate_admin(bearer(tenant_key))
        forged = api_keys.mint("admin", tenant_key.decode()[11:23], bytes(32)).reveal()
        with pytest.raises(Unauthorized):
            await door.directory.authenticate_admin(bearer(forged))


async def test_the_first_admin_key_is_made_once_and_only_its_file_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    async with opened(tmp_path) as door:
        path = await door.directory.ensure_first_admin_key(tmp_path)
        assert path == tmp_path / "admin-key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        key = path.read_bytes().strip()
        assert await door.directory.ensure_first_admin_key(tmp_path) == path
        assert path.read_bytes().strip() == key
        assert key[-49:] not in door.files()
    async with opened(tmp_path) as door:
        await door.directory.ensure_first_admin_key(tmp_path)
        await door.directory.authenticate_admin(bearer(key))
    output = capsys.readouterr()
    assert "kek" in caplog.text
    for place in (caplog.text, output.out, output.err):
        assert key.decode()[-49:] not in place


async def test_salt_and_offload_key_are_32_independent_bytes_per_tenant(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        secrets = []
        for name in ("a", "b"):
            tenant = await door.tenant(name)
            secrets.append(await door.directory.salt(tenant.id, 1))
            secrets.append(await door.directory.offload_key(tenant.id, 1))
            assert await door.directory.salt(tenant.id, 1) == secrets[-2]
        assert {len(secret.reveal()) for secret in secrets} == {32}
        assert len({secret.reveal() for secret in secrets}) == 4


async def test_line_6_without_a_resolvable_salt_there_is_only_an_error(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        for tenant_id, epoch in ((tenant.id, 0), (tenant.id, 2), ("ten_unknown", 1), ("", 1)):
            with pytest.raises(SaltUnavailable) as caught:
                await door.directory.salt(tenant_id, epoch)
            assert caught.value.status == 503
        await door.directory.salt(tenant.id, 1)


@pytest.mark.parametrize(
    "swap",
    [
        "UPDATE wrapped_secrets SET wrapped = (SELECT wrapped FROM wrapped_secrets WHERE purpose = 'salt' "
        "AND tenant_id = :b) WHERE purpose = 'salt' AND tenant_id = :a",
        "UPDATE wrapped_secrets SET wrapped = (SELECT wrapped FROM wrapped_secrets WHERE purpose = 'offload_key' "
        "AND tenant_id = :a) WHERE purpose = 'salt' AND tenant_id = :a",
        "UPDATE wrapped_secrets SET wrapped = :zeros WHERE purpose = 'salt' AND tenant_id = :a",
        "UPDATE wrapped_secrets SET wrapped = substr(wrapped, 1, 0) WHERE purpose = 'salt' AND tenant_id = :a",
        "UPDATE wrapped_secrets SET kek_id = 'other' WHERE purpose = 'salt' AND tenant_id = :a",
    ],
)
async def test_line_17_a_row_moved_in_the_database_does_not_open(
    tmp_path: Path, database_url: str, swap: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, database_url) as door:
        a, b = await door.tenant("a"), await door.tenant("b")
        await sql(door, swap, a=a.id, b=b.id, zeros=bytes(60))
        with pytest.raises(SaltUnavailable):
            await door.directory.salt(a.id, 1)
        assert "the salt" in caplog.text
        await door.directory.salt(b.id, 1)
        await door.directory.offload_key(a.id, 1)


async def test_a_row_moved_to_another_epoch_does_not_open(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        await sql(door, "UPDATE wrapped_secrets SET epoch = 2 WHERE tenant_id = :id", id=tenant.id)
        with pytest.raises(SaltUnavailable):
            await door.directory.salt(tenant.id, 2)
        await sql(door, "UPDATE wrapped_secrets SET epoch = 1 WHERE tenant_id = :id", id=tenant.id)
        await door.directory.salt(tenant.id, 1)


async def test_an_opened_secret_is_kept_for_five_minutes_at_most(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        await door.directory.salt(tenant.id, 1)
        await sql(door, "DELETE FROM wrapped_secrets WHERE tenant_id = :id", id=tenant.id)
        door.clock.advance(minutes=4, seconds=59)
        await door.directory.salt(tenant.id, 1)
        door.clock.advance(seconds=1)
        with pytest.raises(SaltUnavailable):
            await door.directory.salt(tenant.id, 1)
        assert tenant.id not in repr(vars(door.directory.keyring))


async def test_standing_is_read_after_every_rotation_by_every_gateway(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door, opened(tmp_path, database_url) as other_gateway:
        tenant = await door.tenant("a")
        _, key = await door.key(tenant)
        principal = await other_gateway.directory.authenticate(bearer(key))
        for epoch in (1, 2, 3):
            assert (await other_gateway.directory.standing(principal)).epoch == epoch
            await door.registry.rotate(tenant.id)


async def test_sixty_requests_at_once_are_all_answered(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        _, key = await door.key(await door.tenant("a"))
        principals = await asyncio.gather(*(door.directory.authenticate(bearer(key)) for _ in range(60)))
        assert len(set(principals)) == 1


async def test_no_repr_shows_a_secret(tmp_path: Path, database_url: str) -> None:
    async with opened(tmp_path, database_url) as door:
        tenant = await door.tenant("a")
        row, key = await door.key(tenant)
        salt = await door.directory.salt(tenant.id, 1)
        principal = await door.directory.authenticate(bearer(key))
        shown = repr([door.directory, vars(door.directory), vars(door.directory.keyring), principal, row, salt])
        assert "Secret" in shown
        for secret in (salt.reveal(), row.digest):
            assert repr(secret)[2:10] not in shown
            assert secret.hex() not in shown
        assert key.decode()[-49:] not in shown
