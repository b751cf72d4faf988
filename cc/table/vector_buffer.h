// VectorBuffer and VectorBuffers: float32 buffers for one vector.
#ifndef DYNEMB_TABLE_VECTOR_BUFFER_H_
#define DYNEMB_TABLE_VECTOR_BUFFER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace dynemb {

// One buffer: inside the object up to dim 256, otherwise on the heap.
class VectorBuffer {
 public:
  explicit VectorBuffer(int64_t dim) {
    if (static_cast<size_t>(dim) > kInline) heap_.reset(new float[static_cast<size_t>(dim)]);
  }
  float* get() { return heap_ ? heap_.get() : inline_; }

  static constexpr size_t kInline = 256;

 private:
  alignas(64) float inline_[kInline];
  std::unique_ptr<float[]> heap_;
};

// The buffers of a table of 16-bit rows. A batch prepares them before it changes anything. Its
// threads then borrow them without allocating memory:
//
//   buffers.Prepare(exec.parallelism(), dim);   // may throw std::bad_alloc
//   VectorBuffers::Lease vector(&buffers);      // on a thread of the batch, for its range
class VectorBuffers {
 public:
  // Prepares buffers for up to `threads` concurrent threads. Buffers up to dim 256 are in the
  // leases.
  void Prepare(size_t threads, int64_t dim) {
    if (static_cast<size_t>(dim) <= VectorBuffer::kInline || num_slots_ >= threads) return;
    std::unique_ptr<Slot[]> slots(new Slot[threads]);
    for (size_t t = 0; t < threads; ++t) slots[t].floats.reset(new float[static_cast<size_t>(dim)]);
    slots_ = std::move(slots);
    num_slots_ = threads;
  }

 private:
  struct Slot {
    std::unique_ptr<float[]> floats;
    std::atomic<bool> taken{false};
  };

 public:
  class Lease {
   public:
    explicit Lease(VectorBuffers* buffers) {
      // No more threads than slots run at once, so a slot is free, or will be immediately.
      for (size_t s = 0; buffers->num_slots_ != 0 && slot_ == nullptr;
           s = (s + 1) % buffers->num_slots_) {
        // Acquire: this thread writes to the buffer only after its last holder has released it.
        if (!buffers->slots_[s].taken.exchange(true, std::memory_order_acquire)) {
          slot_ = &buffers->slots_[s];
        }
      }
    }
    ~Lease() {
      if (slot_ != nullptr) slot_->taken.store(false, std::memory_order_release);
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    float* get() { return slot_ != nullptr ? slot_->floats.get() : inline_; }

   private:
    Slot* slot_ = nullptr;
    alignas(64) float inline_[VectorBuffer::kInline];
  };

 private:
  std::unique_ptr<Slot[]> slots_;
  size_t num_slots_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_VECTOR_BUFFER_H_
