// What DeepSpeed's CPU ops use of torch's header of this name, which has all operators and all of torch's C++ modules.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#ifdef IS_PYTHON_MODULE
#include <torch/csrc/utils/pybind.h>
#endif

namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}  // namespace torch
