// JSON: texts that RFC 8259 permits and their canonical form; malformed ones; random ones.
#include "cc/io/json.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <clocale>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/json_text.h"
#include "tests/cc/replaced_new.h"
#include "tests/cc/test_length.h"

static size_t allocated = 0;  // bytes, also those that were freed

static void* AllocateForTest(size_t bytes, size_t alignment) {
  void* const p =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  allocated += bytes;
  return p;
}

namespace dynemb {
namespace {

using testing_json::Array;
using testing_json::Members;
using testing_json::Object;

Json Parsed(const std::string& text) {
  Json json;
  const Status status = Json::Parse(text, &json);
  EXPECT_TRUE(status.ok()) << text << ": " << status.message();
  return json;
}

TEST(Json, CanonicalForm) {
  const std::vector<std::pair<std::string, std::string>> texts = {
      {"null", "null"},
      {" \t\r\n true \n", "true"},
      {"[ ]", "[]"},
      {"{ }", "{}"},
      {"[1 , 2,\n3]", "[1,2,3]"},
      {R"({"b": 1, "a": [false, null]})", R"({"a":[false,null],"b":1})"},
      // Numbers and strings keep their text.
      {"[-0, 0, 1.50, 1e5, 1E+05, -2.5e-300]", "[-0,0,1.50,1e5,1E+05,-2.5e-300]"},
      {R"(["\u0041\/", "A/"])", R"(["\u0041\/","A/"])"},
      // Names are in the order of code points: U+FFFF comes before U+10000.
      {"{\"\xF0\x90\x80\x80\":1,\"\xEF\xBF\xBF\":2,\"\":3}",
       "{\"\":3,\"\xEF\xBF\xBF\":2,\"\xF0\x90\x80\x80\":1}"},
      // Names are sorted by what they mean, not by how they are written.
      {R"({"\u0062": 1, "a": 2, "c": 3})", R"({"a":2,"\u0062":1,"c":3})"},
  };
  for (const auto& [text, canonical] : texts) EXPECT_EQ(Parsed(text).Canonical(), canonical);
}

TEST(Json, CanonicalFormWithoutAMember) {
  const Json json = Parsed(R"({"crc": 1, "a": {"crc": 2}, "b": [{"crc": 3}]})");
  EXPECT_EQ(json.Canonical("crc"), R"({"a":{"crc":2},"b":[{"crc":3}]})");
  EXPECT_EQ(json.Canonical("a"), R"({"b":[{"crc":3}],"crc":1})");
  EXPECT_EQ(json.Canonical("x"), json.Canonical());
  EXPECT_EQ(Parsed(R"({"crc": 1})").Canonical("crc"), "{}");
}

TEST(Json, KindsAndMembers) {
  const Json json = Parsed(R"({"n": null, "t": true, "i": [1, "x"], "s": "y", "o": {"i": 2}})");
  EXPECT_EQ(json.kind(), Json::Kind::kObject);
  EXPECT_TRUE(json.Find("n")->is_null());
  EXPECT_EQ(json.Find("t")->kind(), Json::Kind::kBool);
  EXPECT_EQ(json.Find("s")->string(), "y");
  std::vector<std::string> items;
  for (const Json& item : json.Find("i")->items()) items.push_back(item.Canonical());
  EXPECT_EQ(items, (std::vector<std::string>{"1", "\"x\""}));
  EXPECT_EQ(json.Find("o")->Find("i")->Canonical(), "2");
  for (const char* name : {"", "a", "N", "z", "nn"})
    EXPECT_FALSE(json.Find(name).has_value()) << name;
  // For other kinds, they are empty.
  EXPECT_FALSE(json.Find("s")->Find("s").has_value());
  EXPECT_TRUE(json.Find("s")->items().empty());
  EXPECT_EQ(json.Find("i")->string(), "");
}

TEST(Json, Integers) {
  const auto integer = [](const std::string& text, uint64_t* value) {
    return Parsed(text).Get(value);
  };
  uint64_t value = 0;
  EXPECT_TRUE(integer("0", &value) && value == 0);
  EXPECT_TRUE(integer("18446744073709551615", &value) && value == ~uint64_t{0});
  for (const char* text : {"18446744073709551616", "99999999999999999999999", "-1", "-0", "1.0",
                           "1.5", "1e3", "true", "null", "\"1\"", "[1]", "{}"}) {
    EXPECT_FALSE(integer(text, &value)) << text;
  }
}

TEST(Json, Doubles) {
  const auto number = [](const std::string& text) {
    double value = -7;
    EXPECT_TRUE(Parsed(text).Get(&value)) << text;
    return value;
  };
  EXPECT_EQ(number("1.5"), 1.5);
  EXPECT_EQ(number("-25e-1"), -2.5);
  EXPECT_EQ(number("18446744073709551616"), 18446744073709551616.0);
  EXPECT_EQ(number("1e999"), HUGE_VAL);
  EXPECT_EQ(number("1e-999"), 0.0);
  // In a locale with a decimal comma, too, if the system has one.
  for (const char* locale : {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8"}) {
    if (std::setlocale(LC_NUMERIC, locale) == nullptr) continue;
    EXPECT_EQ(number("0.25"), 0.25) << locale;
  }
  std::setlocale(LC_NUMERIC, "C");
  double value;
  EXPECT_FALSE(Parsed("\"1\"").Get(&value));
  EXPECT_FALSE(Parsed("true").Get(&value));
}

TEST(Json, Strings) {
  const std::vector<std::pair<std::string, std::string>> texts = {
      {R"("")", ""},
      {R"("\"\\\/\b\f\n\r\t")", "\"\\/\b\f\n\r\t"},
      {R"("\u0041\u00e9\u20AC")", "A\xC3\xA9\xE2\x82\xAC"},
      {R"("\uD83D\uDE00")", "\xF0\x9F\x98\x80"},
      {R"("\uDBFF\uDFFF")", "\xF4\x8F\xBF\xBF"},
      {"\"\xC3\xA9 \xF0\x9F\x98\x80\x7F\"", "\xC3\xA9 \xF0\x9F\x98\x80\x7F"},
      {R"("\u0000")", std::string(1, '\0')},
      // Lone surrogates are kept, as Python keeps them.
      {R"("\ud800")", "\xED\xA0\x80"},
      {R"("\ud800x")", "\xED\xA0\x80x"},
      {R"("\udc00\ud800")", "\xED\xB0\x80\xED\xA0\x80"},
      {R"("\ud800\u0041")",
       "\xED\xA0\x80"
       "A"},
      {R"("\ud800\n")", "\xED\xA0\x80\n"},
  };
  for (const auto& [text, meaning] : texts) EXPECT_EQ(Parsed(text).string(), meaning) << text;
}

// A malformed text, and the byte offset of its first fault.
TEST(Json, MalformedTexts) {
  const std::vector<std::pair<std::string, size_t>> texts = {
      {"", 0},
      {"  ", 2},
      {"nul", 0},
      {"True", 0},
      {"nullx", 4},
      {"1 2", 2},
      {"01", 1},
      {"+1", 0},
      {"-", 1},
      {".5", 0},
      {"1.", 2},
      {"1.e5", 2},
      {"1e", 2},
      {"1e+", 3},
      {"0x10", 1},
      {"NaN", 0},
      {"Infinity", 0},
      {"[1,]", 3},
      {"[,1]", 1},
      {"[1 2]", 3},
      {"[1", 2},
      {"]", 0},
      {"{\"a\"}", 4},
      {"{\"a\":}", 5},
      {"{\"a\":1,}", 7},
      {"{a:1}", 1},
      {"{1:1}", 1},
      {"{\"a\":1 \"b\":2}", 7},
      {"{\"a\":1", 6},
      {"{", 1},
      {"\"", 1},
      {"\"abc", 4},
      {"\"\\", 2},
      {"\"\\x\"", 3},
      {"\"\\u12\"", 3},
      {"\"\\u12G4\"", 7},
      {"\"\\u-123\"", 7},
      {"\"\\u 123\"", 7},
      {"\"\\ud800\\u12\"", 9},
      {"\"a\nb\"", 2},
      {std::string("\"a\0b\"", 5), 2},
      {"'a'", 0},
      {"// x\n1", 0},
      {"\xEF\xBB\xBF"
       "1",
       0},  // a byte order mark
      {std::string(1, '\0'), 0},
      {std::string("1\0", 2), 1},
  };
  for (const auto& [text, offset] : texts) {
    Json json;
    const Status status = Json::Parse(text, &json);
    EXPECT_EQ(status.code(), Code::kDataLoss) << text;
    EXPECT_EQ(status.message(), "it is not JSON at byte offset " + std::to_string(offset)) << text;
  }
}

TEST(Json, NamesMustDiffer) {
  Json json;
  for (const char* text :
       {R"({"a":1,"a":1})", R"({"a":1,"b":2,"\u0061":3})", R"([{"x":{"":1,"":2}}])"}) {
    EXPECT_EQ(Json::Parse(text, &json).code(), Code::kDataLoss) << text;
  }
  EXPECT_TRUE(Json::Parse(R"([{"a":1},{"a":1},{"b":{"a":1},"a":2}])", &json).ok());
}

TEST(Json, Depth) {
  const auto nested = [](size_t depth, const std::string& open, const std::string& close) {
    std::string text;
    for (size_t i = 0; i < depth; ++i) text += open;
    text += "1";
    for (size_t i = 0; i < depth; ++i) text += close;
    return text;
  };
  Json json;
  for (const auto& [open, close] :
       {std::pair<const char*, const char*>{"[", "]"}, {"{\"a\":", "}"}}) {
    EXPECT_TRUE(Json::Parse(nested(Json::kMostDepth, open, close), &json).ok());
    EXPECT_FALSE(Json::Parse(nested(Json::kMostDepth + 1, open, close), &json).ok());
    EXPECT_FALSE(Json::Parse(nested(1000000, open, close), &json).ok());
    EXPECT_FALSE(Json::Parse(nested(1000000, open, ""), &json).ok());
  }
}

// A failed Parse leaves nothing of an earlier value behind a later one.
TEST(Json, ParseReplacesTheValue) {
  Json json = Parsed(R"({"a": [1, 2]})");
  EXPECT_FALSE(Json::Parse("[1, 2", &json).ok());
  ASSERT_TRUE(Json::Parse("3", &json).ok());
  EXPECT_EQ(json.Canonical(), "3");
  EXPECT_TRUE(json.items().empty());
  EXPECT_FALSE(json.Find("a").has_value());
}

// Writes random values twice: in canonical form, and with white space and members in any order.
class RandomJson {
 public:
  explicit RandomJson(uint64_t seed) : random_(seed) {}

  size_t Below(size_t n) { return static_cast<size_t>(random_() % n); }

  std::string Space() {
    static const char* const kSpaces[] = {"", "", "", " ", "\n", "\t ", "\r\n"};
    return kSpaces[Below(7)];
  }

  // The canonical form, and the other one in *text.
  std::string Value(int depth, std::string* text) {
    static const char* const kScalars[] = {"null", "true",  "false",          "0",
                                           "-1",   "12345", "-0.5e-7",        "1e300",
                                           "\"\"", "\"x\"", "\"\\u00e9\\n\"", "\"\xC3\xA9\""};
    const size_t kind = Below(depth > 4 ? 1 : 3);
    if (kind == 0) {
      *text = kScalars[Below(12)];
      return *text;
    }
    const size_t n = Below(5);
    std::vector<std::string> canonical, others;
    Members members;
    for (size_t i = 0; i < n; ++i) {
      std::string other;
      const std::string item = Value(depth + 1, &other);
      const std::string name = std::string(1, static_cast<char>('a' + Below(26)));
      if (kind == 2) {
        if (!members.emplace(name, item).second) continue;
        other = testing_json::Quoted(name) + Space() + ":" + Space() + other;
      }
      canonical.push_back(item);
      others.push_back(Space() + other + Space());
    }
    if (kind == 2) std::shuffle(others.begin(), others.end(), random_);
    const std::string inner = Array(others);
    *text = kind == 1 ? inner : "{" + inner.substr(1, inner.size() - 2) + "}";
    return kind == 1 ? Array(canonical) : Object(members);
  }

 private:
  std::mt19937_64 random_;
};

TEST(Json, RandomValues) {
  RandomJson random(1);
  for (size_t round = 0; round < Longer(kSanitized ? 500 : 3000); ++round) {
    std::string text;
    const std::string canonical = random.Value(0, &text);
    ASSERT_EQ(Parsed(random.Space() + text + random.Space()).Canonical(), canonical) << text;
  }
}

// Damaged texts, and any bytes: an error or a value, whose canonical form is a fixed point.
TEST(Json, RandomDamage) {
  RandomJson random(2);
  size_t sound = 0;
  for (size_t round = 0; round < Longer(kSanitized ? 2000 : 20000); ++round) {
    std::string text;
    random.Value(0, &text);
    for (size_t change = random.Below(3); change <= 3; ++change) {
      const size_t at = random.Below(text.size() + 1);
      const char byte = random.Below(3) == 0 ? static_cast<char>(random.Below(256))
                                             : "[]{}\",:\\u0123eE+-. "[random.Below(20)];
      switch (random.Below(3)) {
        case 0:
          text.insert(at, 1, byte);
          break;
        case 1:
          if (at < text.size()) text[at] = byte;
          break;
        default:
          if (at < text.size()) text.erase(at, 1 + random.Below(3));
      }
    }
    Json json;
    const Status status = Json::Parse(text, &json);
    if (!status.ok()) {
      ASSERT_EQ(status.code(), Code::kDataLoss);
      continue;
    }
    ++sound;
    const std::string canonical = json.Canonical();
    ASSERT_EQ(Parsed(canonical).Canonical(), canonical) << text;
  }
  EXPECT_GT(sound, 0u);
}

// The bytes that parsing and the canonical form take, for texts of which each byte or two is a
// value.
TEST(Json, MemoryIsLinear) {
  const auto repeated = [](const std::string& first, const std::string& more, size_t bytes) {
    std::string text = first;
    while (text.size() < bytes) text += more;
    return text;
  };
  constexpr size_t kBytes = size_t{1} << 20;
  std::string members = "{\"a\":1";
  for (int i = 0; members.size() < kBytes; ++i) members += ",\"" + std::to_string(i) + "\":1";
  for (const std::string& text :
       {repeated("[1", ",1", kBytes) + "]", repeated("[[]", ",[]", kBytes) + "]",
        repeated("[\"\"", ",\"\"", kBytes) + "]", repeated("[{}", ",{\"\":0}", kBytes) + "]",
        members + "}", repeated("[\"", "\\n", kBytes) + "\"]"}) {
    allocated = 0;
    Json json;
    ASSERT_TRUE(Json::Parse(text, &json).ok()) << text.substr(0, 20);
    ASSERT_EQ(json.Canonical().size(), text.size());
    EXPECT_LT(allocated, 10 * text.size()) << text.substr(0, 20);
  }
}

TEST(Json, EveryTruncationIsFound) {
  const std::string text = R"({"a": [1.5e3, "x\u00e9\ud83d\ude00", {"b": null}], "c": false})";
  for (size_t n = 0; n < text.size(); ++n) {
    Json json;
    EXPECT_FALSE(Json::Parse(text.substr(0, n), &json).ok()) << n;
  }
  Parsed(text);
}

}  // namespace
}  // namespace dynemb
