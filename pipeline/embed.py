"""Writes the features of a run: python pipeline/embed.py runs/faces --out embeddings/faces."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["embed", *sys.argv[1:]]))
