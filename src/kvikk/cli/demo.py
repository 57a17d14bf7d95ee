"""`kvikk demo`: questions over one long real document: in a batch, from the cache, with part of its KV, losslessly."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvikk.cli.arguments import add_config_arguments, add_logging_argument, resolve
from kvikk.configuration import given
from kvikk.engine import EngineConfig, SamplingParams
from kvikk.errors import ConfigError
from kvikk.memory import format_bytes

if TYPE_CHECKING:
    from kvikk.llm import LLM, RequestOutput, StreamDelta

CONFIG = EngineConfig
DOCUMENT_TOPIC = "compound"
DOCUMENT_TOKENS = 6500
QUESTIONS = (
    "What does the `finally` clause of a `try` statement do?",
    "In one sentence, what is the `with` statement for?",
    "How does a `for` loop end early?",
)
FOLLOW_UP = "And what does `else` mean after a loop?"
ANSWER_TOKENS = 64
POLICY = "snapkv"
BUDGETS = ("50%", "25%", "12.5%")
DRAFT_BUDGET = "25%"
DRAFT_TOKENS = 4
"""Fixed: on a CPU drafting pays little, and as many as pay would show little of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    add_config_arguments(parser, CONFIG)
    add_logging_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    from rich.console import Console

    from kvikk.llm import LLM

    console = Console(highlight=False, soft_wrap=True)
    options = given(resolve(parsed, CONFIG))
    if "model" not in options:  # the bundled one can be exact: then an answer is the same in every way of computing it
        options = {"numerics": "exact"} | options
    llm = LLM(**options)
    document, tokens = long_document(llm.get_tokenizer(), min(DOCUMENT_TOKENS, llm.capacity.max_model_len * 3 // 4))
    console.print(f"The document: {tokens:,} tokens of Python's language reference.\n")
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    conversations = [conversation(document, question) for question in QUESTIONS]
    rows = [ask(llm, console, "three questions", conversations, params)]
    first_answer = rows[0].outputs[0].outputs[0].text
    follow_up = [
        *conversations[0],
        {"role": "assistant", "content": first_answer},
        {"role": "user", "content": FOLLOW_UP},
    ]
    rows.append(ask(llm, console, "a follow-up", [follow_up], params))
    console.print(table(rows))
    console.print(f"\n[bold]the same question, with less of the document kept ({POLICY})[/bold]")
    answers = [ask_with_budget(llm, console, conversations[0], budget) for budget in ("all", *BUDGETS)]
    console.print(budget_table([answer.row for answer in answers]))
    console.print(f"\n[bold]the same question, drafted with {DRAFT_BUDGET} and verified on all of it (lossless)[/bold]")
    ask_losslessly(llm, console, conversations[0], answers[0].text)
    llm.engine.check()
    console.print(
        f"pool check: free + held + cached = total, every block accounted for ({llm.engine.pool.total:,} blocks)"
    )
    return 0


def long_document(tokenizer: Any, tokens: int) -> tuple[str, int]:
    """The first `tokens` tokens of the language reference on compound statements, which Python itself carries."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "the demo's document is Python's own documentation (pydoc_data), which this Python lacks"
        ) from None
    ids = tokenizer(topics[DOCUMENT_TOPIC], add_special_tokens=False, truncation=True, max_length=tokens).input_ids
    return tokenizer.decode(ids), len(ids)


def conversation(document: str, question: str) -> list[dict[str, str]]:
    """A question about a document: the document first, so that questions share it."""
    return [
        {"role": "system", "content": "You answer questions about a document, briefly and from the document only."},
        {"role": "user", "content": f"{document}\n\nQuestion: {question}"},
    ]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One batch that was answered, and what it cost."""

    name: str
    outputs: list[RequestOutput]
    seconds: float
    blocks_held: int
    blocks_cached: int

    def figures(self) -> list[tuple[str, str]]:
        """What the table shows, as (name, value)."""
        prompt, cached, generated = (
            sum(output.usage[name] for output in self.outputs)
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        )
        until_text = max(output.first_token_s or 0.0 for output in self.outputs)
        afterwards = self.seconds - until_text
        return [
            ("prompt tokens", f"{prompt:,}"),
            ("  found cached", f"{cached:,}"),
            ("  computed", f"{prompt - cached:,}"),
            ("generated tokens", f"{generated:,}"),
            ("blocks held at the peak", f"{self.blocks_held:,}"),
            ("blocks cached after", f"{self.blocks_cached:,}"),
            ("seconds to the first tokens", f"{until_text:.2f}"),
            ("prompt tokens / s until then", _rate(prompt - cached, until_text)),
            (
                "generated tokens / s then",
                _rate(generated - len(self.outputs), afterwards),
            ),
        ]


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if seconds > 0 else "-"


def ask(llm: LLM, console: Any, name: str, conversations: list[list[dict[str, str]]], params: Any) -> Asked:
    """Answer a batch, streaming the first answer; the others follow whole."""
    console.print(f"[bold]{name}[/bold]")
    outputs: dict[int, RequestOutput] = {}
    peak_held = 0
    started = time.monotonic()
    console.print(f"[cyan]Q: {_question(conversations[0])}[/cyan]\nA: ", end="")
    for delta in llm.stream(llm.render(conversations), params):
        peak_held = max(peak_held, llm.engine.pool.held)
        _show(delta, console)
        if delta.output is not None:
            outputs[delta.prompt_index] = delta.output
    seconds = time.monotonic() - started
    console.print()
    for index in range(1, len(conversations)):
        console.print(f"[cyan]Q: {_question(conversations[index])}[/cyan]")
        console.print(f"A: {outputs[index].outputs[0].text}", markup=False)
    console.print()
    return Asked(
        name=name,
        outputs=[outputs[index] for index in range(len(conversations))],
        seconds=seconds,
        blocks_held=peak_held,
        blocks_cached=llm.engine.pool.cached,
    )


@dataclass(frozen=True, kw_only=True)
class BudgetAnswer:
    """What came of a budget: the text, and its row of the table."""

    text: str
    row: list[str]


def ask_with_budget(llm: LLM, console: Any, messages: list[dict[str, str]], budget: str) -> BudgetAnswer:
    """Answer a question with so much of its KV kept from the end of the prompt on."""
    kv_cache = {"policy": "full"} if budget == "all" else {"policy": POLICY, "budget": budget}
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, kv_cache=kv_cache)
    held = 0
    answer = ""
    for delta in llm.stream(llm.render([messages]), params):
        answer += delta.text
        output = delta.output
        if output is None:
            held = llm.engine.pool.held  # as it is while the answer is written
    assert output is not None
    console.print(f"[cyan]{budget} kept[/cyan]\nA: ", end="")
    console.print(answer, markup=False)
    usage = output.kv_cache
    prompt = output.usage["prompt_tokens"]
    size = format_bytes(held * llm.capacity.geometry.block_bytes)
    kept, freed = (prompt, 0) if usage is None else (round(usage.kept_tokens), usage.blocks_freed)
    return BudgetAnswer(text=answer, row=[budget, f"{kept:,} of {prompt:,}", size, f"{freed:,}"])


def ask_losslessly(llm: LLM, console: Any, messages: list[dict[str, str]], whole: str) -> None:
    """Answer a question by drafting on a small cache, and compare with the answer of the whole one."""
    kv_cache = {"policy": POLICY, "budget": DRAFT_BUDGET, "lossless": True, "draft_tokens": DRAFT_TOKENS}
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, kv_cache=kv_cache))
    answer, usage = output.outputs[0].text, output.kv_cache
    assert usage is not None
    console.print("A: ", end="")
    console.print(answer, markup=False)
    same = "exactly the answer of the whole cache"
    if answer != whole:
        same = "not the answer of the whole cache: a near-tie was decided otherwise, --numerics exact leaves none"
    console.print(f"{same}; {usage.drafted} tokens drafted in {usage.rounds} rounds, {usage.accepted} of them accepted")


def budget_table(rows: list[list[str]]) -> Any:
    """What each budget kept and freed, for a terminal."""
    from rich.table import Table

    result = Table("kept", "tokens of each KV head", "KV held while answering", "blocks freed", title="Less of it kept")
    for row in rows:
        result.add_row(*row)
    return result


def _show(delta: StreamDelta, console: Any) -> None:
    if delta.prompt_index == 0:
        console.print(delta.text, end="", markup=False)


def _question(messages: list[dict[str, str]]) -> str:
    return messages[-1]["content"].rpartition("Question: ")[2]


def table(batches: list[Asked]) -> Any:
    """What the batches cost, for a terminal."""
    from rich.table import Table

    result = Table(title="What the KV memory did")
    result.add_column("")
    for batch in batches:
        result.add_column(batch.name, justify="right")
    for figures in zip(*(batch.figures() for batch in batches), strict=True):
        result.add_row(figures[0][0], *(value for _, value in figures))
    return result
