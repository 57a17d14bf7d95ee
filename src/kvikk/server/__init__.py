"""The server: OpenAI's API over an engine in a process of its own.

- `run.serve`: from a config to a server that runs; read this first.
- `engine_process`, `client`, `messages`: the engine's process, the front's end of it, and what passes between them.
- `service`: what every endpoint works with; `generation`: one request in flight, from tokens to pieces of text.
- `app`: which path does what; `openai`: the bodies, and how requests become answers; `streaming`: answers in pieces.
- `security`: keys, salts, limits; `counting`, `metrics`, `page`: what an operator sees.

Invariants: a streamed answer and a plain one are made of the same pieces; a client that is gone has its request aborted
before the next step; every error has OpenAI's form and says the field, the value and the limit; no request reaches the
file system; when the engine dies, whoever waits is told, and the server ends with an exit code that is not zero.
"""
