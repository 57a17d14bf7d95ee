"""The built-in policies, one file each: what it is, where it is from, and its score.

`kvikk.compress.registry` knows them by name and imports the one that is asked for. Read `knorm` first, then `snapkv`.
"""
