#include "cc/io/json_file.h"

#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>

#include "cc/io/crc32c.h"
#include "cc/io/mapped_file.h"

namespace dynemb {

Status ReadJson(const std::string& file, size_t most, Json* json) {
  std::string text;
  DYNEMB_RETURN_IF_ERROR(ReadFile(file, most, &text));
  if (Status parsed = Json::Parse(std::move(text), json); !parsed.ok()) {
    return DataLoss(file + " is damaged: " + parsed.message());
  }
  return Status();
}

Status CheckChecksum(const std::string& file, const Json& json) {
  constexpr size_t kDigits = 8;
  const std::optional<Json> member = json.Find("crc32c");
  const std::string digits = member.has_value() ? member->string() : std::string();
  const std::string canonical = json.Canonical("crc32c");
  char expected[kDigits + 1];
  snprintf(expected, sizeof(expected), "%08x", Crc32c(0, canonical.data(), canonical.size()));
  if (digits != expected) {
    return DataLoss(file + " is damaged: its CRC32C is not " + digits);
  }
  return Status();
}

}  // namespace dynemb
