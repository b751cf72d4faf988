// NumberText: a number in a message. std::to_string and printf write 0,25 in the locale of many
// countries, which a program may have set for its own texts.
#ifndef DYNEMB_TABLE_NUMBER_TEXT_H_
#define DYNEMB_TABLE_NUMBER_TEXT_H_

#include <locale>
#include <sstream>
#include <string>

namespace dynemb {

template <class Number>
std::string NumberText(Number number) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << number;
  return text.str();
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_NUMBER_TEXT_H_
