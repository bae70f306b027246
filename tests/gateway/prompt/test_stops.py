from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.stops import StopStrings


def run(stops: list[str], chunks: list[str]) -> tuple[list[str], bool]:
    scanner = StopStrings(stops)
    return [*(scanner.push(chunk) for chunk in chunks), scanner.finish()], scanner.matched


def test_without_stop_strings_text_passes_at_once() -> None:
    assert run([], ["a", "", "bc"]) == (["a", "", "bc", ""], False)


def test_text_that_may_become_a_stop_string_is_held_back_across_chunks() -> None:
    assert run(["STOP"], ["one S", "T", "O", "P two"]) == (["one ", "", "", "", ""], True)
    assert run(["STOP"], ["one S", "T", "A", "R"]) == (["one ", "", "STA", "R", ""], False)
    assert run(["STOP"], ["one ST"]) == (["one ", "ST"], False)


def test_nothing_comes_after_a_match() -> None:
    assert run(["x"], ["axb", "c"]) == (["a", "", ""], True)


def test_the_match_that_is_complete_first_wins_however_the_text_is_cut() -> None:
    for chunks in (["abc"], ["ab", "c"], ["a", "b", "c"]):
        pieces, matched = run(["abc", "b"], chunks)
        assert ("".join(pieces), matched) == ("a", True)
    assert run(["bc", "abc"], ["zabc"]) == (["z", ""], True)


def test_a_stop_string_that_overlaps_its_own_start_is_found() -> None:
    assert run(["aab"], ["aaaab"]) == (["aa", ""], True)
    assert run(["\n\n"], ["x\n", "\n"]) == (["x", "", ""], True)


def test_a_stop_string_that_is_kept_ends_the_answer_and_holds_nothing_back() -> None:
    scanner = StopStrings(["STOP"], kept=True)
    assert [scanner.push(piece) for piece in ("one S", "TO", "P two", "x")] == ["one S", "TO", "P", ""]
    assert scanner.matched
    assert scanner.finish() == ""


def test_a_stop_string_that_is_complete_too_early_is_none() -> None:
    scanner = StopStrings(["aba"])
    assert scanner.push("xaba", too_early=True) == "xab"
    assert not scanner.matched
    # What began too early may be complete in time.
    assert scanner.push("ba") == ""
    assert scanner.matched
    later = StopStrings(["ab"])
    assert [later.push("ab", too_early=True), later.push("ab", too_early=True), later.push("cab")] == ["ab", "ab", "c"]
    assert later.matched


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("ab", max_size=5), max_size=8),
)
def test_any_cut_gives_the_same_text_and_holds_no_more_than_it_must(stops: list[str], chunks: list[str]) -> None:
    text = "".join(chunks)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text[: sum(min(ends))] if ends else text
    scanner = StopStrings(stops)
    sent = ""
    for index, chunk in enumerate(chunks):
        sent += scanner.push(chunk)
        if not scanner.matched:
            held = "".join(chunks[: index + 1])[len(sent) :]
            assert not held or any(stop.startswith(held) for stop in stops)
    assert sent + scanner.finish() == expected
    assert scanner.matched == bool(ends)
