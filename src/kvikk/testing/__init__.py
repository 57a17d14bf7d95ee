"""Tests that authors of policies run on their own: `from kvikk.testing.policies import PolicyConformance`.

- `policies`: the claims that every policy must meet, as a class of tests and as one function.
- `layers`: the layers that these are tried on.

Nothing here is used by an engine, and pytest is not needed to import it.
"""
