// CRC32C (RFC 3720): the checksum of dumps. By the processor's instruction where it has one.
#ifndef DYNEMB_IO_CRC32C_H_
#define DYNEMB_IO_CRC32C_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/exec.h"

namespace dynemb {

// The checksum of what `crc` is the checksum of (0: nothing) followed by data[n].
uint32_t Crc32c(uint32_t crc, const void* data, size_t n);

// The same without the instruction; for tests.
uint32_t Crc32cByTables(uint32_t crc, const void* data, size_t n);

// Checksums of a file's blocks, for a stretch of it: of data[0, room) following what `initial` is
// the checksum of, then of each `block` bytes, the last of which may be fewer.
std::vector<uint32_t> Crc32cBlocks(Exec& exec, const void* data, size_t n, uint32_t initial,
                                   size_t room, size_t block);

}  // namespace dynemb

#endif  // DYNEMB_IO_CRC32C_H_
