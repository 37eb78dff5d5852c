// What torch asks of every accelerator: current devices and streams, events, and hooks.
#include "device.h"

#include <array>
#include <cstring>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace pretend {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// An event is a pointer to the moment that was recorded last.
MomentPtr& moment_of(void* event) { return *static_cast<MomentPtr*>(event); }

DeviceIndex exchange_device(DeviceIndex device) {
  TORCH_CHECK(device < num_devices, "acc:", int(device), " is not there, only ", int(num_devices), " devices are");
  const auto previous = current.device;
  if (device >= 0) current.device = device;
  return previous;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  Device exchangeDevice(Device device) const override { return {kType, exchange_device(device.index())}; }
  Device getDevice() const override { return {kType, current.device}; }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current.device = index_of(device); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }

  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return new_stream(index_of(device)); }
  Stream getNewStream(Device device, int) const override { return new_stream(index_of(device)); }
  Stream exchangeStream(Stream stream) const override {
    auto previous = current_stream(stream.device_index());
    current.streams[stream.device_index()] = stream.id();
    return previous;
  }
  bool queryStream(const Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const Stream& stream) const override {
    ++num_host_waits;
    drain(stream);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    ++num_host_waits;
    drain_device(device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new MomentPtr;
    moment_of(*event) = pretend::record(stream);
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) make_wait(stream, moment_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || moment_of(event)->has_passed(); }
  void synchronizeEvent(void* event) const override {
    ++num_host_waits;
    if (event != nullptr) host_waits_for(*moment_of(event));
  }
  double elapsedTime(void* since, void* until, const DeviceIndex) const override {
    auto &begin = *moment_of(since), &end = *moment_of(until);
    TORCH_CHECK(begin.has_passed() && end.has_passed(), "both events must have passed");
    return std::chrono::duration<double, std::milli>(end.passed_at() - begin.passed_at()).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<MomentPtr*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    used_on(memory.get(), stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Random operators run on the CPU, with its generator; this one is there for those who ask for the device's.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex device) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = Device(kType, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current.device; }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchange_device(device); }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    static const auto& generators = *[] {
      auto* all = new std::array<at::Generator, kMostDevices>;
      for (DeviceIndex i = 0; i < kMostDevices; ++i) (*all)[i] = at::make_generator<Generator>(i);
      return all;
    }();
    return generators[device < 0 ? current.device : device];
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current.device : device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    drain(current_stream(storage.device().index()));
    auto memory = allocator()->allocate(num_bytes);
    const size_t both = std::min(num_bytes, storage.nbytes());
    if (both > 0) std::memcpy(memory.get(), storage.data(), both);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

}  // namespace

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace pretend
