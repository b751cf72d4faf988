// KeySpan: the keys of a batch, an array of keys of one type. Does not own them.
//
//   table->Find(exec, {keys.data(), keys.size()}, tick, rows);            // K* of a key type
//   table->Find(exec, {table->options().key_type, data, n}, tick, rows);  // type known at run time
//
// Code that nvcc compiles writes KeySpan(...) instead of {...}, which nvcc loses in templates.
#ifndef DYNEMB_TABLE_KEY_SPAN_H_
#define DYNEMB_TABLE_KEY_SPAN_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cc/table/types.h"

namespace dynemb {

class KeySpan {
 public:
  KeySpan() = default;
  KeySpan(const int64_t* keys, size_t n) : KeySpan(KeyType::kInt64, keys, n) {}
  KeySpan(const int32_t* keys, size_t n) : KeySpan(KeyType::kInt32, keys, n) {}
  KeySpan(const uint64_t* keys, size_t n) : KeySpan(KeyType::kUint64, keys, n) {}
  // The bit patterns of int32 keys.
  KeySpan(const uint32_t* keys, size_t n) : KeySpan(KeyType::kInt32, keys, n) {}
  KeySpan(KeyType type, const void* keys, size_t n) : keys_(keys), size_(n), type_(type) {}

  KeyType type() const { return type_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const void* data() const { return keys_; }
  // The keys [begin, begin + n).
  KeySpan Part(size_t begin, size_t n) const {
    return KeySpan(type_, static_cast<const char*>(keys_) + begin * SizeOf(type_), n);
  }

  // The keys as bit patterns of the width of `K`. A caller that passed keys of another width would
  // make the table read past them, so that aborts the process.
  template <class K>
  const K* As() const {
    CheckWidth(sizeof(K));
    return static_cast<const K*>(keys_);
  }
  // A key as a bit pattern, zero-extended to 64 bits.
  uint64_t BitsAt(size_t i) const {
    return SizeOf(type_) == 8 ? As<uint64_t>()[i] : As<uint32_t>()[i];
  }
  void CheckWidth(size_t width) const {
    if (SizeOf(type_) == width) return;
    std::fprintf(stderr, "KeySpan: keys of %zu bytes, and the table's have %zu\n", SizeOf(type_),
                 width);
    std::abort();
  }

 private:
  const void* keys_ = nullptr;
  size_t size_ = 0;
  KeyType type_ = KeyType::kInt64;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_KEY_SPAN_H_
