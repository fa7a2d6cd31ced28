"""Shows what a data set holds: python shards/show.py data/faces."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["shards", "show", *sys.argv[1:]]))
