// Reads and writes of words that are not aligned to their size, such as keys in files. On a
// GPU, the address must be a multiple of 4, or of the size if that is smaller.
#ifndef DYNEMB_TABLE_UNALIGNED_H_
#define DYNEMB_TABLE_UNALIGNED_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cc/table/portability.h"

namespace dynemb {

namespace internal {

// On a GPU, memcpy would access each byte of such a word.
template <class T>
struct Pieces {
  using Piece = std::conditional_t<sizeof(T) % 4 == 0, uint32_t, uint16_t>;
  static constexpr size_t kCount = sizeof(T) / sizeof(Piece);
  static_assert(sizeof(T) % sizeof(Piece) == 0, "a word of two bytes, or a multiple of four");
  Piece piece[kCount];
};

}  // namespace internal

template <class T>
DYNEMB_HD inline T LoadUnaligned(const void* p) {
  T value;
#if defined(__CUDA_ARCH__)
  using Pieces = internal::Pieces<T>;
  Pieces pieces;
  for (size_t i = 0; i < Pieces::kCount; ++i) {
    pieces.piece[i] = static_cast<const typename Pieces::Piece*>(p)[i];
  }
  memcpy(&value, &pieces, sizeof(T));
#else
  memcpy(&value, p, sizeof(T));
#endif
  return value;
}

template <class T>
DYNEMB_HD inline void StoreUnaligned(void* p, T value) {
#if defined(__CUDA_ARCH__)
  using Pieces = internal::Pieces<T>;
  Pieces pieces;
  memcpy(&pieces, &value, sizeof(T));
  for (size_t i = 0; i < Pieces::kCount; ++i) {
    static_cast<typename Pieces::Piece*>(p)[i] = pieces.piece[i];
  }
#else
  memcpy(p, &value, sizeof(T));
#endif
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_UNALIGNED_H_
