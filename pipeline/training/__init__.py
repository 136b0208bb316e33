"""The training loop, one step of it, and how a run is built."""

import os

# Torch reads both at its import: so here, where every module of training passes before it imports torch.
# If the store's process was killed, torch's C++ prints a stack for every call to it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else a line for each profiler that starts or stops
