"""Line 48 of the promise, at debug level and where telemetry is sent: canaries show in no log, span or metric."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.system.insider import Insider, block_names
from tests.system.otlp import receiving
from tests.system.served import EAGER, eventually, running
from tests.system.test_isolation_secrets import DAMAGES, found

CANARY = "canary-9d41c7"
SECOND_CANARY = "canary-e05b26"


def shown(secrets: dict[str, bytes], place: bytes) -> list[str]:
    return [name for name, secret in secrets.items() if found(secret, place)]


def test_line_48_canaries_show_in_no_log_no_span_and_no_metric_at_debug_level(
    tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_LOG_LEVEL", "debug")
        options = ["--log-level", "debug", "--tenant-metrics", "9"]
        with running(tmp_path / "data", "serve", *options, limits=EAGER) as server:
            server.wait_until_ready()
            tenant, insider = server.tenant(), Insider(server)
            answers = [tenant.chat(CANARY, **fields) for fields in requests()]
            answers += [tenant.complete(f"{CANARY} {SECOND_CANARY}", **fields) for fields in requests()]
            assert {answer.status_code for answer in answers} == {200, 400}
            for path in (f"/v1/models/{CANARY}", f"/{CANARY}?{CANARY}={CANARY}"):
                headers = tenant.headers | {"user-agent": CANARY, "baggage": f"a={CANARY}", "x-request-id": CANARY}
                assert server.http.get(path, headers=headers).status_code == 404
            wrong = {"authorization": f"Bearer sk-saltern-{CANARY}"}
            assert server.http.get("/v1/models", headers=wrong).status_code == 401
            assert server.admin.post("/admin/v1/tenants", json={"name": f"{CANARY}!"}).status_code == 400
            named = tenant.complete([*range(1000, 1040)], max_tokens=20, ignore_eos=True)
            assert named.status_code == 200
            tenant.rotate()
            with server.http.stream(
                "POST",
                "/v1/completions",
                headers=tenant.headers,
                json={"model": server.model, "prompt": CANARY, "max_tokens": 1500, "stream": True, "ignore_eos": True},
            ) as stream:
                next(stream.iter_raw())
                server.kill_store()
            server.wait_until_ready()
            unlucky = server.tenant()
            with insider.database() as database:
                database.execute(DAMAGES["zeros"], (unlucky.id,))
            assert unlucky.complete(CANARY).status_code == 503
            secrets = insider.secrets(tenant)
            eventually(lambda: b"saltern_cache_blocks" in server.admin.get("/metrics").content, "a report came")
            scrape = server.admin.get("/metrics").content
            admin_key = server.admin.headers["authorization"].removeprefix("Bearer ")
            names = block_names(secrets.salt, insider.welcome(), [*range(1000, 1040)])
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
        log = server.log().encode()
        told = b"".join(receiver.bodies)
    choices = [choice for answer in answers for choice in answer.json().get("choices", [])]
    texts = [choice.get("text") or choice["message"]["content"] for choice in choices]
    hidden = {
        "prompt": CANARY.encode(),
        "second prompt": SECOND_CANARY.encode(),
        "salt": secrets.salt,
        "offload key": secrets.offload_key,
        "account": secrets.account,
        "key": tenant.key.encode()[-49:-6],
        "admin key": admin_key.encode()[-49:-6],
    }
    hidden |= {f"block name {number}": name for number, name in enumerate(names)}
    hidden |= {f"text {number}": text.encode() for number, text in enumerate(texts) if len(text) >= 8}
    assert len(hidden) > 12
    for place, what in ((log, "the log"), (told, "traces and metrics"), (scrape, "the scrape")):
        assert shown(hidden, place) == [], what
    # The same search finds what is there: the tenant's public id, in all three.
    for place in (log, told, scrape):
        assert shown({"tenant": tenant.id.encode()}, place) == ["tenant"]
    assert b" DEBUG saltern." in log


def requests() -> list[dict[str, Any]]:
    """Fields of requests that are answered, and of some that are refused."""
    return [
        {"max_tokens": 20},
        {"max_tokens": 20, "stop": [CANARY, SECOND_CANARY], "user": CANARY, "metadata": {CANARY: CANARY}},
        {"max_tokens": 20, "cache_salt": CANARY, "prompt_cache_key": CANARY, CANARY: CANARY},
        {"max_tokens": 20, "temperature": 1, "top_k": 50, "seed": 7, "stream": False},
        {"max_tokens": 10**7},
        {"temperature": CANARY},
        {"stop": {CANARY: CANARY}},
        {"tools": [{"type": "function", "function": {"name": CANARY}}]},
        {"response_format": {"type": CANARY}},
        {"logit_bias": {CANARY: 1}},
        {"model": CANARY[:3] * 100, "max_tokens": -1},
    ]
