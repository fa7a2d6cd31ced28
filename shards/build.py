"""Builds a data set: python shards/build.py faces --out data/faces."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["shards", "build", *sys.argv[1:]]))
