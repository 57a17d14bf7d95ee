from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvikk.llm.text import Detokenizer, StopMatcher


@pytest.fixture(scope="session")
def tokenizer():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    from kvikk.models.bundled import bundled_folder

    return AutoTokenizer.from_pretrained(bundled_folder())


def pieces(tokenizer, prompt: list[int], ids: list[int], *, skip: bool = True) -> list[str]:  # type: ignore[no-untyped-def]
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(text=st.text(min_size=1, max_size=60), prompt=st.text(max_size=20))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_pieces_joined_are_the_text_for_all_of_unicode(tokenizer, text: str, prompt: str) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    assert "".join(pieces(tokenizer, before, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 49151), min_size=1, max_size=30))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_pieces_joined_are_the_full_decode_for_any_tokens(tokenizer, ids: list[int]) -> None:  # type: ignore[no-untyped-def]
    assert "".join(pieces(tokenizer, [], ids, skip=False)) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "text", ["naïve café", "👩‍👩‍👧 family", "한국어 텍스트", "日本語のテキスト", "🇳🇴 flag", "a\u0301 combining"]
)
def test_no_piece_shows_half_a_character(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    found = pieces(tokenizer, [1], ids)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


def test_a_text_that_ends_within_a_character_shows_it_at_the_end(tokenizer) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer("ok 🦜", add_special_tokens=False).input_ids[:-1]
    found = pieces(tokenizer, [], ids)
    assert "".join(found) == tokenizer.decode(ids)
    assert found[-1].endswith("\ufffd")


@pytest.mark.parametrize("cut", [1, 2])
def test_a_character_that_the_prompt_began_shows_whole(tokenizer, cut: int) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer("\U0001f99c hello", add_special_tokens=False).input_ids
    assert "".join(pieces(tokenizer, ids[:cut], ids[cut:])) == "\U0001f99c hello"


def test_many_skipped_tokens_keep_the_window_small(tokenizer) -> None:  # type: ignore[no-untyped-def]
    detokenizer = Detokenizer(tokenizer, [5], skip_special_tokens=True)
    for _ in range(500):
        assert detokenizer.push(2) == ""
    assert len(detokenizer._window) <= 128
    (word,) = tokenizer(" fjord", add_special_tokens=False).input_ids[:1]
    assert detokenizer.push(word) == tokenizer.decode([word])


def fed(stops: list[str], parts: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = ""
    for part in parts:
        text += matcher.push(part)
        if matcher.matched is not None:
            return text, matcher.matched
    return text + matcher.finish(), None


def test_a_stop_string_over_several_tokens_never_shows_in_part() -> None:
    assert fed(["\nUser:"], ["Hello", "\n", "Us", "er", ": more"]) == ("Hello", "\nUser:")
    matcher = StopMatcher(["\nUser:"], include=False)
    assert [matcher.push(p) for p in ("Hello", "\n", "Us", "ual")] == ["Hello", "", "", "\nUsual"]


def test_the_earliest_stop_string_wins_and_may_be_included() -> None:
    assert fed(["cd", "b"], ["abcd"]) == ("a", "b")
    assert fed(["cd", "b"], ["abcd"], include=True) == ("ab", "b")
    assert fed(["zzz"], ["ab", "z", "z"]) == ("abzz", None)


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=30),
)
def test_matching_piece_by_piece_equals_matching_as_soon_as_the_whole_text_does(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    parts, rest = [], text
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    parts.append(rest)
    found, matched = fed(stops, parts)
    if not any(stop in text for stop in stops):
        assert (found, matched) == (text, None)
    else:
        assert matched is not None
        assert text.startswith(found + matched)
        assert not any(stop in found for stop in stops)
