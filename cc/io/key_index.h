// The index column of a dump: the position of each key in the column of keys (docs/file_format.md).
#ifndef DYNEMB_IO_KEY_INDEX_H_
#define DYNEMB_IO_KEY_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/table/status.h"

namespace dynemb {

// Ids may have been sharded upstream by the same hash that places keys here, and keys may be
// chosen. The hash is therefore salted. The salt is the first of kIndexSalts salts under which
// probes pass at most kIndexPassed slots per key; the last salt is used in any case. A key that is
// bad under all salts has to meet one condition per salt, and hardly any of the 2^64 keys does.
//
// `tf_dynemb/storage` chooses the same salt, because the total number of slots passed does not
// depend on the order of the keys.
constexpr size_t kIndexPassed = 8;
constexpr uint64_t kIndexSalts = 64;

// Writes the 2^log_slots slots of an index of n distinct keys (of 8 or 4 bytes) into `slots`.
// n < 2^log_slots. Returns the salt.
uint64_t BuildKeyIndex(const void* keys, size_t n, size_t key_bytes, uint32_t log_slots,
                       uint32_t* slots);

// The same from file to file, without allocating memory for the keys or the slots. Maps the keys at
// `keys_offset` of one file, and the slots at `index_offset` of another, which must already have
// its full length. `index_offset` must be a multiple of 4.
Status BuildKeyIndexFile(const std::string& keys_path, size_t keys_offset, size_t n,
                         size_t key_bytes, const std::string& index_path, size_t index_offset,
                         uint32_t log_slots, uint64_t* salt);

}  // namespace dynemb

#endif  // DYNEMB_IO_KEY_INDEX_H_
