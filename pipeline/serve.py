"""Serves an index as a web page: python pipeline/serve.py indexes/faces."""

import sys

from heron.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
