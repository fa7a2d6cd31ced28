"""Builds an index of embeddings: python pipeline/index.py embeddings/faces --out indexes/faces."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["index", *sys.argv[1:]]))
