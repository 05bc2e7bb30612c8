"""`python -m musalib`."""

import sys

from musalib.cli import main

if __name__ == "__main__":
    sys.exit(main())
