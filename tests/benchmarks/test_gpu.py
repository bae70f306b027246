"""`benchmarks.gpu` without a GPU: its arithmetic, and all that it measures in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch

from benchmarks.figures import Spread
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.machine import Machine, Sample, in_turns
from benchmarks.gpu.moves import block_order
from benchmarks.gpu.report import OURS, Figure, Report, tables
from benchmarks.gpu.suite import ROOT, Suite, outcomes, run_limited
from benchmarks.gpu.work import Heads, decode_bytes, prefill_operations, visible_keys

LLAMA = Heads(query_heads=32, kv_heads=8, dim=128)

# The package `kernels.triton_backend` is not imported here: in the interpreter it needs a process of its own.


def test_decode_moves_keys_and_values_once_for_each_kv_head() -> None:
    # 64 × 8192 tokens × 8 heads × (K and V) × 128 × 2 bytes, and 64 × 32 × 128 × 2 bytes of q and as many of out
    assert decode_bytes(LLAMA, sequences=64, context_tokens=8192, cache_bytes=2) == 2_147_483_648 + 2 * 524_288


def test_decode_of_8_bits_moves_a_scale_for_each_row() -> None:
    # 10 tokens × 2 heads × (K and V) × (16 + 4) bytes, and 4 × 16 × 2 bytes of q and as many of out
    assert decode_bytes(Heads(4, 2, 16), sequences=1, context_tokens=10, cache_bytes=1) == 800 + 256


def test_a_token_sees_itself_and_all_before_it() -> None:
    assert visible_keys(new_tokens=4, context_tokens=4) == 1 + 2 + 3 + 4
    assert visible_keys(new_tokens=3, context_tokens=10) == 8 + 9 + 10
    assert visible_keys(new_tokens=1, context_tokens=10) == 10


def test_prefill_does_four_operations_for_each_element_of_a_visible_key() -> None:
    assert prefill_operations(Heads(4, 2, 16), new_tokens=3, context_tokens=10) == 4 * 4 * 16 * 27
    assert prefill_operations(LLAMA, new_tokens=8192, context_tokens=8192) == 549_822_922_752


def test_moved_blocks_are_all_blocks_in_runs() -> None:
    order = block_order(24, 4, seed=1)
    assert sorted(order) == list(range(24))
    assert order != sorted(order)
    for start in range(0, 24, 4):
        assert order[start] % 4 == 0
        assert order[start : start + 4] == list(range(order[start], order[start] + 4))
    assert block_order(24, 4, seed=2) != order


def test_calls_are_timed_in_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def timed(call: Any) -> Sample:
        call()
        return Sample(float(len(order)), 0.0)

    machine = Machine(torch.device("cpu"), timed, lambda call: call)
    samples = in_turns(machine, {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3
    assert {name: [sample.device_us for sample in each] for name, each in samples.items()} == {"a": [3, 5], "b": [4, 6]}


def test_outcomes_are_counted_with_and_without_workers_and_of_a_run_that_was_cut_off() -> None:
    output = """
collecting ... collected 4 items
tests/kernels/test_write_kv.py::test_a[PASSED-1] PASSED                  [ 25%]
tests/kernels/test_write_kv.py::test_b FAILED                            [ 50%]
tests/kernels/test_write_kv.py::test_c SKIPPED (no float8 here)          [ 75%]
tests/kernels/test_write_kv.py::test_d
[gw1] [ 31%] PASSED tests/kernels/test_copy_blocks.py::test_FAILED
[gw0] [ 32%] ERROR tests/kernels/test_copy_blocks.py::test_e
FAILED tests/kernels/test_write_kv.py::test_b - assert 1 == 2
"""
    assert outcomes(output) == {"PASSED": 2, "FAILED": 1, "SKIPPED": 1, "ERROR": 1}


def test_a_program_is_ended_when_its_time_is_over() -> None:
    assert run_limited(["sleep", "600"], 0.2)[0] is None
    assert run_limited([sys.executable, "-c", "print('told'); raise SystemExit(3)"], 600) == (3, "told\n")


@pytest.mark.parametrize(("returncode", "passed"), [(1, 5), (None, 5), (0, 0)])
def test_tests_that_failed_did_not_end_or_were_not_there_are_no_success(returncode: int | None, passed: int) -> None:
    assert Suite(0, passed=5, failed=0, skipped=1, seconds=100).succeeded
    suite = Suite(returncode, passed=passed, failed=0, skipped=0, seconds=100)
    assert not suite.succeeded


def test_the_file_is_up_to_date_after_every_case(tmp_path: Path) -> None:
    lines: list[str] = []
    report = Report(tmp_path / "figures.json", lines.append)

    def written() -> dict[str, Any]:
        return json.loads(report.file.read_text()) if report.file else {}

    report.note("limits", {"copy": 4e12}, "limits: …")
    assert written() == {"limits": {"copy": 4e12}, "failures": [], "figures": []}
    samples = [Sample(9.0, 3.0), Sample(10.0, 4.0), Sample(30.0, 5.0)]
    report.add([Figure.of("decode", "batch 1", OURS, samples, least_us=5.0, aim=0.9)])
    (figure,) = written()["figures"]
    assert figure["device_us"] == {"median": 10.0, "least": 9.0, "greatest": 30.0}
    assert (figure["host_us"], figure["share"], figure["aim"]) == (4.0, 0.5, 0.9)
    assert lines[-1] == "decode, batch 1: saltern 10.0 us, 50% of the limit (aim 90%)"
    assert report.status == 0
    report.fail("moves: gone")
    assert written()["failures"] == ["moves: gone"]
    assert report.status == 1


def test_a_table_shows_shares_beside_aims_and_who_was_wrong() -> None:
    spread = Spread(10.0, 9.0, 11.0)
    told = tables(
        [
            Figure("decode", "batch 1", OURS, spread, 4.0, 0.5, 0.9),
            Figure("decode", "batch 1", "sdpa", wrong="an error of 1"),
            Figure("decode", "batch 2", OURS, missing="no time"),
        ]
    )
    assert [line.split() for line in told.splitlines()] == [
        ["decode,", "us", "saltern", "sdpa", "of", "the", "limit", "aim", "host"],
        ["batch", "1", "10.0", "WRONG", "50%", "90%", "4"],
        ["batch", "2", "-", "-"],
    ]


def test_without_a_device_there_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--json", str(tmp_path / "figures.json")]) == 2
    assert main(["--tiles"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "There is no CUDA device here, and nothing was measured.\n" * 2
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reports")
    command = [sys.executable, "-m", "tests.benchmarks.gpu_on_cpu", str(folder)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def by_contender(report: dict[str, Any], part: str) -> dict[str, list[dict[str, Any]]]:
    contenders: dict[str, list[dict[str, Any]]] = {}
    for figure in report["figures"]:
        if figure["part"] == part:
            contenders.setdefault(figure["contender"], []).append(figure)
    return contenders


def test_every_case_is_checked_and_timed(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["right"]
    assert report["failures"] == []
    assert report["status"] == 0
    assert set(report["limits"]) == {"copy", "to_device", "to_host", "matrix"}
    assert [figure["wrong"] for figure in report["figures"] if figure["wrong"]] == []
    decode, prefill, moves = (by_contender(report, part) for part in ("decode", "prefill", "moves"))
    assert [len(decode[name]) for name in (OURS, f"{OURS}, graph", "sdpa")] == [3, 3, 3]
    assert [len(prefill[name]) for name in (OURS, "sdpa", "flex_attention")] == [2, 2, 2]
    assert len(moves[OURS]) == 4
    for figure in (*decode[OURS], *decode[f"{OURS}, graph"], *decode["sdpa"], *prefill[OURS], *moves[OURS]):
        assert figure["device_us"]["median"] > 0
        assert figure["share"] > 0
    assert all(figure["tiles"]["decode"]["key_tile"] for figure in decode[OURS] + prefill[OURS])


def test_others_are_asked_where_they_can_do_it(reports: dict[str, dict[str, Any]]) -> None:
    decode, prefill = (by_contender(reports["right"], part) for part in ("decode", "prefill"))
    for name in ("flex_attention", "flashinfer"):
        measured, *missing = decode[name]
        assert measured["device_us"] is not None
        assert [figure["missing"] for figure in missing] == ["it is asked for bfloat16 alone"] * 2
    assert {figure["missing"] for figure in prefill["flashinfer"]} == {"it is only asked for decode"}
    assert {figure["missing"] for figure in decode["broken"]} == {"RuntimeError: no kernel image"}


def test_a_context_of_several_splits_is_measured(reports: dict[str, dict[str, Any]]) -> None:
    assert reports["splits"]["status"] == 0
    assert [figure["device_us"] is not None for figure in reports["splits"]["figures"]] == [True] * 3


def test_when_time_is_over_the_rest_is_told_as_not_measured(reports: dict[str, dict[str, Any]]) -> None:
    assert [figure["missing"] for figure in reports["late"]["figures"]] == ["the 0 s of this part are spent"] * 3
    assert reports["late"]["status"] == 0


def test_a_wrong_result_is_told_and_not_timed(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["corrupt"]
    ours, sdpa = report["figures"]
    assert "2 of 2 tokens differ from float64" in ours["wrong"]
    assert ours["device_us"] is None
    assert report["calls"] == 1
    assert sdpa["device_us"] is not None
    assert report["status"] == 1


def test_a_cache_that_holds_something_else_is_told(reports: dict[str, dict[str, Any]]) -> None:
    (figure,) = reports["unwritten"]["figures"]
    assert figure["wrong"] == "write_kv left k of sequence 0 with an error of 1"
    assert reports["unwritten"]["status"] == 1


def test_the_sweep_tries_the_table_then_others_and_names_the_best(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["tiles"]
    assert report["failures"] == []
    assert report["status"] == 0
    for title, tried in (("tiles, decode int8", 3), ("tiles, prefill bfloat16", 2)):
        figures = [figure for figure in report["figures"] if figure["part"] == title]
        choices = list({figure["contender"]: figure["tiles"] for figure in figures}.values())
        assert len(choices) == tried
        best = report[f"best {title}"]

        def mean(choice: dict[str, Any], figures: list[dict[str, Any]] = figures) -> float:
            return geometric_mean(figure["share"] for figure in figures if figure["tiles"] == choice)

        assert max(choices, key=mean) == best
    assert len(report["table"].splitlines()) == 3
