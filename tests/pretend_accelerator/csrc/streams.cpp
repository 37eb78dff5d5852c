#include "device.h"

#include <Python.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>
#include <vector>

namespace pretend {

thread_local Current current;
c10::DeviceIndex num_devices = 2;
std::atomic<int> longest_pause_us{500}, tasks_per_pause{8};
std::atomic<int64_t> num_host_waits{0};

namespace {

// Whoever holds Python's lock while a stream's task needs it would wait forever.
class WithoutPythonsLock {
 public:
  WithoutPythonsLock() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutPythonsLock() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

class Queue {
 public:
  Queue() : thread_([this] { run(); }) { thread_.detach(); }

  void put(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !is_busy_;
  }

  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !is_busy_; });
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        is_busy_ = false;
        changed_.notify_all();
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        is_busy_ = true;
      }
      try {
        task();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "the pretend accelerator: work of a stream has failed: %s\n", error.what());
        std::abort();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_busy_ = false;
  std::thread thread_;
};

std::mutex queues_mutex;
// By device and stream; made at their first use, so that a process can be forked before. Never destroyed, since their
// threads do not end.
auto& queues = *new std::vector<std::vector<Queue*>>(kMostDevices);

Queue& queue_of(c10::Stream stream) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  auto& of_device = queues[stream.device_index()];
  while (static_cast<c10::StreamId>(of_device.size()) <= stream.id()) of_device.push_back(new Queue);
  return *of_device[stream.id()];
}

}  // namespace

void Moment::pass() {
  std::lock_guard<std::mutex> lock(mutex_);
  has_passed_ = true;
  passed_at_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

bool Moment::has_passed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return has_passed_;
}

void Moment::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return has_passed_; });
}

std::chrono::steady_clock::time_point Moment::passed_at() {
  std::lock_guard<std::mutex> lock(mutex_);
  return passed_at_;
}

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current.device; }

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

c10::Stream current_stream(c10::DeviceIndex device) { return stream_of(device, current.streams[device]); }

c10::Stream new_stream(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  auto& of_device = queues[device];
  if (of_device.empty()) of_device.push_back(new Queue);  // the default stream's, whose number is 0
  of_device.push_back(new Queue);
  return stream_of(device, of_device.size() - 1);
}

void enqueue(c10::Stream stream, std::function<void()> task) { queue_of(stream).put(std::move(task)); }

MomentPtr record(c10::Stream stream) {
  auto moment = std::make_shared<Moment>();
  enqueue(stream, [moment] { moment->pass(); });
  return moment;
}

void make_wait(c10::Stream stream, MomentPtr moment) {
  enqueue(stream, [moment] { moment->wait(); });
}

bool is_idle(c10::Stream stream) { return queue_of(stream).is_idle(); }

void drain(c10::Stream stream) {
  WithoutPythonsLock released;
  queue_of(stream).drain();
}

void drain_device(c10::DeviceIndex device) {
  WithoutPythonsLock released;
  size_t num_queues;
  {
    std::lock_guard<std::mutex> lock(queues_mutex);
    num_queues = queues[device].size();
  }
  for (size_t id = 0; id < num_queues; ++id) queue_of(stream_of(device, id)).drain();
}

void host_waits_for(Moment& moment) {
  WithoutPythonsLock released;
  moment.wait();
}

void pause() {
  const int longest = longest_pause_us;
  thread_local std::mt19937 random(std::hash<std::thread::id>{}(std::this_thread::get_id()));
  if (longest <= 0 || random() % tasks_per_pause != 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random() % (longest + 1)));
}

}  // namespace pretend
