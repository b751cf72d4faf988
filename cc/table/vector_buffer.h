#ifndef DYNEMB_TABLE_VECTOR_BUFFER_H_
#define DYNEMB_TABLE_VECTOR_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace dynemb {

// A float32 buffer for one vector; on the stack up to dim 256.
class VectorBuffer {
 public:
  explicit VectorBuffer(int64_t dim) {
    if (static_cast<size_t>(dim) > kInline) heap_.reset(new float[static_cast<size_t>(dim)]);
  }
  float* get() { return heap_ ? heap_.get() : inline_; }

 private:
  static constexpr size_t kInline = 256;
  alignas(64) float inline_[kInline];
  std::unique_ptr<float[]> heap_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_VECTOR_BUFFER_H_
