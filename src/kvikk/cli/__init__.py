"""The command line, `kvikk`.

Options come from the config dataclasses; a flag wins over a `KVIKK_...` variable, which wins over `--config file.toml`.
Each command is one module, listed in `commands`; read `main` first.
"""

from kvikk.cli.main import main

__all__ = ["main"]
