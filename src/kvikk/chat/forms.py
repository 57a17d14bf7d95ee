"""The forms in which models write tool calls, and which one a model's is."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvikk.chat import hermes, llama
from kvikk.chat.parser import CallParser
from kvikk.chat.tools import ToolUse
from kvikk.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """One way to write tool calls.

    Args:
        name: as `--tool-call-parser` says it.
        parser: reads calls of this form.
        marker: says that a call follows.
        arguments_key: what the arguments are called within a call.
        before: stands before each call; nothing, where a call needs no marker.
        after: stands after each call.
        between: stands between two calls.
        tokens: those of the marks that are tokens of their own in the model's vocabulary.
        keeps_special_tokens: some of them are special tokens: texts with calls must be decoded with special tokens left
            in.
    """

    name: str
    parser: type[CallParser]
    marker: str
    arguments_key: str
    before: str
    after: str
    between: str
    tokens: frozenset[str] = frozenset()
    keeps_special_tokens: bool = False

    def read(self, use: ToolUse, make_id: Callable[[], str]) -> CallParser:
        """A parser for one answer."""
        return self.parser(use.names, make_id, parallel=use.parallel)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model would write it."""
        call = {"name": name, self.arguments_key: arguments}
        return f"{self.before}{json.dumps(call, ensure_ascii=False)}{self.after}"


HERMES = ToolForm(
    name="hermes",
    parser=hermes.HermesParser,
    marker=hermes.OPEN,
    arguments_key="arguments",
    before=f"{hermes.OPEN}\n",
    after=f"\n{hermes.CLOSE}",
    between="\n",
)
LLAMA = ToolForm(
    name="llama",
    parser=llama.LlamaParser,
    marker=llama.TAG,
    arguments_key="parameters",
    before="",
    after="",
    between="; ",
)


def form_for(setting: str, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> ToolForm:
    """The form of a model's tool calls.

    Args:
        setting: `hermes`, `llama`, or `auto`: what the chat template shows. A template that knows no tools leaves the
            choice to us: Hermes's.
        tokenizer: of the model.
        template: overrides the tokenizer's own.

    Raises:
        ConfigError: there is no such form.
    """
    forms = {form.name: form for form in (HERMES, LLAMA)}
    if setting != "auto" and setting not in forms:
        raise ConfigError(f"--tool-call-parser {setting} is not known: choose auto, {', '.join(forms)}")
    form = _guess(tokenizer, template) if setting == "auto" else forms[setting]
    marks = (form.marker, form.after.strip())
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if str(token) in marks]
    return replace(
        form,
        tokens=frozenset(map(str, tokens)),
        keeps_special_tokens=any(token.special for token in tokens),
    )


def _guess(tokenizer: PreTrainedTokenizerBase, template: str | None) -> ToolForm:
    own = tokenizer.chat_template or ""
    text = template or (own if isinstance(own, str) else "\n".join(own.values()))
    if hermes.OPEN in text or "tools" not in text:
        return HERMES
    if llama.TAG in tokenizer.get_added_vocab():
        return LLAMA
    logger.warning(
        "the model's chat template shows tools in a form that is not known: tool calls may come out as text. "
        "--tool-call-parser names a form"
    )
    return HERMES
