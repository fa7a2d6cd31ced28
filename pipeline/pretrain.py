"""The main job: accelerate launch pipeline/pretrain.py --config faces optim.lr=0.1."""

import sys

from heron.base.cores import share_cores

if __name__ == "__main__":
    share_cores()  # before torch is imported
    from heron.api.job import main

    sys.exit(main())
