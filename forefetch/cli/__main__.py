"""`python -m forefetch.cli`: the command where it is not on PATH."""

import sys

from forefetch.cli import main

if __name__ == "__main__":
    sys.exit(main())
