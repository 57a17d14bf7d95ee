"""Kernels for what policies ask most, the attention that slots get (`mass`), and for what stays by scores (`best`).

Importing a module of this package imports triton, except this one: only where it is used.
"""
