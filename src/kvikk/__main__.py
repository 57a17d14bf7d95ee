"""`python -m kvikk` is `kvikk`."""

import sys

from kvikk.cli import main

if __name__ == "__main__":
    sys.exit(main())
