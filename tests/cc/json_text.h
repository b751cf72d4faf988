// JSON texts in canonical form, built by hand, so that tests do not depend on cc/io/json.h: an
// object is a std::map from the name to the text of the value, and the map sorts the names.
#ifndef DYNEMB_TESTS_CC_JSON_TEXT_H_
#define DYNEMB_TESTS_CC_JSON_TEXT_H_

#include <map>
#include <string>
#include <vector>

namespace dynemb {
namespace testing_json {

using Members = std::map<std::string, std::string>;

// The JSON of a text without characters that JSON escapes.
inline std::string Quoted(const std::string& text) { return "\"" + text + "\""; }

inline std::string Array(const std::vector<std::string>& items) {
  std::string text = "[";
  for (const std::string& item : items) text += (text.size() > 1 ? "," : "") + item;
  return text + "]";
}

inline std::string Object(const Members& members) {
  std::string text = "{";
  for (const auto& [name, value] : members) {
    text += (text.size() > 1 ? "," : "") + Quoted(name) + ":" + value;
  }
  return text + "}";
}

}  // namespace testing_json
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_JSON_TEXT_H_
