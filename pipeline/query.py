"""Searches an index: python pipeline/query.py indexes/faces --key 000008."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["query", *sys.argv[1:]]))
