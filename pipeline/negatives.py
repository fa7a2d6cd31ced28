"""Reports hard negatives: python pipeline/negatives.py embeddings/faces --out negatives."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["negatives", *sys.argv[1:]]))
