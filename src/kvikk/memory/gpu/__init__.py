"""Kernels that move bytes of the pool (`rows`), and that say which ones a compaction moves (`pack`)."""
