#include "tensor_table.h"

#include <algorithm>
#include <utility>

// A few functions of Python's stable ABI, declared here so that the build needs no Python headers. They are found in
// the interpreter that loads this library.
extern "C" {
intptr_t PyTuple_Size(void* tuple);
void* PyTuple_GetItem(void* tuple, intptr_t index);
void* PyObject_GetAttrString(void* object, const char* name);
void* PyObject_CallObject(void* callable, void* arguments);
int PyObject_IsTrue(void* object);
void Py_DecRef(void* object);
}

namespace ddp_compile {

namespace {

Dtype dtype_of(const DLTensor& tensor) {
  if (tensor.dtype_lanes != 1) return kOther;
  if (tensor.dtype_code == kDLFloat && tensor.dtype_bits == 32) return kFloat32;
  if (tensor.dtype_code == kDLFloat && tensor.dtype_bits == 16) return kFloat16;
  if (tensor.dtype_code == kDLBfloat && tensor.dtype_bits == 16) return kBFloat16;
  return kOther;
}

int64_t numel_of(const DLTensor& tensor) {
  int64_t numel = 1;
  for (int32_t d = 0; d < tensor.ndim; ++d) numel *= tensor.shape[d];
  return numel;
}

// Bytes from the start of the first element to the end of the last one.
uint64_t span_of(const DLTensor& tensor) {
  uint64_t last = 0;
  for (int32_t d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] == 0) return 0;
    last += uint64_t((tensor.shape[d] - 1) * tensor.strides[d]);
  }
  return (last + 1) * ((uint64_t(tensor.dtype_bits) * tensor.dtype_lanes + 7) / 8);
}

// Whether some order of the dimensions makes the tensor contiguous.
bool is_dense(const DLTensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int32_t d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] != 1) dims.emplace_back(tensor.strides[d], tensor.shape[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

bool is_contiguous(const DLTensor& tensor) {
  int64_t expected = 1;
  for (int32_t d = tensor.ndim - 1; d >= 0; --d) {
    if (tensor.shape[d] == 1) continue;
    if (tensor.strides[d] != expected) return false;
    expected *= tensor.shape[d];
  }
  return true;
}

// 1 if the tensor must be read with its sign inverted, 0 if not, -1 with a Python exception set.
int is_negated(void* object) {
  void* method = PyObject_GetAttrString(object, "is_neg");
  if (method == nullptr) return -1;
  void* answer = PyObject_CallObject(method, nullptr);
  Py_DecRef(method);
  if (answer == nullptr) return -1;
  const int negated = PyObject_IsTrue(answer);
  Py_DecRef(answer);
  return negated;
}

}  // namespace

int64_t element_bytes(Dtype dtype) { return dtype == kFloat32 ? 4 : 2; }

Fit TensorTable::describe(const DLPackExchangeAPI* api, void* tuple) {
  const intptr_t count = PyTuple_Size(tuple);
  if (count < 0) return kPythonError;
  int64_t end = 0;
  for (intptr_t i = 0; i < count; ++i) {
    DLTensor tensor;
    if (api->tensor_from_py_object(PyTuple_GetItem(tuple, i), &tensor) != 0) return kPythonError;
    if (i == 0) {
      device_type_ = tensor.device_type;
      device_id_ = tensor.device_id;
    } else if (tensor.device_type != device_type_ || tensor.device_id != device_id_) {
      return kMismatch;
    }
    const bool keeps_strides = is_contiguous(tensor) || is_dense(tensor);
    numels.push_back(numel_of(tensor));
    offsets.push_back(end);
    end += numels.back();
    ends.push_back(end);
    const size_t begin = sizes_.size();
    sizes_.insert(sizes_.end(), tensor.shape, tensor.shape + tensor.ndim);
    strides_.resize(sizes_.size());
    int64_t stride = 1;
    for (int32_t d = tensor.ndim - 1; d >= 0; --d) {
      strides_[begin + size_t(d)] = keeps_strides ? tensor.strides[d] : stride;
      stride *= tensor.shape[d];
    }
    dim_ends_.push_back(int64_t(sizes_.size()));
  }
  addresses.resize(size_t(count));
  dtypes.resize(size_t(count));
  spans_.resize(size_t(count));
  places_.reserve(size_t(count));  // so that place_at needs no memory
  return kFits;
}

const int64_t* TensorTable::sizes(int64_t index, int64_t* num_dims) const {
  const int64_t begin = index == 0 ? 0 : dim_ends_[size_t(index - 1)];
  *num_dims = dim_ends_[size_t(index)] - begin;
  return sizes_.data() + begin;
}

Fit TensorTable::fit(int64_t index, const DLTensor& tensor, void* object) {
  if (tensor.device_type != device_type_ || tensor.device_id != device_id_) return kMismatch;
  const int64_t begin = index == 0 ? 0 : dim_ends_[size_t(index - 1)];
  if (tensor.ndim != dim_ends_[size_t(index)] - begin) return kMismatch;
  bool same_strides = true;
  for (int32_t d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] != sizes_[size_t(begin + d)]) return kMismatch;
    same_strides &= tensor.shape[d] == 1 || tensor.strides[d] == strides_[size_t(begin + d)];
  }
  const int64_t numel = numels[size_t(index)];
  if (numel == 0) return kFits;
  // Tensors without storage mean zeros, or belong to a mode that computes nothing. torch's operations handle them.
  if (!same_strides || dtype_of(tensor) == kOther || tensor.data == nullptr) return kOtherLayout;
  // Only .imag of a conjugate has an inverted sign, and is recognized by its stride of two, except for a single
  // element.
  if (numel == 1) {
    const int negated = is_negated(object);
    if (negated != 0) return negated < 0 ? kPythonError : kOtherLayout;
  }
  return kFits;
}

Fit TensorTable::read(const DLPackExchangeAPI* api, void* tuple) {
  others.clear();
  for (int64_t i = 0; i < size(); ++i) {
    void* object = PyTuple_GetItem(tuple, intptr_t(i));
    DLTensor tensor;
    if (object == nullptr || api->tensor_from_py_object(object, &tensor) != 0) return kPythonError;
    const Fit fits = fit(i, tensor, object);
    addresses[size_t(i)] = uint64_t(reinterpret_cast<uintptr_t>(tensor.data)) + tensor.byte_offset;
    if (fits == kFits) {
      dtypes[size_t(i)] = dtype_of(tensor);
      spans_[size_t(i)] = uint64_t(numels[size_t(i)] * element_bytes(dtypes[size_t(i)]));
      continue;
    }
    dtypes[size_t(i)] = kOther;
    spans_[size_t(i)] = tensor.data == nullptr ? 0 : span_of(tensor);
    others.push_back(i);
    if (fits != kOtherLayout) return fits;
  }
  return kFits;
}

int64_t TensorTable::place_at(const int64_t* new_offsets, int64_t flat_numel) {
  std::vector<std::pair<int64_t, int64_t>>& places = places_;  // of the tensors that are not empty: offset, tensor
  places.clear();
  for (int64_t i = 0; i < size(); ++i) {
    const size_t at = size_t(i);
    if (new_offsets != nullptr) offsets[at] = new_offsets[i];
    if (offsets[at] < 0 || offsets[at] > flat_numel || numels[at] > flat_numel - offsets[at]) return i;
    if (numels[at] > 0) places.emplace_back(offsets[at], i);
  }
  if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
  for (size_t p = 1; p < places.size(); ++p) {
    if (places[p].first < places[p - 1].first + numels[size_t(places[p - 1].second)]) return places[p].second;
  }
  return -1;
}

int64_t TensorTable::first_astray(uint64_t flat, Dtype flat_dtype, int64_t flat_numel) const {
  const uint64_t flat_end = flat + uint64_t(flat_numel * element_bytes(flat_dtype));
  for (int64_t i = 0; i < size(); ++i) {
    const size_t at = size_t(i);
    if (dtypes[at] == kOther || numels[at] == 0) continue;
    const uint64_t begin = addresses[at], end = begin + uint64_t(numels[at] * element_bytes(dtypes[at]));
    if (end <= flat || begin >= flat_end) continue;
    const uint64_t place = flat + uint64_t(offsets[at] * element_bytes(flat_dtype));
    if (begin != place || dtypes[at] != flat_dtype) return i;
  }
  return -1;
}

bool TensorTable::any_overlap() {
  if (addresses == disjoint_ && spans_ == disjoint_spans_) return false;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  ranges.reserve(addresses.size());
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (spans_[i] != 0) ranges.emplace_back(addresses[i], addresses[i] + spans_[i]);
  }
  if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return true;
  }
  disjoint_ = addresses;
  disjoint_spans_ = spans_;
  return false;
}

}  // namespace ddp_compile
