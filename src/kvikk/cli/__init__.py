"""The command line: `kvikk generate | chat | demo | doctor`.

Engine options come from the config dataclasses; a flag wins over a `KVIKK_...` variable, which wins over `--config
file.toml`. Each command is one module; read `main` first.
"""

from kvikk.cli.main import main

__all__ = ["main"]
