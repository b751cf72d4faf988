#include "cc/ranks/wire.h"

namespace dynemb {

std::string Wire::Late(const std::vector<int>& ranks, const char* what) const {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i == 16) {
      text += " and " + std::to_string(ranks.size() - i) + " more";
      break;
    }
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text + (ranks.size() == 1 ? " has " : " have ") + what + " for " + Seconds(timeout_);
}

std::string Wire::Seconds(std::chrono::milliseconds time) {
  std::string seconds = std::to_string(static_cast<double>(time.count()) / 1000);
  const size_t last = seconds.find_last_not_of('0');
  seconds.resize(seconds[last] == '.' ? last : last + 1);
  return seconds + " s";
}

}  // namespace dynemb
