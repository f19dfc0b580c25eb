"""`python -m fp8fn`."""

import sys

from fp8fn.cli import main

if __name__ == "__main__":
    sys.exit(main())
