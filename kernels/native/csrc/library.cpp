// The functions that Python calls through ctypes. kernels/native/library.py declares the same signatures.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "simd.h"
#include "tensor_table.h"

#if defined(_WIN32)
#define DDP_COMPILE_EXPORT extern "C" __declspec(dllexport)
#else
#define DDP_COMPILE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

using namespace ddp_compile;

namespace {

// Threads are started in every call, so that no pool has to survive a fork, but not for less work than this.
constexpr int64_t kMinElementsPerThread = 1 << 19;

// Calls work(begin, end) on consecutive parts of 0..count, each on its own thread.
template <class Work>
void in_parallel(int64_t count, int64_t num_threads, const Work& work) {
  const int64_t parts = std::max<int64_t>(1, std::min(num_threads, count / kMinElementsPerThread));
  const auto run = [&](int64_t part) { work(count * part / parts, count * (part + 1) / parts); };
  std::vector<std::thread> threads;
  int64_t part = 1;
  try {
    threads.reserve(size_t(parts));
    for (; part < parts; ++part) threads.emplace_back(run, part);
  } catch (const std::exception&) {
    // No more threads can be started: this thread does the remaining parts.
    for (; part < parts; ++part) run(part);
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
}

// From this size on, written data would evict other data from the caches before it is read, and fetching the old
// contents first costs a third of the time. Smaller buckets are still in the caches when the collective reads them.
constexpr int64_t kStreamingBytes = 8 << 20;

// One direction of a plan: elements begin..end, counted over all tensors one after another.
struct Copy {
  const TensorTable& table;
  char* flat;
  Dtype flat_dtype;
  bool to_flat;
  float scale;
  bool streaming;

  void operator()(int64_t begin, int64_t end) const {
    const std::vector<int64_t>& ends = table.ends;
    size_t i = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    while (begin < end) {
      const int64_t start = i == 0 ? 0 : ends[i - 1];
      const int64_t stop = std::min(end, ends[i]);
      if (table.dtypes[i] != kOther && stop > begin) copy_part(i, begin - start, stop - begin);
      begin = stop;
      ++i;
    }
  }

  void copy_part(size_t i, int64_t first, int64_t count) const {
    const Dtype dtype = table.dtypes[i];
    char* tensor = reinterpret_cast<char*>(uintptr_t(table.addresses[i])) + first * element_bytes(dtype);
    char* place = flat + (table.offsets[i] + first) * element_bytes(flat_dtype);
    const Dtype from = to_flat ? dtype : flat_dtype;
    const Dtype to = to_flat ? flat_dtype : dtype;
    const char* source = to_flat ? tensor : place;
    char* destination = to_flat ? place : tensor;
    if (scale == 1.0f && source == destination) return;
    loops().scale(from, to, source, destination, count, scale, streaming);
  }
};

// Chunk j is elements j * chunk_numel to (j + 1) * chunk_numel, as far as they exist. It is written to row j: its
// extremes, its codes, and zeros up to row_bytes.
struct Chunks {
  Dtype dtype;
  int64_t count;
  int64_t num_chunks;
  int64_t chunk_numel;
  int64_t row_bytes;

  // One thread's share of one chunk.
  struct Share {
    int64_t chunk;
    int64_t begin;     // counted over all elements
    int64_t position;  // counted in the chunk
    int64_t numel;
    bool is_whole;
  };

  int64_t numel_of(int64_t chunk) const {
    return std::max<int64_t>(0, std::min(count - chunk * chunk_numel, chunk_numel));
  }

  // Calls function(share) for each chunk that has elements in begin..end.
  template <class Function>
  void for_each_share(int64_t begin, int64_t end, const Function& function) const {
    while (begin < end) {
      const int64_t chunk = begin / chunk_numel;
      const int64_t position = begin - chunk * chunk_numel;
      const int64_t numel = std::min(end - begin, numel_of(chunk) - position);
      function(Share{chunk, begin, position, numel, numel == numel_of(chunk)});
      begin += numel;
    }
  }

  // Leaves out the skipped chunk, unless its number is negative: neither its values nor its row are touched.
  void compress(const char* values, int64_t skipped, uint8_t* rows, int64_t num_threads) const;
  void decompress(const uint8_t* rows, bool accumulate, char* values, int64_t num_threads) const;
};

Extremes extremes_of(const uint8_t* row) {
  Extremes extremes;
  memcpy(&extremes, row, sizeof extremes);
  return extremes;
}

// The extremes of both, in any order. NaNs remain.
Extremes merged(const Extremes& a, const Extremes& b) {
  if (b.minimum != b.minimum) return b;
  return {b.minimum < a.minimum ? b.minimum : a.minimum, b.maximum > a.maximum ? b.maximum : a.maximum};
}

void Chunks::compress(const char* values, int64_t skipped, uint8_t* rows, int64_t num_threads) const {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    if (chunk == skipped) continue;
    uint8_t* row = rows + chunk * row_bytes;
    const int64_t numel = numel_of(chunk);
    const Extremes none = numel > 0 ? Extremes{kInfinity, -kInfinity} : Extremes{0, 0};
    memcpy(row, &none, sizeof none);
    memset(row + sizeof none + numel, 0, size_t(row_bytes - int64_t(sizeof none) - numel));
  }
  const auto encode = [&](const Share& share) {
    uint8_t* row = rows + share.chunk * row_bytes;
    const Extremes extremes = extremes_of(row);
    const char* from = values + share.begin * element_bytes(dtype);
    uint8_t* codes = row + sizeof extremes + share.position;
    // From the end, since the latest data is still in the caches.
    constexpr int64_t kBlock = 16384;
    for (int64_t begin = (share.numel - 1) / kBlock * kBlock; begin >= 0; begin -= kBlock) {
      const int64_t numel = std::min(kBlock, share.numel - begin);
      loops().encode(dtype, from + begin * element_bytes(dtype), numel, extremes, codes + begin);
    }
  };
  // A thread that has a whole chunk encodes it while it is in the caches. Other chunks wait for all of their threads.
  std::mutex merging;
  in_parallel(count, num_threads, [&](int64_t begin, int64_t end) {
    for_each_share(begin, end, [&](const Share& share) {
      if (share.chunk == skipped) return;
      uint8_t* row = rows + share.chunk * row_bytes;
      Extremes found;
      loops().find_extremes(dtype, values + share.begin * element_bytes(dtype), share.numel, &found);
      {
        const std::lock_guard<std::mutex> lock(merging);
        found = merged(extremes_of(row), found);
        memcpy(row, &found, sizeof found);
      }
      if (share.is_whole) encode(share);
    });
  });
  in_parallel(count, num_threads, [&](int64_t begin, int64_t end) {
    for_each_share(begin, end, [&](const Share& share) {
      if (!share.is_whole && share.chunk != skipped) encode(share);
    });
  });
}

void Chunks::decompress(const uint8_t* rows, bool accumulate, char* values, int64_t num_threads) const {
  in_parallel(count, num_threads, [&](int64_t begin, int64_t end) {
    for_each_share(begin, end, [&](const Share& share) {
      const uint8_t* row = rows + share.chunk * row_bytes;
      loops().decode(dtype, extremes_of(row), row + sizeof(Extremes) + share.position, share.numel, accumulate,
                     values + share.begin * element_bytes(dtype));
    });
  });
}

// No exception may leave the library.
template <class Function>
int64_t unless_out_of_memory(const Function& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

}  // namespace

// Changes with every change of a signature below. library.py requires the number that it was written for.
DDP_COMPILE_EXPORT int64_t ddp_compile_interface() { return 6; }

// The digest of the files in this folder, computed by source_hash.py and passed by setup.py.
DDP_COMPILE_EXPORT const char* ddp_compile_source_hash() { return DDP_COMPILE_SOURCE_HASH; }

DDP_COMPILE_EXPORT const char* ddp_compile_instruction_set() { return instruction_set(); }
DDP_COMPILE_EXPORT const char* ddp_compile_instruction_set_at(int64_t index) { return instruction_set_at(index); }
DDP_COMPILE_EXPORT int64_t ddp_compile_set_instruction_set(const char* name) { return use_instruction_set(name); }

// The next three functions need Python's lock, so they are called through ctypes.PyDLL.

DDP_COMPILE_EXPORT TensorTable* ddp_compile_table_new(const DLPackExchangeAPI* api, void* tuple, int64_t* fit) {
  TensorTable* table = new (std::nothrow) TensorTable;
  *fit = table == nullptr ? kOutOfMemory : unless_out_of_memory([&] { return table->describe(api, tuple); });
  if (*fit != kPythonError && *fit != kOutOfMemory) return table;
  delete table;  // ctypes raises Python's exception and drops the result
  return nullptr;
}

DDP_COMPILE_EXPORT void ddp_compile_table_free(TensorTable* table) { delete table; }

DDP_COMPILE_EXPORT int64_t ddp_compile_table_read(TensorTable* table, const DLPackExchangeAPI* api, void* tuple) {
  return unless_out_of_memory([&] { return table->read(api, tuple); });
}

// The others are called without Python's lock.

DDP_COMPILE_EXPORT int64_t ddp_compile_table_place_at(TensorTable* table, const int64_t* offsets, int64_t flat_numel) {
  return table->place_at(offsets, flat_numel);
}

DDP_COMPILE_EXPORT int64_t ddp_compile_table_any_overlap(TensorTable* table) {
  return unless_out_of_memory([&] { return int64_t(table->any_overlap()); });
}

DDP_COMPILE_EXPORT int64_t ddp_compile_table_first_astray(
    const TensorTable* table, uint64_t flat, int64_t flat_dtype, int64_t flat_numel) {
  return table->first_astray(flat, Dtype(flat_dtype), flat_numel);
}

DDP_COMPILE_EXPORT const int64_t* ddp_compile_table_sizes(const TensorTable* table, int64_t index, int64_t* num_dims) {
  return table->sizes(index, num_dims);
}
DDP_COMPILE_EXPORT int64_t ddp_compile_table_size(const TensorTable* table) { return table->size(); }
DDP_COMPILE_EXPORT const int64_t* ddp_compile_table_numels(const TensorTable* table) { return table->numels.data(); }
DDP_COMPILE_EXPORT const int64_t* ddp_compile_table_offsets(const TensorTable* table) { return table->offsets.data(); }
DDP_COMPILE_EXPORT const uint64_t* ddp_compile_table_addresses(const TensorTable* table) {
  return table->addresses.data();
}
DDP_COMPILE_EXPORT const Dtype* ddp_compile_table_dtypes(const TensorTable* table) { return table->dtypes.data(); }
DDP_COMPILE_EXPORT int64_t ddp_compile_table_num_others(const TensorTable* table) {
  return int64_t(table->others.size());
}
DDP_COMPILE_EXPORT const int64_t* ddp_compile_table_others(const TensorTable* table) { return table->others.data(); }

// Moves the tensors that were last read to or from their places, except those listed as others.
DDP_COMPILE_EXPORT void ddp_compile_copy(const TensorTable* table, void* flat, int64_t flat_dtype, int64_t to_flat,
                                         float scale, int64_t num_threads) {
  const int64_t count = table->ends.empty() ? 0 : table->ends.back();
  const bool streaming = count * element_bytes(Dtype(flat_dtype)) >= kStreamingBytes;
  const Copy copy = {*table, static_cast<char*>(flat), Dtype(flat_dtype), to_flat != 0, scale, streaming};
  in_parallel(count, num_threads, copy);
}

DDP_COMPILE_EXPORT void ddp_compile_average(int64_t dtype, void* x, const void* sum, const void* copy, int64_t count,
                                            float world_size, int64_t num_threads) {
  const int64_t bytes = element_bytes(Dtype(dtype));
  in_parallel(count, num_threads, [=](int64_t begin, int64_t end) {
    loops().average(Dtype(dtype), static_cast<char*>(x) + begin * bytes, static_cast<const char*>(sum) + begin * bytes,
                    static_cast<const char*>(copy) + begin * bytes, end - begin, world_size);
  });
}

// Rows of `count` elements each, one after another.
DDP_COMPILE_EXPORT void ddp_compile_add_rows(int64_t dtype, const void* rows, int64_t num_rows, int64_t count,
                                             float scale, void* out, int64_t num_threads) {
  const int64_t bytes = element_bytes(Dtype(dtype));
  in_parallel(count, num_threads, [=](int64_t begin, int64_t end) {
    loops().add_rows(Dtype(dtype), static_cast<const char*>(rows) + begin * bytes, num_rows, count, end - begin, scale,
                     static_cast<char*>(out) + begin * bytes);
  });
}

DDP_COMPILE_EXPORT void ddp_compile_minmax_u8_compress(int64_t dtype, const void* values, int64_t count,
                                                       int64_t num_chunks, int64_t chunk_numel, int64_t row_bytes,
                                                       int64_t skipped, uint8_t* rows, int64_t num_threads) {
  const Chunks chunks = {Dtype(dtype), count, num_chunks, chunk_numel, row_bytes};
  chunks.compress(static_cast<const char*>(values), skipped, rows, num_threads);
}

DDP_COMPILE_EXPORT void ddp_compile_minmax_u8_decompress(int64_t dtype, const uint8_t* rows, int64_t count,
                                                         int64_t num_chunks, int64_t chunk_numel, int64_t row_bytes,
                                                         int64_t accumulate, void* values, int64_t num_threads) {
  const Chunks chunks = {Dtype(dtype), count, num_chunks, chunk_numel, row_bytes};
  chunks.decompress(rows, accumulate != 0, static_cast<char*>(values), num_threads);
}
