"""The training loop, one step of it, and how a run is built."""

import os

# Torch reads both when it is imported. Python runs this file before any module of the package.
# Without the first, torch's C++ prints a stack for every call to a store whose process was killed.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else a line for each profiler that starts or stops
