"""`python -m evolver_async`: the command line, where its script is not on the path."""

import sys

from evolver_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
