"""Train a model: deepspeed launch/train.py --deepspeed ds_configs/zero2.json

Also: torchrun --nproc-per-node 2 launch/train.py ..., or python launch/train.py on one device.
"""

import sys

from pipeline.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
