"""Indexes tars of others: python shards/index.py data/cats --image jpg --label cls."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["shards", "index", *sys.argv[1:]]))
