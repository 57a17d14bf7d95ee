"""Real text that every Python carries, or files of one's own, as documents of an exact number of tokens."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from kvikk.errors import ConfigError

CODE, PROSE, CHAT, JSON = "code", "prose", "chat", "json"
LONGEST_TOKEN = 8
"""Characters of a token, more than the mean of any text: so much of a text is enough to have its first tokens."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True)
class Document:
    """The beginning of a text.

    Args:
        kind: the source it is from.
        name: of the module, the topic or the file.
        tokens: as many as were asked for.
    """

    kind: str
    name: str
    tokens: list[int]


def documents(source: str, count: int, tokens: int, encode: Encode) -> list[Document]:
    """The first texts of a source that are long enough, in the order of their names.

    Args:
        source: of `texts`.
        count: how many.
        tokens: of each.
        encode: of the model's tokenizer.

    Raises:
        ConfigError: there are too few.
    """
    found: list[Document] = []
    for name, text in texts(source):
        if len(found) == count:
            break
        ids = encode(text[: LONGEST_TOKEN * tokens]) if len(text) >= tokens else []
        if len(ids) >= tokens:
            found.append(Document(kind=source, name=name, tokens=ids[:tokens]))
    if len(found) < count:
        raise ConfigError(
            f"{source} has {len(found)} texts of {tokens:,} tokens, {count} are asked for: lower --documents or "
            "--length"
        )
    return found


def pieces(source: str, lengths: Iterable[int], encode: Encode) -> Iterator[list[int]]:
    """Of all texts of a source, one after the other, a piece of each of these many tokens; round again at the end.

    Args:
        source: of `texts`; several, separated by commas, take turns.
        lengths: in tokens.
        encode: of the model's tokenizer.

    Raises:
        ConfigError: a source is not there, or has no text in it.
    """
    readers = [_Reader(each, encode) for each in source.split(",")]
    for length, reader in zip(lengths, cycle(readers), strict=False):
        yield reader.read(length)


class _Reader:
    """Reads a source's tokens from beginning to end, and again."""

    def __init__(self, source: str, encode: Encode) -> None:
        self._source = source
        self._encode = encode
        self._more = texts(source)
        self._rest: list[int] = []

    def read(self, length: int) -> list[int]:
        read_from_start = False
        while len(self._rest) < length:
            _, text = next(self._more, ("", None))
            if text is not None:
                self._rest += self._encode(text)
            elif read_from_start and not self._rest:
                raise ConfigError(f"--texts {self._source!r} has no text in it: name another folder")
            else:
                self._more, read_from_start = texts(self._source), True
        found, self._rest = self._rest[:length], self._rest[length:]
        return found


def texts(source: str) -> Iterator[tuple[str, str]]:
    """Names and texts of a source, in the order of the names; bytes that are no UTF-8 are left out.

    Args:
        source: `code`, Python's own library; `prose`, its manual; `chat`, questions about that library with what it
            says of itself for an answer, in ChatML; `json`, the table of characters; or a folder of text files.

    Raises:
        ConfigError: it is not there.
    """
    if source == CODE:
        yield from _files(_library())
    elif source == PROSE:
        yield from sorted(_language_reference().items())
    elif source == CHAT:
        for name, text in _files(_library()):
            yield name, _conversation(name.removesuffix(".py"), text)
    elif source == JSON:
        yield from _character_tables()
    else:
        if not Path(source).is_dir():
            sources = f"{CODE}, {PROSE}, {CHAT}, {JSON}"
            raise ConfigError(f"--texts {source!r} is none of {sources}, and no folder of text files")
        yield from _files(path for path in Path(source).iterdir() if path.is_file())


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in sorted(paths):
        yield path.name, path.read_text(encoding="utf-8", errors="ignore")


def _library() -> Iterator[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return (path for path in folder.glob("*.py") if not path.name.startswith("_"))


def _conversation(module: str, code: str) -> str:
    """What each documented function and class of a module is for: asked, and answered by its docstring."""
    turns = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (answer := ast.get_docstring(node)):
            called = f"{node.name}({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else node.name
            for role, said in (("user", f"What is `{called}` of Python's {module} for?"), ("assistant", answer)):
                turns.append(f"<|im_start|>{role}\n{said}<|im_end|>\n")
    return "".join(turns)


def _character_tables() -> Iterator[tuple[str, str]]:
    """What Unicode says of its characters, a document for each 256 of them."""
    for first in range(0, 0x3000, 256):
        records = [
            {
                "character": character,
                "name": unicodedata.name(character),
                "category": unicodedata.category(character),
                "lower": character.lower(),
                "decomposition": unicodedata.decomposition(character).split(),
            }
            for character in map(chr, range(first, first + 256))
            if unicodedata.name(character, None)
        ]
        if records:
            yield f"{first:04x}", json.dumps(records, indent=2)


def paragraphs(source: str) -> list[str]:
    """Pieces of some lines each of a source, in order: what facts are hidden between."""
    return [part for _, text in texts(source) for part in text.split("\n\n") if 100 < len(part) < 1000]


def digest(parts: Sequence[object]) -> str:
    """Says whether two runs asked about the same; 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _language_reference() -> dict[str, str]:
    """Python's own manual: topic by topic, a thousand lines of the longest."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            f"{PROSE} is Python's own documentation (pydoc_data), which this Python lacks: name a folder with --texts"
        ) from None
    return dict(topics)
