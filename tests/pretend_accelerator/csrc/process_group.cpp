// "accl": a process group with the rules of NCCL's, which sends through gloo.
//
// - A collective waits for the stream that is current when it is called, and runs on a stream of the group; with
//   async_op=False on the current stream itself. All collectives of a group run in the order of their calls.
// - Work.wait() lets the current stream wait, and the host goes on. A barrier makes the host wait.
// - Until then the work keeps its tensors alive, and no longer; the allocator hears nothing of the group's stream.
// - Between startCoalescing and endCoalescing calls become one work.
// - A group uses one device in each rank. With NCCL a second one would be another communicator, and two ranks that meet
//   on one GPU an error.
#include "device.h"

#include <optional>

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "cpu_view.h"

namespace pretend {

namespace {

using c10::intrusive_ptr;
using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
// Starts to send by gloo, and returns what is to be waited for; or nothing if it is over.
using Transfer = std::function<intrusive_ptr<Work>()>;

std::mutex failure_mutex;
std::string failure;  // of a collective that a stream has run, for the next call

void refuse_after_failure() {
  std::lock_guard<std::mutex> lock(failure_mutex);
  TORCH_CHECK(failure.empty(), "accl: an earlier collective has failed: ", failure);
}

struct StreamWork final : Work {
  StreamWork(int rank, OpType type, const char* title) : Work(rank, type, title) {}

  bool isCompleted() override { return end->has_passed(); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    make_wait(current_stream(stream.device_index()), end);
    kept_alive->clear();
  }
  bool wait(std::chrono::milliseconds) override {
    refuse_after_failure();
    synchronize();
    if (opType_ == OpType::BARRIER) host_waits_for(*end);
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  void abort() override {}
  Tensors result() override { return outputs; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  c10::Stream stream = stream_of(0, 0);
  MomentPtr end;
  // Shared with the group, which frees them if nobody waits.
  std::shared_ptr<Tensors> kept_alive;
  Tensors outputs;
  intrusive_ptr<c10::ivalue::Future> future;
};

Tensors concatenated(const TensorLists& lists) {
  Tensors all;
  for (auto& each : lists) all.insert(all.end(), each.begin(), each.end());
  return all;
}

// Each as a CPU tensor of one dimension.
Tensors flat_views(const Tensors& tensors) {
  Tensors views;
  for (auto& each : tensors) {
    TORCH_CHECK(each.is_non_overlapping_and_dense(), "accl: tensors must be contiguous");
    views.push_back(at::from_blob(each.mutable_data_ptr(), {each.numel()}, each.options().device(at::kCPU)));
  }
  return views;
}

TensorLists flat_views(const TensorLists& lists) {
  TensorLists views;
  for (auto& each : lists) views.push_back(flat_views(each));
  return views;
}

struct Group final : c10d::Backend {
  Group(intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "accl"; }
  bool supportsCoalescing() const override { return true; }

  void startCoalescing() override {
    is_coalescing_ = true;
    coalesced_ = {};
    coalesced_tensors_.clear();
  }

  intrusive_ptr<Work> endCoalescing() override {
    is_coalescing_ = false;
    auto transfers = std::exchange(coalesced_, {});
    // All begin before one is waited for: two ranks may each send first.
    auto run_all = [transfers]() -> intrusive_ptr<Work> {
      std::vector<intrusive_ptr<Work>> works;
      for (auto& transfer : transfers) works.push_back(transfer());
      for (auto& work : works)
        if (work) work->wait();
      return nullptr;
    };
    return launch({OpType::COALESCED, "accl:coalesced"}, std::exchange(coalesced_tensors_, {}), {}, run_all);
  }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch({OpType::BROADCAST, "accl:broadcast", options.asyncOp}, tensors, tensors,
                  [gloo = gloo_, views = flat_views(tensors), options]() mutable { return gloo->broadcast(views, options); });
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch({OpType::ALLREDUCE, "accl:all_reduce", options.asyncOp}, tensors, tensors,
                  [gloo = gloo_, views = flat_views(tensors), options] { return all_reduce(*gloo, views, options); });
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return launch({OpType::ALLREDUCE_COALESCED, "accl:all_reduce_coalesced", options.asyncOp}, tensors, tensors,
                  [gloo = gloo_, views = flat_views(tensors), options]() -> intrusive_ptr<Work> {
                    for (auto& view : views) all_reduce(*gloo, {view}, options);
                    return nullptr;
                  });
  }

  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch({OpType::REDUCE, "accl:reduce", options.asyncOp}, tensors, tensors,
                  [gloo = gloo_, views = flat_views(tensors), options]() mutable { return gloo->reduce(views, options); });
  }

  intrusive_ptr<Work> allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto all = outputs;
    all.push_back(inputs);
    return launch({OpType::ALLGATHER, "accl:all_gather", options.asyncOp}, concatenated(all), concatenated(outputs),
                  [gloo = gloo_, to = flat_views(outputs), from = flat_views(inputs), options]() mutable {
                    return gloo->allgather(to, from, options);
                  });
  }

  intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) override {
    return launch({OpType::_ALLGATHER_BASE, "accl:_all_gather_base", options.asyncOp}, {output, input}, {output},
                  [gloo = gloo_, views = flat_views({output, input}), options]() mutable {
                    return gloo->_allgather_base(views[0], views[1], options);
                  });
  }

  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.numel() == output.numel() * getSize(), "accl: the input must hold an output for each rank");
    return launch({OpType::_REDUCE_SCATTER_BASE, "accl:_reduce_scatter_base", options.asyncOp}, {output, input},
                  {output}, [gloo = gloo_, views = flat_views({output, input}), options, rank = getRank()]() -> intrusive_ptr<Work> {
                    at::NoGradGuard no_grad;
                    c10d::AllreduceOptions of_all;
                    of_all.reduceOp = options.reduceOp;
                    auto sum = views[1].clone();
                    all_reduce(*gloo, {sum}, of_all);
                    views[0].copy_(sum.narrow(0, rank * views[0].numel(), views[0].numel()));
                    return nullptr;
                  });
  }

  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                     const c10d::ReduceScatterOptions& options) override {
    auto all = inputs;
    all.push_back(outputs);
    return launch({OpType::REDUCE_SCATTER, "accl:reduce_scatter", options.asyncOp}, concatenated(all), outputs,
                  [gloo = gloo_, to = flat_views(outputs), from = flat_views(inputs), options, rank = getRank()]() -> intrusive_ptr<Work> {
                    at::NoGradGuard no_grad;
                    c10d::AllreduceOptions of_all;
                    of_all.reduceOp = options.reduceOp;
                    for (size_t i = 0; i < from[0].size(); ++i) {
                      auto sum = from[0][i].clone();  // inputs of one rank may differ in size
                      all_reduce(*gloo, {sum}, of_all);
                      if (int(i) == rank) to[0].copy_(sum);
                    }
                    return nullptr;
                  });
  }

  intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return launch({OpType::ALLTOALL_BASE, "accl:all_to_all", options.asyncOp}, {output, input}, {output},
                  [gloo = gloo_, to = cpu_view(output), from = cpu_view(input), output_sizes, input_sizes,
                   options]() mutable { return gloo->alltoall_base(to, from, output_sizes, input_sizes, options); });
  }

  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return launch({OpType::SEND, "accl:send"}, tensors, {}, [gloo = gloo_, views = flat_views(tensors), to]() mutable {
      return gloo->send(views, to, /*tag=*/0);  // NCCL knows no tags
    });
  }

  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return launch({OpType::RECV, "accl:recv"}, tensors, tensors,
                  [gloo = gloo_, views = flat_views(tensors), from]() mutable {
                    return gloo->recv(views, from, /*tag=*/0);
                  });
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    const auto device = options.device_ids.empty() ? current.device : c10::DeviceIndex(options.device_ids[0]);
    if (!device_.has_value()) device_ = device;
    return launch({OpType::BARRIER, "accl:barrier", options.asyncOp}, Tensors{}, Tensors{},
                  [gloo = gloo_, options] { return gloo->barrier(options); });
  }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

 private:
  struct Call {
    OpType type;
    const char* title;
    bool is_async = true;
  };

  static intrusive_ptr<Work> all_reduce(c10d::Backend& gloo, Tensors views, c10d::AllreduceOptions options) {
    const bool is_average = options.reduceOp == ReduceOp::AVG;  // which gloo has not
    if (is_average) options.reduceOp = ReduceOp::SUM;
    gloo.allreduce(views, options)->wait();
    at::NoGradGuard no_grad;
    if (is_average)
      for (auto& view : views) view.div_(gloo.getSize());
    return nullptr;
  }

  intrusive_ptr<Work> launch(Call call, const Tensors& tensors, const Tensors& outputs, Transfer transfer) {
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_privateuseone(), call.title, ": a tensor is on ", tensor.device());
      const auto device = tensor.device().index();
      if (!device_.has_value()) device_ = device;
      TORCH_CHECK(*device_ == device, call.title, ": rank ", getRank(), " has used acc:", int(*device_),
                  " with this group, and now acc:", int(device));
    }
    if (is_coalescing_) {
      coalesced_.push_back(std::move(transfer));
      coalesced_tensors_.insert(coalesced_tensors_.end(), tensors.begin(), tensors.end());
      return nullptr;
    }
    refuse_after_failure();
    TORCH_CHECK(device_.has_value(), call.title, ": without a tensor");
    const auto here = current_stream(*device_);
    if (!own_stream_.has_value()) own_stream_ = new_stream(*device_);
    auto work = c10::make_intrusive<StreamWork>(getRank(), call.type, call.title);
    work->stream = call.is_async ? *own_stream_ : here;
    if (call.is_async) make_wait(work->stream, record(here));
    if (last_end_ != nullptr) make_wait(work->stream, last_end_);
    enqueue(work->stream, [transfer, title = call.title] { run(transfer, title); });
    work->end = last_end_ = record(work->stream);
    work->outputs = outputs;
    keep_alive(*work, tensors);
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<c10::Device>{work->stream.device()});
    c10::StreamGuard guard(work->stream);  // whoever waits for the future waits for this stream
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  static void run(const Transfer& transfer, const char* title) {
    pause();
    try {
      if (auto work = transfer()) work->wait();
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(failure_mutex);
      failure = std::string(title) + ": " + error.what();
    }
  }

  // Also of works that nobody holds, until they are over.
  void keep_alive(StreamWork& work, const Tensors& tensors) {
    work.kept_alive = std::make_shared<Tensors>(tensors);
    std::erase_if(kept_, [](auto& each) { return each.first->has_passed(); });
    kept_.emplace_back(work.end, work.kept_alive);
  }

  intrusive_ptr<c10d::Backend> gloo_;
  std::optional<c10::DeviceIndex> device_;
  std::optional<c10::Stream> own_stream_;
  MomentPtr last_end_;
  std::vector<std::pair<MomentPtr, std::shared_ptr<Tensors>>> kept_;
  bool is_coalescing_ = false;
  std::vector<Transfer> coalesced_;
  Tensors coalesced_tensors_;
};

}  // namespace

}  // namespace pretend

PYBIND11_MODULE(pretend_accelerator_C, m) {
  using namespace pretend;
  py::module_::import("torch.distributed");
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "Group")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>());
  m.def("register_hooks", &register_hooks);
  m.def("num_devices", [] { return int(num_devices); });
  m.def("current_device", [] { return int(current.device); });
  m.def("set_pauses", [](int longest_us, int one_of) {
    longest_pause_us = longest_us;
    tasks_per_pause = std::max(1, one_of);
  });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"host_waits", num_host_waits}, {"poisoned", num_poisoned}, {"recorded", num_recorded}};
  });
}
