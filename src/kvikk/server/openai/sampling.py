"""From a request's body to `SamplingParams`: null means the model's default, then OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvikk.engine import SamplingParams
from kvikk.errors import InvalidRequest
from kvikk.grammar import StructuredOutputsParams
from kvikk.server.openai.requests import GenerationBody

PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "prompt_logprobs",
    "kv_cache",
)
"""Fields that mean the same in `SamplingParams`."""
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    max_choices: int,
    form: StructuredOutputsParams | None,
) -> SamplingParams:
    """What a body asks of sampling.

    Args:
        body: checked by pydantic.
        defaults: what the model's authors recommend, by `SamplingParams`' names.
        max_tokens: as the endpoint reads it.
        logprobs: as the endpoint reads it.
        max_choices: the server's limit on `n`.
        form: that the text must have.

    Raises:
        InvalidRequest: a value out of its limits, or two that exclude each other.
    """
    values = dict(defaults)
    values |= {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    if values.get("n", 1) > max_choices:
        raise InvalidRequest(f"n is {values['n']}: this server writes at most --max-choices {max_choices}", param="n")
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given without stream: set stream to true", param="stream_options")
    return SamplingParams(**values, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form)


def requested_form(body: GenerationBody) -> StructuredOutputsParams | None:
    """The form that a body asks of its answer, by OpenAI's field or vLLM's.

    Raises:
        InvalidRequest: more than one field says it, or the form itself is wrong.
    """
    given = [name for name in ("response_format", "structured_outputs", *GUIDED) if getattr(body, name) is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} exclude each other: give one", param=given[1])
    if not given:
        return None
    name = given[0]
    if body.response_format is not None:
        return _response_format(body)
    if body.structured_outputs is not None:
        fields = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        return StructuredOutputsParams(**fields)
    return StructuredOutputsParams(**{name.removeprefix("guided_"): getattr(body, name)})


def _response_format(body: GenerationBody) -> StructuredOutputsParams | None:
    asked = body.response_format
    assert asked is not None
    if asked.type == "json_schema":
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            raise InvalidRequest(
                "response_format.json_schema.schema is missing: give the schema, or use type json_object",
                param="response_format",
            )
        return StructuredOutputsParams(json=asked.json_schema.schema_)
    if asked.json_schema is not None:
        raise InvalidRequest(
            f"response_format has a json_schema but its type is {asked.type!r}: use type json_schema",
            param="response_format",
        )
    return StructuredOutputsParams(json_object=True) if asked.type == "json_object" else None


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(
            f"logit_bias has the key {text!r}: keys are token ids, as text", param="logit_bias"
        ) from None
