"""`python -m evolver_async`: the command line, where its script is not on the path."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # of the working directory, whose files would hide any module

from evolver_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
