"""The main job: accelerate launch pipeline/pretrain.py --config faces optim.lr=0.1."""

import sys

from heron.api.job import main

if __name__ == "__main__":
    sys.exit(main())
