// Makes torch's C++ code treat CUDA as present. Autograd gets streams from a device guard and contexts from CUDA's
// hooks, and a build without CUDA has neither. Nothing here computes.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {
using namespace c10;

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
  long versionCuDNN() const override { return 91500; }
  long versionRuntimeCuDNN() const override { return 91500; }
};
}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// torch keeps the hooks that it made first; there is no way to hand it others later.
extern "C" void pretend() { new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks; }
