"""Compiled attention on the CPU: numba kernels over pages where they lie, on the threads that torch uses.

From the bottom up: `ir` (words of LLVM IR), `vector` and `products` (primitives made of them), `table` (the numbers a
kernel works from), `split` (one query position), `tile` (several), `kernels` (what a thread runs), `work` (items of a
step), `backend` (the Python side). Read `kernels` and `split` first.

What holds here: kernels allocate nothing, raise nothing and check nothing, so `backend` and the plan check everything
before; no item's result depends on which thread computes it, or on which other items there are. Only `backend` may be
imported without numba.
"""
