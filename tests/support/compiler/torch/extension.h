// What DeepSpeed's CPU ops use of torch's header of this name, which has all of torch's C++ modules too.
#pragma once
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>
