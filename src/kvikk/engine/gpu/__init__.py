"""A step on a GPU: one descriptor in, tokens out, the kernels between them captured as a graph.

Row state is the device's: block tables, next positions, last tokens and sampling parameters lie by *seat*, and the host
sends commands. So the next step can be started before the tokens of this one are read, and a graph serves any mix of
rows.

Read `runner` (what the engine calls), `descriptor` (what the host says), `seats` (what it knows the device to hold),
`state` (what the kernels derive from both), `program` (all kernels of one shape of step), `sampling` and `border` (from
logits to tokens).

Invariants: the tokens are those of `engine.runner` and `engine.sampler`; one copy to the device in a steady step; a
row's token does not depend on the other rows.
Importing a module of this package imports triton, except this one: only where it is used.
"""
