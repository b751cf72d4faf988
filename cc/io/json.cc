#include "cc/io/json.h"

#include <locale.h>
#include <stdlib.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

namespace dynemb {
namespace {

// The position of a value in the text.
struct Position {
  uint32_t offset;  // of its first byte
  uint32_t next;    // the number of the next value that is not inside this one
};

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

void AppendUtf8(uint32_t code, std::string* out) {
  const auto put = [out](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

// Reads four hexadecimal digits. Returns false if there are none.
bool ReadHex(std::string_view text, size_t* at, uint32_t* code) {
  if (text.size() - *at < 4) return false;
  const char* const first = text.data() + *at;
  const auto [end, error] = std::from_chars(first, first + 4, *code, 16);
  *at += 4;
  return error == std::errc() && end == first + 4;
}

// Appends what the escape sequence whose backslash is at *at means, and moves *at behind it, or to
// the fault if there is one. `out` may be null.
bool ReadEscape(std::string_view text, size_t* at, std::string* out) {
  static constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
  if (++*at == text.size()) return false;
  const char c = text[(*at)++];
  if (const size_t name = kNames.find(c); name != std::string_view::npos) {
    if (out != nullptr) out->push_back(kMeanings[name]);
    return true;
  }
  uint32_t code, low;
  if (c != 'u' || !ReadHex(text, at, &code)) return false;
  // A lone surrogate is kept as it is, as Python does.
  if (code >> 10 == 0xD800 >> 10 && text.substr(*at, 2) == "\\u") {
    const size_t before = *at;
    *at += 2;
    if (!ReadHex(text, at, &low)) return false;
    if (low >> 10 == 0xDC00 >> 10) {
      code = 0x10000 + ((code & 0x3FF) << 10 | (low & 0x3FF));
    } else {
      *at = before;
    }
  }
  if (out != nullptr) AppendUtf8(code, out);
  return true;
}

// The end of the string that begins at `begin` of a text that was parsed, behind its last quote.
size_t EndOfString(std::string_view text, size_t begin) {
  size_t at = begin + 1;
  while (text[at] != '"') at += text[at] == '\\' ? 2 : 1;
  return at + 1;
}

// The text that a string with its quotes denotes.
std::string Decoded(std::string_view quoted) {
  std::string out;
  const std::string_view text = quoted.substr(0, quoted.size() - 1);
  for (size_t at = 1; at < text.size();) {
    const size_t plain = std::min(text.find('\\', at), text.size());
    out.append(text.substr(at, plain - at));
    at = plain;
    if (at < text.size()) (void)ReadEscape(text, &at, &out);
  }
  return out;
}

// Compares the values of two strings, given with their quotes. UTF-8 has the order of code points,
// by which Python sorts.
int Compare(std::string_view a, std::string_view b) {
  const auto is_plain = [](std::string_view s) { return s.find('\\') == std::string_view::npos; };
  if (!is_plain(a) || !is_plain(b)) return Decoded(a).compare(Decoded(b));
  return a.substr(1, a.size() - 2).compare(b.substr(1, b.size() - 2));
}

}  // namespace

struct Json::Document {
  std::string text;
  std::vector<Position> values;

  char First(uint32_t number) const { return text[values[number].offset]; }
  uint32_t End(uint32_t number) const { return values[number].next; }
  // The text of a value that is no array or object.
  std::string_view TextOf(uint32_t number) const;

  // Calls visit(name, value) for the members of an object, in the order of the text.
  template <class Visit>
  void ForEachMember(uint32_t object, const Visit& visit) const {
    for (uint32_t name = object + 1; name < End(object); name = End(name + 1)) {
      visit(name, name + 1);
    }
  }
  // The names of an object in their order; none if that is the order of the text. *unique: no name
  // is there twice.
  std::vector<uint32_t> Sorted(uint32_t object, bool* unique) const;
  void Append(uint32_t number, std::string_view except, std::string* out) const;
};

std::string_view Json::Document::TextOf(uint32_t number) const {
  const std::string_view all = text;
  const size_t begin = values[number].offset;
  const char first = all[begin];
  if (first == '"') return all.substr(begin, EndOfString(all, begin) - begin);
  const bool is_word = first == 't' || first == 'f' || first == 'n';
  const char* const more = is_word ? "truefalsn" : "+-.eE0123456789";
  return all.substr(begin, std::min(all.find_first_not_of(more, begin), all.size()) - begin);
}

std::vector<uint32_t> Json::Document::Sorted(uint32_t object, bool* unique) const {
  bool ascending = true;
  size_t count = 0;
  uint32_t before = 0;
  ForEachMember(object, [&](uint32_t name, uint32_t) {
    if (count++ > 0) ascending = ascending && Compare(TextOf(before), TextOf(name)) < 0;
    before = name;
  });
  *unique = true;
  std::vector<uint32_t> names;
  if (ascending) return names;
  names.reserve(count);
  ForEachMember(object, [&](uint32_t name, uint32_t) { names.push_back(name); });
  std::sort(names.begin(), names.end(),
            [this](uint32_t a, uint32_t b) { return Compare(TextOf(a), TextOf(b)) < 0; });
  *unique = std::adjacent_find(names.begin(), names.end(), [this](uint32_t a, uint32_t b) {
              return Compare(TextOf(a), TextOf(b)) == 0;
            }) == names.end();
  return names;
}

class JsonParser {
 public:
  explicit JsonParser(Json::Document* document)
      : document_(*document), values_(document->values), text_(document->text) {}

  Status Parse() {
    values_.reserve(MostValues());
    if (Value(0)) {
      SkipSpace();
      if (at_ == text_.size()) return Status();
    }
    return DataLoss("it is not JSON at byte offset " + std::to_string(at_));
  }

 private:
  // At least the number of values, names included.
  size_t MostValues() const {
    size_t most = 1;
    bool in_string = false;
    for (size_t at = 0; at < text_.size(); ++at) {
      const char c = text_[at];
      if (c == '"') in_string = !in_string;
      if (in_string && c == '\\') ++at;
      if (!in_string && (c == ',' || c == ':' || c == '[' || c == '{')) ++most;
    }
    return most;
  }

  bool Value(int depth) {
    SkipSpace();
    if (at_ == text_.size() || depth > Json::kMostDepth) return false;
    const auto number = static_cast<uint32_t>(values_.size());
    values_.push_back({static_cast<uint32_t>(at_), 0});
    const char first = text_[at_];
    if (!Rest(first, depth)) return false;
    values_[number].next = static_cast<uint32_t>(values_.size());
    bool unique = true;
    if (first == '{') (void)document_.Sorted(number, &unique);
    return unique;
  }

  bool Rest(char first, int depth) {
    switch (first) {
      case '{':
        return Object(depth);
      case '[':
        return Array(depth);
      case '"':
        return String();
      case 't':
        return Word("true");
      case 'f':
        return Word("false");
      case 'n':
        return Word("null");
      default:
        return Number();
    }
  }

  bool Object(int depth) {
    ++at_;
    if (Take('}')) return true;
    do {
      SkipSpace();
      if (at_ == text_.size() || text_[at_] != '"') return false;
      const auto number = static_cast<uint32_t>(values_.size());
      values_.push_back({static_cast<uint32_t>(at_), number + 1});
      if (!String() || !Take(':') || !Value(depth + 1)) return false;
    } while (Take(','));
    return Take('}');
  }

  bool Array(int depth) {
    ++at_;
    if (Take(']')) return true;
    do {
      if (!Value(depth + 1)) return false;
    } while (Take(','));
    return Take(']');
  }

  bool String() {
    ++at_;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) return false;
      if (text_[at_] != '\\') {
        ++at_;
      } else if (!ReadEscape(text_, &at_, nullptr)) {
        return false;
      }
    }
    if (at_ == text_.size()) return false;
    ++at_;
    return true;
  }

  bool Number() {
    const auto digits = [this] {
      const size_t first = at_;
      while (at_ < text_.size() && IsDigit(text_[at_])) ++at_;
      return at_ > first;
    };
    const auto is = [this](std::string_view any) {
      return at_ < text_.size() && any.find(text_[at_]) != std::string_view::npos;
    };
    if (is("-")) ++at_;
    if (is("0")) {
      ++at_;  // no digit may follow
    } else if (!digits()) {
      return false;
    }
    if (is(".")) {
      ++at_;
      if (!digits()) return false;
    }
    if (is("eE")) {
      ++at_;
      if (is("+-")) ++at_;
      if (!digits()) return false;
    }
    return true;
  }

  bool Word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  bool Take(char c) {
    SkipSpace();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void SkipSpace() {
    while (at_ < text_.size() &&
           std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) {
      ++at_;
    }
  }

  const Json::Document& document_;
  std::vector<Position>& values_;
  const std::string_view text_;
  size_t at_ = 0;
};

Json::Json() : Json(nullptr, 0) {}

Status Json::Parse(std::string text, Json* value) {
  *value = Json();
  if (text.size() >= std::numeric_limits<uint32_t>::max()) {
    return InvalidArgument("a JSON text of " + std::to_string(text.size()) + " bytes");
  }
  const auto document = std::make_shared<Document>();
  document->text = std::move(text);
  DYNEMB_RETURN_IF_ERROR(JsonParser(document.get()).Parse());
  *value = Json(document, 0);
  return Status();
}

Json::Kind Json::kind() const {
  switch (document_ == nullptr ? 'n' : document_->First(number_)) {
    case '{':
      return Kind::kObject;
    case '[':
      return Kind::kArray;
    case '"':
      return Kind::kString;
    case 't':
    case 'f':
      return Kind::kBool;
    case 'n':
      return Kind::kNull;
    default:
      return Kind::kNumber;
  }
}

std::string Json::string() const {
  return kind() == Kind::kString ? Decoded(document_->TextOf(number_)) : std::string();
}

Json::Items Json::items() const {
  if (kind() != Kind::kArray) return Items(Json(), Json());
  return Items(Json(document_, number_ + 1), Json(document_, document_->End(number_)));
}

Json::Items::Iterator& Json::Items::Iterator::operator++() {
  value_.number_ = value_.document_->End(value_.number_);
  return *this;
}

std::vector<std::pair<std::string, Json>> Json::members() const {
  std::vector<std::pair<std::string, Json>> members;
  if (kind() != Kind::kObject) return members;
  document_->ForEachMember(number_, [&](uint32_t at, uint32_t value) {
    members.emplace_back(Decoded(document_->TextOf(at)), Json(document_, value));
  });
  return members;
}

std::optional<Json> Json::Find(std::string_view name) const {
  if (kind() != Kind::kObject) return std::nullopt;
  std::optional<Json> found;
  document_->ForEachMember(number_, [&](uint32_t at, uint32_t value) {
    if (!found.has_value() && Decoded(document_->TextOf(at)) == name) {
      found = Json(document_, value);
    }
  });
  return found;
}

bool Json::Get(uint64_t* value) const {
  if (kind() != Kind::kNumber) return false;
  const std::string_view text = document_->TextOf(number_);
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end;
}

bool Json::Get(double* value) const {
  if (kind() != Kind::kNumber) return false;
  // strtod reads 0,25 and not 0.25 in many locales, and old libraries have no from_chars of floats.
  static const locale_t classic = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string text(document_->TextOf(number_));
  *value = strtod_l(text.c_str(), nullptr, classic);
  return true;
}

std::string Json::Canonical(std::string_view except) const {
  if (document_ == nullptr) return "null";
  std::string out;
  out.reserve(document_->text.size());
  document_->Append(number_, except, &out);
  return out;
}

void Json::Document::Append(uint32_t number, std::string_view except, std::string* out) const {
  const char* between = "";
  if (First(number) == '[') {
    out->push_back('[');
    for (uint32_t item = number + 1; item < End(number); item = End(item)) {
      out->append(between);
      Append(item, {}, out);
      between = ",";
    }
    out->push_back(']');
  } else if (First(number) == '{') {
    out->push_back('{');
    const auto append = [&](uint32_t name, uint32_t value) {
      const std::string_view quoted = TextOf(name);
      if (!except.empty() && Decoded(quoted) == except) return;
      out->append(between).append(quoted).push_back(':');
      Append(value, {}, out);
      between = ",";
    };
    bool unique;
    const std::vector<uint32_t> sorted = Sorted(number, &unique);
    for (const uint32_t name : sorted) append(name, name + 1);
    if (sorted.empty()) ForEachMember(number, append);
    out->push_back('}');
  } else {
    out->append(TextOf(number));
  }
}

}  // namespace dynemb
