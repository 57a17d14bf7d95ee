"""Attention on a GPU: Triton kernels over the flat pool, driven by a list of work items that the GPU itself plans.

A step's queries become *work items* of about equal work, (row, KV head, queries, slots from, to), once for all layers.
One kernel works the list off, for single queries and for several; lanes that were cut write partial results, which a
second kernel merges in order. Everything irregular about a step is data in buffers that never move, so captured graphs
stay valid.

Read `rows` (what is asked), `planner` (the list), `attend` and `merge` (the maths; a tile of slots in
`running`, of quantised ones in `words` and `unpack`), `store` (RoPE and the KV write),
`worklist` (the three joined), `backend` (the same behind `AttentionBackend`). `plan_twin` and `twins` have each kernel
in PyTorch. `flashinfer` has the routes of another package, `cost` and `calibration` what each costs, `routing` the
choice.
Importing the kernel modules imports triton, an optional dependency: only where it is used.
"""
