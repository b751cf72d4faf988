// Arrays on the host, for the suites that are typed by a Place. Each is a separate copy, so that
// the address sanitizer reports an access past its end.
#ifndef DYNEMB_TESTS_CC_HOST_ARRAYS_H_
#define DYNEMB_TESTS_CC_HOST_ARRAYS_H_

#include <cstddef>
#include <cstring>
#include <vector>

namespace dynemb {

class HostArrays {
 public:
  template <class T>
  T* Up(const std::vector<T>& values) {
    if (values.empty()) return nullptr;  // like the data of a tensor without elements
    arrays_.emplace_back(values.size() * sizeof(T));
    std::memcpy(arrays_.back().data(), values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(arrays_.back().data());
  }
  template <class T>
  std::vector<T> Down(const T* array, size_t n) const {
    return std::vector<T>(array, array + n);
  }

 private:
  std::vector<std::vector<char>> arrays_;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_HOST_ARRAYS_H_
