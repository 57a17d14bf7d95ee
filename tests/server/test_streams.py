"""Streams of text: whole characters, and stop strings that never show in part."""

from __future__ import annotations

import openai
import pytest

MODEL = "smollm2"
TEXTS = {
    "emoji": "🦑👩‍👩‍👧‍👦🏳️‍🌈🇳🇴👍🏽 done",
    "hangul": "안녕하세요 한국어 뷁뷁",
    "devanagari": "नमस्ते क्षत्रिय ज्ञान",
    "combining": "e\u0301a\u0308o\u0302n\u0303 Z\u0351\u036b\u0343 ffi",
    "mixed": "Ægir 🦑 한 क्ष e\u0301 ‏עברית‏ 漢字 \U0001d518\U0001d52b\U0001d526\ttab\nline",
}


def streamed(client: openai.OpenAI, prompt: str, **asked: object) -> list[str]:
    chunks = client.completions.create(model=MODEL, prompt=prompt, temperature=0, stream=True, **asked)
    return [chunk.choices[0].text for chunk in chunks]


@pytest.mark.parametrize("name", TEXTS)
def test_the_joined_stream_is_the_full_text_whatever_the_script(client: openai.OpenAI, name: str) -> None:
    text = TEXTS[name]
    pieces = streamed(client, "Say:", max_tokens=200, extra_body={"guided_choice": [text]})
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say it"}],
        max_tokens=200,
        temperature=0,
        extra_body={"guided_choice": [text]},
    )
    assert chat.choices[0].message.content == text


def test_a_text_cut_within_a_character_shows_that_it_is_unfinished_and_nothing_more(client: openai.OpenAI) -> None:
    asked = {"max_tokens": 2, "extra_body": {"guided_choice": ["뷁뷁뷁"]}}
    pieces = streamed(client, "Say:", **asked)
    plain = client.completions.create(model=MODEL, prompt="Say:", temperature=0, **asked).choices[0].text
    assert "".join(pieces) == plain
    assert plain.rstrip("\N{REPLACEMENT CHARACTER}") in "뷁뷁뷁"


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one two three STOP four", "STOP", "one two three "),
        ("one two three STOP four", "ree STO", "one two th"),
        ("aaaaaaaaaaab and more", "aab", "aaaaaaaaa"),
        ("alpha<|end|>beta", "<|end|>", "alpha"),
        ("no <|en but then <|end|> it came", "<|end|>", "no <|en but then "),
        ("before 한국어 after", "국", "before 한"),
    ],
)
def test_a_stop_string_across_tokens_never_leaks_and_keeps_the_text_before_it(
    client: openai.OpenAI, text: str, stop: str, shown: str
) -> None:
    asked = {"max_tokens": 100, "stop": [stop, "never seen"], "extra_body": {"guided_choice": [text]}}
    pieces = streamed(client, "Say:", **asked)
    for count in range(len(pieces) + 1):
        assert shown.startswith("".join(pieces[:count])), "no piece shows anything of the stop string"
    assert "".join(pieces) == shown
    plain = client.completions.create(model=MODEL, prompt="Say:", temperature=0, **asked).choices[0]
    assert plain.text == shown
    assert plain.finish_reason == "stop"


def test_what_might_have_become_a_stop_string_is_shown_when_the_text_ends(client: openai.OpenAI) -> None:
    pieces = streamed(client, "Say:", max_tokens=50, stop="<|end|>", extra_body={"guided_choice": ["text <|en"]})
    assert "".join(pieces) == "text <|en"
