"""`python -m kerasps` is the `kerasps` command."""

import sys

from kerasps.cli import main

if __name__ == "__main__":
    sys.exit(main())
