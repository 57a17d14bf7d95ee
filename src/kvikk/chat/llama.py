"""The form of Llama 3.1 and 3.2: the whole answer is a JSON object, or one follows a special token."""

from __future__ import annotations

from kvikk.chat.parser import CallParser, Reading

TAG = "<|python_tag|>"


class LlamaParser(CallParser):
    """Reads `{"name": ..., "parameters": {...}}` at the very start of an answer, or after `<|python_tag|>` anywhere.

    Several follow each other with `;` between them. Without the tag an object is a call only if it names one of the
    request's tools: answers in JSON are no calls.
    """

    def _answer(self) -> Reading[None]:
        yield from self._space()
        if self._char == "{":
            yield from self._row(is_marked=False)
        while self._char and not self.has_ended:
            yield from self._space()
            if self._char != "<":
                yield from self._text()
            elif (yield from self._marker(TAG)):
                yield from self._row(is_marked=True)
            else:
                self._give_text()

    def _row(self, *, is_marked: bool) -> Reading[None]:
        """Read calls, one after the other."""
        while (yield from self._call(is_marked=is_marked)) and not self.has_ended:
            yield from self._space()
            if self._char == ";":
                yield from self._take()
                yield from self._space()
            if self._char != "{":
                return
