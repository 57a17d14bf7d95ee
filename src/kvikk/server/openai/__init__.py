"""OpenAI's API: what comes in, what goes out, and how one becomes the other.

- `requests`, `responses`: the bodies, as pydantic models; the OpenAPI page is made of them.
- `sampling`: from a body to `SamplingParams`.
- `completions`, `chat`: the two endpoints, each with its streamed and its plain answer over the same pieces.
- `logprobs`: OpenAI's two forms of log-probabilities.
- `problems`: every error in OpenAI's form.
"""
