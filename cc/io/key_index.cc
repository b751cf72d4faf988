#include "cc/io/key_index.h"

#include <string.h>

#include "cc/io/mapped_file.h"
#include "cc/table/hash.h"
#include "cc/table/unaligned.h"

namespace dynemb {
namespace {

// Returns false if probes pass more than `most` slots.
template <class K>
bool Build(const char* keys, size_t n, uint64_t salt, size_t most, uint32_t log_slots,
           uint32_t* slots) {
  constexpr size_t kAhead = 32;
  const size_t mask = (size_t{1} << log_slots) - 1;
  memset(slots, 0, sizeof(uint32_t) << log_slots);
  size_t homes[kAhead];
  size_t passed = 0;
  for (size_t j = 0; j < n + kAhead; ++j) {
    if (j >= kAhead) {
      const size_t i = j - kAhead;
      size_t at = homes[i % kAhead];
      for (; slots[at] != 0; at = (at + 1) & mask) ++passed;
      if (passed > most) return false;
      slots[at] = static_cast<uint32_t>(i + 1);
    }
    if (j >= n) continue;
    const uint64_t key = LoadUnaligned<K>(keys + j * sizeof(K));
    homes[j % kAhead] = HashKey(key, salt) >> (64 - log_slots);
    __builtin_prefetch(&slots[homes[j % kAhead]], 1);
  }
  return true;
}

template <class K>
uint64_t BuildWithSalt(const char* keys, size_t n, uint32_t log_slots, uint32_t* slots) {
  for (uint64_t number = 0;; ++number) {
    const uint64_t salt = KeyIndexSalt(number);
    const size_t most = number + 1 < kIndexSalts ? kIndexPassed * n : ~size_t{0};
    if (Build<K>(keys, n, salt, most, log_slots, slots)) return salt;
  }
}

}  // namespace

uint64_t BuildKeyIndex(const void* keys, size_t n, size_t key_bytes, uint32_t log_slots,
                       uint32_t* slots) {
  const auto* k = static_cast<const char*>(keys);
  return key_bytes == 8 ? BuildWithSalt<uint64_t>(k, n, log_slots, slots)
                        : BuildWithSalt<uint32_t>(k, n, log_slots, slots);
}

Status BuildKeyIndexFile(const std::string& keys_path, size_t keys_offset, size_t n,
                         size_t key_bytes, const std::string& index_path, size_t index_offset,
                         uint32_t log_slots, uint64_t* salt) {
  if (key_bytes != 8 && key_bytes != 4) return InvalidArgument("key_bytes must be 8 or 4");
  if (log_slots < 1 || log_slots > 40 || n >= (uint64_t{1} << log_slots) || n >= 0xFFFFFFFFu) {
    return InvalidArgument("an index of 2^" + std::to_string(log_slots) + " slots cannot hold " +
                           std::to_string(n) + " keys");
  }
  if (index_offset % sizeof(uint32_t) != 0) return InvalidArgument("index_offset is unaligned");
  MappedFile keys, index;
  DYNEMB_RETURN_IF_ERROR(keys.Open(keys_path, false, keys_offset + n * key_bytes));
  DYNEMB_RETURN_IF_ERROR(
      index.Open(index_path, true, index_offset + (sizeof(uint32_t) << log_slots)));
  *salt = BuildKeyIndex(keys.data() + keys_offset, n, key_bytes, log_slots,
                        reinterpret_cast<uint32_t*>(index.data() + index_offset));
  return Status();
}

}  // namespace dynemb
