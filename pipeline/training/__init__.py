"""The training loop, one step of it, and how a run is built."""

import os

# Torch reads both variables when it is imported, and Python runs this file before any module of the package.
# Otherwise torch's C++ code prints a stack for every call to a store whose process was killed.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else each profiler prints a line when it starts or stops
