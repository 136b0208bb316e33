"""launch/train.py on a card that is not there: fake_run.py ARGUMENTS. See fake_cuda."""

import os
import sys

from support.fake_cuda import hopper

from pipeline.cli import main

if __name__ == "__main__":
    with hopper():
        os.environ["DS_ACCELERATOR"] = "cuda"
        code = main()
    sys.exit(code)
