// The allocator. As the caching allocator of a GPU it hands freed memory out again in the order of the stream that
// allocated it, and waits for another stream only if record_stream has told of it. Here the next owner's writes are
// bytes of 0xFF, which are NaN: who still reads sees them. The memory itself is kept for a while, so that a late access
// is no crash.
#include "device.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>

namespace pretend {

std::atomic<int64_t> num_poisoned{0}, num_recorded{0};

namespace {

constexpr int kPoison = 0xFF;
constexpr size_t kAlignment = 512;
constexpr size_t kMostBytesKept = 64 << 20;

struct Block {
  void* memory;
  size_t num_bytes;
  c10::Stream allocated_on;
  std::set<c10::StreamId> used_on;  // other streams of the same device
};

struct FreedBlock {
  Block block;
  std::vector<MomentPtr> last_uses;
};

std::mutex blocks_mutex;
auto& blocks = *new std::unordered_map<const void*, Block>;
// Those that other streams have used.
auto& freed = *new std::deque<FreedBlock>;

std::mutex kept_mutex;
auto& kept = *new std::deque<Block>;
size_t num_bytes_kept = 0;

void keep(const Block& block) {
  std::lock_guard<std::mutex> lock(kept_mutex);
  kept.push_back(block);
  num_bytes_kept += block.num_bytes;
  while (num_bytes_kept > kMostBytesKept) {
    num_bytes_kept -= kept.front().num_bytes;
    std::free(kept.front().memory);
    kept.pop_front();
  }
}

void poison(const Block& block) {
  enqueue(block.allocated_on, [block] {
    std::memset(block.memory, kPoison, block.num_bytes);
    ++num_poisoned;
    keep(block);
  });
}

// Blocks whose other streams are done can be handed out again, as the caching allocator finds at its next call.
void look_at_freed() {
  std::vector<Block> unused;
  {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    for (auto it = freed.begin(); it != freed.end();) {
      bool is_unused = true;
      for (auto& moment : it->last_uses) is_unused = is_unused && moment->has_passed();
      if (is_unused) unused.push_back(it->block);
      it = is_unused ? freed.erase(it) : std::next(it);
    }
  }
  for (auto& block : unused) poison(block);
}

void release(void* memory) {
  if (memory == nullptr) return;
  std::unique_lock<std::mutex> lock(blocks_mutex);
  auto it = blocks.find(memory);
  Block block = std::move(it->second);
  blocks.erase(it);
  if (block.used_on.empty()) {
    lock.unlock();
    poison(block);
  } else {
    std::vector<MomentPtr> last_uses;
    for (auto id : block.used_on) last_uses.push_back(record(stream_of(block.allocated_on.device_index(), id)));
    freed.push_back({std::move(block), std::move(last_uses)});
  }
}

struct PoisoningAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    look_at_freed();
    const c10::Device device(kType, current.device);
    void* memory = nullptr;
    if (num_bytes > 0) {
      const size_t whole = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
      TORCH_CHECK(posix_memalign(&memory, kAlignment, whole) == 0, "no memory for ", num_bytes, " bytes");
      std::memset(memory, kPoison, num_bytes);
      std::lock_guard<std::mutex> lock(blocks_mutex);
      blocks.insert_or_assign(memory, Block{memory, num_bytes, current_stream(current.device), {}});
    }
    return {memory, memory, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    drain(current_stream(current.device));
    std::memcpy(to, from, num_bytes);
  }
};

PoisoningAllocator the_allocator;
REGISTER_ALLOCATOR(kType, &the_allocator)

}  // namespace

c10::Allocator* allocator() { return &the_allocator; }

void used_on(const void* memory, c10::Stream stream) {
  if (memory == nullptr) return;
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto it = blocks.find(memory);
  TORCH_CHECK(it != blocks.end(), "record_stream of memory that is not the allocator's");
  ++num_recorded;
  if (it->second.allocated_on != stream) it->second.used_on.insert(stream.id());
}

}  // namespace pretend
