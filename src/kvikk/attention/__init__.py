"""Attention over pages: what a step asks, the plan made of it, and the backends that run it.

A caller makes a `QueryRun` for each row (or several, for a prompt with holes), and then

    schedule = backend.plan(runs)        # once for each step
    step = backend.begin(schedule)       # handed to the model's forward
    out = step.attend(layer, q, k, v, scale=scale)

A row is uniform, all of its positions in the blocks of its table, or it has a body (`memory.body`): then each lane has
slots of its own number in frames of its own, and the table begins where the body stops. A lane's slots are numbered
through its body and then its tail. Backends take both kinds in one step.

What holds here:

- All K and V of a step are stored before any of its queries attends.
- What lies beyond a row's length, or a lane's in its body, is masked, never multiplied by zero; the null block is
  never written.
- A row's result does not depend on its batch mates.
- Log-sum-exp is natural, fp32, and (0, -inf) for a query that sees nothing; merging never makes NaN.

Read `plan` (the question), `backend` (the contract), `reference` (the maths); `cpu` is the same maths, compiled.
"""

from kvikk.attention.backend import AttentionBackend, BackendName, attention_backend
from kvikk.attention.plan import QueryRun, Schedule, plan_step
from kvikk.attention.reference import ReferenceBackend, attend_dense, merge_states

__all__ = [
    "AttentionBackend",
    "BackendName",
    "QueryRun",
    "ReferenceBackend",
    "Schedule",
    "attend_dense",
    "attention_backend",
    "merge_states",
    "plan_step",
]
