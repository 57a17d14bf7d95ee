"""The reference pages, written from the code they describe.

`python -m docs.generate` writes them to `docs/reference`, `--check` says which are out of date. One module makes one
page: `commands` and `options` from the command line, `http` from the OpenAPI description, `python` from docstrings,
`errors` from the tree of errors.
"""
