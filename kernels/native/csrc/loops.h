// The loops over elements, on top of lanes.h; included several times, like lanes.h. Compilers without vector types get
// only the one-element loops, which handle the last few elements everywhere else.

// to[i] = from[i] * scale.
template <class S, class D, bool kStreaming>
void scale_elements(const S* from, D* to, int64_t count, float scale) {
  int64_t i = 0;
#if defined(DDP_COMPILE_VECTORS)
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    const f32v value0 = read_lanes(from + i) * scale;
    const f32v value1 = read_lanes(from + i + kLanes) * scale;
    const f32v value2 = read_lanes(from + i + 2 * kLanes) * scale;
    const f32v value3 = read_lanes(from + i + 3 * kLanes) * scale;
    write_two<kStreaming>(to + i, value0, value1);
    write_two<kStreaming>(to + i + 2 * kLanes, value2, value3);
  }
#endif
  for (; i < count; ++i) write(to + i, read(from + i) * scale);
  if (kStreaming) end_streaming();
}

template <class S, class D>
void scale_elements(const void* source, void* destination, int64_t count, float scale, bool streaming) {
  const S* from = static_cast<const S*>(source);
  D* to = static_cast<D*>(destination);
  // Scaling in place has already fetched its output. Memory that is not aligned to its elements never becomes aligned.
  const bool is_odd = reinterpret_cast<uintptr_t>(to) % sizeof(D) != 0;
  if (!streaming || source == destination || is_odd) return scale_elements<S, D, false>(from, to, count, scale);
  const int64_t misaligned = int64_t(-reinterpret_cast<intptr_t>(to) & 63) / int64_t(sizeof(D));
  const int64_t head = misaligned < count ? misaligned : count;
  scale_elements<S, D, false>(from, to, head, scale);
  scale_elements<S, D, true>(from + head, to + head, count - head, scale);
}

template <class S>
void scale_from(Dtype to, const void* source, void* destination, int64_t count, float scale, bool streaming) {
  switch (to) {
    case kFloat32: return scale_elements<S, Float32>(source, destination, count, scale, streaming);
    case kBFloat16: return scale_elements<S, BFloat16>(source, destination, count, scale, streaming);
    default: return scale_elements<S, Float16>(source, destination, count, scale, streaming);
  }
}

void scale_elements(Dtype from, Dtype to, const void* source, void* destination, int64_t count, float scale,
                    bool streaming) {
  switch (from) {
    case kFloat32: return scale_from<Float32>(to, source, destination, count, scale, streaming);
    case kBFloat16: return scale_from<BFloat16>(to, source, destination, count, scale, streaming);
    default: return scale_from<Float16>(to, source, destination, count, scale, streaming);
  }
}

// x[i] += sum[i] / world_size - copy[i], in float, rounded once.
template <class T>
void average_elements(void* x, const void* sum, const void* copy, int64_t count, float world_size) {
  T* to = static_cast<T*>(x);
  const T* sums = static_cast<const T*>(sum);
  const T* copies = static_cast<const T*>(copy);
  int64_t i = 0;
#if defined(DDP_COMPILE_VECTORS)
  for (; i + kLanes <= count; i += kLanes) {
    write_lanes(to + i, read_lanes(to + i) + (read_lanes(sums + i) / world_size - read_lanes(copies + i)));
  }
#endif
  for (; i < count; ++i) write(to + i, read(to + i) + (read(sums + i) / world_size - read(copies + i)));
}

void average_elements(Dtype dtype, void* x, const void* sum, const void* copy, int64_t count, float world_size) {
  switch (dtype) {
    case kFloat32: return average_elements<Float32>(x, sum, copy, count, world_size);
    case kBFloat16: return average_elements<BFloat16>(x, sum, copy, count, world_size);
    default: return average_elements<Float16>(x, sum, copy, count, world_size);
  }
}

// to[i] = the sum of all rows' values * scale, added up in the order of rows in float, rounded once.
template <class T>
void add_rows(const void* rows, int64_t num_rows, int64_t stride, int64_t count, float scale, void* out) {
  const T* from = static_cast<const T*>(rows);
  T* to = static_cast<T*>(out);
  int64_t i = 0;
#if defined(DDP_COMPILE_VECTORS)
  for (; i + kLanes <= count; i += kLanes) {
    f32v total = read_lanes(from + i);
    for (int64_t row = 1; row < num_rows; ++row) total += read_lanes(from + row * stride + i);
    write_lanes(to + i, total * scale);
  }
#endif
  for (; i < count; ++i) {
    float total = read(from + i);
    for (int64_t row = 1; row < num_rows; ++row) total += read(from + row * stride + i);
    write(to + i, total * scale);
  }
}

void add_rows(Dtype dtype, const void* rows, int64_t num_rows, int64_t stride, int64_t count, float scale, void* to) {
  switch (dtype) {
    case kFloat32: return add_rows<Float32>(rows, num_rows, stride, count, scale, to);
    case kBFloat16: return add_rows<BFloat16>(rows, num_rows, stride, count, scale, to);
    default: return add_rows<Float16>(rows, num_rows, stride, count, scale, to);
  }
}

// The smallest and largest of at least one value. Both are NaN if a value is infinite or NaN.
template <class T>
void find_extremes(const T* from, int64_t count, Extremes* found) {
  float lowest = read(from), highest = lowest;
  uint32_t bad = 0;
  int64_t i = 0;
#if defined(DDP_COMPILE_VECTORS)
  // Four of each, since each comparison with a single one would wait for the one before.
  constexpr int kChains = 4;
  if (count >= kChains * kLanes) {
    f32v low[kChains], high[kChains];
    u32v bad_lanes = {};
    for (int chain = 0; chain < kChains; ++chain) low[chain] = high[chain] = read_lanes(from);
    for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
      for (int chain = 0; chain < kChains; ++chain) {
        const f32v value = read_lanes(from + i + chain * kLanes);
        low[chain] = value < low[chain] ? value : low[chain];
        high[chain] = value > high[chain] ? value : high[chain];
        bad_lanes |= bit_cast<u32v>(value - value);
      }
    }
    for (int chain = 0; chain < kChains; ++chain) {
      for (int lane = 0; lane < kLanes; ++lane) {
        lowest = low[chain][lane] < lowest ? low[chain][lane] : lowest;
        highest = high[chain][lane] > highest ? high[chain][lane] : highest;
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) bad |= bad_lanes[lane];
  }
#endif
  for (; i < count; ++i) {
    const float value = read(from + i);
    lowest = value < lowest ? value : lowest;
    highest = value > highest ? value : highest;
    bad |= bit_cast<uint32_t>(value - value);
  }
  const float nan = bit_cast<float>(uint32_t(0x7fc00000));
  // Adding zero makes every zero positive, so that the order of the values does not matter.
  found->minimum = bad ? nan : lowest + 0.0f;
  found->maximum = bad ? nan : highest + 0.0f;
}

// codes[i] = round((from[i] - minimum) * 255 / (maximum - minimum)), computed in double: neither the difference of two
// large floats nor a step below the smallest normal float is lost. Between the extremes the result is within 0..255:
// the difference is exact or rounded toward an exact one, and the product exceeds 255 by far less than a half.
template <class T>
void encode(const T* from, int64_t count, const Extremes& extremes, uint8_t* codes) {
  const double minimum = extremes.minimum;
  const double range = double(extremes.maximum) - minimum;
  if (!(range > 0)) {  // constant, or not finite
    memset(codes, 0, size_t(count));
    return;
  }
  const double inverse = 255.0 / range;
  int64_t i = 0;
#if defined(DDP_COMPILE_VECTORS)
  for (; i + kCodesAtOnce <= count; i += kCodesAtOnce) {
    f64v steps[kCodesAtOnce / kHalf];
    for (int half = 0; half < kCodesAtOnce / kHalf; half += 2) {
      const f32v values = read_lanes(from + i + half * kHalf);
      steps[half] = (lower_half(values) - minimum) * inverse;
      steps[half + 1] = (upper_half(values) - minimum) * inverse;
    }
    write_codes(codes + i, steps);
  }
#endif
  for (; i < count; ++i) {
    const double steps = (double(read(from + i)) - minimum) * inverse;
    codes[i] = uint8_t(bit_cast<uint64_t>(steps + kRounding));
  }
}

// to[i] = codes[i] * step + minimum, computed in double and rounded to float; or the same added to to[i], in float.
template <class T, bool kAccumulate>
void decode(const Extremes& extremes, const uint8_t* codes, int64_t count, T* to) {
  const double minimum = extremes.minimum;
  const double step = (double(extremes.maximum) - minimum) / 255.0;
  int64_t i = 0;
#if defined(DDP_COMPILE_VECTORS)
  for (; i + kLanes <= count; i += kLanes) {
    const f64v lower = read_codes(codes + i) * step + minimum;
    const f64v upper = read_codes(codes + i + kHalf) * step + minimum;
    f32v values = in_single(lower, upper);
    if constexpr (kAccumulate) values = read_lanes(to + i) + values;
    write_lanes(to + i, values);
  }
#endif
  for (; i < count; ++i) {
    const float value = float(double(codes[i]) * step + minimum);
    write(to + i, kAccumulate ? read(to + i) + value : value);
  }
}

template <class T>
void decode(const Extremes& extremes, const uint8_t* codes, int64_t count, bool accumulate, void* to) {
  if (accumulate) return decode<T, true>(extremes, codes, count, static_cast<T*>(to));
  decode<T, false>(extremes, codes, count, static_cast<T*>(to));
}

void find_extremes(Dtype dtype, const void* from, int64_t count, Extremes* found) {
  switch (dtype) {
    case kFloat32: return find_extremes(static_cast<const Float32*>(from), count, found);
    case kBFloat16: return find_extremes(static_cast<const BFloat16*>(from), count, found);
    default: return find_extremes(static_cast<const Float16*>(from), count, found);
  }
}

void encode(Dtype dtype, const void* from, int64_t count, const Extremes& extremes, uint8_t* codes) {
  switch (dtype) {
    case kFloat32: return encode(static_cast<const Float32*>(from), count, extremes, codes);
    case kBFloat16: return encode(static_cast<const BFloat16*>(from), count, extremes, codes);
    default: return encode(static_cast<const Float16*>(from), count, extremes, codes);
  }
}

void decode(
    Dtype dtype, const Extremes& extremes, const uint8_t* codes, int64_t count, bool accumulate, void* to) {
  switch (dtype) {
    case kFloat32: return decode<Float32>(extremes, codes, count, accumulate, to);
    case kBFloat16: return decode<BFloat16>(extremes, codes, count, accumulate, to);
    default: return decode<Float16>(extremes, codes, count, accumulate, to);
  }
}

const Loops kLoops = {scale_elements, average_elements, add_rows, find_extremes, encode, decode};
