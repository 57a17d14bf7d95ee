"""Quality beside bytes beside speed: what a smaller KV cache costs, on the engine that users get.

- `evaluate`: every suite over every cell of a grid; read this first. `config`: what it is told. `grid`: its cells.
- `fidelity`: distance from the full cache on real text, position by position. `answers`: questions still answered, made
  by `tasks`. `suite`: what both have in common.
- `subject`: the engine, asked in batches; `teacher`: the runner that forces tokens. Real text is `kvikk.bench.texts`.
- `results`: the file, gone on with by a later run; `report`, `plot`: tables and pictures of its rows.

Invariants: chunks, triggers and the pool are the engine's, only sampled tokens are overruled; no distance is measured
before the first trigger; a result that could not have differed says so; a task counts only where the full cache solves
at least half of it; rows of one file are of one model, one text and one code.
"""
