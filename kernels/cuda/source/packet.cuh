// A few adjacent elements, which one thread reads or writes with as few instructions as possible.
#pragma once

#include "device.cuh"

namespace ddp_compile {

template <class T>
constexpr int kBytes = int(sizeof(typename T::Bits));

// kWidth elements, 4 to 32 bytes, at a multiple of kAlignment.
template <class T, int kWidth>
struct Packet {
  static constexpr int kWords = kWidth * kBytes<T> / 4;
  static constexpr int kAlignment = kWords < 4 ? 4 * kWords : 16;
  u32 words[kWords];

  DDP_COMPILE_INLINE void load(const u8* from) {
    if constexpr (kWords == 1) load_word(from, words);
    if constexpr (kWords == 2) load_pair(from, words);
#pragma unroll
    for (int quad = 0; quad < kWords / 4; ++quad) load_quad(from + 16 * quad, words + 4 * quad);
  }
  DDP_COMPILE_INLINE void store(u8* to) const {
    if constexpr (kWords == 1) store_word(to, words);
    if constexpr (kWords == 2) store_pair(to, words);
#pragma unroll
    for (int quad = 0; quad < kWords / 4; ++quad) store_quad(to + 16 * quad, words + 4 * quad);
  }
  DDP_COMPILE_INLINE void decode(float (&values)[kWidth]) const {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if constexpr (kBytes<T> == 4) {
        values[e] = T::decode(words[e]);
      } else {
        values[e] = T::decode(u16(words[e / 2] >> (16 * (e % 2))));
      }
    }
  }
  DDP_COMPILE_INLINE void encode(const float (&values)[kWidth]) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      if constexpr (kBytes<T> == 4) {
        words[word] = T::encode(values[word]);
      } else {
        words[word] = T::encode(values[2 * word], values[2 * word + 1]);
      }
    }
  }
};

// One element, aligned to its own size.
template <class T>
struct Packet<T, 1> {
  typename T::Bits bits;

  DDP_COMPILE_INLINE void load(const u8* from) { bits = *reinterpret_cast<const typename T::Bits*>(from); }
  DDP_COMPILE_INLINE void store(u8* to) const { *reinterpret_cast<typename T::Bits*>(to) = bits; }
  DDP_COMPILE_INLINE void decode(float (&values)[1]) const { values[0] = T::decode(bits); }
  DDP_COMPILE_INLINE void encode(const float (&values)[1]) { bits = T::encode(values[0]); }
};

DDP_COMPILE_INLINE bool is_aligned(const u8* address, int alignment = 16) {
  return reinterpret_cast<u64>(address) % alignment == 0;
}

}  // namespace ddp_compile
