"""Trains a model like `ds-pipeline train`, as a file that launchers can start.

deepspeed launch/train.py --deepspeed ds_configs/zero2.json
torchrun --nproc-per-node 2 launch/train.py ...
python launch/train.py ...                         # on one device
"""

import sys

from pipeline.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
