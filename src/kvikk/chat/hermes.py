"""The form of Hermes and Qwen: each call is a JSON object between two tags."""

from __future__ import annotations

from kvikk.chat.parser import CallParser, Reading

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(CallParser):
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text anywhere around.

    A closing tag may be missing, as may the call's last bracket before it.
    """

    def _answer(self) -> Reading[None]:
        may_close = False
        while self._char and not self.has_ended:
            yield from self._space()
            if self._char != "<":
                yield from self._text()
                may_close = False
                continue
            found = yield from self._marker(*((OPEN, CLOSE) if may_close else (OPEN,)))
            may_close = False
            if found == OPEN:
                may_close = yield from self._call(is_marked=True)
            elif found == CLOSE:
                self._held.clear()
            else:
                self._give_text()
