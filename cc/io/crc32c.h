// CRC32C (RFC 3720): the checksum of dumps. Uses the processor's CRC instruction if it has one.
#ifndef DYNEMB_IO_CRC32C_H_
#define DYNEMB_IO_CRC32C_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/exec.h"

namespace dynemb {

// Extends `crc`, the checksum of the preceding bytes (0 if there are none), by data[n].
uint32_t Crc32c(uint32_t crc, const void* data, size_t n);

// The same without the instruction; for tests.
uint32_t Crc32cByTables(uint32_t crc, const void* data, size_t n);

// The checksums of the blocks of a file, for data[n], a range of the file that may begin inside a
// block. The first checksum is `initial`, the checksum of the bytes of that block before the range,
// extended by data[0, room). Every other checksum covers `block` bytes; the last block may be
// shorter.
std::vector<uint32_t> Crc32cBlocks(Exec& exec, const void* data, size_t n, uint32_t initial,
                                   size_t room, size_t block);

}  // namespace dynemb

#endif  // DYNEMB_IO_CRC32C_H_
