// Reads and writes of words that are not aligned to their size (rows are packed to 4 bytes).
#ifndef DYNEMB_TABLE_UNALIGNED_H_
#define DYNEMB_TABLE_UNALIGNED_H_

#include <cstring>

#include "cc/table/portability.h"

namespace dynemb {

template <class T>
DYNEMB_HD inline T LoadUnaligned(const void* p) {
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}

template <class T>
DYNEMB_HD inline void StoreUnaligned(void* p, T value) {
  memcpy(p, &value, sizeof(T));
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_UNALIGNED_H_
