"""Run launch/train.py on the fake GPU of support.fake_cuda: `fake_run.py ARGUMENTS`."""

import os
import sys

from support.fake_cuda import hopper

from pipeline.cli.train import main

if __name__ == "__main__":
    with hopper():
        os.environ["DS_ACCELERATOR"] = "cuda"  # support.launch asks for the CPU
        code = main()
    sys.exit(code)
