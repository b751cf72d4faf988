// Arena: one contiguous address range, reserved at its greatest size and committed from the front
// as it fills. Growing never moves what is in it, and costs nothing but the page faults of the part
// that is used.
#ifndef DYNEMB_TABLE_ARENA_H_
#define DYNEMB_TABLE_ARENA_H_

#include <cstddef>

#include "cc/table/exec.h"
#include "cc/table/status.h"

namespace dynemb {

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;

  // Reserves address space for up to `bytes`; if the process may not reserve so much, the greatest
  // power-of-two fraction of it that is granted, but ResourceExhausted below `at_least`. Call once.
  Status Reserve(size_t bytes, size_t at_least);

  // Makes the first `bytes` usable; what is newly usable reads as zero. ResourceExhausted if
  // `bytes` is more than was reserved or the system refuses; the arena is then as it was.
  Status Commit(size_t bytes);

  // Faults in what of the first `bytes` (committed) has not been, each huge page by one thread.
  // Only for speed: threads that come upon a new huge page together all clear it, and all but one
  // in vain. Contents stay.
  void Populate(Exec& exec, size_t bytes);

  // Makes everything read as zero again and gives the memory back.
  void Clear();

  char* data() const { return data_; }
  size_t committed() const { return committed_; }
  size_t reserved() const { return reserved_; }

 private:
  void Release();

  char* data_ = nullptr;
  size_t reserved_ = 0;
  size_t committed_ = 0;
  size_t advised_ = 0;    // bytes from the front for which huge pages were asked
  size_t populated_ = 0;  // of these, those that Populate has seen to
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

// Bytes of physical memory of this machine.
size_t PhysicalMemory();

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ARENA_H_
