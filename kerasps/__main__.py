"""`python -m kerasps` is the `kerasps` command."""

import sys

from kerasps.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
