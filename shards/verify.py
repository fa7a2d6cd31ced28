"""Checks a data set: python shards/verify.py data/faces."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["shards", "verify", *sys.argv[1:]]))
