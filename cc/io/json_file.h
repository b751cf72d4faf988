// Files that are one JSON text.
#ifndef DYNEMB_IO_JSON_FILE_H_
#define DYNEMB_IO_JSON_FILE_H_

#include <cstddef>
#include <string>

#include "cc/io/json.h"
#include "cc/table/status.h"

namespace dynemb {

// DataLoss names the file: it is missing, has more than `most` bytes, or is not JSON.
Status ReadJson(const std::string& file, size_t most, Json* json);

// DataLoss, unless the member "crc32c" of the file's object is the CRC32C of the canonical form of
// the others, in 8 hexadecimal digits.
Status CheckChecksum(const std::string& file, const Json& json);

}  // namespace dynemb

#endif  // DYNEMB_IO_JSON_FILE_H_
