// What the parts of the pretend accelerator share: streams, moments of their work, and memory.
//
// A stream is a queue with a thread of its own. Copies between tensors of the device, collectives, and waits for events
// run there, later than the call. Any other operator runs on the CPU at once, after the host has waited for the current
// stream (operators.cpp). So nothing but waits orders two streams, as on a real device, and whoever reads without one
// reads too early.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace c10 {
struct Allocator;
}

namespace pretend {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kMostDevices = 8;

// A moment of a stream's work: it passes when all that was queued before it is done.
class Moment {
 public:
  void pass();
  bool has_passed();
  void wait();
  std::chrono::steady_clock::time_point passed_at();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_passed_ = false;
  std::chrono::steady_clock::time_point passed_at_;
};
using MomentPtr = std::shared_ptr<Moment>;

// A device is current in a thread, and of each device a stream.
struct Current {
  c10::DeviceIndex device = 0;
  c10::StreamId streams[kMostDevices] = {};
};
extern thread_local Current current;
extern c10::DeviceIndex num_devices;

// The current device if the index is -1, which is the index of "acc" without a number.
c10::DeviceIndex index_of(c10::Device device);
c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id);
c10::Stream current_stream(c10::DeviceIndex device);

c10::Stream new_stream(c10::DeviceIndex device);
void enqueue(c10::Stream stream, std::function<void()> task);
MomentPtr record(c10::Stream stream);
void make_wait(c10::Stream stream, MomentPtr moment);
bool is_idle(c10::Stream stream);

// The host waits, without Python's lock.
void drain(c10::Stream stream);
void drain_device(c10::DeviceIndex device);
void host_waits_for(Moment& moment);

// Pauses before some tasks, one of so many and up to this long: a fast stream must not hide that nobody waits for it.
extern std::atomic<int> longest_pause_us, tasks_per_pause;
void pause();

// How often the host waited because a caller needed it: synchronize(), item(), a copy to the CPU.
extern std::atomic<int64_t> num_host_waits;

// Tells the allocator that a stream uses memory that another one may have allocated.
void used_on(const void* memory, c10::Stream stream);
c10::Allocator* allocator();
extern std::atomic<int64_t> num_poisoned, num_recorded;

void register_hooks();

}  // namespace pretend
