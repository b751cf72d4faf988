// Json: a value of a parsed JSON text (RFC 8259), such as the MANIFEST.json of a snapshot.
//
// The text is kept, and its values are a list of their positions, eight bytes each, in the order of
// the text:
//
//   {"a": [1, 2]}      {      "a"     [      1      2
//                      0,5    1,2     6,5    7,4    10,5      byte offset, number of the next
//                                                             value that is not inside this one
//
// A value is its number in that list. So the memory is linear in the text: at most five times its
// size, and while it is parsed, ten times.
//
// Numbers and strings keep their text in the file. The canonical form, over which a manifest's
// checksum is computed, therefore has the bytes of Python's json.dumps for a file that json.dumps
// wrote, without a formatter for floats.
//
// Contract. Parse accepts any bytes, and nests at most kMostDepth values. Objects with a name twice
// are refused. Values are immutable, and cheap to copy: they share the text.
#ifndef DYNEMB_IO_JSON_H_
#define DYNEMB_IO_JSON_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/table/status.h"

namespace dynemb {

class Json {
 public:
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };
  class Items;
  static constexpr int kMostDepth = 64;

  // A null.
  Json();
  // DataLoss names the byte offset of the first fault; *value is then undefined. A text of 4 GiB is
  // InvalidArgument.
  static Status Parse(std::string text, Json* value);

  Kind kind() const;
  bool is_null() const { return kind() == Kind::kNull; }
  // The decoded string, in UTF-8; empty for other kinds.
  std::string string() const;
  // The items of an array; empty for other kinds.
  Items items() const;
  // The members of an object, in order; empty for other kinds.
  std::vector<std::pair<std::string, Json>> members() const;
  // The member of an object; nullopt if there is none, or this is no object.
  std::optional<Json> Find(std::string_view name) const;
  // Sets *value and returns true if this is an integer of the type's range.
  bool Get(uint64_t* value) const;
  bool Get(double* value) const;

  // As json.dumps(value, sort_keys=True, separators=(",", ":")), without the member `except` of the
  // outermost object.
  std::string Canonical(std::string_view except = {}) const;

 private:
  friend class JsonParser;
  struct Document;

  Json(std::shared_ptr<const Document> document, uint32_t number)
      : document_(std::move(document)), number_(number) {}

  std::shared_ptr<const Document> document_;
  uint32_t number_;
};

// The items of an array, in order.
class Json::Items {
 public:
  class Iterator {
   public:
    explicit Iterator(Json value) : value_(std::move(value)) {}
    const Json& operator*() const { return value_; }
    Iterator& operator++();
    bool operator!=(const Iterator& o) const { return value_.number_ != o.value_.number_; }

   private:
    Json value_;
  };
  Iterator begin() const { return Iterator(begin_); }
  Iterator end() const { return Iterator(end_); }
  bool empty() const { return begin_.number_ == end_.number_; }

 private:
  friend class Json;
  Items(Json begin, Json end) : begin_(std::move(begin)), end_(std::move(end)) {}

  Json begin_, end_;
};

}  // namespace dynemb

#endif  // DYNEMB_IO_JSON_H_
