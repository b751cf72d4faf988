#include "cc/io/json.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <system_error>

namespace dynemb {
namespace {

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

}  // namespace

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Status Parse(Json* value) {
    if (Value(0, value)) {
      SkipSpace();
      if (at_ == text_.size()) return Status();
    }
    return DataLoss("it is not JSON at byte offset " + std::to_string(at_));
  }

 private:
  bool Value(int depth, Json* value) {
    SkipSpace();
    if (at_ == text_.size() || depth > Json::kMostDepth) return false;
    switch (text_[at_]) {
      case '{':
        return Object(depth, value);
      case '[':
        return Array(depth, value);
      case '"':
        return String(value);
      case 't':
        return Word("true", Json::Kind::kBool, value);
      case 'f':
        return Word("false", Json::Kind::kBool, value);
      case 'n':
        return Word("null", Json::Kind::kNull, value);
      default:
        return Number(value);
    }
  }

  bool Object(int depth, Json* value) {
    value->kind_ = Json::Kind::kObject;
    ++at_;
    if (!Take('}')) {
      do {
        std::pair<Json, Json> member;
        SkipSpace();
        if (at_ == text_.size() || text_[at_] != '"' || !String(&member.first)) return false;
        if (!Take(':') || !Value(depth + 1, &member.second)) return false;
        value->members_.push_back(std::move(member));
      } while (Take(','));
      if (!Take('}')) return false;
    }
    auto& members = value->members_;
    // The order of UTF-8 is that of code points, by which Python sorts.
    std::sort(members.begin(), members.end(),
              [](const auto& a, const auto& b) { return a.first.string() < b.first.string(); });
    return std::adjacent_find(members.begin(), members.end(), [](const auto& a, const auto& b) {
             return a.first.string() == b.first.string();
           }) == members.end();
  }

  bool Array(int depth, Json* value) {
    value->kind_ = Json::Kind::kArray;
    ++at_;
    if (Take(']')) return true;
    do {
      value->items_.emplace_back();
      if (!Value(depth + 1, &value->items_.back())) return false;
    } while (Take(','));
    return Take(']');
  }

  bool String(Json* value) {
    const size_t begin = at_++;
    value->kind_ = Json::Kind::kString;
    while (at_ < text_.size() && text_[at_] != '"') {
      const char c = text_[at_];
      if (static_cast<unsigned char>(c) < 0x20) return false;
      if (c != '\\') {
        value->string_.push_back(c);
        ++at_;
      } else if (!Escape(&value->string_)) {
        return false;
      }
    }
    if (at_ == text_.size()) return false;
    ++at_;
    value->text_ = text_.substr(begin, at_ - begin);
    return true;
  }

  bool Escape(std::string* out) {
    static constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    if (++at_ == text_.size()) return false;
    const char c = text_[at_++];
    if (const size_t name = kNames.find(c); name != std::string_view::npos) {
      out->push_back(kMeanings[name]);
      return true;
    }
    uint32_t code, low;
    if (c != 'u' || !Hex(&code)) return false;
    // A lone surrogate is kept as it is, as Python does.
    if (code >> 10 == 0xD800 >> 10 && text_.substr(at_, 2) == "\\u") {
      const size_t before = at_;
      at_ += 2;
      if (!Hex(&low)) return false;
      if (low >> 10 == 0xDC00 >> 10) {
        code = 0x10000 + ((code & 0x3FF) << 10 | (low & 0x3FF));
      } else {
        at_ = before;
      }
    }
    AppendUtf8(code, out);
    return true;
  }

  bool Hex(uint32_t* code) {
    if (text_.size() - at_ < 4) return false;
    const char* const first = text_.data() + at_;
    const auto [end, error] = std::from_chars(first, first + 4, *code, 16);
    at_ += 4;
    return error == std::errc() && end == first + 4;
  }

  bool Number(Json* value) {
    const size_t begin = at_;
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
    value->kind_ = Json::Kind::kNumber;
    value->text_ = text_.substr(begin, at_ - begin);
    return true;
  }

  bool Word(std::string_view word, Json::Kind kind, Json* value) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    value->kind_ = kind;
    value->text_ = word;
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

  const std::string_view text_;
  size_t at_ = 0;
};

Status Json::Parse(std::string_view text, Json* value) {
  *value = Json();
  return JsonParser(text).Parse(value);
}

const Json* Json::Find(std::string_view name) const {
  const auto found = std::lower_bound(
      members_.begin(), members_.end(), name,
      [](const auto& member, std::string_view wanted) { return member.first.string() < wanted; });
  return found != members_.end() && found->first.string() == name ? &found->second : nullptr;
}

bool Json::Get(uint64_t* value) const {
  if (kind_ != Kind::kNumber) return false;
  const char* const end = text_.data() + text_.size();
  const auto [stop, error] = std::from_chars(text_.data(), end, *value);
  return error == std::errc() && stop == end;
}

bool Json::Get(double* value) const {
  if (kind_ != Kind::kNumber) return false;
  *value = std::strtod(text_.c_str(), nullptr);
  return true;
}

std::string Json::Canonical(std::string_view except) const {
  std::string out;
  Append(except, &out);
  return out;
}

void Json::Append(std::string_view except, std::string* out) const {
  const char* between = "";
  if (kind_ == Kind::kArray) {
    out->push_back('[');
    for (const Json& item : items_) {
      out->append(between);
      item.Append({}, out);
      between = ",";
    }
    out->push_back(']');
  } else if (kind_ == Kind::kObject) {
    out->push_back('{');
    for (const auto& [name, value] : members_) {
      if (!except.empty() && name.string() == except) continue;
      out->append(between).append(name.text_).push_back(':');
      value.Append({}, out);
      between = ",";
    }
    out->push_back('}');
  } else {
    out->append(text_);
  }
}

}  // namespace dynemb
