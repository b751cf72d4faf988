#ifndef DYNEMB_TABLE_COPY_VECTOR_H_
#define DYNEMB_TABLE_COPY_VECTOR_H_

#include <cstddef>
#include <cstring>

namespace dynemb {

// Copies a vector. The common sizes are inline, since a call costs more than the copy.
inline void CopyVector(void* to, const void* from, size_t bytes) {
  switch (bytes) {
    case 16:
      memcpy(to, from, 16);
      break;
    case 32:
      memcpy(to, from, 32);
      break;
    case 64:
      memcpy(to, from, 64);
      break;
    case 128:
      memcpy(to, from, 128);
      break;
    case 256:
      memcpy(to, from, 256);
      break;
    default:
      memcpy(to, from, bytes);
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_COPY_VECTOR_H_
