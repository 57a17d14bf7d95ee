"""What a layer does between and in its projections, on a GPU, in Triton.

`norms` and `gate` are the small operations, `operations` is how `llama` calls them, `linear` is the product of `exact`
numerics. Invariant: a row's bits depend on that row and the weights alone, so that they are the same in any batch: what
a kernel's code is specialised on (widths, tiles, warps) never comes from the number of rows.
Importing a module of this package imports triton, except this one: only where it is used.
"""
