"""The page of the Python API: classes and methods, from their signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from docs.generate.markdown import code, table

import kvikk.llm
from kvikk import LLM, SamplingParams
from kvikk.compress import KVCacheParams
from kvikk.configuration import argument_help
from kvikk.grammar import StructuredOutputsParams
from kvikk.llm import CompletionOutput, KVUsage, Logprob, RequestOutput, StreamDelta

INTRODUCTION = """\
# Python

`from kvikk import LLM, SamplingParams`. Names and shapes are vLLM's where the meaning is the same; every option of the
[command line](options.md) is a keyword of `LLM`. Errors are in [a tree of their own](errors.md).
"""
CLASSES = (
    LLM,
    SamplingParams,
    StructuredOutputsParams,
    KVCacheParams,
    RequestOutput,
    CompletionOutput,
    StreamDelta,
    Logprob,
    KVUsage,
)


def page() -> str:
    """The whole page."""
    types = [
        f"- `{name}` is `{kvikk.llm.llm.__dict__[name]}`".replace("typing.", "").replace("collections.abc.", "")
        for name in ("Prompt", "Message")
    ]
    return "\n".join([INTRODUCTION, *(part for each in CLASSES for part in _class(each)), "## Types\n", *types, ""])


def _class(described: type) -> Iterator[str]:
    yield f"## {described.__name__}\n"
    yield _prose(described)
    if dataclasses.is_dataclass(described):
        yield _fields(described)
    else:
        yield _signature(described.__name__, vars(described)["__init__"])
        yield from filter(None, (_arguments(described), _raises(described)))
    for name, member in vars(described).items():
        function = getattr(member, "__func__", member)  # of a class method
        if name.startswith("_") or not (inspect.isfunction(function) or isinstance(member, property)):
            continue
        yield f"### {described.__name__}.{name}\n"
        if inspect.isfunction(function):
            yield _signature(name, function)
        yield _prose(member)
        yield from filter(None, (_arguments(member), _raises(member)))


def _prose(described: Any) -> str:
    """A docstring up to its sections, code blocks fenced."""
    text = re.split(r"^(?:Args|Raises|Returns|Yields):$", inspect.getdoc(described) or "", flags=re.MULTILINE)[0]
    paragraphs = text.strip().split("\n\n")
    return (
        "\n\n".join(
            f"```python\n{textwrap.dedent(paragraph)}\n```" if paragraph.startswith("    ") else paragraph
            for paragraph in paragraphs
        )
        + "\n"
    )


def _fields(described: Any) -> str:
    """The fields of a dataclass, with their help from its `Args:` or from the string below each."""
    help_of = argument_help(described) | _strings_below(described)
    return table(
        ["field", "type", "default", ""],
        [
            (code(field.name), code(str(field.type)), _default(field), help_of.get(field.name, ""))
            for field in dataclasses.fields(described)
        ],
    )


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return code(repr(field.default))
    return "" if field.default_factory is dataclasses.MISSING else code(repr(field.default_factory()))


def _strings_below(described: type) -> dict[str, str]:
    """The strings that stand below fields, by field."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(described))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if is_text and isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            found[before.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    returns = signature.return_annotation if name[0].islower() else inspect.Signature.empty
    text = str(signature.replace(parameters=parameters, return_annotation=returns)).replace("'", "")
    if len(name + text) > 100:
        inner = re.split(r", (?![^\[]*\])", text[1 : text.rindex(")")])
        text = "(\n" + "".join(f"    {part},\n" for part in inner) + text[text.rindex(")") :]
    return f"```python\n{name}{text}\n```\n"


def _arguments(described: Any) -> str:
    return "".join(f"- `{name}`: {text}\n" for name, text in argument_help(described).items())


def _raises(described: Any) -> str:
    section = (inspect.getdoc(described) or "").partition("Raises:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, flags=re.MULTILINE)
    return "".join(f"- raises `{name}`: {' '.join(text.split())}\n" for name, text in entries)
