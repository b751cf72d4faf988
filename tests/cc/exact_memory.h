// Memory of exactly the required size, at any address, in which accesses outside of the arrays are
// found. For the tests of what ranks exchange.
#ifndef DYNEMB_TESTS_CC_EXACT_MEMORY_H_
#define DYNEMB_TESTS_CC_EXACT_MEMORY_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

namespace dynemb {

// Bytes that begin `shift` bytes after a multiple of 16. They end where their memory ends, so that
// sanitizers detect reads beyond. Null if there are none.
class Input {
 public:
  Input(const void* bytes, size_t n, size_t shift) : shift_(shift) {
    if (n == 0) return;
    memory_.reset(new char[shift + n]);
    memcpy(memory_.get() + shift, bytes, n);
  }
  const char* get() const { return memory_ == nullptr ? nullptr : memory_.get() + shift_; }

 private:
  size_t shift_;
  std::unique_ptr<char[]> memory_;
};

// Bytes to write to, `shift` bytes after a multiple of 16. They initially hold garbage, and have
// guards on both sides.
class Output {
 public:
  static constexpr char kGarbage = '\xA5';

  Output(size_t n, size_t shift)
      : n_(n), begin_(16 + shift), bytes_(begin_ + n + kGuards, kGarbage) {}
  char* get() { return n_ == 0 ? nullptr : bytes_.data() + begin_; }
  // The written bytes. Checks the guards.
  std::vector<char> Take() const {
    const auto begin = bytes_.begin() + static_cast<ptrdiff_t>(begin_);
    const auto end = begin + static_cast<ptrdiff_t>(n_);
    const auto is_guard = [](char byte) { return byte == kGarbage; };
    EXPECT_TRUE(std::all_of(bytes_.begin(), begin, is_guard)) << "written before the array";
    EXPECT_TRUE(std::all_of(end, bytes_.end(), is_guard)) << "written after the array";
    return {begin, end};
  }

 private:
  static constexpr size_t kGuards = 32;

  size_t n_, begin_;
  std::vector<char> bytes_;
};

inline std::vector<const void*> Pointers(const std::vector<Input>& inputs) {
  std::vector<const void*> pointers;
  for (const Input& input : inputs) pointers.push_back(input.get());
  return pointers;
}
inline std::vector<void*> Pointers(std::vector<Output>* outputs) {
  std::vector<void*> pointers;
  for (Output& output : *outputs) pointers.push_back(output.get());
  return pointers;
}

// An array without spare room, so that the address sanitizer detects accesses beyond its end. It is
// filled with garbage.
template <class T>
struct Exact {
  explicit Exact(size_t size) : n(size), p(new T[size]) {
    std::memset(p.get(), 0x5A, n * sizeof(T));
  }
  explicit Exact(const std::vector<T>& values) : Exact(values.size()) {
    std::copy(values.begin(), values.end(), p.get());
  }
  std::vector<T> values() const { return {p.get(), p.get() + n}; }
  size_t n;
  std::unique_ptr<T[]> p;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_EXACT_MEMORY_H_
