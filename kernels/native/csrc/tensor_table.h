// Where the tensors of one bucket are in memory, and where their places are in the bucket's flat buffer.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "dlpack_abi.h"
#include "formats.h"

namespace ddp_compile {

// The result of reading a tensor. kernels/native/library.py has the same numbers.
enum Fit : int64_t {
  kFits = 0,           // its memory can be copied as one run
  kOtherLayout = 1,    // other strides than its place, a dtype without loops here, or no memory
  kMismatch = 2,       // another shape or device than its place
  kPythonError = 3,    // a Python exception is set
  kOutOfMemory = 4,
};

class TensorTable {
 public:
  // Reads the shapes and strides of a tuple of tensors. A place has its tensor's strides if these leave no gaps,
  // otherwise those of a contiguous tensor. Both functions need Python's lock.
  Fit describe(const DLPackExchangeAPI* api, void* tuple);

  // Reads the present addresses of a tuple of tensors of the same shapes. Tensors that do not fit are listed in
  // `others`. The first mismatch ends the reading, and is the last of `others`.
  Fit read(const DLPackExchangeAPI* api, void* tuple);

  // Gives every place an offset. Returns the first tensor that would not fit into a flat buffer of that many elements,
  // or whose place would overlap another one; -1 if there is none.
  int64_t place_at(const int64_t* offsets, int64_t flat_numel);

  // Whether two tensors that have just been read share memory, including those in `others`: whether the spans from
  // first to last element overlap. Costs a sort if the addresses have changed.
  bool any_overlap();

  // The first tensor that shares memory with the flat buffer but is not exactly in its place; -1 if there is none.
  int64_t first_astray(uint64_t flat, Dtype flat_dtype, int64_t flat_numel) const;

  // The sizes of one tensor; writes how many there are.
  const int64_t* sizes(int64_t index, int64_t* num_dims) const;

  int64_t size() const { return int64_t(numels.size()); }

  std::vector<int64_t> numels;
  std::vector<int64_t> ends;     // of each tensor, in elements of all tensors one after another
  std::vector<int64_t> offsets;  // in elements of the flat buffer
  std::vector<uint64_t> addresses;
  std::vector<Dtype> dtypes;     // as last read; kOther for those in `others`
  std::vector<int64_t> others;

 private:
  Fit fit(int64_t index, const DLTensor& tensor, void* object);

  int32_t device_type_ = 0;
  int32_t device_id_ = 0;
  std::vector<int64_t> dim_ends_;  // in sizes_ and strides_, of each tensor
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  std::vector<std::pair<int64_t, int64_t>> places_;  // of place_at
  std::vector<uint64_t> spans_;  // bytes of each tensor, as last read, gaps included; 0 for those without memory
  // The spans that any_overlap found disjoint.
  std::vector<uint64_t> disjoint_;
  std::vector<uint64_t> disjoint_spans_;
};

int64_t element_bytes(Dtype dtype);

}  // namespace ddp_compile
