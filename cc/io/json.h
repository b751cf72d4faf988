// Json: a parsed JSON text (RFC 8259), such as the MANIFEST.json of a snapshot.
//
// Numbers and strings keep their text in the file. The canonical form, over which a manifest's
// checksum is computed, therefore has the bytes of Python's json.dumps for a file that json.dumps
// wrote, without a formatter for floats.
//
// Contract. Parse accepts any bytes, and nests at most kMostDepth values. Objects with a name twice
// are refused. Values are immutable.
#ifndef DYNEMB_IO_JSON_H_
#define DYNEMB_IO_JSON_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/table/status.h"

namespace dynemb {

class Json {
 public:
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };
  static constexpr int kMostDepth = 64;

  // DataLoss names the byte offset of the first fault; *value is then undefined.
  static Status Parse(std::string_view text, Json* value);

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::kNull; }
  // The decoded string, in UTF-8; empty for other kinds.
  const std::string& string() const { return string_; }
  // The items of an array; empty for other kinds.
  const std::vector<Json>& items() const { return items_; }
  // The member of an object; null if there is none, or this is no object.
  const Json* Find(std::string_view name) const;
  // Sets *value and returns true if this is an integer of the type's range.
  bool Get(uint64_t* value) const;
  bool Get(double* value) const;

  // As json.dumps(value, sort_keys=True, separators=(",", ":")), without the member `except` of the
  // outermost object.
  std::string Canonical(std::string_view except = {}) const;

 private:
  friend class JsonParser;
  void Append(std::string_view except, std::string* out) const;

  Kind kind_ = Kind::kNull;
  std::string text_;    // as in the file: a number, a string with its quotes, true or false
  std::string string_;  // of a string
  std::vector<Json> items_;
  std::vector<std::pair<Json, Json>> members_;  // name and value, in the order of the names
};

}  // namespace dynemb

#endif  // DYNEMB_IO_JSON_H_
