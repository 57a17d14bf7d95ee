"""The driver's parts: prompts, works, worker processes, environments and the table of `cpu_peers.py`."""
