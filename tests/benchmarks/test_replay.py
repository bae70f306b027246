from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import replay
from tests.policies.made_traces import Trace, blocks, lru_hits

CONVERSATION = Path(__file__).parents[1] / "traces" / "conversation-1000.jsonl"
RECORDED: Trace = [json.loads(line)["hash_ids"] for line in CONVERSATION.read_text().splitlines()]


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert replay.main([*map(str, arguments), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def trace_of(folder: Path, *chains: list[int]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in chains))
    return path


@pytest.mark.parametrize(("device_blocks", "hits"), [(500, 999), (2000, 1151), (5000, 2630), (20_000, 5791)])
def test_lru_finds_what_an_ordered_dictionary_finds(
    capsys: pytest.CaptureFixture[str], device_blocks: int, hits: int
) -> None:
    assert sum(lru_hits(RECORDED, device_blocks)) == hits
    done = replayed(capsys, CONVERSATION, "--device-blocks", device_blocks)
    assert done["policy"] == "lru"
    assert (done["requests"], done["blocks"]) == (1000, blocks(RECORDED))
    assert done["hit_ratio"] == hits / blocks(RECORDED)
    assert done["evictions"] == max(0, blocks(RECORDED) - hits - device_blocks)


def test_reuse_finds_more(capsys: pytest.CaptureFixture[str]) -> None:
    lru, reuse = (
        replayed(capsys, CONVERSATION, "--device-blocks", 2000, "--policy", name) for name in ("lru", "reuse")
    )
    assert lru["hit_ratio"] + 0.01 < reuse["hit_ratio"] < reuse["optimal_ratio"] == lru["optimal_ratio"]


def test_with_room_for_all_nothing_is_evicted_and_every_policy_is_optimal(capsys: pytest.CaptureFixture[str]) -> None:
    for policy in ("lru", "reuse"):
        done = replayed(capsys, CONVERSATION, "--device-blocks", blocks(RECORDED), "--policy", policy)
        assert done["evictions"] == 0
        assert done["hit_ratio"] == done["optimal_ratio"] == 5791 / blocks(RECORDED)


def test_the_optimum_keeps_what_is_used_next(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Round and round: least recently used finds nothing. At best 1, 2 and 3 stay, and the others pass.
    done = replayed(capsys, trace_of(tmp_path, *[[1, 2], [3, 4], [5, 6]] * 3), "--device-blocks", 3)
    assert done["hit_ratio"] == 0
    assert done["optimal_ratio"] == 2 * 3 / 18


def test_tenants_share_nothing_and_conversations_stay_with_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chains = [[0, number, number + 100] for number in range(1, 41)] * 2
    path = trace_of(tmp_path, *chains)
    accounts = [request.account for request in replay.read_trace(path, tenants=4)]
    assert len(set(accounts)) == 4
    assert accounts[:40] == accounts[40:]
    # Block 0 is made once by each tenant.
    done = replayed(capsys, path, "--device-blocks", 1000, "--tenants", 4)
    assert done["hit_ratio"] == done["optimal_ratio"] == (240 - 80 - 4) / 240


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: no request with `hash_ids`"),
        ("[]", "line 2: no request with `hash_ids`"),
        ('{"hash_ids": [1, -1]}', "line 2: no request with `hash_ids`"),
        ('{"hash_ids": [true]}', "line 2: no request with `hash_ids`"),
        ('{"hash_ids": [1, 2, 1]}', "line 2: an id stands for a whole prefix, it can't come twice"),
        ('{"hash_ids": [1, 2, 3, 4, 5]}', "a request of 5 blocks does not fit into 4: raise --device-blocks"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_by_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, says: str
) -> None:
    path = trace_of(tmp_path, [1, 2])
    path.write_text(path.read_text() + line + "\n")
    assert replay.main([str(path), "--device-blocks", "4"]) == 1
    assert says in capsys.readouterr().err


def test_no_requests_no_file_and_no_room_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert replay.main([str(trace_of(tmp_path, [])), "--device-blocks", "4"]) == 1
    assert "has no request with a block" in capsys.readouterr().err
    assert replay.main([str(tmp_path / "none"), "--device-blocks", "4"]) == 1
    assert "No such file" in capsys.readouterr().err
    for option in ("--device-blocks", "--tenants"):
        with pytest.raises(SystemExit):
            replay.main([str(CONVERSATION), "--device-blocks", "4", option, "0"])
        assert f"{option} 0: 1 at least" in capsys.readouterr().err


def test_the_table_says_what_json_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = trace_of(tmp_path, [1, 2], [1, 2, 3])
    assert replay.main([str(path), "--device-blocks", "4"]) == 0
    lines = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {name: lines[name] for name in ("policy", "blocks", "hit ratio", "optimal", "evictions")} == {
        "policy": "lru",
        "blocks": "5",
        "hit ratio": "0.4000",
        "optimal": "0.4000",
        "evictions": "0",
    }
