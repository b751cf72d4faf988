// ByteWriter and ByteReader: numbers, texts and arrays one after another, in the machine's byte
// order (little-endian), without padding.
//
// A ByteReader never reads past the end. The first read that would do so sets ok() to false; it and
// all later reads return zeros, empty texts and empty arrays. Callers check ok() once, at the end.
#ifndef DYNEMB_TABLE_BYTES_H_
#define DYNEMB_TABLE_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace dynemb {

class ByteWriter {
 public:
  template <class T>
  void Put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void PutText(const std::string& text) {
    Put(uint64_t{text.size()});
    bytes_ += text;
  }
  template <class T>
  void PutArray(const std::vector<T>& array) {
    static_assert(std::is_trivially_copyable_v<T>);
    Put(uint64_t{array.size()});
    bytes_.append(reinterpret_cast<const char*>(array.data()), array.size() * sizeof(T));
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class ByteReader {
 public:
  // The bytes must outlive the reader.
  explicit ByteReader(const std::string& bytes) : next_(bytes.data()), left_(bytes.size()) {}

  // Whether all reads have succeeded.
  bool ok() const { return ok_; }
  bool at_end() const { return left_ == 0; }

  template <class T>
  T Get() {
    T value{};
    if (Has(1, sizeof(T))) Take(&value, sizeof(T));
    return value;
  }
  std::string GetText() {
    const auto n = Get<uint64_t>();
    if (!Has(n, 1)) return std::string();
    std::string text(n, '\0');
    Take(text.data(), n);
    return text;
  }
  template <class T>
  std::vector<T> GetArray() {
    const auto n = Get<uint64_t>();
    if (!Has(n, sizeof(T))) return {};
    std::vector<T> array(n);
    Take(array.data(), n * sizeof(T));
    return array;
  }

 private:
  bool Has(uint64_t n, size_t size) {
    ok_ = ok_ && n <= left_ / size;
    return ok_;
  }
  void Take(void* to, size_t bytes) {
    if (bytes != 0) memcpy(to, next_, bytes);
    next_ += bytes;
    left_ -= bytes;
  }

  const char* next_;
  size_t left_;
  bool ok_ = true;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BYTES_H_
