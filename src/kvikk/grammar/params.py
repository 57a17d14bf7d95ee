"""What a request wants its text to be: vLLM's names and meanings, checked when made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvikk.errors import InvalidRequest

PARAM = "structured_outputs"
"""The sampling parameter that these belong to, as errors name it."""
MAX_CHARACTERS = 65_536
"""Of a schema, a regex, a grammar, or all choices together."""
MAX_CHOICES = 1024


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that a text must have. Exactly one field is given.

    Args:
        json: a JSON schema, as an object or as its text: the text is a JSON value that the schema describes.
        json_object: True: the text is any JSON object.
        regex: the whole text matches this regular expression (Rust's syntax: no look-around, no back-references).
        choice: the text is one of these strings.
        grammar: the text is a sentence of this grammar, in Lark's or in GBNF's notation.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not (self.json_object is None or isinstance(self.json_object, bool)):
            raise InvalidRequest(f"json_object is {self.json_object!r}: it must be true or false", param=PARAM)
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            found = "none is given" if not given else f"{' and '.join(given)} are given"
            raise InvalidRequest(f"exactly one of {', '.join(names)} shapes a text, {found}", param=PARAM)
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice(self.choice))
        elif self.json is not None:
            self._check_length("json", self.schema_text)
        elif not self.json_object:
            self._check_length(given[0], getattr(self, given[0]))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) not in (None, False))

    @property
    def schema_text(self) -> str:
        """The JSON schema of `json` or `json_object` as text; equal for equal schemas given as objects.

        Raises:
            InvalidRequest: `json` is no JSON object.
        """
        if self.json is None:
            return '{"type": "object"}'
        try:
            schema = json.loads(self.json) if isinstance(self.json, str) else self.json
            if not isinstance(schema, Mapping):
                raise InvalidRequest("json is no JSON schema: it must be an object", param=PARAM)
            return json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequest):
                raise
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise InvalidRequest(f"json is no JSON schema: {reason}", param=PARAM) from None

    def _checked_choice(self, choice: object) -> tuple[str, ...]:
        if not isinstance(choice, list | tuple) or not all(isinstance(text, str) for text in choice):
            raise InvalidRequest(f"choice is {choice!r}: it must be a list of strings", param=PARAM)
        if not 0 < len(choice) <= MAX_CHOICES:
            raise InvalidRequest(f"choice holds {len(choice)} strings: give 1 to {MAX_CHOICES}", param=PARAM)
        if "" in choice:
            raise InvalidRequest("choice holds an empty string: a text has at least one token", param=PARAM)
        self._check_length("choice", "".join(choice))
        return tuple(choice)

    @staticmethod
    def _check_length(name: str, text: object) -> None:
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} is {type(text).__name__}: it must be text", param=PARAM)
        if not 0 < len(text) <= MAX_CHARACTERS:
            raise InvalidRequest(
                f"{name} has {len(text):,} characters: it must have 1 to {MAX_CHARACTERS:,}", param=PARAM
            )
