"""Kernels that move bytes of the pool (`link`), and that say which ones a compaction moves (`pack`)."""
