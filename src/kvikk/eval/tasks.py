"""Questions about long real text, made in code: facts that nobody knows are hidden in it, and asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from kvikk.bench.texts import CODE, PROSE, Encode, paragraphs

QUESTIONS: Final = 5
"""On one context, each about another fact; so many depths are asked about."""
PAIRS: Final = 10
"""Of the JSON object that is looked up in."""

CITIES: Final = ("Athens", "Cairo", "Dublin", "Havana", "Lima", "Lisbon", "Oslo", "Prague", "Seoul", "Vienna")
PEOPLE: Final = (
    "Anna",
    "Bruno",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Greta",
    "Hugo",
    "Irene",
    "Jacob",
    "Karin",
    "Louis",
)
THINGS: Final = (
    "anchor", "apple", "banana", "candle", "castle", "copper", "forest", "garden",
    "guitar", "mirror", "pepper", "river", "rocket", "tunnel", "velvet", "window",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What is asked about a context.

    Args:
        task: its name.
        context: what comes first.
        text: the question, up to where the answer begins.
        answer: what is right, for people.
        answer_tokens: so many are enough to say it.
        is_right: whether an answer is.
    """

    task: str
    context: str
    text: str
    answer: str
    answer_tokens: int
    is_right: Callable[[str], bool]


class Filler:
    """Real text of about so many tokens, with facts between its paragraphs.

    Args:
        source: `prose` or `code`.
        tokens: of a context, roughly: whole paragraphs and the facts.
        encode: of the model's tokenizer.
    """

    def __init__(self, source: str, tokens: int, encode: Encode) -> None:
        self._paragraphs = paragraphs(source)
        self._tokens = tokens
        self._encode = encode

    def around(self, facts: Sequence[str], random: Random, opening: str = "") -> str:
        """The facts at even depths, in their order, the text beginning at a random paragraph."""
        parts: list[str] = []
        start = random.randrange(len(self._paragraphs))
        left = self._tokens - sum(len(self._encode(text)) for text in (opening, *facts))
        while left > 0:
            parts.append(self._paragraphs[(start + len(parts)) % len(self._paragraphs)])
            left -= len(self._encode(parts[-1]))
        for index in reversed(range(len(facts))):
            parts.insert(round((index + 0.5) / len(facts) * len(parts)), facts[index])
        return "\n\n".join([opening, *parts] if opening else parts)


def needles(random: Random, filler: Filler) -> list[Question]:
    """Sentences at five depths."""
    numbers = {city: _number(random) for city in random.sample(CITIES, QUESTIONS)}
    fact = "One of the special magic numbers for {} is:"
    context = filler.around([f"{fact.format(city)} {number}." for city, number in numbers.items()], random)
    ask = "\n\nWhat is the special magic number for {} mentioned in the text?\n" + fact
    return [
        _asking_for("needle", context, ask.format(city, city), number, answer_tokens=10)
        for city, number in numbers.items()
    ]


def lookups(random: Random, filler: Filler) -> list[Question]:
    """Keys of a JSON object in the middle of the text."""
    numbers = {thing: _number(random) for thing in random.sample(THINGS, PAIRS)}
    context = filler.around([json.dumps(numbers, indent=2)], random)
    ask = '\n\nFrom the JSON object above:\n  "{}": "'
    return [
        _asking_for("lookup", context, ask.format(thing), numbers[thing], answer_tokens=10)
        for thing in list(numbers)[:QUESTIONS]
    ]


def variables(random: Random, filler: Filler) -> list[Question]:
    """Variables that are set once."""
    numbers = {f"{thing}_size": _number(random) for thing in random.sample(THINGS, QUESTIONS)}
    context = filler.around([f"{name} = {number}" for name, number in numbers.items()], random)
    return [
        _asking_for("variable", context, f"\n\n# The values again:\n{name} =", number, answer_tokens=10)
        for name, number in numbers.items()
    ]


def chains(random: Random, filler: Filler) -> list[Question]:
    """Variables that are set to other variables, half of the text further on."""
    names = [f"{thing}_size" for thing in random.sample(THINGS, 2 * QUESTIONS)]
    numbers = {name: _number(random) for name in names[:QUESTIONS]}
    copies = dict(zip(names[QUESTIONS:], numbers, strict=True))
    facts = [f"{name} = {value}" for name, value in (numbers | copies).items()]
    context = filler.around(facts, random)
    ask = "\n\n# All assignments followed to the number:\n{} ="
    return [
        _asking_for("chain", context, ask.format(copy), numbers[name], answer_tokens=20)
        for copy, name in copies.items()
    ]


def tool_calls(random: Random, filler: Filler) -> list[Question]:
    """Calls of a tool, as JSON, whose arguments stand in the request and in a record; an example comes first."""
    orders = {person: _number(random) for person in random.sample(PEOPLE, QUESTIONS + 1)}
    *asked, example = orders
    records = [json.dumps({"customer": person, "order": order}) for person, order in orders.items()]
    opening = f"{_request(example)} {_call(example, orders[example])}"
    context = filler.around(records, random, opening)
    return [
        Question(
            task="tool-call",
            context=context,
            text=f"\n\n{_request(person)}",
            answer=_call(person, orders[person]),
            answer_tokens=40,
            is_right=_calls(json.loads(_call(person, orders[person]))),
        )
        for person in asked
    ]


MAKERS: Final[dict[str, tuple[Callable[[Random, Filler], list[Question]], str]]] = {
    "needle": (needles, PROSE),
    "lookup": (lookups, PROSE),
    "variable": (variables, CODE),
    "chain": (chains, CODE),
    "tool-call": (tool_calls, PROSE),
}
"""Each task, and what text its facts are hidden in."""


def make_questions(*, contexts: int, tokens: int, seed: int, encode: Encode) -> list[Question]:
    """All tasks; a seed makes the same questions, character by character, with the same tokenizer and Python.

    Args:
        contexts: of each task, with five questions on each.
        tokens: of a context, roughly.
        seed: of facts and places.
        encode: of the model's tokenizer.
    """
    found: list[Question] = []
    for task, (make, source) in MAKERS.items():
        filler = Filler(source, tokens, encode)
        for index in range(contexts):
            found += make(Random(f"{seed} {task} {index}"), filler)
    return found


def _number(random: Random) -> str:
    return str(random.randrange(10_000, 100_000))


def _request(person: str) -> str:
    return f'User: Cancel my order. I am {{"customer": "{person}"}}\nCall:'


def _call(person: str, order: str) -> str:
    return json.dumps({"name": "cancel", "arguments": {"customer": person, "order": order}})


def _asking_for(task: str, context: str, text: str, number: str, *, answer_tokens: int) -> Question:
    """A question whose answer says a number, and says it before it begins to speak of something else."""
    paragraph = re.compile(rf"(?<!\w){number}(?!\w)")
    return Question(
        task=task,
        context=context,
        text=text,
        answer=number,
        answer_tokens=answer_tokens,
        is_right=lambda said: paragraph.search(said.strip().partition("\n\n")[0]) is not None,
    )


def _calls(wanted: dict[str, Any]) -> Callable[[str], bool]:
    """Whether the first JSON object of a text is this call, with these arguments."""

    def is_right(said: str) -> bool:
        start = said.find("{")
        try:
            return start >= 0 and json.JSONDecoder().raw_decode(said[start:])[0] == wanted
        except ValueError:
            return False

    return is_right
