"""Real text that every Python carries, or files of one's own, as documents of an exact number of tokens."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvikk.errors import ConfigError

CODE, PROSE = "code", "prose"
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
        source: `code`, `prose`, or a folder of text files.
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
        source: `code`, `prose`, or a folder of text files.
        lengths: in tokens.
        encode: of the model's tokenizer.

    Raises:
        ConfigError: the source is not there, or has no text in it.
    """
    rest: list[int] = []
    more = texts(source)
    for length in lengths:
        read_from_start = False
        while len(rest) < length:
            _, text = next(more, ("", None))
            if text is not None:
                rest += encode(text)
            elif read_from_start and not rest:
                raise ConfigError(f"--texts {source!r} has no text in it: name another folder")
            else:
                more, read_from_start = texts(source), True
        yield rest[:length]
        rest = rest[length:]


def texts(source: str) -> Iterator[tuple[str, str]]:
    """Names and texts of a source, in the order of the names; bytes that are no UTF-8 are left out.

    Raises:
        ConfigError: it is not there.
    """
    if source == CODE:
        folder = Path(sysconfig.get_paths()["stdlib"])
        paths: Iterable[Path] = (path for path in folder.glob("*.py") if not path.name.startswith("_"))
    elif source == PROSE:
        yield from sorted(_language_reference().items())
        return
    else:
        if not Path(source).is_dir():
            raise ConfigError(f"--texts {source!r} is neither {CODE}, {PROSE} nor a folder of text files")
        paths = (path for path in Path(source).iterdir() if path.is_file())
    for path in sorted(paths):
        yield path.name, path.read_text(encoding="utf-8", errors="ignore")


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
