"""The command line: `python -m heron VERB`."""

import sys

from heron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
